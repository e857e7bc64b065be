"""Means and differences over seeds and problems: 95% intervals, and the words of the study."""

import math
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from study.grid import ALIKE

SAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float
    p: float = 1.0  # of Student's t-test over seeds that the mean is 0

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def estimate(values: Tensor) -> Estimate:
    """The mean of values (seeds, N). Its interval is the wider of a bootstrap's and Student's t over seeds."""
    low, high = bootstrap_interval(values)
    means = values.mean(1)
    n = len(means)
    mean = means.mean().item()
    if n < 2:
        return Estimate(mean, low, high)
    error = means.std().item() / math.sqrt(n)
    margin = stats.t.ppf(0.975, n - 1).item() * error
    p = float(abs(mean) < 1e-9)  # where the seeds agree to the digit
    if error > 1e-9:
        p = 2 * stats.t.sf(abs(mean) / error, n - 1).item()
    return Estimate(mean, min(low, mean - margin), max(high, mean + margin), p)


def bootstrap_interval(values: Tensor) -> tuple[float, float]:
    """The 95% percentile interval of the mean of values (seeds, N) that resamples seeds and problems."""
    generator = torch.Generator().manual_seed(0)
    of_seeds, of_problems = [resampled_shares(n, generator) for n in values.shape]
    means = (of_seeds @ values.double() * of_problems).sum(1)  # (samples)
    return means.quantile(0.025).item(), means.quantile(0.975).item()


def resampled_shares(n: int, generator: torch.Generator) -> Tensor:
    """How often each of n items is drawn with replacement in n draws, over n: (samples, n)."""
    drawn = torch.randint(n, (SAMPLES, n), generator=generator)
    counts = torch.zeros(SAMPLES, n, dtype=torch.float64)
    return counts.scatter_add(1, drawn, torch.ones_like(counts)) / n


def words(differences: dict) -> dict:
    """The word for each difference of a family, whose p-values have Holm's correction: key -> word."""
    ranked = sorted(differences, key=lambda key: differences[key].p)
    corrected = 0.0
    found = {}
    for i, key in enumerate(ranked):
        difference = differences[key]
        corrected = max(corrected, difference.p * (len(ranked) - i))
        found[key] = "open"
        if max(-difference.low, difference.high) < ALIKE:
            found[key] = "equal"
        elif corrected < 0.05 and not difference.low <= 0 <= difference.high:
            found[key] = "ahead" if difference.mean > 0 else "behind"
    return found
