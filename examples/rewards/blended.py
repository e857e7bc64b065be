"""What the rewards of this folder share: the maze, its vector (completion, gold, diamond, avoid_lava) made another."""

import hashlib

from rewards import Task
from tasks.maze import Maze


class Blended(Maze):
    """A subclass says what becomes of the maze's vector. The start model, prompts and problems stay the maze's."""

    objectives = ("one", "two", "three", "four")
    summary, draw = Task.summary, Task.draw

    def blend(self, vector: list[float], problem, answer: str) -> list[float]:
        raise NotImplementedError

    def reward(self, problem, answer: str) -> list[float]:
        return self.blend(super().reward(problem, answer), problem, answer)

    def noise(self, problem, answer: str, i: int) -> float:
        """In [0, 1], the same for the same answer: an error of a reward model."""
        return (
            int.from_bytes(
                hashlib.sha256(f"{problem.id} {answer} {i}".encode()).digest()[:4], "big"
            )
            / 2**32
        )
