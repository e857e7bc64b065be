"""Drawings of answers, for the figures, the page and the film."""

from typing import Any

from torch import Tensor

from rewards import Fence, Problem, Task


class Drawing:
    """Drawings of a task's answers: `class Maze(Drawing, Task)`."""

    wide = False  # whether a drawing is wider than high: policies then stand side by side
    width = 3.9  # inches of a wide one
    legend = ""  # what the letters and colors of a drawing mean
    for_whom = "objective"  # what a component of the reward vector stands for

    def draw(self, axes: Any, problem: Problem, answers: list[str], color: str) -> None:
        """Draw the answers to a problem on matplotlib axes, in the color of their policy."""
        raise NotImplementedError

    def summary(self, rewards: Tensor) -> str:
        """The title of a drawing: the best of a pool's rewards (n, d) in each objective, a mean over these."""
        best = rewards.amax(0)  # (d)
        return f"best of {len(rewards)} for each {self.for_whom}: {best.mean():.2f}"

    def text_of(self, problem: Problem) -> str:
        """A line above the drawings of a problem, if they are wide."""
        return ""

    def marks(self, problem: Problem, answer: str) -> dict[str, str]:
        """The words of an answer, in small letters, that have a color of their own in a text: word -> color."""
        return {}


class FenceDrawing(Drawing):
    """A row of six boards per fence, equal fences together; an answer of other words is blank."""

    wide = True
    width = 3.1
    legend = "a row is a fence of six boards; Ann likes red, Bob blue, Cid green"
    for_whom = "user"
    # Those of docs/playground.html: the color-blind can tell them apart.
    paint = {"red": "#b71f1c", "blue": "#2558c4", "green": "#63c98b", "grey": "#808080"}

    def __init__(self, fence: Fence):
        self.fence = fence

    def draw(self, axes: Any, problem: Problem, answers: list[str], color: str) -> None:
        for row, answer in enumerate(sorted(answers)):
            if any(self.fence.reward(problem, answer)):
                colors = [self.paint[board] for board in answer.split()]
                axes.barh([row] * 6, 0.98, left=range(6), height=0.7, align="edge", color=colors)
        axes.set(xlim=(0, 6), ylim=(max(len(answers), 1), 0), xticks=[], yticks=[])


def drawing_of(task: Task) -> Drawing | None:
    """The drawing of a task's answers: the task itself, the fence's drawing, or None."""
    if isinstance(task, Drawing):
        return task
    if isinstance(task, Fence):
        return FenceDrawing(task)
    return None
