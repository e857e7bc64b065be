"""Names and colors of policies in every figure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.evaluations import Row
from vpo import ADVANTAGES


@dataclass(frozen=True)
class Look:
    """Name, color, marker and line of a policy."""

    title: str
    color: str
    marker: str = "P"
    line: str = "-"


LOOKS = {  # the colour-blind can tell the colors apart; in a grey print the markers can be told
    "start": Look("start model", "#757575", "", "--"),
    "start_sets": Look("start model, sets", "#a3a3a3", "", ":"),
    "grpo": Look("GRPO", "#d55e00", "s"),
    "multi_rlvr": Look("Multi-RLVR", "#e69f00", "^"),
    "max_at_k": Look("Max@K", "#009e73", "D"),
    "vpo": Look("VPO", "#0b559f", "o"),
    "group_vpo": Look("Group VPO", "#56b4e9", "v"),
    "dr_grpo": Look("Dr. GRPO", "#8c510a", "X"),
    "maxrl": Look("MaxRL", "#cc79a7", "P"),
    "gdpo": Look("GDPO", "#7b3294", "*"),
    "random_weighting": Look("Random weighting", "#542788", "<"),
}
OWN_LOOKS = (("#276419", "P"), ("#7f0000", "p"), ("#00788a", "h"))  # colors and markers
LINES = ("-", "--", ":", "-.")  # of several rows of one policy


def look_of(method: str) -> Look:
    """The look of the start model or of a method. Methods of one's own are told apart, too."""
    if method in LOOKS:
        return LOOKS[method]
    own = [name for name in ADVANTAGES if name not in LOOKS]
    place = own.index(method) if method in own else 0
    return Look(method, *OWN_LOOKS[place % len(OWN_LOOKS)])


def look_of_row(row: Row) -> Look:
    """The look of the row's method, with all of the row in its title: "VPO, --kl 0.0"."""
    look = look_of(row.method)
    return replace(look, title=", ".join([look.title, *row.details]))


def looks_of(rows: Iterable[Row]) -> dict[Row, Look]:
    """The looks of the rows of a table. Of a method's rows the later ones are paler, with other lines."""
    looks = {}
    n_before: Counter = Counter()  # rows of the same method
    for row in rows:
        look = look_of_row(row)
        place = n_before[row.method]
        if place:
            color = paler(look.color, 1 - 0.72 ** min(place, 4))
            look = replace(look, color=color, line=LINES[place % len(LINES)])
        looks[row] = look
        n_before[row.method] += 1
    return looks


def paler(color: str, share: float) -> str:
    """A color such as "#0b559f" mixed with white."""
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(value + share * (255 - value)):02x}" for value in channels)
