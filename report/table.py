"""The table of an evaluation: what it holds, eval.json, and the sentences below it."""

import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.evaluations import Settings
from engine.files import read_log, write_text
from report.looks import look_of
from report.statistics import half_width
from vpo import ADVANTAGES, SEVERAL_ANSWERS, answers_per_rollout


@dataclass
class Table:
    """The measures of one run's policies, or of several runs' policies together."""

    runs: list[str]
    settings: Settings
    measures: dict[str, dict[str, Tensor]]  # policy -> measure -> values (N) or (runs, N)

    def mean(self, policy: str, measure: str) -> float:
        return self.measures[policy][measure].double().mean().item()

    def margin(self, policy: str, measure: str) -> float:
        """Half of the 95% interval of the mean."""
        return half_width(self.measures[policy][measure])


def mean_of(tables: list[Table]) -> Table:
    """Several runs as one table, of the policies that all of them have."""
    first = tables[0]
    measures = {}
    for policy in first.measures:
        if all(policy in table.measures for table in tables):
            measures[policy] = {}
            for name in first.measures[policy]:
                stacked = [table.measures[policy][name] for table in tables]
                measures[policy][name] = torch.stack(stacked)  # (runs, N)
    return Table([table.runs[0] for table in tables], first.settings, measures)


def write_table(table: Table, path: Path, device: str) -> None:
    """Write eval.json: settings, and of every measure mean and 95% interval."""
    settings = dataclasses.asdict(table.settings) | {"runs": table.runs, "device": device}
    record = {"settings": settings, "policies": {}}
    for policy, values in table.measures.items():
        record["policies"][policy] = {}
        for name in values:
            mean = table.mean(policy, name)
            margin = table.margin(policy, name)
            summary = {"mean": mean, "interval": [mean - margin, mean + margin]}
            record["policies"][policy][name] = summary
    write_text(path, json.dumps(record, indent=1))


def sentences(table: Table) -> str:
    """What the table says: whose variety is left, and who is best for one candidate and for all."""
    n = table.settings.pool
    if not any(table.mean(policy, "diversity") for policy in table.measures):
        return (
            "all candidates of all policies earned the same: nothing was learnt, or nothing can be"
        )
    outcomes = [outcome(table, policy) for policy in table.measures if policy in ADVANTAGES]
    return (
        f"diversity, against the start model's: {', '.join(outcomes)}\n"
        f"one candidate, best@1: {ranking(table, 'best@1')}\n"
        f"{n} candidates for a user of unknown preferences, W@{n}: {ranking(table, f'W@{n}')}"
    )


def outcome(table: Table, policy: str) -> str:
    """What became of a method's diversity, such as "GRPO 3% (collapsed)"."""
    title = look_of(policy).title
    # The start model is asked for what the method is asked for.
    start = "start_sets" if policy in SEVERAL_ANSWERS else "start"
    before = table.mean(start, "diversity")
    after = table.mean(policy, "diversity")
    if before < 1e-6:
        return f"{title} {after:.3f} (start model 0)"
    what = variety(after / before)
    utility = f"W@{table.settings.pool}"
    if table.mean(policy, utility) < table.mean(start, utility):
        what += f", {utility} below the start model"
    return f"{title} {after / before:.0%} ({what})"


def variety(share: float) -> str:
    """What became of a policy's diversity, given as a share of the start model's."""
    if share < 1 / 3:
        return "collapsed"
    if share < 0.9:
        return "narrowed"
    if share < 1.1:
        return "kept"
    return "grew"


def ranking(table: Table, measure: str) -> str:
    """The policies from the best to the worst, with half of the 95% interval of each."""
    has_sets = any(policy in SEVERAL_ANSWERS for policy in table.measures)
    shown = [policy for policy in table.measures if policy != "start_sets" or has_sets]
    shown.sort(key=lambda policy: table.mean(policy, measure), reverse=True)
    parts = []
    for policy in shown:
        mean = table.mean(policy, measure)
        margin = table.margin(policy, measure)
        parts.append(f"{look_of(policy).title} {mean:.3f} ± {margin:.3f}")
    return ", ".join(parts)


def training_costs(run: Path, methods: list[str], m: int) -> str:
    """What each method sampled in training, which shows whether a comparison of them is fair."""
    costs = []
    for method in methods:
        rows = read_log(run / method / "metrics.jsonl", "rollouts", "tokens")
        answers = answers_per_rollout(method, m) * sum(row["rollouts"] for row in rows)
        tokens = sum(row["tokens"] for row in rows)
        title = look_of(method).title
        costs.append(f"{title} {len(rows)} steps, {answers:,} answers, {tokens:,} tokens")
    return f"sampled in training: {'; '.join(costs)}"


def print_left_out(policies_of: dict[str, list[str]]) -> None:
    """Name the policies that a mean over runs lacks, given those of each run."""
    of_any = itertools.chain.from_iterable(policies_of.values())
    for policy in dict.fromkeys(of_any):
        lacking = [run for run, own in policies_of.items() if policy not in own]
        if lacking:
            title = look_of(policy).title
            print(f"{title} is left out of the mean: not trained in {', '.join(lacking)}")
