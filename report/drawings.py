"""Drawings of answers, for the figures, the page and the film."""

import textwrap
from collections import Counter
from typing import Any

from torch import Tensor

from rewards import Fence, Problem, Task

LINES = 7  # different answers in a table of them
LETTERS = 60  # of a line there
MAX_NUMBERS = 6  # of a reward vector there; of a longer one its mean


class Drawing:
    """What a task may add to have its answers drawn: `class Maze(Drawing, Task)`."""

    objectives: tuple[str, ...]  # those of the task
    wide = False  # whether a drawing is wider than high: policies then stand side by side
    width = 3.9  # inches of a wide one
    legend = ""  # what the letters and colors of a drawing mean

    def draw(self, axes: Any, problem: Problem, answers: list[str], color: str) -> None:
        """Draw the answers to a problem on matplotlib axes, in the color of their policy."""
        raise NotImplementedError

    def summary(self, rewards: Tensor) -> str:
        """The title of a drawing: what matters in the reward vectors (n, k) of a pool, counted."""
        if not self.objectives:
            return f"mean reward {rewards.mean():.2f}"
        means = rewards.mean(0).tolist()
        named = zip(self.objectives, means, strict=True)
        return "mean reward: " + ", ".join(f"{name} {mean:.2f}" for name, mean in named)

    def marks(self, problem: Problem, answer: str) -> dict[str, str]:
        """The words of an answer, in small letters, that have a color of their own in a text: word -> color."""
        return {}


class FenceDrawing(Drawing):
    """A row of six boards per fence, equal fences together; an answer of other words is blank."""

    wide = True
    legend = "ann likes red, bob blue, cid green"
    paint = {"red": "#c8373c", "blue": "#3d6bb3", "green": "#4a9a5b", "grey": "#a7a7a7"}

    def __init__(self, fence: Fence):
        self.fence = fence
        self.objectives = fence.objectives

    def draw(self, axes: Any, problem: Problem, answers: list[str], color: str) -> None:
        for row, answer in enumerate(sorted(answers)):
            if any(self.fence.reward(problem, answer)):
                colors = [self.paint[board] for board in answer.split()]
                axes.barh([row] * 6, 0.96, left=range(6), height=0.8, align="edge", color=colors)
        axes.set(xlim=(0, 6), ylim=(max(len(answers), 1), 0), xticks=[], yticks=[])


class TextDrawing(Drawing):
    """A table of the most frequent answers to a problem, with their counts and rewards.

    Args:
        problems: the N problems.
        pools: by policy the answers to each problem, and their rewards (n, k).
    """

    wide = True

    def __init__(self, task: Task, problems: list[Problem], pools: dict[str, tuple[list, list]]):
        self.task = task
        self.objectives = task.objectives
        self.rewards: dict[tuple[str, str | None], list[float]] = {}  # (id, answer) -> its vector
        for answers, rewards in pools.values():
            for problem, own_answers, vectors in zip(problems, answers, rewards, strict=True):
                self.n = len(own_answers)
                for answer, vector in zip(own_answers, vectors.tolist(), strict=True):
                    self.rewards[problem.id, answer] = vector
        names = f" ({', '.join(self.objectives)})" if self.objectives else ""
        self.legend = f"equal answers are counted; behind the count stand the rewards{names}"

    def draw(self, axes: Any, problem: Problem, answers: list[str], color: str) -> None:
        counts = Counter(answers).most_common()
        question = textwrap.shorten(self.task.prompt(problem, 1), LETTERS, placeholder=" ...")
        lines = [question]
        for answer, count in counts[:LINES]:
            vector = self.rewards[problem.id, answer]
            numbers = " ".join(f"{round(value, 2):5g}" for value in vector)
            if len(vector) > MAX_NUMBERS:
                numbers = f"mean {sum(vector) / len(vector):.2g}"
            lines.append(f"{count:3}\u00d7  {numbers}  {' '.join(answer.split()) or '(empty)'}")
        n_missing = self.n - len(answers)
        if n_missing:
            lines.append(f"{n_missing:3}\u00d7  (no answer)")
        if len(counts) > LINES:
            lines.append(f"and {len(counts) - LINES} more that differ")
        for row, line in enumerate(lines):
            short = line if len(line) <= LETTERS else f"{line[: LETTERS - 4]} ..."
            style = {"family": "monospace", "fontsize": 7, "va": "center", "parse_math": False}
            axes.text(0, row, short, color="#222222" if row else "#666666", **style)
        axes.set(xlim=(0, 1), ylim=(LINES + 2.6, -0.6), xticks=[], yticks=[])


def drawing_of(task: Task) -> Drawing | None:
    """What draws the answers of a task: the task itself, the fence's drawing, or nothing."""
    if isinstance(task, Drawing):
        return task
    if isinstance(task, Fence):
        return FenceDrawing(task)
    return None
