"""The stored results of study/reproduce.py by task, policy and seed; their means and paired differences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from report.statistics import bootstrap_interval
from study.entries import Entry
from study.significance import t_test

TEMPERATURES = ("0.7", "1", "1.3")  # the first is that of the tables
START = ("start", "start_sets")  # the start model, asked for single answers or for sets
SINGLE = ("grpo", "dr_grpo", "maxrl", "gdpo", "random_weighting", "goal_conditioned", "max_at_k")
METHODS = (*START, *SINGLE, "multi_rlvr", "vpo", "group_vpo")  # in the order of the tables


@dataclass(frozen=True)
class Result:
    """What was measured of one training run."""

    task: str
    policy: Entry
    seed: int
    tuning: bool  # measured on validation problems, only to choose a learning rate
    # temperature -> the method or one of START -> measure -> (N), of a tuning run (1)
    measures: dict[str, dict[str, dict[str, Tensor]]]
    prompt_ids: Tensor | None  # (N), equal where two problems show the same prompt
    geometry: dict[str, float] | None
    training: dict[str, list[float]]  # means over ten steps each
    rollouts: int
    tokens: int
    steps: int
    training_seconds: float


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences with its 95% interval over seeds and problems.

    The interval is a bootstrap's. So few seeds make it too narrow. So a difference is firm only if
    Student's t-test over three seeds or more rejects 0, too. In the tables it is bold if it is firm
    and has five seeds.
    """

    mean: float
    low: float
    high: float
    p: float  # of the t-test over the means of the seeds
    n_seeds: int

    @property
    def firm(self) -> bool:
        excludes_zero = self.low > 0 or self.high < 0
        return excludes_zero and self.p < 0.05 and self.n_seeds >= 3

    def __str__(self) -> str:
        text = f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"
        return f"**{text}**" if self.firm and self.n_seeds >= 5 else text


class TaskResults:
    """The results of one task, on its held-out problems or on those of validation."""

    def __init__(self, name: str, results: list[Result]):
        self.name = name
        self.prompt_ids = results[0].prompt_ids if results else None  # (N), equal in all results
        self._runs: dict[Entry, dict[int, Result]] = {}
        for result in results:
            for method in result.measures[TEMPERATURES[0]]:  # GRPO's hold the start model's too
                policy = Entry(method) if method in START else result.policy
                self._runs.setdefault(policy, {})[result.seed] = result

    def policies(self) -> list[Entry]:
        """The policies that were trained with their method's default flags, in the tables' order."""
        return sorted((policy for policy in self._runs if not policy.flags), key=table_order)

    def variants(self) -> list[Entry]:
        """The policies that were trained with other flags, in the tables' order."""
        return sorted((policy for policy in self._runs if policy.flags), key=table_order)

    def runs(self, policy: Entry) -> dict[int, Result]:
        """The results that hold a policy, by seed."""
        return self._runs.get(policy, {})

    def shared_seeds(self, *policies: Entry) -> list[int]:
        """The seeds that all these policies have."""
        seeds = [set(self.runs(policy)) for policy in policies]
        return sorted(set.intersection(*seeds))

    def values(
        self,
        policy: Entry,
        measure: str,
        temperature: str = TEMPERATURES[0],
        seeds: list[int] | None = None,
    ) -> Tensor:
        """One measure for every seed, or for `seeds`, and problem: (seeds, N)."""
        runs = self.runs(policy)
        chosen = [runs[seed] for seed in seeds or sorted(runs)]
        return torch.stack([run.measures[temperature][policy.method][measure] for run in chosen])

    def mean(self, policy: Entry, measure: str, temperature: str = TEMPERATURES[0]) -> float:
        """The mean of a measure over seeds and problems."""
        return self.values(policy, measure, temperature).mean().item()

    def average(self, policy: Entry, value: Callable[[Result], float]) -> float:
        """The mean over seeds of a value of each result."""
        runs = self.runs(policy).values()
        return sum(value(run) for run in runs) / len(runs)

    def lead(self, ours: Entry, theirs: Entry, measure: str) -> Tensor:
        """Ours minus theirs, paired by seed and problem: (seeds that both have, N)."""
        seeds = self.shared_seeds(ours, theirs)
        our_values = self.values(ours, measure, seeds=seeds)
        return our_values - self.values(theirs, measure, seeds=seeds)

    def summary(self, values: Tensor) -> Difference:
        """Mean and interval of values (seeds, N)."""
        mean = values.mean().item()
        low, high = bootstrap_interval(values, self.prompt_ids, samples=2000)
        p = t_test(values.mean(1))
        return Difference(mean, low, high, p, n_seeds=len(values))

    def difference(self, ours: Entry, theirs: Entry, measure: str) -> Difference:
        """The difference of two policies at the first temperature."""
        return self.summary(self.lead(ours, theirs, measure))

    def differences(self, ours: Entry, theirs: Entry, measures: Sequence[str]) -> list[Difference]:
        """The differences of two policies in several measures."""
        return [self.difference(ours, theirs, measure) for measure in measures]


@dataclass(frozen=True)
class Stored:
    """All stored results, and the stored searches: name -> what search.py wrote to search.json."""

    results: list[Result]
    searches: dict[str, dict]

    def task(self, name: str, tuning: bool = False) -> TaskResults:
        """The results on held-out problems, or those by which learning rates are chosen."""
        chosen = [run for run in self.results if run.task == name and run.tuning == tuning]
        return TaskResults(name, chosen)


def table_order(policy: Entry) -> tuple:
    """By method, learning rate and flags."""
    return METHODS.index(policy.method), policy.lr or 0, str(policy.flags)
