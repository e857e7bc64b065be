"""The figures of the study, drawn from stored results; those of headlines are in documents.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

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
    START_MODEL,
    VPO,
    Entry,
)
from study.grid import EIGHT_WORDS, HEADLINE
from study.stored import Stored, TaskResults
from study.tables import KS, OF_HEADLINES, geometry_tasks, regret
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
LABELS = {
    "best": "best score of k candidates (best@k)",
    "W": "best of k, random preferences (W@k)",
    "pass": "a full solution among k (pass@k)",
}


def draw_figures(stored: Stored, root: Path) -> None:
    """Draw all figures of results."""
    pages = root / "study/figures"
    for name, kinds in KINDS.items():
        panels = [(stored.task(name), kind, OF_HEADLINES) for kind in kinds]
        best_of_k(panels, pages / f"{name}_best_at_k.png")
    other_cures(stored, pages / "other_cures.png")
    solved(stored, pages / "search.png")
    two_halves(geometry_tasks(stored), pages / "two_halves.png")


def best_of_k(
    panels: list[tuple[TaskResults, str, tuple[Entry, ...]]], path: Path, columns: int = 2
) -> None:
    """Draw best@k, W@k or pass@k of policies, as far as they are stored.

    Args:
        panels: a task, "best", "W" or "pass", and the policies of each.
        columns: panels in a row.
    """
    n_rows = len(panels) // columns
    with style.new_figure(n_rows, columns, (5.4 * columns, 4.6 * n_rows)) as axes:
        for ax, (task, kind, policies) in zip(axes.flat, panels, strict=True):
            for policy in policies:
                if task.runs(policy):
                    means = [task.mean(policy, f"{kind}@{k}") for k in KS]
                    ax.plot(KS, means, **style.curve_style(look_of_entry(policy)))
            finish_axes(ax, TITLES[task.name], "number of candidates k", LABELS[kind])
            ax.set_xscale("log")
            ax.set_xticks(KS, KS)
            ax.minorticks_off()
        seeds = {len(task.runs(VPO)) for task, *_ in panels}.pop()
        style.finish(axes, path, f"mean of {seeds} seeds; temperature 0.7")


def finish_axes(ax: Any, title: str, x_label: str, y_label: str) -> None:
    ax.set(xlabel=x_label, ylabel=y_label)
    ax.set_title(title, fontsize=13)
    ax.grid(alpha=0.2, lw=0.6)


def other_cures(stored: Stored, path: Path) -> None:
    """Draw best@k and W@k of GRPO with the winner of each cure, and of the sets with their own KL term."""
    panels = []
    for name in TASKS:
        task = stored.task(name)
        cured = [entry for entry in task.policies(flags=True) if entry.is_cure]
        of_grpo = [entry for entry in cured if entry.method == "grpo"]
        sets = [own(stored, name, method, "best@30") for method in ("max_at_k", "vpo", "group_vpo")]
        entries = (START_MODEL, GRPO, GRPO_LOW, *of_grpo, *sets)
        panels += [(task, "best", entries), (task, "W", entries)]
    best_of_k(panels, path)


def look_of_entry(entry: Entry) -> Look:
    """Each cure of GRPO has a color of its own; the one of the main table is solid."""
    look = look_of(entry.method)
    if entry in (GRPO_AT_30, GRPO_QUARTER):
        look = replace(look_of(LOW_RATE), line=":" if entry == GRPO_QUARTER else "--")
    for name, _ in entry.flags:
        if entry.method == "grpo":
            look = replace(look, color=CURE_COLORS[name], line=":")
    if entry == GRPO_KL:
        look = replace(look, color="#7f0000", line="-")
    title = entry.title.replace("training temperature", "trained at")
    return replace(look, title=title)


def solved(stored: Stored, path: Path) -> None:
    """Draw the share of problems that each policy of a search solved within so many candidates."""
    with style.new_figure(1, len(SEARCHES), (5.4 * len(SEARCHES), 4.6)) as axes:
        for ax, (key, title) in zip(axes.flat, SEARCHES.items(), strict=True):
            search = stored.searches[key]
            for name, runs in search["policies"].items():
                after = solved_at(runs)[..., None]  # (runs, N, 1), 0: never
                within = (after > 0) & (after <= torch.tensor(search["ticks"]))
                shares = within.double().mean((0, 1))  # (ticks)
                ax.plot(
                    search["ticks"], shares, **style.curve_style(look_of(name)) | {"marker": ""}
                )
            finish_axes(ax, title, "candidates scored for a problem", "share of problems solved")
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:,.0f}")
        style.finish(axes, path, "mean of three training seeds")


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
            means = [gain.mean for gain in gains]
            below = [gain.mean - gain.low for gain in gains]
            above = [gain.high - gain.mean for gain in gains]
            x = [i + shift for i in range(len(tasks))]
            bars = {"width": 0.38, "color": look_of(ours.method).color, "capsize": 3}
            ax.bar(x, means, yerr=[below, above], label=label, **bars)
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
