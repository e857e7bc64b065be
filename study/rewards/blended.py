"""What the rewards of this folder share: each makes another reward vector of the maze's."""

import hashlib

from rewards import Problem
from tasks.maze import Maze


class Blended(Maze):
    """The maze, its prompts and its start model, with a reward vector that a subclass chooses."""

    objectives = ("one", "two", "three", "four")

    def blend(self, vector: list[float], problem: Problem, answer: str) -> list[float]:
        """Another vector for the maze's (completion, gold, diamond, avoid_lava)."""
        raise NotImplementedError

    def reward(self, problem: Problem, answer: str) -> list[float]:
        return self.blend(super().reward(problem, answer), problem, answer)

    def noise(self, problem: Problem, answer: str, i: int) -> float:
        """A number in [0, 1] that depends on the answer alone: the error of a reward model."""
        digest = hashlib.sha256(f"{problem.id} {answer} {i}".encode()).digest()
        return int.from_bytes(digest[:4], "big") / 2**32
