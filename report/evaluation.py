"""What an evaluation has measured: what it prints, and eval.json."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.files import write_text
from report.statistics import bootstrap_interval
from report.style import Entry
from vpo import SEVERAL_ANSWERS


@dataclass
class EvalReport:
    """The measures of one run's policies, or of several runs' policies together."""

    name: str  # of the run
    split: str
    problems: int  # N
    pool: int  # candidates per problem
    temperature: float
    measures: dict[Entry, dict[str, Tensor]]  # policy -> measure -> values (N) or (runs, N)
    prompt_ids: Tensor | None  # (N), equal where two problems show the same prompt; None: all do
    runs: list[str] | None = None  # of several

    def print_table(self) -> None:
        """Print the means of the main measures, a row per policy."""
        n = self.pool
        columns = [f"best@{k}" for k in (1, 3, 10) if k < n] + [f"best@{n}"]
        if any(values[f"pass@{n}"].any() for values in self.measures.values()):
            columns += ["pass@1", f"pass@{n}"]
        columns += [f"W@{n}", "diversity", "pareto_share", "coverage"]

        heading = (
            f"{self.name}: {self.problems} {self.split} problems, pool of {n} "
            f"candidates, temperature {self.temperature}"
        )
        if self.runs:
            heading = f"mean of {len(self.runs)} runs"
        heads = [f"{column.removesuffix('_share'):>11}" for column in columns]
        print(f"\n{heading}\n" + " " * 20 + "".join(heads))
        for policy, values in self.measures.items():
            cells = [f"{values[column].mean():11.3f}" for column in columns]
            print(f"{policy.title:20}" + "".join(cells))
        if not any(values["diversity"].any() for values in self.measures.values()):
            print(
                "all candidates of all policies earned the same: nothing was learnt, or nothing "
                "can be"
            )
        elif len(self.measures) > 1:
            print(self.in_words())

    def in_words(self) -> str:
        """What the table says: whose variety is left, and who is best for one candidate and for all."""
        n = self.pool
        outcomes = []
        for policy in self.measures:
            if policy.method in ("start", "start_sets"):
                continue
            has_sets = policy.method in SEVERAL_ANSWERS  # as the start model when asked for sets
            start = self.mean(Entry("start_sets" if has_sets else "start"), "diversity")
            share = self.mean(policy, "diversity") / max(start, 1e-9)
            outcomes.append(f"{policy.title} {share:.0%} ({variety(share)})")
        return (
            f"diversity, against the start model's: {', '.join(outcomes)}\n"
            f"one candidate, best@1: {self.ranking('best@1')}\n"
            f"{n} candidates for a user of unknown preferences, W@{n}: {self.ranking(f'W@{n}')}"
        )

    def ranking(self, measure: str) -> str:
        """The policies from the best to the worst."""
        means = {}
        for policy in self.measures:
            if policy.method != "start_sets":
                means[policy.title] = self.mean(policy, measure)
        ranked = sorted(means, key=means.get, reverse=True)
        return ", ".join(f"{title} {means[title]:.3f}" for title in ranked)

    def mean(self, policy: Entry, measure: str) -> float:
        return self.measures[policy][measure].double().mean().item()

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

    def write(self, folder: Path) -> None:
        """Write eval.json: settings, and of every measure mean and 95% interval."""
        settings = {
            "split": self.split,
            "problems": self.problems,
            "size": self.pool,
            "temperature": self.temperature,
            "seeds": len(self.runs) if self.runs else 1,
        }
        if self.runs:
            settings["runs"] = self.runs
        policies = {}
        for policy, values in self.measures.items():
            summaries = policies[policy.method] = {}
            for measure, value in values.items():
                mean = value.double().mean().item()
                summaries[measure] = {"mean": mean, "interval": self.interval(value)}
        report = {"settings": settings, "policies": policies}
        write_text(folder / "eval.json", json.dumps(report, indent=1))


def variety(share: float) -> str:
    """What became of a policy's diversity, given as a share of the start model's."""
    if share < 1 / 3:
        return "collapsed"
    if share < 0.9:
        return "narrowed"
    return "kept" if share < 1.1 else "grew"


def mean_of(reports: list[EvalReport]) -> EvalReport:
    """Several runs as one report, of the policies that all of them have."""
    first = reports[0]
    measures = {}
    for policy, values in first.measures.items():
        if not all(policy in report.measures for report in reports):
            continue
        measures[policy] = {}
        for measure in values:
            stacked = [report.measures[policy][measure] for report in reports]
            measures[policy][measure] = torch.stack(stacked)  # (runs, N)
    return replace(first, measures=measures, runs=[report.name for report in reports])


def training_cost(method: str, rows: list[dict], m: int) -> str:
    """What a method sampled in training, which shows whether a comparison of methods is fair.

    Args:
        method: the method's name.
        rows: its metrics, one record per step.
        m: answers per rollout.
    """
    title = Entry(method).title
    answers = m * sum(row["rollouts"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    return f"{title} {len(rows)} steps, {answers:,} answers, {tokens:,} tokens"
