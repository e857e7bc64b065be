"""Rows of the study's tables and curves of its figures."""

from dataclasses import dataclass, replace
from typing import Any

from engine.looks import Look, look_of
from report import style

HIGHLIGHTED = ("start", "grpo", "max_at_k", "vpo", "group_vpo")  # thick where curves are many
MAIN_LR = 2e-5  # where learning rates are compared, curves of any other rate are dotted


@dataclass(frozen=True)
class Entry:
    """A row of a table or a curve of a figure: the start model, or what a method trained."""

    method: str  # or "start" or "start_sets"
    lr: float | None = None  # where learning rates are compared; else the method's own
    flags: tuple[tuple[str, object], ...] = ()  # of train.py, where they are not the defaults

    @property
    def look(self) -> Look:
        """The look of the method, with its learning rate in the title, such as "GRPO at 5e-05"."""
        look = look_of(self.method)
        if self.lr is None:
            return look
        line = look.line if self.is_main else ":"
        return replace(look, title=f"{look.title} at {self.lr:g}", line=line)

    @property
    def title(self) -> str:
        return self.look.title

    @property
    def color(self) -> str:
        """The color of the method, the same for all learning rates."""
        return self.look.color

    @property
    def is_main(self) -> bool:
        """Whether its learning rate is the main one, or the only one."""
        return self.lr in (None, MAIN_LR)

    @property
    def line_style(self) -> dict[str, Any]:
        """Label, color, line and marker of its curve, as keyword arguments of `Axes.plot`."""
        return style.curve_style(self.look)
