"""The table of a search: what each policy solved, and how much of it no rival solved."""

import torch
from torch import Tensor

from engine.looks import look_of
from report.markdown import markdown
from report.statistics import bootstrap_interval

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
    """What every policy of a search.json solved within budgets, and how much of it no rival did.

    Where no target is known, nothing can count as solved, and a dash stands for what did.
    """
    policies = search["policies"]
    last_budget = search["settings"]["budget"]
    budgets = [budget for budget in BUDGETS if budget < last_budget]
    budgets.append(last_budget)
    head = ["", *(f"solved by {budget}" for budget in budgets)]
    head += ["95% interval", "best score", "reward vectors"]
    head += ["not by GRPO or start", "nor in any run"]
    rows = []
    for name, runs in policies.items():
        if has_targets(search):
            solved = solved_cells(runs, budgets)
            alone = [alone_cell(policies, name, any_run) for any_run in (False, True)]
        else:
            solved = ["-"] * (len(budgets) + 1)
            alone = ["-", "-"]
        vectors = f"{final_mean(runs, 'behaviours'):.1f}"
        rows.append([look_of(name).title, *solved, final_mean(runs, "best"), vectors, *alone])
    return markdown(head, rows)


def has_targets(search: dict) -> bool:
    """Whether it is known of any problem which score solves it; older files do not say."""
    return any(target is not None for target in search.get("targets", [0.0]))


def solved_cells(runs: list[dict], budgets: list[int]) -> list:
    """The share of problems that were solved within each budget, and the last one's interval."""
    solved = solved_at(runs)  # (runs, N)
    cells = []
    for budget in budgets:
        within = (solved > 0) & (solved <= budget)
        cells.append(within.double().mean().item())
    low, high = bootstrap_interval(solved > 0)
    return [*cells, f"[{low:.3f}, {high:.3f}]"]


def alone_cell(policies: dict[str, list[dict]], name: str, any_run: bool) -> str:
    """How many problems a policy solved in each run and no rival did, where there are rivals."""
    if not set(RIVALS) <= policies.keys():
        return ""
    return " ".join(map(str, counts_alone(policies, (name,), RIVALS, any_run)))


def final_mean(runs: list[dict], key: str) -> float:
    """The mean over runs and problems of what a curve reaches at the end of the budget."""
    curves = torch.tensor([run[key] for run in runs], dtype=torch.float64)  # (runs, N, ticks)
    return curves[..., -1].mean().item()
