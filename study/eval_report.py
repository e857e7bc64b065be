"""What was measured of a task's policies over all seeds, and its figure of best@k."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from report import style
from report.statistics import bootstrap_interval
from study.entries import HIGHLIGHTED, Entry


@dataclass
class EvalReport:
    """The measures of several policies, over problems and seeds."""

    name: str  # of the task
    split: str
    problems: int  # N
    pool: int  # candidates per problem
    temperature: float
    measures: dict[Entry, dict[str, Tensor]]  # policy -> measure -> values (N) or (runs, N)
    prompt_ids: Tensor | None  # (N), equal where two problems show the same prompt; None: all do

    def caption(self) -> str:
        """What curves of the measures were measured on, and what their bands are."""
        seeds = [len(torch.atleast_2d(values["best@1"])) for values in self.measures.values()]
        mark = "lines at the right" if any(policy.lr for policy in self.measures) else "bands"
        bands = f"one run, {mark}: 95% over problems"
        if max(seeds) > 1:
            number = f"{max(seeds)}"
            if min(seeds) < max(seeds):
                number = f"{min(seeds)} to {max(seeds)}"
            bands = f"mean of {number} seeds, {mark}: 95% over seeds and problems"
        return (
            f"{self.problems} {self.split} problems, {self.pool} candidates each "
            f"at temperature {self.temperature:g}; {bands}"
        )

    def interval(self, values: Tensor) -> tuple[float, float]:
        """The 95% interval of the mean of values (N) or (runs, N)."""
        return bootstrap_interval(values, self.prompt_ids)


def best_at_k(report: EvalReport, path: Path) -> None:
    """Draw best@k, W@k and, if any candidate passes, pass@k against the number of candidates k.

    A ring marks where VPO overtakes GRPO, if its lead is clear in the end.
    """
    measures = next(iter(report.measures.values()))
    ks = [int(name.removeprefix("best@")) for name in measures if name.startswith("best@")]
    headings = {
        "best": "best@k: the task's own scalar",
        "W": "W@k: a random weighting of the objectives",
        "pass": "pass@k: one of k is a full solution",
    }
    if not any(values[f"pass@{ks[-1]}"].any() for values in report.measures.values()):
        del headings["pass"]
    ticks = [k for k, after in pairwise(ks) if after > 1.2 * k] + ks[-1:]  # labels need room

    size = (4.4 * len(headings), 4.2)
    with style.new_figure(1, len(headings), size) as axes:
        axes[0, 1].sharey(axes[0, 0])
        for ax, kind in zip(axes[0], headings, strict=True):
            curves = _draw_curves(ax, report, [f"{kind}@{k}" for k in ks], ks)
            _mark_crossing(ax, ks, curves)
            ax.set(
                title=headings[kind],
                xlabel="candidates k",
                xscale="log",
                xlim=(0.9, 1.12 * ks[-1]),
            )
            ax.set_xticks(ticks, ticks)
            ax.minorticks_off()
            if any(policy.lr for policy in curves):  # room for the lines
                ax.set_xlim(0.9, 1.05 ** (len(curves) + 1) * ks[-1])
        axes[0, 0].set_ylabel("expected best of k")
        for ax in axes[0, 2:]:
            ax.set(ylabel="share of problems", ylim=(0, None))
        style.finish(axes, path, report.caption())


def crossing(ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    """The first position at which ours is above theirs and was not at the one before, or None."""
    for i in range(1, len(ours)):
        if ours[i] > theirs[i] and ours[i - 1] <= theirs[i - 1]:
            return i
    return None


@dataclass(frozen=True)
class Curve:
    """A measure of one policy at every k."""

    means: list[float]
    low: Sequence[float]  # ends of the 95% intervals
    high: Sequence[float]


def _draw_curves(
    ax: Any, report: EvalReport, measures: list[str], ks: list[int]
) -> dict[Entry, Curve]:
    """Draw the mean of every policy with the band of its intervals.

    Where learning rates are compared, lines beside the largest k stand for its intervals.
    """
    is_crowded = any(policy.lr for policy in report.measures)
    curves = {}
    for policy, values in report.measures.items():
        means = [values[measure].double().mean().item() for measure in measures]
        intervals = [report.interval(values[measure]) for measure in measures]
        low, high = zip(*intervals, strict=True)
        curves[policy] = Curve(means, low, high)
        line_style = policy.line_style
        alpha = 0.15
        highlighted = policy.is_main and policy.method in HIGHLIGHTED
        if len(report.measures) > 7 and not highlighted:
            line_style |= {"lw": 0.7, "ms": 4}
            alpha = 0
        ax.plot(ks, means, **line_style)
        if is_crowded:  # bands would hide one another
            x = ks[-1] * 1.04 ** len(curves)
            line = policy.line_style["ls"]
            ax.plot([x, x], [low[-1], high[-1]], color=policy.color, ls=line, lw=1.5, clip_on=False)
        else:
            ax.fill_between(ks, low, high, color=policy.color, alpha=alpha, lw=0)
    return curves


def _mark_crossing(ax: Any, ks: list[int], curves: dict[Entry, Curve]) -> None:
    """Draw a ring where VPO overtakes GRPO and the start model.

    None is drawn if the bands of VPO and GRPO overlap at the largest k: the order may be noise.
    """
    vpo = Entry("vpo")
    grpo = Entry("grpo")
    start = Entry("start")
    if vpo not in curves or grpo not in curves:
        return
    i = crossing(curves[vpo].means, curves[grpo].means)
    is_clear = curves[vpo].low[-1] > curves[grpo].high[-1]
    if i is None or not is_clear:
        return
    if start in curves and curves[vpo].means[i] <= curves[start].means[i]:
        return

    point = (ks[i], curves[vpo].means[i])
    bottom, top = ax.get_ylim()
    is_low = point[1] <= bottom + 0.2 * (top - bottom)  # too low for a label below the ring
    label = f"{vpo.title} passes {grpo.title}"
    ax.plot(*point, "o", ms=13, mfc="none", mec="black", mew=1.3, zorder=4, label=label)
    ax.annotate(
        f"k = {ks[i]}",
        point,
        (-25, 12) if is_low else (5, -20),
        textcoords="offset points",
        zorder=5,
        bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.8},
    )
