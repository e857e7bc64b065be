"""The table of an evaluation, as it is printed and as eval.json."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.evaluations import Row, Settings
from engine.files import read_log, write_text
from report.looks import look_of, look_of_row
from report.statistics import half_width
from rewards import Problem
from vpo import ADVANTAGES, SEVERAL_ANSWERS, answers_per_rollout


@dataclass
class Table:
    """The measures of one run's policies, or of several runs' policies together."""

    runs: list[str]
    settings: Settings
    # row -> measure -> values (N), or (runs, N) where the row is a mean of several runs
    measures: dict[Row, dict[str, Tensor]]
    clusters: Tensor | None = None  # (N) numbers of the problems, equal where two are the same
    seeds: dict[Row, list[int]] = field(default_factory=dict)  # of several runs: row -> its seeds

    def mean(self, row: Row, measure: str) -> float:
        return self.measures[row][measure].double().mean().item()

    @property
    def margins(self) -> dict[Row, dict[str, float | None]]:
        """Half of the 95% interval of each mean; None where too little differs, as of one problem."""
        margins = {}
        for row, measures in self.measures.items():
            margins[row] = {name: half_width(of, self.clusters) for name, of in measures.items()}
        return margins

    @property
    def n_problems(self) -> int:
        """The number of problems that differ."""
        return self.settings.problems if self.clusters is None else int(self.clusters.max()) + 1

    def n_runs(self, row: Row) -> int:
        return len(self.seeds.get(row, [0]))

    @property
    def asked(self) -> str:
        """On which problems the policies are compared."""
        settings = self.settings
        n = self.n_problems
        problems = f"{settings.problems} {settings.split} problems"
        if n == 1 < settings.problems:
            problems = f"the same {settings.split} problem {settings.problems} times"
        elif n < settings.problems:
            problems += f", {n} of which differ"
        pool = f"pool of {settings.pool} candidates"
        return f"{problems}, {pool}, temperature {settings.temperature:g}"

    @property
    def heading(self) -> str:
        n = len(self.runs)
        return f"{self.runs[0] if n == 1 else f'{n} runs'}: {self.asked}"

    @property
    def interval(self) -> str:
        """The values that the 95% intervals are over; empty if there are none."""
        if any(self.n_runs(row) > 1 for row in self.measures):
            return "95% over seeds, of one seed over problems"
        return "95% over problems" if self.n_problems > 1 else ""


def joint_table(tables: dict[Path, Table], rows: dict[Row, dict[int, Path]]) -> Table:
    """The tables of several runs as one. `rows` are its rows, each with its runs: seed -> run."""
    first = next(iter(tables.values()))
    runs = [table.runs[0] for table in tables.values()]
    joint = Table(runs, first.settings, {}, first.clusters)
    for row, run_of_seed in rows.items():
        own_row = replace(row, differing=())  # in the table of one run
        by_run = [tables[run].measures[own_row] for run in run_of_seed.values()]
        joint.seeds[row] = list(run_of_seed)
        joint.measures[row] = by_run[0]
        if len(by_run) > 1:
            stacks = {name: torch.stack([values[name] for values in by_run]) for name in by_run[0]}
            joint.measures[row] = stacks  # (runs, N)
    return joint


def write_table(table: Table, path: Path, device: str) -> None:
    """Write eval.json: settings, and of every measure mean and 95% interval."""
    settings = asdict(table.settings) | {"runs": table.runs, "device": device}
    policies = {row.title: {} for row in table.measures}
    for row, margins in table.margins.items():
        for name, margin in margins.items():
            mean = table.mean(row, name)
            interval = None if margin is None else [mean - margin, mean + margin]
            policies[row.title][name] = {"mean": mean, "interval": interval}
    write_text(path, json.dumps({"settings": settings, "policies": policies}, indent=1))


def clusters_of(problems: list[Problem]) -> Tensor:
    """The numbers of problems (N), from 0, equal where their data are equal."""
    numbers: dict[str, int] = {}
    texts = [json.dumps(problem.data) for problem in problems]
    return torch.tensor([numbers.setdefault(text, len(numbers)) for text in texts])


def print_table(table: Table) -> None:
    """Print the means of the main measures, a row per policy. After ± stands half of the 95% interval.

    A question mark stands for an interval that cannot be known.
    """
    n = table.settings.pool
    measures = ["best@1", *(["best@3"] if n > 3 else []), f"best@{n}"]
    if any(table.mean(row, f"pass@{n}") for row in table.measures):
        measures.append(f"pass@{n}")
    measures += [f"W@{n}", "diversity"]
    is_unknown = False  # of any interval
    all_margins = table.margins
    shares = [times_start(table, row) for row in table.measures]
    columns = {"": [look_of_row(row).title for row in table.measures]}
    for measure in measures:
        cells = [f"{table.mean(row, measure):.3f}" for row in table.measures]
        margins = [own[measure] for own in all_margins.values()]
        if measure in ("best@1", f"W@{n}") and (table.n_problems > 1 or any(margins)):
            measure += " ±"
            for i, margin in enumerate(margins):
                cells[i] += " ±?" if margin is None else f" ±{margin:.3f}"
                is_unknown |= margin is None
        columns[measure] = cells
    columns["x start"] = shares
    seeds = [table.n_runs(row) for row in table.measures]
    if max(seeds) > 1:
        columns["seeds"] = list(map(str, seeds))
    widths = {head: max(map(len, [head, *cells])) for head, cells in columns.items()}
    print(f"\n{table.heading}")
    for line in (columns, *zip(*columns.values(), strict=True)):
        padded = [cell.ljust(width) for cell, width in zip(line, widths.values(), strict=True)]
        print(" ".join(padded).rstrip())
    if is_unknown:
        print("±?: too few problems or seeds differ for an interval")
    if any("collapsed" in share for share in shares):
        print("collapsed: the diversity is below a third of the start model's")


def times_start(table: Table, row: Row) -> str:
    """A method's diversity as a multiple of the start model's. Below a third it has collapsed."""
    start = table.mean(start_of(table, row), "diversity")
    if row.method not in ADVANTAGES or start < 1e-6:
        return ""
    share = table.mean(row, "diversity") / start
    return f"{share:.2f}x collapsed" if share < 1 / 3 else f"{share:.2f}x"


def start_of(table: Table, row: Row) -> Row:
    """The row of the start model, asked for as many answers as a method, of the same runs."""
    has_sets = row.method in SEVERAL_ANSWERS and row.m is None
    start = "start_sets" if has_sets else "start"
    fitting = []
    for candidate in table.measures:
        if candidate.method == start and set(candidate.differing) <= set(row.differing):
            fitting.append(candidate)
    return fitting[0]


def print_costs(run: Path, methods: list[str], m: int) -> None:
    """Print the answers and tokens that each method sampled in training, its time and its memory."""
    print("sampled in training:")
    for method in methods:
        rows = read_log(run / method / "metrics.jsonl", "rollouts", "tokens", "seconds")
        answers = answers_per_rollout(method, m) * sum(row["rollouts"] for row in rows)
        tokens = sum(row["tokens"] for row in rows)
        seconds = sum(row["seconds"] for row in rows)
        text = f"{look_of(method).title}: {len(rows)} steps, {answers:,} answers, {tokens:,} tokens"
        text += f", {seconds:.0f} s" if seconds < 120 else f", {seconds / 60:.0f} min"
        memory = run / method / "memory.json"
        if memory.exists():
            peak = json.loads(memory.read_text("utf-8"))["peak_gib"]
            text += f", {peak:.1f} GiB at most"
        print(f"  {text}")
