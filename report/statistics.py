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


def spread_weights(k: int, n: int = 256) -> Tensor:
    """n preference weights (n, k) spread evenly over the simplex: the gaps between k - 1 cuts of [0, 1]."""
    if k == 1:
        return torch.ones(n, 1, dtype=torch.float64)
    # A scrambled Sobol net, always the same one.
    net = torch.quasirandom.SobolEngine(k - 1, scramble=True, seed=0)
    cuts = net.draw(n, dtype=torch.float64).sort(-1).values  # (n, k - 1)
    zeros = torch.zeros(n, 1, dtype=torch.float64)
    return torch.diff(cuts, prepend=zeros, append=zeros + 1)
