"""What policies are called, and their colors in every figure."""

from dataclasses import dataclass

from vpo import ADVANTAGES


@dataclass(frozen=True)
class Look:
    """How a policy is named and drawn."""

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
    "goal_conditioned": Look("Goal-conditioned", "#c51b7d", ">"),
}
OWN_LOOKS = (("#276419", "P"), ("#7f0000", "p"), ("#00788a", "h"))  # colors and markers


def look_of(name: str) -> Look:
    """The look of the start model or of a method. Methods of one's own are told apart, too."""
    if name in LOOKS:
        return LOOKS[name]
    own = [method for method in ADVANTAGES if method not in LOOKS]
    place = own.index(name) if name in own else 0
    color, marker = OWN_LOOKS[place % len(OWN_LOOKS)]
    return Look(name, color, marker)
