"""Confidence intervals and preference weights of an evaluation."""

import torch
from torch import Tensor

# Student's t: standard errors on either side of the mean of 2, 3, ... values.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


def half_width(values: Tensor, clusters: Tensor | None = None) -> float:
    """Half of the 95% interval of the mean of values (N), over problems, or (runs, N), over runs.

    Args:
        clusters: (N), the number of each problem's cluster, from 0: problems that are the same one, which
            tell no more than one problem. None: all differ. A mean over runs needs none.
    """
    values = values.double()
    if values.ndim == 2:
        values = values.mean(1)
        clusters = None
    deviations = values - values.mean()
    if clusters is not None:
        sums = torch.zeros(int(clusters.max()) + 1, dtype=torch.float64)
        deviations = sums.index_add(0, clusters, deviations)  # (clusters)
    n = len(deviations)
    if n < 2:
        return 0.0
    error = (deviations.square().sum() * n / (n - 1)).sqrt().item() / len(values)
    errors = T_95[n - 2] if n - 2 < len(T_95) else 1.96 + 2.6 / (n - 1)
    return errors * error


def spread_weights(k: int, n: int = 4096) -> Tensor:
    """n preference weights (n, k) spread as Dirichlet(1) is, always the same: exponentials, divided by their sum."""
    net = torch.quasirandom.SobolEngine(k, scramble=True, seed=0)
    uniform = net.draw(n, dtype=torch.float64) + 2**-31  # the middle of a cell of 2**-30: never 0
    exponentials = -torch.log1p(-uniform)  # (n, k)
    return exponentials / exponentials.sum(1, keepdim=True)
