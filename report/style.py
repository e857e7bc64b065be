"""The frame that all figures share."""

import contextlib
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report.looks import Look

SMALL = 9  # points, the smallest text of a figure
BOLD = {"size": 12, "weight": "bold"}
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,
    "text.usetex": False,
    "svg.hashsalt": "",  # equal numbers give equal files
    "pdf.fonttype": 42,  # TrueType, as journals ask for
}


def curve_style(look: Look) -> dict[str, Any]:
    """Label, color, line and marker of a policy's curve, as keyword arguments of `Axes.plot`."""
    return {
        "label": look.title,
        "color": look.color,
        "marker": look.marker,
        "ls": look.line,
        "lw": 2,
        "ms": 5.5,
        "mec": "white",
        "mew": 0.5,
    }


@contextlib.contextmanager
def new_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """Axes (rows, columns) of a new figure in the project's style, which holds inside the block.

    The figure is not pyplot's: it opens no window and need not be closed. `size` is in inches, and
    `options` are those of `Figure.subplots`.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure.subplots(rows, columns, squeeze=False, **options)


def finish(axes: Any, path: Path, caption: str, heading: str = "") -> None:
    """Add a caption below all axes, a heading and one legend above them, and write the figure to `path`.

    SVG and PDF files would hold the date, which is left out.
    """
    figure = axes[0, 0].figure
    width = figure.get_figwidth()
    figure.supxlabel(textwrap.fill(caption, int(14 * width)), x=0.005, ha="left", fontsize=SMALL)
    handles = {}
    for ax in axes.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    if handles:
        column = max(1.9, 0.5 + 0.08 * max(map(len, handles)))  # inches of the longest label
        rows = math.ceil(len(handles) / max(1, width // column))
        columns = math.ceil(len(handles) / rows)
        options = {"ncols": columns, "title": heading, "title_fontproperties": BOLD}
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", **options)
    elif heading:
        figure.suptitle(heading, **BOLD)
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    figure.savefig(path, dpi=150, metadata=dates.get(path.suffix))
