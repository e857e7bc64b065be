"""Confidence intervals and preference weights of an evaluation."""

import functools

import torch
from torch import Tensor

# Student's t: standard errors on either side of the mean of 2, 3, ... values.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
ALIKE = 1e-6  # a smaller difference is none
FEW = 5  # problems that differ from the others; fewer tell nothing of how often such come


def half_width(values: Tensor, clusters: Tensor | None = None) -> float | None:
    """Half of the 95% interval of the mean of values (N), over problems, or (runs, N), over runs.

    It is a jackknife: the mean is taken without each cluster in turn.

    Args:
        clusters: (N), the number of each problem's cluster, from 0: problems that are the same one, which
            tell no more than one problem. None: all differ. A mean over runs needs none.

    Returns:
        None where an interval would be false: one cluster holds more than a fifth of the problems, fewer
        than five clusters differ from the most common value, or all runs are alike.
    """
    values = values.double()
    is_over_runs = values.ndim == 2
    if is_over_runs:
        values = values.mean(1)
    if is_over_runs or clusters is None:
        clusters = torch.arange(len(values))
    N = len(values)
    sizes = torch.bincount(clusters).double()  # (clusters)
    sums = torch.bincount(clusters, weights=values)
    means = sums / sizes
    n_differ = ((means - means.mode().values).abs() > ALIKE).sum()
    is_lopsided = sizes.max() > N / 5 and not is_over_runs
    if is_lopsided or n_differ < (1 if is_over_runs else FEW):
        return None
    without = (sums.sum() - sums) / (N - sizes)  # the mean without each cluster
    n = len(sizes)
    error = (without.var(correction=0) * (n - 1)).sqrt().item()
    n_equal = int(N**2 / sizes.square().sum())  # clusters of one size that would tell as much
    errors = T_95[n_equal - 2] if n_equal - 2 < len(T_95) else 1.96 + 2.6 / (n_equal - 1)
    return errors * error


@functools.cache
def spread_weights(d: int, n: int = 4096) -> Tensor:
    """n preference weights (n, d) spread as Dirichlet(1) is, always the same: exponentials, divided by their sum."""
    net = torch.quasirandom.SobolEngine(d, scramble=True, seed=0)
    uniform = net.draw(n, dtype=torch.float64) + 2**-31  # the middle of a cell of 2**-30: never 0
    exponentials = -torch.log1p(-uniform)  # (n, d)
    return exponentials / exponentials.sum(1, keepdim=True)
