"""Problems that a policy solves and others do not, in the searches of the study."""

import torch
from torch import Tensor

from examples.search_report import solved_at


def solved_by(policies: dict[str, list[dict]], names: tuple[str, ...]) -> Tensor:
    """Which problems at least one of some policies solved in each run: (runs, N) bool."""
    solved = [solved_at(policies[name]) > 0 for name in names]
    return torch.stack(solved).any(0)


def counts_alone(
    policies: dict[str, list[dict]],
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
) -> list[int]:
    """How many problems one of `ours` solved in each run, and none of `theirs` did."""
    alone = solved_by(policies, ours) & ~solved_by(policies, theirs)  # (runs, N)
    return alone.sum(1).tolist()
