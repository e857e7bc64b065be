"""The figures of the study, drawn from stored results; those of headlines are in documents.py."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from examples.search_report import solved_at
from report import style
from report.looks import Look, look_of
from study.entries import (
    GROUP_VPO,
    GRPO,
    GRPO_AT_30,
    GRPO_KL,
    GRPO_LOW,
    GRPO_QUARTER,
    LOW_RATE,
    MAX_AT_K,
    MULTI_RLVR,
    START_MODEL,
    VPO,
    Entry,
)
from study.grid import EIGHT_WORDS, HEADLINE
from study.stored import Difference, Stored, TaskResults
from study.tables import KS, MAIN, OF_HEADLINES, geometry_tasks, regret
from study.validation import TASKS, own

CURE_COLORS = {"kl": "#e31a1c", "entropy-coef": "#7b3294", "temperature": "#c51b7d"}
TITLES = {
    "maze": "Maze",
    "code": "Programs",
    "toy": "Toy",
    HEADLINE: "Headlines",
    EIGHT_WORDS: "Headlines of up to eight words",
}
KINDS = {  # task -> the measures of its figure
    "maze": ("best", "W"),
    "code": ("best", "pass"),
    "toy": ("best", "pass"),
    HEADLINE: ("best", "W"),
    EIGHT_WORDS: ("best", "W"),
}
SEARCHES = {
    "maze_diamond_79_evolve": "79 hard mazes: a route with all the diamonds",
    "nested_scalar_evolve": "40 hard programs",
}
MAX_BANDS = 4  # more would hide one another


@dataclass
class Curve:
    """A curve of a policy, and the lowest and highest seed at each of its points."""

    look: Look
    x: list[int]
    y: Tensor  # (points)
    low: Tensor
    high: Tensor


@dataclass
class Panel:
    """One pair of axes with curves."""

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]


def draw_figures(stored: Stored, root: Path) -> None:
    """Draw all figures of results."""
    pages = root / "study/figures"
    maze = stored.task("maze")
    code = stored.task("code")
    panels = [best_of_k(task, "best", MAIN) for task in (maze, code)]
    draw_curves(panels, root / "docs/figures/best_at_k.png", of_seeds(maze))
    for name, kinds in KINDS.items():
        task = stored.task(name)
        panels = [best_of_k(task, kind, OF_HEADLINES) for kind in kinds]
        draw_curves(panels, pages / f"{name}_best_at_k.png", of_seeds(task))
    panels = [solved_by(stored.searches[name], title) for name, title in SEARCHES.items()]
    draw_curves(panels, pages / "search.png", "mean of three training seeds")
    two_halves(geometry_tasks(stored), pages / "two_halves.png")
    frontier(stored, pages / "frontier.png")
    other_cures(stored, pages / "other_cures.png")


def of_seeds(task: TaskResults) -> str:
    """The caption of a task's curves."""
    counts = sorted({len(task.runs(entry)) for entry in (GRPO, MAX_AT_K, VPO, GROUP_VPO)})
    seeds = str(counts[0])
    if len(counts) > 1:
        seeds = f"{counts[0]} to {counts[-1]}"
    return f"mean of {seeds} seeds; temperature 0.7"


def other_cures(stored: Stored, path: Path) -> None:
    """Draw best@k and W@k of GRPO with the winner of each cure, and of the sets with their own KL term."""
    panels = []
    for name in TASKS:
        task = stored.task(name)
        cured = [entry for entry in task.policies(flags=True) if entry.is_cure]
        of_grpo = [entry for entry in cured if entry.method == "grpo"]
        sets = [own(stored, name, method, "best@30") for method in ("max_at_k", "vpo", "group_vpo")]
        entries = [START_MODEL, GRPO, GRPO_LOW, *of_grpo, *sets]
        for kind in ("best", "W"):
            curves = [measure_curve(task, entry, kind, look_of_cure(entry)) for entry in entries]
            panels.append(panel_of_k(task, kind, curves))
    draw_curves(panels, path, of_seeds(stored.task("maze")), columns=2)


def look_of_cure(entry: Entry) -> Look:
    """Each cure of GRPO has a color of its own; the one of the main table is solid."""
    look = look_of(entry.method)
    if entry in (GRPO_AT_30, GRPO_QUARTER):  # tables of headlines name the rate
        line = ":" if entry == GRPO_QUARTER else "--"
        return replace(look_of(LOW_RATE), title=entry.title, line=line)
    for name, _ in entry.flags:
        if entry.method == "grpo":
            look = replace(look, color=CURE_COLORS[name], line=":")
            if entry == GRPO_KL:
                look = replace(look, color="#7f0000", line="-")
    title = entry.title.replace("training temperature", "trained at")
    return replace(look, title=title)


def best_of_k(task: TaskResults, kind: str, policies: tuple[Entry, ...]) -> Panel:
    """best@k, W@k or pass@k of some policies, as far as they are stored.

    Args:
        kind: "best", "W" or "pass".
    """
    curves = []
    for policy in policies:
        if task.runs(policy):
            curves.append(measure_curve(task, policy, kind, look_of_cure(policy)))
    return panel_of_k(task, kind, curves)


def panel_of_k(task: TaskResults, kind: str, curves: list[Curve]) -> Panel:
    labels = {
        "best": "best score of k candidates (best@k)",
        "W": "best of k, random preferences (W@k)",
        "pass": "a full solution among k (pass@k)",
    }
    return Panel(TITLES[task.name], "number of candidates k", labels[kind], curves)


def measure_curve(task: TaskResults, policy: Entry, kind: str, look: Look) -> Curve:
    """A measure of a policy at every k."""
    means = [task.values(policy, f"{kind}@{k}").mean(1) for k in KS]
    return seed_curve(look, list(KS), torch.stack(means, 1))


def seed_curve(look: Look, x: list[int], of_seeds: Tensor) -> Curve:
    """The curve through the means over seeds of values (seeds, points)."""
    low, high = of_seeds.aminmax(dim=0)
    return Curve(look, x, of_seeds.mean(0), low, high)


def solved_by(search: dict, title: str) -> Panel:
    """The share of problems that each policy of a search solved within so many candidates."""
    ticks = search["ticks"]
    curves = []
    for name, runs in search["policies"].items():
        after = solved_at(runs)[..., None]  # (runs, N, 1), 0: never
        solved = (after > 0) & (after <= torch.tensor(ticks))
        of_runs = solved.double().mean(1)  # (runs, ticks)
        curves.append(seed_curve(look_of(name), ticks, of_runs))
    return Panel(title, "candidates scored for a problem", "share of problems solved", curves)


def draw_curves(panels: list[Panel], path: Path, caption: str, columns: int = 0) -> None:
    """Draw panels side by side.

    Bands show the lowest and the highest seed where the curves are few.

    Args:
        columns: panels in a row; 0: all.
    """
    columns = columns or len(panels)
    n_rows = len(panels) // columns
    if len(panels[0].curves) <= MAX_BANDS:
        caption += "; bands: lowest to highest seed"
    with style.new_figure(n_rows, columns, (5.4 * columns, 4.4 * n_rows)) as axes:
        for ax, panel in zip(axes.flat, panels, strict=True):
            for curve in panel.curves:
                line = style.curve_style(curve.look)
                if len(curve.x) > len(KS):
                    line["marker"] = ""
                ax.plot(curve.x, curve.y, **line)
                if len(panel.curves) <= MAX_BANDS:
                    band = {"color": curve.look.color, "alpha": 0.15, "lw": 0}
                    ax.fill_between(curve.x, curve.low, curve.high, **band)
            x = panel.curves[0].x
            ax.set(xscale="log", xlabel=panel.x_label, ylabel=panel.y_label)
            ax.set_title(panel.title, fontsize=13)
            if len(x) <= len(KS):
                ax.set_xticks(x, x)
            else:
                ax.xaxis.set_major_formatter("{x:,.0f}")
            ax.minorticks_off()
            ax.grid(alpha=0.2, lw=0.6)
        style.finish(axes, path, caption)


def two_halves(tasks: list[TaskResults], path: Path) -> None:
    """Draw what a set and what a vector gained in W@30, a pair of bars for each reward.

    Args:
        tasks: in the order of the regret of their scalar.
        path: the file that is written.
    """
    halves = (
        ("a set instead of single answers (Max@K - GRPO)", MAX_AT_K, GRPO, -0.2),
        ("a vector instead of its mean (Group VPO - Max@K)", GROUP_VPO, MAX_AT_K, 0.2),
    )
    with style.new_figure(1, 1, (9.6, 4.4)) as axes:
        ax = axes[0, 0]
        for label, ours, theirs, shift in halves:
            gains = [task.difference(ours, theirs, "W@30") for task in tasks]
            x = [i + shift for i in range(len(tasks))]
            bars = {"width": 0.38, "color": look_of(ours.method).color, "capsize": 3}
            ax.bar(x, [gain.mean for gain in gains], yerr=error_bars(gains), label=label, **bars)
        ax.axhline(0, color="#666666", lw=0.8)
        names = [f"{task.name}\n{regret(task):.3f}" for task in tasks]
        ax.set_xticks(range(len(tasks)), names)
        ax.set(
            ylabel="gained in W@30",
            xlabel="reward, and the regret of its scalar before training",
        )
        style.finish(
            axes, path, "five seeds for each reward; 95% intervals over seeds and problems"
        )


def error_bars(differences: list[Difference]) -> list[list[float]]:
    """The lengths of the intervals below and above the means."""
    below = [difference.mean - difference.low for difference in differences]
    above = [difference.high - difference.mean for difference in differences]
    return [below, above]


def frontier(stored: Stored, path: Path) -> None:
    """Draw what five methods reach with one candidate and with thirty, a point per learning rate."""
    with style.new_figure(1, 2, (10.4, 4.6)) as axes:
        for ax, name in zip(axes[0], ("maze", "code"), strict=True):
            validation = stored.task(name, tuning=True)
            for policy in (GRPO, MULTI_RLVR, MAX_AT_K, VPO, GROUP_VPO):
                points = rate_points(validation, policy.method)
                line = style.curve_style(look_of(policy.method)) | {"lw": 1, "ms": 7}
                ax.plot(*points.T, **line)
            ax.set(xlabel="one candidate (best@1) →", ylabel="thirty candidates (best@30) →")
            ax.set_title(TITLES[name], fontsize=13)
            ax.grid(alpha=0.2, lw=0.6)
        caption = (
            "The best lies at the top right. A point per peak learning rate, validation problems, one "
            "seed; GRPO in the maze two."
        )
        style.finish(axes, path, caption)


def rate_points(validation: TaskResults, method: str) -> Tensor:
    """best@1 and best@30 of a method at every learning rate, from the lowest to the highest: (rates, 2)."""
    points = []
    for policy in validation.policies():  # in the order of their rates
        if policy.method == method:
            points.append([validation.mean(policy, name) for name in ("best@1", "best@30")])
    return torch.tensor(points)
