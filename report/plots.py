"""The figures of an evaluation, of training and of a search, from plain numbers; SVG, PDF or PNG."""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from report import style
from report.evaluation import EvalReport
from report.style import Entry
from vpo import SEVERAL_ANSWERS

HIGHLIGHTED = ("start", "grpo", "max_at_k", "vpo", "group_vpo")  # thick where curves are many
COLUMNS = 4  # problems in a figure of answers; policies side by side in one of reward vectors
BOLD = {"fontsize": 12, "fontweight": "bold"}
TRAINING_PANELS = {  # key in metrics.jsonl: title, label of the y axis
    "diversity": ("diversity of training rollouts", "mean pairwise L1 distance"),
    "reward": ("mean reward of training rollouts", "the task's own scalar"),
    "answers": ("different answers in training", "share of those asked for"),
    "entropy": ("entropy of the policy in training", "nats per token"),
}
SEARCH_PANELS = {  # key in search.json: title
    "solved": "share of problems solved",
    "best": "mean best score",
    "behaviours": "distinct reward vectors",
}


def run_figures(
    evaluation: Any,
    report: EvalReport,
    logs: dict[Entry, list[dict]],
    pools: dict[str, Any],
    suffix: str,
) -> None:
    """Write the four figures of a run into the folder of its evaluation.

    Args:
        evaluation: engine.evaluations.Evaluation of the run.
        report: what was measured of its pools.
        logs: the records of metrics.jsonl by policy.
        pools: eval.Pool by method, "start" and "start_sets".
        suffix: svg, pdf or png.
    """
    folder = evaluation.folder
    task = evaluation.task
    drawn = {name: pool for name, pool in pools.items() if name != "start_sets"}
    rewards = {name: pool.rewards for name, pool in drawn.items()}
    texts = {name: (pool.answers, pool.vectors()) for name, pool in drawn.items()}

    best_at_k(report, folder / f"best_at_k.{suffix}")
    training(logs, evaluation.config.temperature, folder / f"diversity.{suffix}")
    reward_vectors(rewards, task.objectives, folder / f"reward_vectors.{suffix}")
    answers(texts, pools["start"].problems, task, folder / f"answers.{suffix}")
    print(f"figures: {folder}/*.{suffix}")


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


def training(
    logs: dict[Entry, list[dict]], temperature: float, path: Path, window: int = 10
) -> None:
    """Draw diversity, reward, different answers and entropy of the training rollouts by training step.

    In step 1 every method still samples from the start model, so the methods' mean in that step is
    the level of the start model: one of methods with single answers, one of those with sets.

    Args:
        logs: the records of metrics.jsonl by policy; those without a record are left out.
        temperature: at which the rollouts were sampled.
        path: the file that is written.
        window: steps per running mean; 1 if each record is already the mean of 10 steps.
    """
    logs = {policy: rows for policy, rows in logs.items() if rows}
    keys = []  # older logs lack some
    for key in TRAINING_PANELS:
        if all(key in rows[0] for rows in logs.values()):
            keys.append(key)
    n_columns = 2 if len(keys) == 4 else len(keys)
    n_rows = len(keys) // n_columns
    means = "Running means" if window > 1 else "Means"
    first = "step 1" if window > 1 else "steps 1 to 10"
    size = (4.5 * n_columns, 0.6 + 3.5 * n_rows)
    with style.new_figure(n_rows, n_columns, size) as axes:
        for ax, key in zip(axes.flat, keys, strict=True):
            for policy, rows in logs.items():
                points = [(row["step"], row[key]) for row in rows]
                curve = torch.tensor(points)  # (steps, 2)
                smooth = curve.unfold(0, min(window, len(rows)), 1).mean(-1)
                ax.plot(*curve.T, color=policy.color, alpha=0.2, lw=0.8)
                every = max(1, len(smooth) // 10)
                ax.plot(*smooth.T, **policy.line_style, markevery=every)
            if key != "answers":  # rollouts of several answers lack more of them
                _draw_start_levels(ax, logs, key, first)
            heading, unit = TRAINING_PANELS[key]
            ax.set(
                title=f"{heading} (temperature {temperature:g})",
                xlabel="training step",
                ylabel=unit,
            )
        axes[0, 0].set_ylim(0, None)
        style.finish(
            axes,
            path,
            f"{means} of 10 steps; tables and other figures sample held-out problems, at their "
            "own temperature",
        )


def _draw_start_levels(ax: Any, logs: dict[Entry, list[dict]], key: str, first: str) -> None:
    """Draw what methods with single answers, and those with sets, have in their first record."""
    levels: dict[str, list[float]] = {}
    for policy, rows in logs.items():
        name = "start_sets" if policy.method in SEVERAL_ANSWERS else "start"
        levels.setdefault(name, []).append(rows[0][key])
    for name, values in levels.items():
        look = Entry(name).look
        label = f"{look.title} ({first})"
        ax.axhline(sum(values) / len(values), color=look.color, ls=look.line, label=label)


def reward_vectors(pools: dict[str, Tensor], objectives: Sequence[str], path: Path) -> None:
    """Draw the reward vectors of a typical problem, a panel per policy.

    The axes are the two objectives that conflict most over all problems. If problems differ in
    their objectives, they are the first two of the problem's own.

    Args:
        pools: rewards (N, n, k) by policy.
        objectives: names of the k objectives; empty if problems differ in them.
        path: the file that is written.
    """
    index = typical_problem(pools)
    vectors = torch.stack([rewards[index] for rewards in pools.values()])  # (policies, n, k)
    n, k = vectors.shape[1:]
    labels = objectives or [f"objective {i + 1}" for i in range(k)]
    x = 0
    y = min(1, k - 1)
    if objectives:
        x, y = _conflicting_pair(torch.cat(list(pools.values())))

    views = vectors[..., [x, y]]  # (policies, n, 2)
    limits = _limits(views)
    rows = math.ceil(len(pools) / COLUMNS)
    columns = min(len(pools), COLUMNS)
    size = (2.8 * columns, 3.2 * rows + 0.4)
    with style.new_figure(rows, columns, size, sharex=True, sharey=True) as axes:
        for ax in axes.flat[len(pools) :]:
            ax.set_visible(False)
        for ax, name, all_objectives, view in zip(axes.flat, pools, vectors, views, strict=False):
            policy = Entry(name)
            seen = _draw_vectors(ax, view, policy.color)
            distinct = len(all_objectives.unique(dim=0))
            heading = f"{policy.title}\n{distinct} distinct"
            if seen < distinct:
                heading += f", {seen} in this view"
            ax.set(title=heading, xlabel=labels[x], xlim=limits, ylim=limits)
            ax.locator_params(nbins=5)
            ax.tick_params(labelbottom=True)
            ax.grid(alpha=0.25, lw=0.6)
        for ax in axes[:, 0]:
            ax.set_ylabel(labels[y])
        caption = f"Reward vectors for problem {index + 1}, {n} candidates per policy; "
        style.finish(axes, path, caption + "a number: so many at one place, a bare dot: one")


def _limits(values: Tensor) -> tuple[float, float]:
    """Limits of an axis that shows the values and 0 to 1, with room for circles."""
    low = min(0.0, values.min().item())
    high = max(1.0, values.max().item())
    margin = 0.17 * (high - low)
    return low - margin, high + margin


def _draw_vectors(ax: Any, vectors: Tensor, color: str) -> int:
    """Draw vectors (n, 2) as circles, as large as they are frequent; returns how many differ."""
    points, counts = vectors.unique(dim=0, return_counts=True)
    for point, count in zip(points.tolist(), counts.tolist(), strict=True):
        share = count / len(vectors)
        ax.scatter(
            *point,
            s=25 + 900 * share,
            facecolor=(color, 0.3),
            edgecolor=color,
            lw=1.3,
            zorder=3 - share,
            clip_on=False,
        )
        if count > 1:
            inside = share >= 0.2  # else the circle is too small for a number
            ax.annotate(
                str(count),
                point,
                (0, 0) if inside else (6, 6),
                textcoords="offset points",
                ha="center" if inside else "left",
                va="center_baseline",
                zorder=4,
            )
    return len(points)


def _conflicting_pair(rewards: Tensor) -> tuple[int, int]:
    """The two objectives with the lowest correlation over all candidates that scored: (N, n, k)."""
    k = rewards.shape[-1]
    scored = rewards[rewards.any(-1)]  # (candidates, k)
    if len(scored) < 2:
        scored = rewards.flatten(0, 1)
    matrix = torch.corrcoef(scored.T).reshape(k, k)  # nan: an objective that is constant
    matrix = matrix.nan_to_num(1.0).fill_diagonal_(2.0)
    return divmod(int(matrix.argmin()), k)


def typical_problem(pools: dict[str, Tensor]) -> int:
    """The problem of median gap in diversity between the first and the last method.

    Args:
        pools: rewards (N, n, k) by policy.
    """
    methods = [rewards for name, rewards in pools.items() if not name.startswith("start")]
    gap = _sum_of_distances(methods[-1]) - _sum_of_distances(methods[0])  # (N)
    order = gap.argsort(stable=True)
    return int(order[len(order) // 2])


def _sum_of_distances(rewards: Tensor) -> Tensor:
    """The L1 distances between all candidates of a pool, added up: (N, n, k) -> (N)."""
    return torch.cdist(rewards, rewards, p=1).sum((1, 2))


def answers(
    pools: dict[str, tuple[list[list[str | None]], list[Tensor]]],
    problems: list,
    task: Any,
    path: Path,
    heading: str = "",
    columns: list[str] | None = None,
) -> bool:
    """Let the task draw the answers to the first distinct problems.

    Args:
        pools: by policy the answers (n) to each of the N problems, None where a slot was left
            empty, and their rewards (n, k).
        problems: the N problems.
        task: its `draw` makes the drawings and its `summary` their titles.
        path: the file that is written.
        heading: stands above the whole figure, which then leaves room for titles of two lines,
            so that nothing moves from one picture of a film to the next.
        columns: headings of the problems, each of which then has a column; None: if drawings are
            wide, each policy has one.

    Returns:
        False if the task cannot draw answers; then nothing is written.
    """
    distinct = distinct_problems(problems)
    drawn = distinct[:COLUMNS]
    policies_in_rows = columns is not None or not task.wide
    shape = (len(pools), len(drawn)) if policies_in_rows else (len(drawn), len(pools))
    width, height = (3.9, 2.3) if task.wide else (2.4, 2.5)
    if columns is not None:
        height = 1.45
    with style.new_figure(*shape, (width * shape[1], height * shape[0] + 0.6)) as axes:
        by_policy = axes if policies_in_rows else axes.T
        for of_policy, (name, (texts, rewards)) in zip(by_policy, pools.items(), strict=True):
            for i, ax in zip(drawn, of_policy, strict=True):
                parsed = [text for text in texts[i] if text is not None]
                if not task.draw(ax, problems[i], parsed, Entry(name).color):
                    return False
                _finish_drawing(ax, task, rewards[i], width, two_lines=bool(heading))
        labels = _policy_labels({name: rewards for name, (_, rewards) in pools.items()})
        for of_policy, label in zip(by_policy, labels, strict=True):
            _label_policy(of_policy[0], label, above=not policies_in_rows)
        axes[0, 0].figure.suptitle(heading, **BOLD)
        for ax, text in zip(axes[0], columns or [], strict=False):
            above = textwrap.fill(text, int(13 * width))
            ax.set_title(f"{above}\n\n{ax.get_title('left')}", loc="left", fontsize=style.SMALL)
        caption = _answers_caption(len(texts[0]), len(drawn), len(distinct), task.legend)
        style.finish(axes, path, caption)
    return True


def _answers_caption(n: int, n_drawn: int, n_problems: int, legend: str) -> str:
    """What a figure of n answers per policy and problem shows."""
    caption = f"{n} candidates per policy"
    if legend:
        caption += f"; {legend}"
    if n_drawn < n_problems:
        caption = f"{n_drawn} of {n_problems} problems, {caption}"
    return caption


def _finish_drawing(ax: Any, task: Any, rewards: Tensor, width: float, two_lines: bool) -> None:
    """Take the frame from a drawing of answers, and write their summary above it.

    Args:
        ax: the axes with the drawing.
        task: makes the summary.
        rewards: (n, k), of the answers.
        width: of the drawing, in inches.
        two_lines: whether the title has the height of two lines at least.
    """
    ax.spines[:].set_visible(False)
    summary = textwrap.fill(task.summary(rewards), int(15 * width))
    if two_lines and "\n" not in summary:
        summary = f"\n{summary}"
    side = "left" if task.wide else "center"
    ax.set_title(summary, loc=side, fontsize=style.SMALL)


def _policy_labels(rewards: dict[str, list[Tensor]]) -> list[str]:
    """The titles of policies, with how many problems each solves if any solves one.

    A problem is solved if a candidate earns the full reward in every objective.

    Args:
        rewards: by policy the rewards (n, k) of the N problems.
    """
    solved = {}
    for name, of_problems in rewards.items():
        is_solved = [(vectors >= 1).all(-1).any().item() for vectors in of_problems]
        solved[name] = sum(is_solved)
    labels = []
    for name, count in solved.items():
        label = Entry(name).title
        if any(solved.values()):
            label += f"\nsolves {count} of {len(rewards[name])} problems"
        labels.append(label)
    return labels


def distinct_problems(problems: list) -> list[int]:
    """The indices of the problems whose data differ from those before."""
    first: dict[str, int] = {}
    for i, problem in enumerate(problems):
        first.setdefault(json.dumps(problem.data), i)
    return list(first.values())


def _label_policy(ax: Any, label: str, above: bool) -> None:
    """Write a policy's name above the title of its first drawing, or beside it."""
    if not above:
        ax.set_ylabel(label, **BOLD)
        return
    lines = 1 + ax.get_title("left").count("\n")
    position = (0, 10 + 12 * lines)
    ax.annotate(label, (0, 1), position, "axes fraction", "offset points", **BOLD)


def search(ticks: list[int], policies: dict[str, list[dict]], path: Path) -> None:
    """Draw how much a search solved, and how well, against the candidates scored for a problem.

    Args:
        ticks: numbers of candidates, the x coordinates.
        policies: by policy the curves of every run, as in search.json.
        path: the file that is written.
    """
    with style.new_figure(1, 3, (13.2, 4.2)) as axes:
        for ax, (key, heading) in zip(axes[0], SEARCH_PANELS.items(), strict=True):
            for name, runs in policies.items():
                values = torch.tensor([run[key] for run in runs], dtype=torch.float64)
                if key == "solved":  # (runs, N), after how many candidates; 0: never
                    after = values[..., None]
                    values = ((after > 0) & (after <= torch.tensor(ticks))).double()
                curves = values.mean(1).float()  # (runs, N, ticks) -> (runs, ticks)
                policy = Entry(name)
                ax.plot(ticks, curves.T, color=policy.color, alpha=0.3, lw=0.8)
                line_style = policy.line_style | {"marker": ""}
                ax.plot(ticks, curves.mean(0), **line_style)
            ax.set(title=heading, xlabel="candidates scored for a problem", xscale="log")
            ax.xaxis.set_major_formatter("{x:,.0f}")
            ax.grid(alpha=0.25, lw=0.6)
        runs = next(iter(policies.values()))
        problems = len(runs[0]["solved"])
        style.finish(axes, path, f"{problems} problems; bold: mean of {len(runs)} runs")
