"""The table and the figure of a search, from its search.json."""

from pathlib import Path

import torch
from torch import Tensor

from examples.markdown import markdown
from report import style
from report.looks import look_of
from report.statistics import half_width

BUDGETS = (30, 100, 300)  # candidates; the whole budget is added
PANELS = {  # key in search.json: title
    "solved": "share of problems solved",
    "best": "mean best score",
    "behaviours": "distinct reward vectors",
}


def solved_at(runs: list[dict]) -> Tensor:
    """The candidate that solved each problem, counted from 1, or 0: (runs, N)."""
    return torch.tensor([run["solved"] for run in runs])


def search_table(policies: dict[str, list[dict]], budget: int, has_targets: bool) -> str:
    """The share that every policy solved within budgets, with half of the last one's 95% interval; what else it found.

    Args:
        policies: by policy the curves of every run, as in search.json.
        has_targets: whether any problem can count as solved; a dash stands for what is not known.
    """
    budgets = [fewer for fewer in BUDGETS if fewer < budget] + [budget]
    head = ["", *(f"solved by {n}" for n in budgets), "±", "best score", "reward vectors"]
    rows = []
    for name, runs in policies.items():
        solved = solved_at(runs) > 0  # (runs, N)
        cells = run_curves(runs, "solved", budgets).mean(0).tolist()
        half = half_width(solved if len(runs) > 1 else solved[0])
        cells.append("-" if half is None else half)
        if not has_targets:
            cells = ["-"] * len(cells)
        score = run_curves(runs, "best", [])[:, -1].mean().item()
        vectors = run_curves(runs, "behaviours", [])[:, -1].mean().item()
        rows.append([look_of(name).title, *cells, score, f"{vectors:.1f}"])
    return markdown(head, rows)


def draw(policies: dict[str, list[dict]], ticks: list[int], has_targets: bool, path: Path) -> None:
    """Draw what `search_table` tells against the numbers of candidates scored for a problem (`ticks`)."""
    keys = [key for key in PANELS if has_targets or key != "solved"]
    with style.new_figure(1, len(keys), (4.4 * len(keys), 4.2)) as axes:
        for ax, key in zip(axes[0], keys, strict=True):
            for name, runs in policies.items():
                curves = run_curves(runs, key, ticks)  # (runs, ticks)
                look = look_of(name)
                ax.plot(ticks, curves.T, color=look.color, alpha=0.3, lw=0.8)
                curve_style = style.curve_style(look) | {"marker": ""}
                ax.plot(ticks, curves.mean(0), **curve_style)
            ax.set(title=PANELS[key], xlabel="candidates scored for a problem", xscale="log")
            ax.xaxis.set_major_formatter("{x:,.0f}")
            ax.grid(alpha=0.25, lw=0.6)
        runs = next(iter(policies.values()))
        caption = f"{len(runs[0]['solved'])} problems"
        if len(runs) > 1:
            caption += f"; bold: mean of {len(runs)} runs"
        style.finish(axes, path, caption)


def run_curves(runs: list[dict], key: str, ticks: list[int]) -> Tensor:
    """The finds of each run, means over problems: (runs, ticks). Only "solved" needs the ticks."""
    if key == "solved":
        after = solved_at(runs)[..., None]  # (runs, N, 1), 0: never
        values = (after > 0) & (after <= torch.tensor(ticks))  # (runs, N, ticks)
    else:
        values = torch.tensor([run[key] for run in runs], dtype=torch.float64)
    return values.double().mean(1)  # (runs, ticks)
