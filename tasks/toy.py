"""The toy: a deceptive valley in which partial progress scores worse than a safe stub."""

import random

from rewards import Problem, Task


class Toy(Task):
    """An answer is `blocks` blocks of `bits` bits; every bit set costs, but all of them set pay: a block scores 0.8 at
    all zeros, falls evenly to 0 with each further bit, and is worth 1.0 at all ones. k = blocks."""
    name = "toy"
    m, warm_steps, steps, lr = 5, 150, 60, 2.5e-4

    def __init__(self, blocks: int = 3, bits: int = 3):
        self.blocks, self.bits = blocks, bits
        self.objectives = tuple(f"block_{i + 1}" for i in range(blocks))
        self.words, self.answer_words = ("bits", "0", "1"), blocks * bits

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        return [Problem(f"toy-{split}-{start + i}", {}) for i in range(n)]  # one and the same problem, asked n times

    def prompt(self, problem: Problem, m: int) -> str:
        tags = " ".join(f"<answer_{i + 1}>0 1 ...</answer_{i + 1}>" for i in range(m))
        return (f"Write {m} strings of {self.blocks * self.bits} bits (0 or 1, separated by blanks), each in its own "
                f"tags: {tags}")

    def tiny_prompt(self, problem: Problem) -> str:
        return "bits"

    def reward(self, problem: Problem, answer: str) -> list[float]:
        bits = answer.split()
        if len(bits) != self.blocks * self.bits or not set(bits) <= {"0", "1"}:
            return [0.0] * self.blocks
        ones = [bits[i:i + self.bits].count("1") for i in range(0, len(bits), self.bits)]
        return [1.0 if n == self.bits else 0.8 * (1 - n / (self.bits - 1)) for n in ones]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        return " ".join(rng.choice("01") for _ in range(self.blocks * self.bits))
