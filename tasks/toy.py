"""The toy: a deceptive valley in which partial progress scores worse than a safe stub."""

import random

from rewards import Problem, Task


class Toy(Task):
    """An answer is three blocks of three bits; every bit set costs, but all of them set pay: a block scores 0.8 at
    all zeros, falls evenly to 0 with each further bit, and is worth 1.0 at all ones. A component for each block."""

    name, objectives = "toy", ("block_1", "block_2", "block_3")
    words, answer_words = ("bits", "0", "1"), 9
    m, warm_steps, steps, lr = 5, 150, 60, 2.5e-4

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        return [
            Problem(f"toy-{split}-{start + i}", {}) for i in range(n)
        ]  # one and the same problem, asked n times

    def prompt(self, problem: Problem, m: int) -> str:
        tags = " ".join(f"<answer_{i + 1}>0 1 ...</answer_{i + 1}>" for i in range(m))
        return f"Write {m} strings of 9 bits (0 or 1, separated by blanks), each in its own tags: {tags}"

    def tiny_prompt(self, problem: Problem) -> str:
        return "bits"

    def reward(self, problem: Problem, answer: str) -> list[float]:
        bits = answer.split()
        if len(bits) != 9 or not set(bits) <= {"0", "1"}:
            return [0.0] * 3
        return [{0: 0.8, 1: 0.4, 2: 0.0, 3: 1.0}[bits[i : i + 3].count("1")] for i in (0, 3, 6)]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        return " ".join(rng.choice("01") for _ in range(9))
