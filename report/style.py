"""What policies are called and how they look, and the frame that all figures share."""

import contextlib
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Look:
    """How a policy is named and drawn."""

    title: str
    color: str
    marker: str = ""
    line: str = "-"


LOOKS = {  # the colour-blind can tell the colors apart; in a grey print the markers can be told
    "start": Look("start model", "#757575", line="--"),
    "start_sets": Look("start model, sets", "#a3a3a3", line=":"),
    "grpo": Look("GRPO", "#d55e00", "s"),
    "multi_rlvr": Look("Multi-RLVR", "#e69f00", "^"),
    "max_at_k": Look("Max@K", "#009e73", "D"),
    "vpo": Look("VPO", "#0b559f", "o"),
    "group_vpo": Look("Group VPO", "#56b4e9", "v"),
    "dr_grpo": Look("Dr. GRPO", "#8c510a", "X"),
    "maxrl": Look("MaxRL", "#cc79a7", "P"),
    "gdpo": Look("GDPO", "#7b3294", "*"),
    "random_weighting": Look("Random weighting", "#542788", "<"),
    "goal_conditioned": Look("Goal-conditioned", "#c51b7d", ">"),
}
MAIN_LR = 2e-5  # where learning rates are compared, curves of any other rate are dotted
SMALL = 9  # points, the smallest text of a figure
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.hashsalt": "",  # equal numbers give equal files
}


@dataclass(frozen=True)
class Entry:
    """A row of a table or a curve of a figure: the start model, or what a method trained."""

    method: str  # or "start" or "start_sets"
    lr: float | None = None  # where learning rates are compared; else the method's own
    flags: tuple[tuple[str, object], ...] = ()  # of train.py, where they are not the defaults

    @property
    def look(self) -> Look:
        """The look of the method; a method of one's own is dark green."""
        return LOOKS.get(self.method, Look(self.method, "#276419", "P"))

    @property
    def title(self) -> str:
        """What the policy is called in tables and figures, such as "GRPO at 5e-05"."""
        if self.lr is None:
            return self.look.title
        return f"{self.look.title} at {self.lr:g}"

    @property
    def color(self) -> str:
        """The policy's color in every figure, the same for all learning rates."""
        return self.look.color

    @property
    def is_main(self) -> bool:
        """Whether its learning rate is the main one, or the only one."""
        return self.lr in (None, MAIN_LR)

    @property
    def line_style(self) -> dict[str, Any]:
        """Label, color, line and marker of its curve, as keyword arguments of `Axes.plot`."""
        return {
            "label": self.title,
            "color": self.color,
            "marker": self.look.marker,
            "ls": self.look.line if self.is_main else ":",
            "lw": 2,
            "ms": 5.5,
            "mec": "white",
            "mew": 0.5,
        }


@contextlib.contextmanager
def new_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """Axes (rows, columns) of a new figure in the project's style, which holds inside the block.

    The figure is not pyplot's: it opens no window and need not be closed.

    Args:
        rows: number of rows of axes.
        columns: number of columns of axes.
        size: width and height in inches.
        options: passed on to `Figure.subplots`.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure.subplots(rows, columns, squeeze=False, **options)


def finish(axes: Any, path: Path, caption: str) -> None:
    """Add a caption below all axes and one legend above them, and write the figure to `path`."""
    figure = axes[0, 0].figure
    width = figure.get_figwidth()
    figure.supxlabel(textwrap.fill(caption, int(14 * width)), fontsize=SMALL)
    handles = {}
    for ax in axes.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    if handles:
        rows = math.ceil(len(handles) / (width // 1.9))
        columns = math.ceil(len(handles) / rows)
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns)
    write(figure, path)


def write(figure: Any, path: Path) -> None:
    """Write a figure without the date that SVG and PDF files would hold."""
    dates = {".svg": "Date", ".pdf": "CreationDate"}
    metadata = {dates[path.suffix]: None} if path.suffix in dates else None
    figure.savefig(path, dpi=150, metadata=metadata)
