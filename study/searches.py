"""Problems that a policy solves and others do not, in the searches of the study."""

import torch
from torch import Tensor

from examples.search_report import solved_at

RIVALS = ("grpo", "start")


def solved_by(policies: dict[str, list[dict]], names: tuple[str, ...]) -> Tensor:
    """Which problems at least one of some policies solved in each run: (runs, N) bool."""
    solved = [solved_at(policies[name]) > 0 for name in names]
    return torch.stack(solved).any(0)


def counts_alone(
    policies: dict[str, list[dict]],
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
    any_run: bool = False,
) -> list[int]:
    """How many problems one of `ours` solved in each run, and none of `theirs` did.

    Args:
        any_run: whether to leave out what `theirs` solved in another run, too.
    """
    solved = solved_by(policies, theirs)  # (runs, N)
    if any_run:
        solved = solved.any(0)  # (N)
    alone = solved_by(policies, ours) & ~solved  # (runs, N)
    return alone.sum(1).tolist()


def alone_cell(policies: dict[str, list[dict]], name: str, any_run: bool) -> str:
    """How many problems a policy solved in each run and no rival did, where there are rivals."""
    if not set(RIVALS) <= policies.keys():
        return ""
    return " ".join(map(str, counts_alone(policies, (name,), RIVALS, any_run)))
