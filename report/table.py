"""The table of an evaluation: what it holds, eval.json, and the sentences below it."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from engine.evaluations import ONE_ANSWER, Row, Settings, method_of
from engine.files import read_log, write_text
from report.looks import look_of
from report.statistics import half_width
from rewards import Problem
from vpo import ADVANTAGES, SEVERAL_ANSWERS, answers_per_rollout

NO_WIDTH = 1e-6  # of an interval: all values are equal, which says nothing of how others vary
LEGEND = (  # of the last columns
    "earned: share of candidates above the least reward; pareto: share left without dominated and repeated "
    "ones; coverage@m: the best value in an objective among m candidates, on average"
)


@dataclass
class Table:
    """The measures of one run's policies, or of several runs' policies together."""

    runs: list[str]
    settings: Settings
    # row -> measure -> values (N), or (runs, N) where the row is a mean of several runs. A row is a policy,
    # after which may stand what makes it another one: "vpo, asked for one answer", "vpo, --kl 0.0"
    measures: dict[str, dict[str, Tensor]]
    clusters: Tensor | None = None  # (N) numbers of the problems, equal where two are the same
    seeds: dict[str, list[int]] = field(default_factory=dict)  # of several runs: row -> its seeds

    def mean(self, row: str, measure: str) -> float:
        return self.measures[row][measure].double().mean().item()

    def margin(self, row: str, measure: str) -> float | None:
        """Half of the 95% interval of the mean; None where nothing varies, as of one problem."""
        values = self.measures[row][measure]
        if values.ndim == 1 and self.n_problems < 2:
            return None
        half = half_width(values, self.clusters)
        return half if half > NO_WIDTH else None

    @property
    def n_problems(self) -> int:
        """How many problems differ."""
        return self.settings.problems if self.clusters is None else int(self.clusters.max()) + 1

    def n_runs(self, row: str) -> int:
        return len(self.seeds.get(row, [0]))

    @property
    def asked(self) -> str:
        """On which problems the policies are compared."""
        settings = self.settings
        n = self.n_problems
        problems = f"{settings.problems} {settings.split} problems"
        if n < settings.problems:
            problems += f", {n} of which differ" if n > 1 else ", all the same one"
        pool = f"pool of {settings.pool} candidates"
        return f"{problems}, {pool}, temperature {settings.temperature:g}"

    @property
    def heading(self) -> str:
        n = len(self.runs)
        return f"{self.runs[0] if n == 1 else f'{n} runs'}: {self.asked}"

    @property
    def interval(self) -> str:
        """What the 95% intervals are over."""
        if any(self.n_runs(row) > 1 for row in self.measures):
            return "95% over seeds, of one seed over problems"
        return "95% over problems" if self.n_problems > 1 else "none, for one problem"


def joint_table(tables: dict[Path, Table], rows: list[Row]) -> Table:
    """The tables of several runs as one: each row is the mean over its runs."""
    first = next(iter(tables.values()))
    runs = [table.runs[0] for table in tables.values()]
    joint = Table(runs, first.settings, {}, first.clusters)
    for row in rows:
        own = [tables[run].measures[row.policy] for run in row.runs.values()]
        joint.seeds[row.name] = list(row.runs)
        joint.measures[row.name] = own[0]
        if len(own) > 1:
            stacks = {name: torch.stack([values[name] for values in own]) for name in own[0]}
            joint.measures[row.name] = stacks  # (runs, N)
    return joint


def write_table(table: Table, path: Path, device: str) -> None:
    """Write eval.json: settings, and of every measure mean and 95% interval."""
    settings = dataclasses.asdict(table.settings) | {"runs": table.runs, "device": device}
    policies = {policy: {} for policy in table.measures}
    for policy, values in table.measures.items():
        for name in values:
            mean = table.mean(policy, name)
            margin = table.margin(policy, name)
            interval = None if margin is None else [mean - margin, mean + margin]
            policies[policy][name] = {"mean": mean, "interval": interval}
    write_text(path, json.dumps({"settings": settings, "policies": policies}, indent=1))


def clusters_of(problems: list[Problem]) -> Tensor:
    """The numbers of problems (N), from 0, equal where their data are equal."""
    numbers: dict[str, int] = {}
    texts = [json.dumps(problem.data) for problem in problems]
    return torch.tensor([numbers.setdefault(text, len(numbers)) for text in texts])


def print_table(table: Table) -> None:
    """Print the means of the main measures, a row per policy, and what they say."""
    settings = table.settings
    n = settings.pool
    columns = [f"best@{k}" for k in (1, 3, 10) if k < n] + [f"best@{n}"]
    if any(table.mean(row, f"pass@{n}") for row in table.measures):
        columns += ["pass@1", f"pass@{n}"]
    columns += [f"W@{n}", "diversity", "earned", "pareto"]
    first, *others = table.measures.values()
    coverages = [name for name in first if name.startswith("coverage")]
    columns += [name for name in coverages if all(name in values for values in others)]
    titles = {row: look_of(row).title for row in table.measures}
    width = max(20, *(len(title) + 2 for title in titles.values()))
    print(f"\n{table.heading}\n" + " " * width + "".join(f"{column:>11}" for column in columns))
    for row, title in titles.items():
        cells = [f"{table.mean(row, column):11.3f}" for column in columns]
        seeds = f"  {table.n_runs(row)} seeds" if table.n_runs(row) > 1 else ""
        print(f"{title:{width}}" + "".join(cells) + seeds)
    print(LEGEND)
    print(sentences(table))


def sentences(table: Table) -> str:
    """What the table says: whose variety is left, and who is best for one candidate and for all."""
    n = table.settings.pool
    if not any(table.mean(row, "diversity") for row in table.measures):
        return (
            "all candidates of all policies earned the same: nothing was learnt, or nothing can be"
        )
    outcomes = [outcome(table, row) for row in table.measures if method_of(row) in ADVANTAGES]
    return (
        f"diversity, against the start model's: {'; '.join(outcomes)}\n"
        f"one candidate, best@1: {ranking(table, 'best@1')}\n"
        f"{n} candidates for a user of unknown preferences, W@{n}: {ranking(table, f'W@{n}')}"
    )


def start_of(table: Table, row: str) -> str:
    """The row of the start model that is asked for what a method is asked for, of the same runs."""
    _, *parts = row.split(", ")
    has_sets = method_of(row) in SEVERAL_ANSWERS and ONE_ANSWER not in parts
    start = "start_sets" if has_sets else "start"
    rows = [each for each in table.measures if method_of(each) == start]
    return next(each for each in rows if set(each.split(", ")[1:]) <= set(parts))


def outcome(table: Table, row: str) -> str:
    """What became of a method's diversity, such as "GRPO 3% ± 1% (collapsed)"."""
    title = look_of(row).title
    title += ":" if ", " in title else ""
    own, start = pair_of(table, row, "diversity")
    if own.shape[-1] < 2 or start.mean() < 1e-6:  # no interval, or no share
        return f"{title} {own.mean():.3f} (start model {start.mean():.3f})"
    share = (own.mean() / start.mean()).item()
    # Of one problem, seen several times, the interval is that of the samples.
    clusters = table.clusters if table.n_problems > 1 else None
    margin = half_width(own - share * start, clusters) / start.mean().item()
    if share == 0:  # nothing varies; but of n other problems so many could, with odds of 5%
        n = table.n_problems if table.n_problems > 1 else own.shape[-1]
        margin = 1 - 0.05 ** (1 / n)
    words = [variety(share - margin, share + margin)]
    utility = f"W@{table.settings.pool}"
    own, start = pair_of(table, row, utility)
    if (own - start).mean() + half_width(own - start, clusters) < 0:
        words.append(f"{utility} below the start model")
    half = f" ± {margin:.0%}" if table.n_problems > 1 and margin > NO_WIDTH else ""
    return f"{title} {share:.0%}{half} ({', '.join(words)})"


def pair_of(table: Table, row: str, measure: str) -> tuple[Tensor, Tensor]:
    """A measure of a method, and of the start model in the same runs."""
    start = start_of(table, row)
    values = table.measures[start][measure]
    if values.ndim == 2:
        places = [table.seeds[start].index(seed) for seed in table.seeds[row]]
        values = values[places] if len(places) > 1 else values[places[0]]
    return table.measures[row][measure].double(), values.double()


def variety(low: float, high: float) -> str:
    """What became of a policy's diversity, whose share of the start model's lies between these."""
    if high < 1 / 3:
        return "collapsed"
    if high < 0.9:
        return "narrowed"
    if low > 1.1:
        return "grew"
    if low > 0.9 and high < 1.1:
        return "kept"
    return "not firm"


def ranking(table: Table, measure: str) -> str:
    """The policies from the best to the worst, with half of the 95% interval of each if there is one."""
    has_sets = any(method_of(row) in SEVERAL_ANSWERS for row in table.measures)
    shown = [row for row in table.measures if method_of(row) != "start_sets" or has_sets]
    shown.sort(key=lambda row: table.mean(row, measure), reverse=True)
    parts = []
    for row in shown:
        margin = table.margin(row, measure)
        half = "" if margin is None else f" ± {margin:.3f}"
        parts.append(f"{look_of(row).title} {table.mean(row, measure):.3f}{half}")
    return "; ".join(parts)


def training_costs(run: Path, methods: list[str], m: int) -> str:
    """What each method sampled in training, which shows whether a comparison is fair; its time and memory."""
    costs = []
    for method in methods:
        rows = read_log(run / method / "metrics.jsonl", "rollouts", "tokens", "seconds")
        answers = answers_per_rollout(method, m) * sum(row["rollouts"] for row in rows)
        tokens = sum(row["tokens"] for row in rows)
        seconds = sum(row["seconds"] for row in rows)
        text = f"{look_of(method).title} {len(rows)} steps, {answers:,} answers, {tokens:,} tokens"
        text += f", {seconds:.0f} s" if seconds < 120 else f", {seconds / 60:.0f} min"
        memory = run / method / "memory.json"
        if memory.exists():
            text += f", {json.loads(memory.read_text())['peak_gib']:.1f} GiB at most"
        costs.append(text)
    return f"sampled in training: {'; '.join(costs)}"
