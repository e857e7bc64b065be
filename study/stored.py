"""The stored results by task, policy and seed; their means and paired differences."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from study.bootstrap import bootstrap_interval
from study.entries import LOW_RATE, Entry

TEMPERATURES = ("0.7", "1", "1.3")  # the first is that of the tables
START = ("start", "start_sets")  # the start model, asked for single answers or for sets
SINGLE = ("grpo", LOW_RATE, "dr_grpo", "maxrl", "gdpo", "random_weighting", "max_at_k")
METHODS = (*START, *SINGLE, "multi_rlvr", "vpo", "group_vpo")  # in the order of the tables


@dataclass(frozen=True)
class Result:
    """What was measured of one training run."""

    task: str
    policy: Entry
    seed: int
    version: int  # of the program
    tuning: bool  # measured on validation problems, only to choose a learning rate
    # temperature -> the method or one of START -> measure -> (N), of a tuning run (1)
    measures: dict[str, dict[str, dict[str, Tensor]]]
    prompt_ids: Tensor | None  # (N), equal where two problems show the same prompt
    training: dict[str, list[float]]  # means over ten steps each
    tokens: int
    step_seconds: float
    answers: dict[str, list[list[str | None]]]  # policy -> those of each problem that are stored
    gpu: str = ""  # the card on which it was trained; empty: a CPU


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences with its 95% interval over seeds and problems.

    The interval is a bootstrap's, too narrow with so few seeds. So a difference is firm only if
    Student's t-test over three seeds or more rejects 0, too. Bold in a table is firm with five seeds.
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

    @property
    def short(self) -> str:
        """Without the interval."""
        return self.bold(f"{self.mean:+.3f}")

    def __str__(self) -> str:
        return self.bold(f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]")

    def bold(self, text: str) -> str:
        return f"**{text}**" if self.firm and self.n_seeds >= 5 else text


def t_test(values: Tensor) -> float:
    """The two-sided p-value of Student's t-test that the mean of n independent values is 0.

    Args:
        values: (n), such as the mean difference of two methods in each seed.

    Returns:
        1 where n < 2.
    """
    values = values.double()
    if len(values) < 2:
        return 1.0
    if values.std() < 1e-12:
        return float(values[0] == 0)
    return stats.ttest_1samp(values.numpy(), 0.0).pvalue.item()


class TaskResults:
    """The results of one task, on its held-out problems or on those of validation."""

    def __init__(self, name: str, results: list[Result]):
        self.name = name
        self.prompt_ids = results[0].prompt_ids if results else None  # (N), equal in all results
        self._runs: dict[Entry, dict[int, Result]] = {}  # policy -> seed -> result
        for result in results:
            for method in result.measures[TEMPERATURES[0]]:  # GRPO's hold the start model's too
                policy = Entry(method) if method in START else result.policy
                self._runs.setdefault(policy, {})[result.seed] = result

    def policies(self, flags: bool = False) -> list[Entry]:
        """The policies without flags of train.py, or those with flags, in the tables' order."""
        chosen = [policy for policy in self._runs if bool(policy.flags) == flags]
        return sorted(chosen, key=table_order)

    def runs(self, policy: Entry) -> dict[int, Result]:
        """The results that hold a policy, by seed."""
        return dict(sorted(self._runs.get(policy, {}).items()))

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
        chosen = [runs[seed] for seed in seeds or runs]
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
        low, high = bootstrap_interval(values, self.prompt_ids, samples=2000)
        p = t_test(values.mean(1))
        return Difference(values.mean().item(), low, high, p, n_seeds=len(values))

    @functools.cache  # noqa: B019 - a table, a figure and a claim may ask for the same one
    def difference(self, ours: Entry, theirs: Entry, measure: str) -> Difference:
        """The difference of two policies at the first temperature."""
        return self.summary(self.lead(ours, theirs, measure))


@dataclass(frozen=True)
class Stored:
    """All stored results, and the stored searches: name -> what examples/search.py wrote to search.json."""

    results: list[Result]
    searches: dict[str, dict]
    mixed: "Stored | None" = None  # of half-way weights, in runs of their own

    def task(self, name: str, tuning: bool = False) -> TaskResults:
        """The results on held-out problems, or those by which learning rates are chosen."""
        return self._tasks[name, tuning]

    @functools.cached_property
    def _tasks(self) -> dict[tuple[str, bool], TaskResults]:
        grouped: dict[tuple[str, bool], list[Result]] = {}
        for result in self.results:
            grouped.setdefault((result.task, result.tuning), []).append(result)
        return {key: TaskResults(key[0], results) for key, results in grouped.items()}

    @property
    def names(self) -> list[str]:
        """The tasks that have results on held-out problems."""
        return [name for name, tuning in self._tasks if not tuning]


def table_order(policy: Entry) -> tuple:
    """By method, learning rate and flags."""
    return METHODS.index(policy.method), policy.lr or 0, str(policy.flags)
