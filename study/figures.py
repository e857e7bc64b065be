"""The figures of the study, drawn from its records."""

from pathlib import Path
from typing import Any

import torch
from matplotlib.ticker import MultipleLocator

from engine.tasks import load_task, take_problems
from report import plots, style
from report.looks import Look, look_of
from study.grid import ALIKE, HEADLINE, KS
from study.results import SIX, Results, title_of

FOLDER = Path(__file__).parent
PANELS = {"maze": "Maze", "code": "Programs", HEADLINE: "Headlines", "fence": "Fence"}
MEASURES = {
    "best@1": "one candidate (best@1), better \N{RIGHTWARDS ARROW}",
    "W@30": "best of 30 (W@30), better \N{RIGHTWARDS ARROW}",
}
KL_COLOR = "#7f0000"


def look(row: str) -> Look:
    """The look of a row's method; GRPO with a KL weight has a color of its own."""
    own = look_of(row.partition("-")[0])
    color = KL_COLOR if row == "grpo-kl" else own.color
    return Look(title_of(row), color, own.marker or "o", own.line)


def intervals(results: Results, path: Path) -> None:
    """Draw the means of the six policies and their distance from Max@K, a column for each task."""
    with style.new_figure(2, len(PANELS), (2.9 * len(PANELS) + 1, 5.4), sharey=True) as axes:
        for axes_of_measure, (measure, label) in zip(axes, MEASURES.items(), strict=True):
            for ax, task in zip(axes_of_measure, PANELS, strict=True):
                for y, row in enumerate(SIX):
                    draw_row(ax, results, task, row, measure, y)
                scalar = results.average(task, "max_at_k", measure)
                ax.axvspan(scalar - ALIKE, scalar + ALIKE, color="#e4e4e4", lw=0)
                ax.axvline(scalar, color="#999999", lw=1, zorder=1.5)
                ax.set(xlabel=label, ylim=(len(SIX) - 0.4, -0.6))
                ax.set_title(PANELS[task] if measure == "best@1" else "")
                ax.set_yticks(range(len(SIX)), [title_of(row) for row in SIX])
                ax.tick_params(axis="y", length=0)
        ax = axes[0, 0]
        ax.plot([], [], "o", color="#555555", ms=7, label="mean")
        ax.plot([], [], ".", color="#555555", ms=5, label="one seed")
        ax.plot([], [], "o", color="#555555", mfc="white", label="at its best temperature")
        ax.fill([], [], color="#e4e4e4", label=f"within {ALIKE} of Max@K")
        rule = "A policy differs from Max@K where its line (95% interval of the difference) misses the grey line"
        style.finish(axes, path, f"{rule}; the text also corrects for the number of comparisons.")


def draw_row(ax: Any, results: Results, task: str, row: str, measure: str, y: int) -> None:
    """Draw one policy: its seeds, its mean with the interval, and W@30 at its best temperature."""
    own = look(row)
    seeds = results.values(task, row, measure).mean(1)
    ax.plot(seeds, [y + 0.25] * len(seeds), ".", color=own.color, ms=4, alpha=0.4)
    scalar = results.average(task, "max_at_k", measure)
    lead = results.difference(task, (row, "max_at_k"), measure)
    ax.plot([scalar + lead.low, scalar + lead.high], [y, y], color=own.color, lw=2)
    ax.plot(results.average(task, row, measure), y, own.marker, color=own.color, ms=7)
    if measure == "W@30":
        mean = results.average(task, f"{row}@best", measure)
        ax.plot(mean, y - 0.25, own.marker, color=own.color, mfc="white", ms=5)


def curves(results: Results, path: Path) -> None:
    """Draw best@k and W@k against k for the six policies, a row for each task."""
    kinds = {"best": "best score of k (best@k)", "W": "best of k, random preferences (W@k)"}
    with style.new_figure(2, 2, (9.6, 8)) as axes:
        for axes_of_task, task in zip(axes, ("maze", "code"), strict=True):
            for ax, (kind, label) in zip(axes_of_task, kinds.items(), strict=True):
                for row in SIX:
                    means = [results.average(task, row, f"{kind}@{k}") for k in KS]
                    ax.plot(KS, means, **style.curve_style(look(row)))
                ax.set(title=PANELS[task], xscale="log", xlabel="candidates k", ylabel=label)
                ax.set_xticks(KS, KS)
                ax.minorticks_off()
        style.finish(axes, path, "means over seeds and problems; temperature 0.7")


def mixing(results: Results, path: Path) -> None:
    """Draw best@1 against W@30 from the start model to each trained policy, by way of half-way weights."""
    with style.new_figure(1, 3, (10.8, 4.6)) as axes:
        for ax, task in zip(axes[0], ("maze", "code", "fence"), strict=True):
            for row in SIX[1:]:
                draw_line(ax, results, task, row)
            for start in ("start", "start_sets"):
                label = "start model (VPO: asked for sets)"
                ax.plot(*point(results, task, start), "*", color="#333333", ms=12, label=label)
            ax.set(title=PANELS[task], xlabel="best@1", ylabel="W@30")
            ax.set_aspect("equal", "datalim")
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(MultipleLocator(0.1))
        caption = "Star: t = 0, the start model. Ring: t = 0.5, half-way weights. Mark: t = 1, the trained policy."
        style.finish(axes, path, caption)


def draw_line(ax: Any, results: Results, task: str, row: str) -> None:
    """Draw the line of a policy: start model, half-way weights, trained policy."""
    own = look(row)
    start = "start_sets" if row == "vpo" else "start"
    points = [point(results, task, name) for name in (start, f"{row}@half", row)]
    line = {"color": own.color, "ls": "--" if row in ("grpo-kl", "group_vpo") else "-"}
    ax.plot(*zip(*points, strict=True), lw=1.6, **line)
    ax.plot(*points[1], "o", color=own.color, mfc="none", ms=7)
    ax.plot(*points[2], own.marker, color=own.color, ms=8, mec="white", label=own.title)


def point(results: Results, task: str, row: str) -> tuple[float, float]:
    return results.average(task, row, "best@1"), results.average(task, row, "W@30")


def headlines(results: Results, path: Path) -> None:
    """Draw the headlines of the start model, GRPO and VPO for two held-out texts."""
    task = load_task(HEADLINE)
    problems = take_problems(task, "test", 3)[1:]
    pools = {}
    for row in ("start", "grpo", "vpo"):
        answers = results.candidates(row)[1:]  # 30 for each text
        rewards = []
        for problem, own in zip(problems, answers, strict=True):
            rewards.append(torch.tensor(task.rewards([(problem, answer) for answer in own])))
        pools[look_of(row)] = (answers, rewards)
    plots.answers(pools, problems, task, path)


def write(results: Results) -> None:
    """Draw all figures."""
    headlines(results, FOLDER.parent / "docs/figures/headlines.png")
    intervals(results, FOLDER.parent / "docs/figures/intervals.png")
    curves(results, FOLDER / "figures" / "curves.png")
    mixing(results, FOLDER / "figures" / "mixing.png")
