"""The figures of an evaluation and of training, from plain numbers; SVG, PDF or PNG.

`path` is the file that a figure is written to.
"""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.evaluations import Evaluation, Pool, Row
from engine.files import read_log
from report import style
from report.drawings import Drawing, drawing_of
from report.looks import Look, look_of, look_of_row, looks_of
from report.table import Table, clusters_of
from rewards import Problem, Task
from vpo import ADVANTAGES, SEVERAL_ANSWERS

COLUMNS = 4  # problems in a figure of answers; policies side by side in one of reward vectors
CROWDED = 6  # curves of a figure
WINDOW = 11  # steps of a running mean, fewer of a short run; odd, so that it lies at a whole step
TRAINING_PANELS = {  # key in metrics.jsonl: title, label of the y axis
    "diversity": ("diversity", "mean pairwise L1 distance"),
    "reward": ("mean reward", "the task's own scalar"),
    "distinct": ("different answers", "share of a group's answers"),
    "W@m": ("W@m", "utility of the best of m answers"),
}


def best_at_k(table: Table, path: Path) -> None:
    """Draw best@k and W@k against k, a curve per policy with its 95% band; of many the main ones without it."""
    rows = sorted(table.measures, key=lambda row: -row.t)  # the trained ones have the plain look
    bands = f"bands: {table.interval}" if table.interval else "no bands: there is only one problem"
    all_margins = table.margins
    is_crowded = len(rows) > CROWDED
    if is_crowded:
        rows = [row for row in rows if row.m is None]
        bands = "rows of one answer and bands are left out"
    panels = {"best@": "best@k: the task scalar", "W@": "W@k: random preference weights"}
    with style.new_figure(1, 2, (9, 4.2), sharey=True) as axes:
        for ax, (prefix, title) in zip(axes[0], panels.items(), strict=True):
            for row, look in looks_of(rows).items():
                names = [name for name in table.measures[row] if name.startswith(prefix)]
                ks = [int(name.removeprefix(prefix)) for name in names]
                means = torch.tensor([table.mean(row, name) for name in names])
                ax.plot(ks, means, **style.curve_style(look))
                if not is_crowded:  # nan: no band where there is no interval
                    margins = torch.tensor([all_margins[row][name] or math.nan for name in names])
                    low, high = means - margins, means + margins
                    ax.fill_between(ks, low, high, color=look.color, alpha=0.12)
            ax.set(title=title, xscale="log", xlabel="candidates k", xticks=ks, xticklabels=ks)
            ax.minorticks_off()
        style.finish(axes, path, f"{table.asked}; {bands}")


def run_figures(
    evaluation: Evaluation,
    task: Task,
    pools: dict[Row, Pool],
    measures: dict[Row, dict[str, Tensor]],  # of each pool, by name (N)
    suffix: str,  # svg, pdf or png
) -> list[Path]:
    """Write a run's figures, but for best@k, into the folder of its evaluation. Returns the files."""
    rows = [row for row in pools if row.method != "start_sets" and row.m is None]
    trained = [row for row in rows if row.method in ADVANTAGES]
    methods = [row.method for row in trained]
    paths = []

    def path_of(name: str) -> Path:
        paths.append(evaluation.folder / f"{name}.{suffix}")
        return paths[-1]

    curves = curves_of(evaluation.run, methods, "metrics", list(TRAINING_PANELS))
    if curves:
        T, T_eval = evaluation.config.temperature, evaluation.settings.temperature
        temperatures = f"at temperature {T:g} (the table's candidates: {T_eval:g})"
        training(curves, path_of("diversity"), temperatures)

    n = evaluation.config.pool
    shown = ["best@1", f"best@{n}", f"W@{n}"]
    curves = curves_of(evaluation.run, methods, "evaluations", shown)
    if curves:
        progress(curves, shown, path_of("progress"))

    rewards = {look_of_row(row): pools[row].rewards for row in rows}
    # The problem of median gap in diversity between the first and the last method.
    gaps = measures[trained[-1]]["diversity"] - measures[trained[0]]["diversity"]  # (N)
    index = int(gaps.argsort(stable=True)[len(gaps) // 2])
    reward_vectors(rewards, index, task.objectives, path_of("reward_vectors"), task.minimum)

    drawing = drawing_of(task)
    if drawing:
        drawn = {look_of_row(row): (pools[row].answers, rewards_of(pools[row])) for row in rows}
        answers(drawn, pools[rows[0]].problems, drawing, path_of("answers"))
    return paths


def rewards_of(pool: Pool) -> list[Tensor]:
    """The rewards (n, d) of each problem of a pool, without the objectives that it lacks."""
    return [pool.rewards[i][:, mask] for i, mask in enumerate(pool.objective_mask)]


def curves_of(run: Path, methods: list[str], log: str, keys: list[str]) -> dict[str, list[dict]]:
    """By method the records with these keys in its log, if there are some."""
    logs = {method: read_log(run / method / f"{log}.jsonl", *keys) for method in methods}
    return {method: rows for method, rows in logs.items() if rows}


def training(curves: dict[str, list[dict]], path: Path, temperatures: str) -> None:
    """Draw the records of metrics.jsonl: diversity, reward, different answers and W@m by training step.

    In step 1 every method still samples from the start model, so the methods' mean in that step is
    the level of the start model: one of methods with single answers, one of those with sets.
    """
    shortest = min(map(len, curves.values()))
    window = max(1, min(WINDOW, shortest // 3))
    if window % 2 == 0:
        window -= 1
    with style.new_figure(2, 2, (9, 7.6)) as axes:
        for ax, (key, (heading, unit)) in zip(axes.flat, TRAINING_PANELS.items(), strict=True):
            for method, rows in curves.items():
                look = look_of(method)
                points = torch.tensor([(row["step"], row[key]) for row in rows])  # (steps, 2)
                means = points.unfold(0, window, 1).mean(-1)
                ax.plot(*points.T, color=look.color, alpha=0.2, lw=0.8)
                every = max(1, len(means) // 10)
                ax.plot(*means.T, **style.curve_style(look), markevery=every)
            _draw_start_levels(ax, curves, key, " (step 1)")
            ax.set(title=heading, xlabel="training step", ylabel=unit)
            ax.set_ylim(bottom=min(0.0, ax.dataLim.y0))
            ax.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        smoothed = f", running means of {window} steps" if window > 1 else ""
        sets = "W@m: of a rollout's m answers, or of any m of a group's single answers"
        style.finish(axes, path, f"Training's own rollouts {temperatures}{smoothed}; {sets}")


def progress(curves: dict[str, list[dict]], measures: list[str], path: Path) -> None:
    """Draw the records of evaluations.jsonl, a panel per measure, a curve per method."""
    measures = list(dict.fromkeys(measures))  # a pool of one has best@1 twice
    # A record of step 0 is of the start model.
    from_start = {method: rows for method, rows in curves.items() if rows[0]["step"] == 0}
    with style.new_figure(1, len(measures), (3.6 * len(measures), 4), sharey=True) as axes:
        for ax, measure in zip(axes[0], measures, strict=True):
            for method, rows in curves.items():
                steps = [row["step"] for row in rows]
                values = [row[measure] for row in rows]
                ax.plot(steps, values, **style.curve_style(look_of(method)))
            _draw_start_levels(ax, from_start, measure)
            ax.set(title=measure, xlabel="training step")
            ax.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            ax.grid(alpha=0.25, lw=0.6)
        style.finish(axes, path, "Means over at most 20 validation problems during training")


def _draw_start_levels(ax: Any, curves: dict[str, list[dict]], key: str, note: str = "") -> None:
    """Draw the first record of methods with single answers, and of those with sets, as levels."""
    levels: dict[str, list[float]] = {}
    for method, rows in curves.items():
        name = "start_sets" if method in SEVERAL_ANSWERS else "start"
        levels.setdefault(name, []).append(rows[0][key])
    for name, values in levels.items():
        look = look_of(name)
        level = sum(values) / len(values)
        ax.axhline(level, color=look.color, ls=look.line, label=f"{look.title}{note}")


def reward_vectors(
    pools: dict[Look, Tensor],
    index: int,
    objectives: Sequence[str],
    path: Path,
    minimum: float = 0.0,
) -> None:
    """Draw the reward vectors of a problem, a panel per policy.

    The axes are the two objectives that conflict most over all problems. If problems differ in
    their objectives, they are the first two of the problem's own.

    Args:
        pools: rewards (N, n, d) by policy.
        index: which of the N problems.
        objectives: names of the d objectives; empty if problems differ in them.
        minimum: the task's, which candidates without an answer have in all objectives.
    """
    vectors = torch.stack([rewards[index] for rewards in pools.values()])  # (policies, n, d)
    n, d = vectors.shape[1:]
    labels = objectives or [f"objective {i + 1}" for i in range(d)]
    x = 0
    y = min(1, d - 1)
    if objectives:
        x, y = _conflicting_pair(torch.cat(list(pools.values())), minimum)

    views = vectors[..., [x, y]]  # (policies, n, 2)
    low = min(0.0, views.min().item())
    high = max(1.0, views.max().item())
    margin = 0.17 * (high - low)  # room for circles
    limits = (low - margin, high + margin)
    rows = math.ceil(len(pools) / COLUMNS)
    columns = min(len(pools), COLUMNS)
    size = (2.8 * columns, 3.2 * rows + 0.4)
    with style.new_figure(rows, columns, size, sharex=True, sharey=True) as axes:
        for ax in axes.flat[len(pools) :]:
            ax.set_visible(False)
        for ax, look, all_objectives, view in zip(axes.flat, pools, vectors, views, strict=False):
            _draw_vectors(ax, view, look.color)
            heading = f"{look.title}\n{len(all_objectives.unique(dim=0))} distinct"
            ax.set(title=heading, xlabel=labels[x], xlim=limits, ylim=limits)
            ax.locator_params(nbins=5)
            ax.tick_params(labelbottom=True)
            ax.grid(alpha=0.25, lw=0.6)
        for ax in axes[:, 0]:
            ax.set_ylabel(labels[y])
        caption = f"Reward vectors for problem {index + 1}, {n} candidates per policy"
        hidden = [name for i, name in enumerate(objectives) if i not in (x, y)]
        if hidden:
            caption += f"; not shown: {', '.join(hidden)}, which answers at 0, 0 may earn"
        style.finish(axes, path, caption)


def _draw_vectors(ax: Any, vectors: Tensor, color: str) -> None:
    """Draw vectors (n, 2) as circles, as large as they are frequent."""
    points, counts = vectors.unique(dim=0, return_counts=True)
    look = {"facecolor": (color, 0.3), "edgecolor": color, "lw": 1.3, "clip_on": False}
    for point, count in zip(points.tolist(), counts.tolist(), strict=True):
        share = count / len(vectors)
        ax.scatter(*point, s=25 + 900 * share, zorder=3 - share, **look)
        if share >= 0.2:  # else the circle is too small for a number
            ax.annotate(str(count), point, ha="center", va="center_baseline", zorder=4)


def _conflicting_pair(rewards: Tensor, minimum: float) -> tuple[int, int]:
    """The two objectives with the lowest correlation over all candidates that scored: (N, n, d)."""
    d = rewards.shape[-1]
    scored = rewards[(rewards > minimum).any(-1)]  # (candidates, d)
    if len(scored) < 2:
        scored = rewards.flatten(0, 1)
    matrix = torch.corrcoef(scored.T).reshape(d, d)  # nan: an objective that is constant
    matrix = matrix.nan_to_num(1.0).fill_diagonal_(2.0)
    return divmod(int(matrix.argmin()), d)


def answers(
    pools: dict[Look, tuple[list[list[str | None]], list[Tensor]]],
    problems: list[Problem],
    drawing: Drawing,
    path: Path,
    heading: str = "",
) -> None:
    """Draw the answers to the first distinct problems.

    Args:
        pools: by policy the answers (n) to each of the N problems, None where a slot was left
            empty, and their rewards (n, d).
        heading: stands above the whole figure, which then leaves room for titles of two lines,
            so that nothing moves from one picture of a film to the next.
    """
    distinct = distinct_problems(problems)
    drawn = distinct[:COLUMNS]
    shape = (len(drawn), len(pools)) if drawing.wide else (len(pools), len(drawn))
    width, height = (drawing.width, 2.3) if drawing.wide else (2.4, 2.5)
    with style.new_figure(*shape, (width * shape[1], height * shape[0] + 0.6)) as axes:
        by_policy = axes.T if drawing.wide else axes
        for of_policy, (look, (texts, rewards)) in zip(by_policy, pools.items(), strict=True):
            for i, ax in zip(drawn, of_policy, strict=True):
                parsed = [text for text in texts[i] if text is not None]
                drawing.draw(ax, problems[i], parsed, look.color)
                ax.spines[:].set_visible(False)
                summary = textwrap.fill(drawing.summary(rewards[i]), int(15 * width))
                if heading and not drawing.wide and "\n" not in summary:
                    summary = f"\n{summary}"
                side = "left" if drawing.wide else "center"
                ax.set_title(summary, loc=side, fontsize=style.SMALL)
        if drawing.wide:  # a row holds the drawings of a problem
            for i, row in zip(drawn, axes, strict=True):
                _label_problem(row, drawing.text_of(problems[i]))
        for of_policy, look in zip(by_policy, pools, strict=True):
            _label_policy(of_policy[0], look.title, above=drawing.wide)
        caption = f"{len(texts[0])} candidates per policy"
        if len(drawn) < len(distinct):
            caption = f"{len(drawn)} of {len(distinct)} problems, {caption}"
        if drawing.legend:
            caption += f"; {drawing.legend}"
        style.finish(axes, path, caption, heading)


def distinct_problems(problems: list[Problem]) -> list[int]:
    """The indices of the problems whose data differ from those before."""
    numbers = clusters_of(problems).tolist()
    return [numbers.index(number) for number in range(max(numbers) + 1)]


def _label_problem(row: Any, text: str) -> None:
    """Write a line above a row of drawings, if there is one."""
    if not text:
        return
    for ax in row:
        ax.set_title(f"\n\n{ax.get_title('left')}", loc="left", fontsize=style.SMALL)
    above = row[0].annotate(text, (0, 1), (0, 28), "axes fraction", "offset points")
    above.set(fontsize=style.SMALL, in_layout=False)  # else its column would grow


def _label_policy(ax: Any, label: str, above: bool) -> None:
    """Write a policy's name above the title of its first drawing, or beside it."""
    if not above:
        ax.set_ylabel(label, **style.BOLD)
        return
    position = (0, 22 + 12 * ax.get_title("left").count("\n"))
    ax.annotate(label, (0, 1), position, "axes fraction", "offset points", **style.BOLD)
