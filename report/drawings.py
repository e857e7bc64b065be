"""Drawings of answers, for the figures, the page and the film."""

from typing import Any

from torch import Tensor

from rewards import Fence, Problem, Task


class Drawing:
    """Drawings of a task's answers: `class Maze(Drawing, Task)`."""

    objectives: tuple[str, ...] = ()  # those of the task
    wide = False  # whether a drawing is wider than high: policies then stand side by side
    width = 3.9  # inches of a wide one
    legend = ""  # what the letters and colors of a drawing mean

    def draw(self, axes: Any, problem: Problem, answers: list[str], color: str) -> None:
        """Draw the answers to a problem on matplotlib axes, in the color of their policy."""
        raise NotImplementedError

    def summary(self, rewards: Tensor) -> str:
        """The title of a drawing: a summary of the reward vectors (n, d) of a pool."""
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


def drawing_of(task: Task) -> Drawing | None:
    """The drawing of a task's answers: the task itself, the fence's drawing, or None."""
    if isinstance(task, Drawing):
        return task
    if isinstance(task, Fence):
        return FenceDrawing(task)
    return None
