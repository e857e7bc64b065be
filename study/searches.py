"""What all stored searches say together, and what chance alone would give."""

from torch import Tensor

from report.markdown import markdown
from report.search_tables import solved_at, solved_by
from report.statistics import bootstrap_interval
from study.entries import Entry
from study.stored import Stored


def counts_of_other_runs(policies: dict[str, list[dict]], names: tuple[str, ...]) -> list[int]:
    """What chance gives: the most that the same policies of another run solved and this run's did not."""
    solved = solved_by(policies, names)  # (runs, N)
    new = solved[None] & ~solved[:, None]  # (this run, other run, N)
    return new.sum(-1).amax(1).tolist()


def all_searches(stored: Stored) -> str:
    """Of every stored search the share of problems that each policy solved, and some differences."""
    names = ("start", "grpo", "max_at_k", "multi_rlvr", "vpo", "group_vpo")
    pairs = (("vpo", "grpo"), ("group_vpo", "grpo"), ("group_vpo", "start"))
    head = ["", *(Entry(name).title for name in names)]
    head += [f"{Entry(ours).title} - {Entry(theirs).title}" for ours, theirs in pairs]
    rows = []
    for key, search in stored.searches.items():
        solved = {}
        for name, runs in search["policies"].items():
            solved[name] = (solved_at(runs) > 0).double()  # (runs, N)
        row = [key.replace("_", " ")]
        row += [share(solved[name]) if name in solved else "" for name in names]
        row += [share(solved[ours] - solved[theirs]) for ours, theirs in pairs]
        rows.append(row)
    return markdown(head, rows)


def share(values: Tensor) -> str:
    """The mean of values (runs, N) with its 95% interval."""
    low, high = bootstrap_interval(values)
    return f"{values.mean():.2f} [{low:.2f}, {high:.2f}]"
