"""Half-way weights, start + t (trained - start): the tables and figures of study/pages/mixing.md."""

import functools
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from examples.markdown import markdown
from report import style
from report.looks import look_of
from study.bootstrap import TAIL, resampled_means
from study.collapse import RESULTS as COLLAPSED
from study.entries import (
    GROUP_VPO,
    GRPO,
    GRPO_KL,
    GRPO_LOW,
    GRPO_QUARTER,
    MAX_AT_K,
    VPO,
    Entry,
    mixed,
)
from study.grid import HEADLINE, LR, MIXES
from study.stored import Stored, TaskResults
from study.tables import (
    KS,
    Column,
    Pair,
    columns,
    lead_cell,
    mean_cell,
    pairs,
    policies,
    table,
    table_of_tasks,
)
from study.validation import first_close

TASKS = ("maze", "code", "gems", "tradeoff", "fence", HEADLINE)
POLICIES = (GRPO, GRPO_KL, MAX_AT_K, VPO, GROUP_VPO)
HALF = 0.5  # t of the tables, fixed before any result
SAMPLES = 2000  # of a bootstrap
SHOWN_WORDS = {"maze": 12, "headline": 6}  # in a figure


def first_page(stored: Stored, _: str) -> str:
    """The maze and programs side by side."""
    rows = {
        "start model": mixed(GRPO, 0),
        "GRPO": GRPO,
        "GRPO, half-way weights": mixed(GRPO, HALF),
    }
    rows |= policies((GRPO_KL, MAX_AT_K, VPO, GROUP_VPO))
    measures = "best@1 W@30"
    return table(rows, columns(stored.mixed, f"maze {measures}, code {measures}"), mean_cell)


def half_way(stored: Stored, _: str) -> str:
    """The means of every policy with half-way weights, and with its own in brackets."""
    rows = dict.fromkeys(TASKS, policies(POLICIES))
    return table_of_tasks(stored.mixed, rows, "best@1 best@3 best@30 W@30 diversity", half_way_cell)


def half_way_cell(column: Column, policy: Entry) -> str:
    """A mean with half-way weights, and with those of the trained policy."""
    if not column.task.runs(policy):
        return ""
    half, own = [column.task.mean(mixed(policy, t), column.measure) for t in (HALF, 1)]
    return f"{half:.3f} ({own:.3f})"


def leads(stored: Stored, _: str) -> str:
    """Who is ahead of whom with half-way weights, in every task."""
    half = mixed(GRPO, HALF)
    found = [(half, GRPO), (half, GRPO_KL), (VPO, half), (mixed(VPO, HALF), VPO)]
    rows = dict.fromkeys(TASKS, pairs(found))
    return table_of_tasks(stored.mixed, rows, "best@1 best@3 best@30 W@30", lead_cell)


def chosen(stored: Stored, _: str) -> str:
    """The t that is best on the validation problems of another seed, and what it gives on held-out ones."""
    cell = functools.partial(chosen_cell, stored)
    rows = dict.fromkeys(("maze", "code"), policies(POLICIES))
    return table_of_tasks(stored.mixed, rows, "best@1 best@3 best@30 W@30", cell)


def chosen_cell(stored: Stored, column: Column, policy: Entry) -> str:
    """A mean with the largest t within the noise of the best; 0 is the start model, not asked."""
    name = column.task.name
    if not column.task.runs(policy):
        return ""
    tuned = policy if policy.flags else Entry(policy.method, LR[name][policy.method])
    ts = {mixed(tuned, t): t for t in reversed(MIXES[1:])}
    validation = stored.mixed.task(name, tuning=True)
    t = ts[first_close(validation, list(ts), column.measure)]
    return f"{column.task.mean(mixed(policy, t), column.measure):.3f} (t = {t:g})"


def train_test(stored: Stored, _: str) -> str:
    """Sets of 2 rollouts in training minus sets of 4, by k in the test."""
    rows = {}
    for policy, names in ((MAX_AT_K, ("maze", "code")), (GROUP_VPO, ("maze_v1", "code_v1"))):
        of_two = Entry(policy.method, flags=(("subset", 2),))
        rows |= dict.fromkeys(names, {policy.title: (of_two, policy)})
    return table_of_tasks(stored, rows, " ".join(f"best@{k}" for k in KS), lead_cell)


# At which k do the curves cross?


def crossings(stored: Stored, _: str) -> str:
    """The k at which the rivals' best@k and W@k meet GRPO's, with its 95% interval."""
    found = [(ours, GRPO) for ours in (VPO, GROUP_VPO, MAX_AT_K, mixed(GRPO, HALF))]
    rows = dict.fromkeys(("maze", "code"), pairs(found))
    return table_of_tasks(stored.mixed, rows, "best W", crossing_cell)


def crossing_cell(column: Column, pair: Pair) -> str:
    """The crossing of the means, and the interval of a bootstrap over seeds and problems."""
    task = column.task
    if not task.shared_seeds(*pair):
        return ""
    of_each_k = [task.lead(*pair, f"{column.measure}@{k}") for k in KS]
    gaps = torch.stack(of_each_k, -1)  # (seeds, N, KS)
    mean = crossing(gaps.mean((0, 1)))
    ks = sorted(crossing(means) for means in resampled_means(gaps, task.prompt_ids, SAMPLES))
    low = ks[math.floor(TAIL * SAMPLES)]
    high = ks[math.ceil((1 - TAIL) * SAMPLES) - 1]
    return f"{k_text(mean)} [{k_text(low)}, {k_text(high)}]"


def crossing(gaps: Tensor) -> float:
    """The k from which a gap (KS) stays above 0, interpolated in log k; inf: not by the last k."""
    if gaps[-1] <= 0:
        return math.inf
    below = [i for i, gap in enumerate(gaps.tolist()) if gap <= 0]
    if not below:
        return KS[0]
    i = below[-1]
    share = (-gaps[i] / (gaps[i + 1] - gaps[i])).item()  # of the way from one k to the next
    step = KS[i + 1] / KS[i]
    return KS[i] * step**share


def k_text(k: float) -> str:
    if k == math.inf:
        return "not by 30"
    return "from 1" if k == 1 else f"{k:.1f}"


# Where does it collapse?


def doors(stored: Stored, _: str) -> str:
    """What GRPO's policy does behind a door that it no longer takes, means over seeds."""
    rows = []
    for name, records in collapse_records().items():
        share = sum(record["doors"] for record in records) / len(records)
        for title in records[0]["scores"]:
            row = [name, len(records), f"{share:.0%}", title]
            for measure in ("best@1", "best@30", "W@30"):
                values = [record["scores"][title][measure] for record in records]
                row.append(sum(values) / len(values))
            rows.append(row)
    head = ["task", "seeds", "problems with a door", "answers", "best@1", "best@30", "W@30"]
    return markdown(head, rows)


def collapse_records() -> dict[str, list[dict]]:
    """What study/collapse.py measured: task -> a record of each seed."""
    records: dict[str, list[dict]] = {}
    for name, record in sorted(json.loads(COLLAPSED.read_text("utf-8")).items()):
        records.setdefault(name.partition("-")[0], []).append(record)
    return records


def draw_collapse(path: Path) -> None:
    """Draw entropy and distinct beginnings by word, for the start model, GRPO and VPO."""
    labels = {"nats": "entropy of the next word, nats", "distinct": "distinct beginnings of 30"}
    tasks = collapse_records()
    with style.new_figure(2, len(tasks), (4.8 * len(tasks), 6.4)) as axes:
        for column, (name, records) in enumerate(tasks.items()):
            n_words = SHOWN_WORDS[name]
            for row, (key, label) in enumerate(labels.items()):
                ax = axes[row, column]
                for policy in ("start", "grpo", "vpo"):
                    values = torch.tensor([record[key][policy][:n_words] for record in records])
                    curve = style.curve_style(look_of(policy))
                    ax.plot(range(1, n_words + 1), values.mean(0), **curve)
                ax.set(ylabel=label, xlabel="word of the answer", title=name, ylim=(0, None))
        style.finish(axes, path, "means over seeds and 40 held-out problems; temperature 0.7")


# The frontier.


def draw_frontier(stored: Stored, path: Path) -> None:
    """Draw best@1 against W@30, a line per method along t, and GRPO's other cures as points."""
    panels = {"maze": "Maze", "code": "Programs", "fence": "Fence", HEADLINE: "Headlines"}
    with style.new_figure(2, 2, (10.4, 8.4)) as axes:
        for ax, (name, title) in zip(axes.flat, panels.items(), strict=True):
            task = stored.mixed.task(name)
            for policy in (GRPO, MAX_AT_K, VPO, GROUP_VPO):
                if task.runs(policy):
                    draw_line(ax, task, policy)
            others = stored.task(name)
            cures = [entry for entry in others.policies(flags=True) if entry.is_cure]
            cures = [entry for entry in cures if entry.method == "grpo"]
            for entry in [GRPO_LOW, GRPO_QUARTER, *cures]:
                if others.runs(entry):
                    mark = {"color": look_of("grpo").color, "mfc": "white", "ms": 7}
                    ax.plot(*point(others, entry), "s", label="GRPO, other cures", **mark)
            ax.set(title=title, xlabel="best@1", ylabel="W@30")
        caption = "Five seeds. A line goes from the start model (t = 0) to the trained policy (large, t = 1)."
        style.finish(axes, path, caption)


def draw_line(ax, task: TaskResults, policy: Entry) -> None:
    """The line of a method along t, its trained policy with a large marker."""
    points = [point(task, mixed(policy, t)) for t in MIXES]
    look = style.curve_style(look_of(policy.method))
    ax.plot(*zip(*points, strict=True), **look | {"ms": 4})
    ax.plot(*points[-1], look["marker"], color=look["color"], ms=10, mec="white")


def point(task: TaskResults, policy: Entry) -> tuple[float, float]:
    return task.mean(policy, "best@1"), task.mean(policy, "W@30")
