"""The tables of the study as Markdown, from stored results alone.

Rows are policies, or pairs of policies (ours, theirs). A column is a measure of a task. A cell is a
mean, a lead (ours minus theirs), or a lead with its 95% interval.
"""

import csv
import functools
import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.markdown import markdown
from examples.search_report import solved_at
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
from study.grid import HEADLINES, LR, LR_AT_30, MAIN_METHODS, PAPERS_KL
from study.searches import counts_alone, solved_by
from study.stored import START, TEMPERATURES, Difference, Stored, TaskResults
from study.validation import TASKS, own
from tasks.headline import words_of

KS = (1, 2, 3, 5, 10, 30)
BEST = "best"  # as a column's temperature: of each policy the one with the highest mean

Pair = tuple[Entry, Entry]
Rows = dict[str, Entry | Pair]  # by title

# What stands in the rows and columns of most tables; what is not stored is left out.
ALL_GRPO = (GRPO, GRPO_LOW, GRPO_AT_30, GRPO_QUARTER, GRPO_KL)
OF_HEADLINES = (START_MODEL, *ALL_GRPO, MAX_AT_K, MULTI_RLVR, VPO, GROUP_VPO)
MAIN_LEADS = [
    *itertools.product((VPO, GROUP_VPO), (GRPO, GRPO_LOW, GRPO_KL, MAX_AT_K, MULTI_RLVR)),
    (GROUP_VPO, VPO),
]
LEADS = [
    *itertools.product((MAX_AT_K, VPO, GROUP_VPO), ALL_GRPO),
    *itertools.product((VPO, GROUP_VPO), (MAX_AT_K, MULTI_RLVR, Entry("multi_rlvr", 8e-5))),
    (GROUP_VPO, VPO),
    *itertools.product((GRPO, VPO, GROUP_VPO), (START_MODEL,)),
]
MEANS = {  # task -> columns of its table of means
    "maze": "best@1 best@3 best@10 best@30 W@30 W@30@1.3 diversity earned",
    "code": "best@1 best@3 best@30 pass@1 pass@30 W@30 W@30@1.3 diversity earned",
    "code_v1": "best@1 best@30 pass@1 pass@30 W@30 diversity",
    "toy": "best@1 best@30 pass@1 pass@30 W@30 diversity",
    "toy_v1": "best@1 best@30 pass@1 pass@30 W@30 diversity",
    "headline": "best@1 best@3 best@30 W@30 by-seed W@30@1 W@30@1.3 diversity distinct",
}
OTHER_MEANS = "best@1 best@3 best@30 W@30 by-seed diversity"


# Columns and cells.


@dataclass(frozen=True)
class Column:
    task: TaskResults
    measure: str  # or a key of COUNTS
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


def mean_cell(column: Column, policy: Entry) -> float | int | str:
    """The mean over seeds and problems, or what COUNTS says."""
    if not column.holds(policy):
        return ""
    if column.measure in COUNTS:
        return COUNTS[column.measure](column.task, policy)
    return column.values(policy).mean().item()


def lead_of(column: Column, pair: Pair) -> Difference | None:
    """The difference of a pair, if it is stored."""
    seeds = column.task.shared_seeds(*pair)
    if not seeds or not all(column.holds(policy) for policy in pair):
        return None
    if column.temperature == TEMPERATURES[0]:
        return column.task.difference(*pair, column.measure)
    ours, theirs = [column.values(policy, seeds) for policy in pair]
    return column.task.summary(ours - theirs)


def lead_cell(column: Column, pair: Pair) -> str | int:
    """A lead without its interval."""
    if column.measure == "seeds":
        return len(column.task.shared_seeds(*pair)) or ""
    lead = lead_of(column, pair)
    return lead.short if lead else ""


def interval_cell(column: Column, pair: Pair) -> str | int:
    """A lead with its interval."""
    if column.measure == "seeds":
        return lead_cell(column, pair)
    return str(lead_of(column, pair) or "")


def change_cell(column: Column, pair: Pair) -> str | int:
    """The means of a pair on the seeds that both have."""
    seeds = column.task.shared_seeds(*pair)
    if column.measure == "seeds":
        return len(seeds)
    before, after = [column.values(policy, seeds).mean().item() for policy in pair]
    return f"{before:.3f} to {after:.3f}"


def own_lead_cell(stored: Stored, column: Column, pair: Pair) -> str:
    """A lead where each method has the cure that validation chose, unless the pair names one."""
    chosen = []
    for policy in pair:
        is_open = not policy.flags
        name = column.task.name
        chosen.append(own(stored, name, policy.method, column.measure) if is_open else policy)
    return lead_cell(column, tuple(chosen))


def own_setting_cell(stored: Stored, column: Column, policy: Entry) -> str:
    """The setting that validation chose for a measure."""
    entry = own(stored, column.task.name, policy.method, column.measure)
    return entry.setting or f"KL {PAPERS_KL:g}"


def range_of_seeds(task: TaskResults, policy: Entry) -> str:
    """The lowest and the highest W@30 of a seed."""
    low, high = task.values(policy, "W@30").mean(1).aminmax()
    return f"{low:.3f} to {high:.3f}"


def earning(task: TaskResults, policy: Entry) -> float | str:
    """The share of candidates that earn anything, over the seeds for which it is stored."""
    shares = []
    for run in task.runs(policy).values():
        measures = run.measures[TEMPERATURES[0]][policy.method]
        if "earned" in measures:
            shares.append(measures["earned"].mean())
    return torch.stack(shares).mean().item() if shares else ""


def distinct_headlines(task: TaskResults, policy: Entry) -> str:
    """How many of thirty headlines for a text differ, a mean over the texts whose headlines are stored."""
    counts = []
    for run in task.runs(policy).values():
        for candidates in run.answers[policy.method]:
            counts.append(len({" ".join(words_of(text)) for text in candidates if text}))
    return f"{sum(counts) / len(counts):.1f}"


COUNTS: dict[str, Callable] = {
    "seeds": lambda task, policy: len(task.runs(policy)),
    "by-seed": range_of_seeds,
    "earned": earning,
    "distinct": distinct_headlines,
}
TITLES = {
    "by-seed": "W@30 by seed",
    "earned": "earn something",
    "distinct": "distinct headlines of 30",
    "best": "best@k",
    "W": "W@k",
}


# Tables.


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


def table_of_tasks(
    stored: Stored, rows: dict[str, Rows], measures: str, cell: Callable, first: str = ""
) -> str:
    """As `table`, with rows of each task below one another, and the task in a column."""
    found = []
    titles = []
    for name, own_rows in rows.items():
        cols = columns(stored, f"{name} {measures}")
        found += [[name, *line] for line in lines(own_rows, cols, cell)]
        titles = [column.title for column in cols] or titles
    return markdown(["task", first, *titles], found)


def main_leads(stored: Stored, _: str) -> str:
    """Who is ahead of whom in the maze and on programs."""
    text = "maze best@1 best@30 W@30, code best@1 best@30 pass@30"
    return table(pairs(MAIN_LEADS), columns(stored, text), lead_cell)


def means(stored: Stored, name: str) -> str:
    """All policies of a task but those of the ablations."""
    task = stored.task(name)
    with_flags = [entry for entry in task.policies(flags=True) if entry.is_cure or entry.is_lora]
    rows = policies([*task.policies(), *with_flags])
    text = f"{name} seeds {MEANS.get(name, OTHER_MEANS)}"
    return table(rows, columns(stored, text), mean_cell)


def leads(stored: Stored, name: str) -> str:
    """Who is ahead of whom in a task, with intervals."""
    measures = "best@1 best@3 best@10 best@30 W@30"
    if name in HEADLINES:
        measures = f"seeds best@1 W@3 W@30 W@30@{BEST}"
    found = LEADS + [(entry, VPO) for entry in stored.task(name).policies(True) if entry.is_lora]
    return table(pairs(found), columns(stored, f"{name} {measures}"), interval_cell)


def own_leads(stored: Stored, _: str) -> str:
    """Who is ahead of whom where each method has its own cure for few candidates, or for thirty."""
    found = [*itertools.product((MAX_AT_K, VPO, GROUP_VPO), (GRPO, GRPO_KL))]
    found += [(VPO, MAX_AT_K), (GROUP_VPO, MAX_AT_K), (GROUP_VPO, VPO)]
    measures = "best@1 best@3 best@30 W@30"
    cols = columns(stored, f"maze {measures}, code {measures}")
    return table(pairs(found), cols, functools.partial(own_lead_cell, stored))


def own_settings(stored: Stored, _: str) -> str:
    """Which setting each method has in each column of `own_leads`."""
    cols = columns(stored, "maze best@1 best@3 best@30, code best@1 best@3 best@30")
    rows = policies([Entry(method) for method in MAIN_METHODS])
    return table(rows, cols, functools.partial(own_setting_cell, stored))


def more_steps(stored: Stored, _: str) -> str:
    """What more steps change for GRPO at its low rate and for VPO."""
    rows: dict[str, Rows] = {}
    for name in TASKS:
        rows[name] = {}
        for entry in stored.task(name).policies(flags=True):
            if "steps" in dict(entry.flags):
                usual = GRPO_LOW if entry.method == "grpo" else Entry(entry.method)
                rows[name][usual.title] = (usual, entry)
    return table_of_tasks(stored, rows, "seeds best@1 best@3 best@30 W@30 diversity", change_cell)


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
    """The rates that validation chose for few and, where others, for thirty candidates."""
    rows = {}
    for task, rates in LR.items():
        for method, rate in rates.items():
            thirty = LR_AT_30.get(task, {}).get(method)
            cell = f"{rate:g}, 30: {thirty:g}" if thirty else f"{rate:g}"
            rows.setdefault(Entry(method).title, dict.fromkeys(LR, ""))[task] = cell
    return markdown(["method", *LR], [[title, *cells.values()] for title, cells in rows.items()])


def searches(stored: Stored, _: str) -> str:
    """The share that each policy solved in each search, and the counts behind claim C5."""
    names = ("start", "grpo", LOW_RATE, "max_at_k", "multi_rlvr", "vpo", "group_vpo")
    head = ["search", *(Entry(name).title for name in names)]
    head += ["VPO, not GRPO", "Group VPO, not GRPO", "by chance"]
    rows = []
    for key, search in stored.searches.items():
        found = search["policies"]
        row = [key.replace("_", " ")]
        for name in names:
            solved = (solved_at(found[name]) > 0).double() if name in found else None
            row.append("" if solved is None else f"{solved.mean():.2f}")
        rival = rival_of(found)
        for name in ("vpo", "group_vpo"):
            row.append(" ".join(map(str, counts_alone(found, (name,), (rival,)))))
        row.append(" ".join(map(str, counts_of_other_runs(found, (rival,)))))
        rows.append(row)
    return markdown(head, rows)


def rival_of(found: dict[str, list[dict]]) -> str:
    """The GRPO that VPO is held against in a search: the one that keeps its variety, if it took part."""
    return LOW_RATE if LOW_RATE in found else "grpo"


def counts_of_other_runs(found: dict[str, list[dict]], names: tuple[str, ...]) -> list[int]:
    """What chance gives: the most that the same policies of another run solved and this run's did not."""
    solved = solved_by(found, names)  # (runs, N)
    new = solved[None] & ~solved[:, None]  # (this run, other run, N)
    return new.sum(-1).amax(1).tolist()


# Sentences of the pages.


def thirty_candidates(stored: Stored, name: str) -> str:
    """The main methods' W@30 in one line."""
    task = stored.task(name)
    n_seeds = len(task.shared_seeds(VPO, GRPO))
    shown = (START_MODEL, GRPO, GRPO_KL, MAX_AT_K, VPO, GROUP_VPO)
    values = [f"{policy.title} ({task.mean(policy, 'W@30'):.3f})" for policy in shown]
    return f"W@30, means of {n_seeds} seeds: {'; '.join(values)}."


# Every run.


def runs_csv(stored: Stored) -> str:
    """A row for every run, policy and temperature; its learning rate where it is not the method's own."""
    measures = ["earned", "diversity"]
    for kind in ("best", "W", "pass"):
        measures += [f"{kind}@{k}" for k in KS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["task", "split", "method", "learning rate", "setting", "seed", "version", "machine"]
    writer.writerow([*head, "tokens", "seconds per step", "temperature", *measures])
    for run in [*stored.results, *stored.mixed.results]:
        split = "validation" if run.tuning else "test"
        for temperature, of_policies in run.measures.items():
            for method, values in of_policies.items():
                policy = Entry(method) if method in START else run.policy
                row = [run.task, split, Entry(method).title, policy.lr or "", policy.setting]
                row += [run.seed, run.version, run.gpu or "CPU", run.tokens]
                row += [f"{run.step_seconds:.4g}", temperature]
                for measure in measures:
                    has_it = measure in values
                    row.append(f"{values[measure].mean().item():.4g}" if has_it else "")
                writer.writerow(row)
    return text.getvalue()
