"""The toy: a deceptive valley, in which partial progress scores worse than a safe start."""

from random import Random

from rewards import Problem, Task

SCORES = (0.8, 0.4, 0.0, 1.0)  # of a block with 0, 1, 2 and 3 bits set


class Toy(Task):
    """An answer is three blocks of three bits. Each block is a component of the reward vector."""

    name = "toy"
    objectives = ("block_1", "block_2", "block_3")
    words = ("bits", "0", "1")
    answer_words = 9
    m = 5
    warm_steps = 150
    steps = 60
    lr = 2.5e-4

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        """The one problem of this task, n times."""
        return [Problem(f"toy-{split}-{i}", {}) for i in range(start, start + n)]

    def prompt(self, problem: Problem, m: int) -> str:
        tags = " ".join(f"<answer_{i + 1}>0 1 ...</answer_{i + 1}>" for i in range(m))
        return f"Write {m} strings of 9 bits (0 or 1, separated by blanks), each in its own tags: {tags}"

    def tiny_prompt(self, problem: Problem) -> str:
        return "bits"

    def reward(self, problem: Problem, answer: str) -> list[float]:
        bits = answer.split()
        if len(bits) != 9 or not set(bits) <= {"0", "1"}:
            return [0.0] * 3
        blocks = bits[:3], bits[3:6], bits[6:]
        return [SCORES[block.count("1")] for block in blocks]

    def demonstration(self, problem: Problem, rng: Random) -> str:
        return " ".join(rng.choice("01") for _ in range(9))
