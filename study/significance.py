"""Tests of differences, and their corrections for many tests."""

import math

import torch
from torch import Tensor


def t_test(values: Tensor) -> float:
    """Two-sided p-value of Student's t-test that the mean of n independent values is 0.

    With t = sqrt(n - 1) tan(angle) the density of Student's distribution is proportional to
    cos(angle)^(n - 2), which has no singularity to integrate over.

    Args:
        values: (n), such as the mean difference of two methods in each seed.

    Returns:
        1 where n < 2. The smaller, the less likely are such values if the true mean is 0.
    """
    n = len(values)
    if n < 2:
        return 1.0
    values = values.double()
    mean = values.mean().abs().item()
    standard_error = values.std(correction=1).item() / math.sqrt(n)
    smallest = math.atan2(mean, standard_error * math.sqrt(n - 1))
    tail = torch.linspace(smallest, math.pi / 2, 1001, dtype=torch.float64)
    half = torch.linspace(0, math.pi / 2, 1001, dtype=torch.float64)
    in_tail = torch.trapezoid(tail.cos() ** (n - 2), tail)
    in_half = torch.trapezoid(half.cos() ** (n - 2), half)
    return (in_tail / in_half).item()


def benjamini_hochberg(p_values: list[float], rate: float = 0.05) -> int:
    """How many tests are significant if `rate` of the significant ones may be false on average."""
    survivors = 0
    for rank, p in enumerate(sorted(p_values), 1):
        if p <= rate * rank / len(p_values):
            survivors = rank
    return survivors


def holm(p_values: list[float], rate: float = 0.05) -> int:
    """How many tests are significant if the chance of any false one among them is at most `rate`."""
    survivors = 0
    for p in sorted(p_values):
        if p > rate / (len(p_values) - survivors):
            break
        survivors += 1
    return survivors
