"""The tables of the study as Markdown, from stored results alone.

Rows are policies, or pairs of policies (ours, theirs). A column is a measure of a task. A cell is a
mean, a lead (ours minus theirs), or a lead with its 95% interval.
"""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from examples.markdown import markdown
from examples.search_report import solved_at
from study.bootstrap import TAIL, resampled_means
from study.collapse import RESULTS as COLLAPSED
from study.entries import (
    GROUP_VPO,
    GRPO,
    GRPO_KL,
    GRPO_LOW,
    GRPO_QUARTER,
    LOW_RATE,
    MAX_AT_K,
    MULTI_RLVR,
    START_MODEL,
    VPO,
    VPO_LORA,
    Entry,
    mixed,
)
from study.grid import HEADLINE, LR, LR_AT_30, MAIN_METHODS, PAPERS_KL
from study.searches import counts_alone, solved_by
from study.stored import TEMPERATURES, Difference, Stored, TaskResults
from study.validation import own
from tasks.headline import words_of

# In half-way weights.
TASKS = ("maze", "code", "gems", "tradeoff", "fence", HEADLINE)
POLICIES = (GRPO, GRPO_KL, MAX_AT_K, VPO, GROUP_VPO)
HALF = 0.5  # t of the tables, fixed before any result

SAMPLES = 2000  # of a bootstrap
KS = (1, 2, 3, 5, 10, 30)
BEST = "best"  # as a column's temperature: of each policy the one with the highest mean

Pair = tuple[Entry, Entry]
Rows = dict[str, Entry | Pair]  # by title

MAIN_LEADS = [  # in the maze and on programs
    *product((VPO, GROUP_VPO), (GRPO, GRPO_LOW, GRPO_KL, MAX_AT_K, MULTI_RLVR)),
    (GROUP_VPO, VPO),
]
OWN_LEADS = [  # where each method has its own KL term
    (MAX_AT_K, GRPO),
    (VPO, GRPO),
    (GROUP_VPO, GRPO),
    (VPO, MAX_AT_K),
    (GROUP_VPO, MAX_AT_K),
    (GROUP_VPO, VPO),
]
HEADLINE_LEADS = [
    *product((MAX_AT_K, VPO, GROUP_VPO), (GRPO, GRPO_QUARTER, GRPO_KL)),
    *product((VPO, GROUP_VPO), (MAX_AT_K, MULTI_RLVR)),
    (GROUP_VPO, VPO),
    *product((GRPO, VPO), (START_MODEL,)),
    (VPO_LORA, VPO),
]
MEANS = {  # task -> columns of its table of means
    "maze": "best@1 best@3 best@30 W@30 W@30@1.3 diversity earned",
    "code": "best@1 best@3 best@30 pass@30 W@30 W@30@1.3 diversity",
    "toy": "best@1 best@30 pass@1 pass@30 diversity",
    HEADLINE: "best@1 best@30 W@30 diversity distinct",
}
OTHER_MEANS = "best@1 best@3 best@30 W@30 diversity"
TITLES = {
    "earned": "earn something",
    "distinct": "distinct headlines of 30",
    "best": "best@k",
    "W": "W@k",
}


# Columns and cells.


@dataclass(frozen=True)
class Column:
    task: TaskResults
    measure: str  # or "distinct"
    temperature: str = TEMPERATURES[0]

    @property
    def title(self) -> str:
        title = TITLES.get(self.measure, self.measure)
        if self.temperature == BEST:
            return f"{title}, each at its best temperature"
        return title if self.temperature == TEMPERATURES[0] else f"{title} at {self.temperature}"

    @property
    def temperatures(self) -> tuple[str, ...]:
        return TEMPERATURES if self.temperature == BEST else (self.temperature,)

    def holds(self, policy: Entry) -> bool:
        """Whether the policy was measured at these temperatures, in every seed."""
        runs = self.task.runs(policy).values()
        return bool(runs) and all(run.measures.keys() >= set(self.temperatures) for run in runs)

    def values(self, policy: Entry, seeds: list[int] | None = None) -> Tensor:
        """The measure of a policy: (seeds, N)."""
        of_each = [self.task.values(policy, self.measure, t, seeds) for t in self.temperatures]
        return max(of_each, key=torch.mean)


def columns(stored: Stored, text: str) -> list[Column]:
    """The columns that a text names, such as "maze best@1 W@30, code W@30@1.3", of the stored tasks."""
    found = []
    for part in text.split(","):
        name, *words = part.split()
        for word in words if name in stored.names else []:
            kind, *numbers = word.split("@")
            measure = "@".join([kind, *numbers[:1]])
            temperature = numbers[1] if len(numbers) > 1 else TEMPERATURES[0]
            found.append(Column(stored.task(name), measure, temperature))
    return found


def mean_cell(column: Column, policy: Entry) -> float | str:
    """The mean over seeds and problems."""
    if not column.holds(policy):
        return ""
    if column.measure == "distinct":
        return distinct_headlines(column.task, policy)
    return column.values(policy).mean().item()


def lead_of(column: Column, pair: Pair) -> Difference | None:
    """The difference of a pair, if it is stored."""
    seeds = column.task.shared_seeds(*pair)
    if not seeds or not all(column.holds(policy) for policy in pair):
        return None
    ours, theirs = [column.values(policy, seeds) for policy in pair]
    return column.task.summary(ours - theirs)


def lead_cell(column: Column, pair: Pair) -> str:
    """A lead without its interval."""
    lead = lead_of(column, pair)
    return lead.short if lead else ""


def interval_cell(column: Column, pair: Pair) -> str:
    """A lead with its interval."""
    return str(lead_of(column, pair) or "")


def own_lead_cell(stored: Stored, column: Column, pair: Pair) -> str:
    """A lead where each method has the cure that validation chose."""
    ours, theirs = [own(stored, column.task.name, policy.method, column.measure) for policy in pair]
    return lead_cell(column, (ours, theirs))


def own_setting_cell(stored: Stored, column: Column, policy: Entry) -> str:
    """The setting that validation chose for a measure."""
    entry = own(stored, column.task.name, policy.method, column.measure)
    return entry.setting or f"KL {PAPERS_KL:g}"


def distinct_headlines(task: TaskResults, policy: Entry) -> str:
    """How many of thirty headlines for a text differ, a mean over the texts whose headlines are stored."""
    counts = []
    for run in task.runs(policy).values():
        for candidates in run.answers[policy.method]:
            counts.append(len({" ".join(words_of(text)) for text in candidates if text}))
    return f"{sum(counts) / len(counts):.1f}"


# Tables.


def compared(task: TaskResults) -> list[Entry]:
    """The policies of a task but those of the ablations, and the start model asked for sets."""
    found = [entry for entry in task.policies() if entry.method != "start_sets"]
    for entry in task.policies(flags=True):
        if entry.is_cure or entry == VPO_LORA:
            found.append(entry)
    return found


def policies(entries: list[Entry] | tuple[Entry, ...]) -> Rows:
    return {entry.title: entry for entry in entries}


def pairs(found: list[Pair]) -> Rows:
    return {f"{ours.title} - {theirs.title}": (ours, theirs) for ours, theirs in found}


def lines(rows: Rows, cols: list[Column], cell: Callable) -> list[list]:
    """A line of cells for each row that is stored."""
    found = []
    for title, row in rows.items():
        cells = [cell(column, row) for column in cols]
        if any(cell != "" for cell in cells):
            found.append([title, *cells])
    return found


def table(rows: Rows, cols: list[Column], cell: Callable) -> str:
    """A cell for each row and column."""
    is_of_several = len({column.task.name for column in cols}) > 1
    head = [f"{col.task.name} {col.title}" if is_of_several else col.title for col in cols]
    return markdown(["", *head], lines(rows, cols, cell))


def first_page(stored: Stored, _: str) -> str:
    """The maze and programs side by side."""
    rows = {
        "start model": mixed(GRPO, 0),
        "GRPO": GRPO,
        "GRPO, mixed half-way": mixed(GRPO, HALF),
    }
    rows |= policies((GRPO_KL, MAX_AT_K, VPO, GROUP_VPO))
    measures = "best@1 W@30"
    return table(rows, columns(stored.mixed, f"maze {measures}, code {measures}"), mean_cell)


def main_leads(stored: Stored, _: str) -> str:
    """Who is ahead of whom in the maze and on programs."""
    text = "maze best@1 best@30 W@30, code best@1 best@30 pass@30"
    return table(pairs(MAIN_LEADS), columns(stored, text), lead_cell)


def means(stored: Stored, name: str) -> str:
    """The policies of a task that are compared."""
    text = f"{name} {MEANS.get(name, OTHER_MEANS)}"
    return table(policies(compared(stored.task(name))), columns(stored, text), mean_cell)


def real_model(stored: Stored, name: str) -> str:
    """The main methods on the real model."""
    rows = policies((START_MODEL, GRPO, GRPO_KL, MAX_AT_K, VPO, GROUP_VPO))
    return table(rows, columns(stored, f"{name} best@1 W@30"), mean_cell)


def headline_leads(stored: Stored, _: str) -> str:
    """Who is ahead of whom in headlines, with intervals."""
    text = f"{HEADLINE} best@1 W@30 W@30@{BEST}"
    return table(pairs(HEADLINE_LEADS), columns(stored, text), interval_cell)


def own_leads(stored: Stored, _: str) -> str:
    """Who is ahead of whom where each method has its own cure for few candidates, or for thirty."""
    measures = "best@1 best@3 best@30 W@30"
    cols = columns(stored, f"maze {measures}, code {measures}")
    return table(pairs(OWN_LEADS), cols, functools.partial(own_lead_cell, stored))


def own_settings(stored: Stored, _: str) -> str:
    """Which setting each method has in each column of `own_leads`."""
    cols = columns(stored, "maze best@1 best@3 best@30, code best@1 best@3 best@30")
    rows = policies([Entry(method) for method in MAIN_METHODS])
    return table(rows, cols, functools.partial(own_setting_cell, stored))


def rewards(stored: Stored, _: str) -> str:
    """What sets and vectors gained in W@30 with each reward, and the regret of its scalar."""
    found = ((VPO, GRPO), (MAX_AT_K, GRPO), (GROUP_VPO, MAX_AT_K), (VPO, MAX_AT_K))
    rows = []
    for task in geometry_tasks(stored):
        rows.append([task.name, regret(task), *(task.difference(*pair, "W@30") for pair in found)])
    return markdown(["reward", "regret", *pairs(found)], rows)


def geometry_tasks(stored: Stored) -> list[TaskResults]:
    """The tasks with a reward geometry; first the one whose scalar has the least regret."""
    names = ("maze", "code", "copies", "noisy", "halfway", "gems", "tradeoff", "fence")
    return sorted([stored.task(name) for name in names], key=regret)


def regret(task: TaskResults) -> float:
    """What the start model's answer that the scalar prefers lacks for a user of random preferences.

    It is measured at the temperature of training. The scalar of these tasks is the mean over the
    objectives, and so is the expected utility of an answer.
    """
    return task.mean(START_MODEL, "W@30", "1") - task.mean(START_MODEL, "best@30", "1")


def chosen_rates(stored: Stored, _: str) -> str:
    """The rates that validation chose for few and for thirty candidates."""
    rows = []
    for method in LR["maze"]:
        row = [Entry(method).title]
        for task in ("maze", "code"):
            few = LR[task][method]
            thirty = LR_AT_30[task].get(method, few)
            row += [f"{few:g}", f"{thirty:g}"]
        rows.append(row)
    return markdown(["", "maze, few", "maze, thirty", "code, few", "code, thirty"], rows)


# Half-way weights: start + t (trained - start).


def by_task(stored: Stored, rows: Rows, measures: tuple[str, ...], cell: Callable) -> str:
    """A column for each task, and all rows once for each measure."""
    found = []
    for measure in measures:
        cols = columns(stored.mixed, ", ".join(f"{name} {measure}" for name in TASKS))
        found += [[measure, *line] for line in lines(rows, cols, cell)]
    return markdown(["measure", "", *(column.task.name for column in cols)], found)


def half_way(stored: Stored, _: str) -> str:
    """The means of every policy with half-way weights, and with its own in brackets."""
    return by_task(stored, policies(POLICIES), ("best@1", "W@30"), half_way_cell)


def half_way_cell(column: Column, policy: Entry) -> str:
    """A mean with half-way weights, and with those of the trained policy."""
    if not column.task.runs(policy):
        return ""
    half, own = [column.task.mean(mixed(policy, t), column.measure) for t in (HALF, 1)]
    return f"{half:.3f} ({own:.3f})"


def mix_leads(stored: Stored, _: str) -> str:
    """Who is ahead of whom with half-way weights, in every task."""
    half = mixed(GRPO, HALF)
    found = [(half, GRPO), (half, GRPO_KL), (VPO, half), (mixed(VPO, HALF), VPO)]
    return by_task(stored, pairs(found), ("best@1", "best@30", "W@30"), lead_cell)


def crossings(stored: Stored, _: str) -> str:
    """The k at which the rivals' best@k and W@k meet GRPO's, with its 95% interval."""
    found = [(ours, GRPO) for ours in (VPO, GROUP_VPO, MAX_AT_K, mixed(GRPO, HALF))]
    cols = columns(stored.mixed, "maze best W, code best W")
    return table(pairs(found), cols, crossing_cell)


def crossing_cell(column: Column, pair: Pair) -> str:
    """The crossing of the means, and the interval of a bootstrap over seeds and problems."""
    task = column.task
    if not task.shared_seeds(*pair):
        return ""
    of_each_k = [task.lead(*pair, f"{column.measure}@{k}") for k in KS]
    gaps = torch.stack(of_each_k, -1)  # (seeds, N, KS)
    mean = crossing(gaps.mean((0, 1)))
    ks = [crossing(means) for means in resampled_means(gaps, task.prompt_ids, SAMPLES)]
    low = torch.tensor(ks).quantile(TAIL, interpolation="lower")
    high = torch.tensor(ks).quantile(1 - TAIL, interpolation="higher")
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


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


# Where a policy collapses.


def doors(stored: Stored, _: str) -> str:
    """What GRPO's policy does behind a door that it no longer takes, means over seeds."""
    measures = ("best@1", "best@30", "W@30")
    rows = []
    for name, records in collapse_records().items():
        for title in records[0]["scores"]:
            row = [name, title]
            for measure in measures:
                values = [record["scores"][title][measure] for record in records]
                row.append(sum(values) / len(values))
            rows.append(row)
    return markdown(["task", "answers", *measures], rows)


def collapse_records() -> dict[str, list[dict]]:
    """What study/collapse.py measured: task -> a record of each seed."""
    records: dict[str, list[dict]] = {}
    for name, record in sorted(json.loads(COLLAPSED.read_text("utf-8")).items()):
        records.setdefault(name.partition("-")[0], []).append(record)
    return records


# Searches.


def searches(stored: Stored, _: str) -> str:
    """The share that each policy solved in each search, and the counts behind claim C5."""
    names = ("start", "grpo", LOW_RATE, "max_at_k", "multi_rlvr", "vpo", "group_vpo")
    head = ["search", *(Entry(name).title for name in names)]
    head += ["VPO, not GRPO", "Group VPO, not GRPO", "by chance"]
    rows = []
    for key, search in stored.searches.items():
        found = search["policies"]
        if not solved_by(found, tuple(found)).any():
            continue
        row = [key.replace("_", " ")]
        for name in names:
            solved = (solved_at(found[name]) > 0).double() if name in found else None
            row.append("" if solved is None else f"{solved.mean():.2f}")
        rival = rival_of(found)
        for name in ("vpo", "group_vpo"):
            row.append(listed(counts_alone(found, (name,), (rival,))))
        row.append(listed(counts_of_other_runs(found, (rival,))))
        rows.append(row)
    return markdown(head, rows)


def listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts))


def rival_of(found: dict[str, list[dict]]) -> str:
    """The GRPO that VPO is held against in a search: the one that keeps its variety, if it took part."""
    return LOW_RATE if LOW_RATE in found else "grpo"


def counts_of_other_runs(found: dict[str, list[dict]], names: tuple[str, ...]) -> list[int]:
    """What chance gives: the most that the same policies of another run solved and this run's did not."""
    solved = solved_by(found, names)  # (runs, N)
    new = solved[None] & ~solved[:, None]  # (this run, other run, N)
    return new.sum(-1).amax(1).tolist()
