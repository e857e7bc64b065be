"""The table of a search: what each policy solved, and how much of it no rival solved."""

import torch
from torch import Tensor

from report.markdown import markdown
from report.statistics import bootstrap_interval
from report.style import Entry

BUDGETS = (30, 100, 300)  # candidates; the whole budget is added
RIVALS = ("grpo", "start")


def solved_at(runs: list[dict]) -> Tensor:
    """The candidate that solved each problem, counted from 1, or 0: (runs, N)."""
    return torch.tensor([run["solved"] for run in runs])


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


def search_table(search: dict) -> str:
    """What every policy of a search.json solved within budgets, and how much of it no rival did."""
    policies = search["policies"]
    last_budget = search["settings"]["budget"]
    budgets = [budget for budget in BUDGETS if budget < last_budget]
    budgets.append(last_budget)
    head = ["", *(f"solved by {budget}" for budget in budgets)]
    head += ["95% interval", "best score", "reward vectors"]
    head += ["not by GRPO or start", "nor in any run"]
    rows = [search_row(policies, name, budgets) for name in policies]
    return markdown(head, rows)


def search_row(policies: dict[str, list[dict]], name: str, budgets: list[int]) -> list:
    runs = policies[name]
    solved = solved_at(runs)  # (runs, N)
    low, high = bootstrap_interval(solved > 0)
    row = [Entry(name).title]
    for budget in budgets:
        within = (solved > 0) & (solved <= budget)
        row.append(within.double().mean().item())
    row += [f"[{low:.3f}, {high:.3f}]", final_mean(runs, "best")]
    row.append(f"{final_mean(runs, 'behaviours'):.1f}")
    for any_run in (False, True):
        counts = []
        if set(RIVALS) <= policies.keys():
            counts = counts_alone(policies, (name,), RIVALS, any_run)
        row.append(" ".join(map(str, counts)))
    return row


def final_mean(runs: list[dict], key: str) -> float:
    """The mean over runs and problems of what a curve reaches at the end of the budget."""
    curves = torch.tensor([run[key] for run in runs], dtype=torch.float64)  # (runs, N, ticks)
    return curves[..., -1].mean().item()
