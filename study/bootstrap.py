"""The bootstrap over runs and problems."""

import torch
from torch import Tensor

TAIL = (1 - 0.95) / 2  # what a 95% interval leaves out at either end


def bootstrap_interval(
    values: Tensor, clusters: Tensor | None = None, *, samples: int = 1000
) -> tuple[float, float]:
    """Percentile interval of the mean, from a bootstrap that resamples both runs and problems.

    Args:
        values: (N) or (runs, N), one measured value per run and problem.
        clusters: (N), the number of each problem's cluster, from 0. The problems of a cluster are
            resampled together, because problems with the same prompt are not independent.
            None: every problem is a cluster of its own.
        samples: how many bootstrap samples are drawn, always the same ones.

    Returns:
        The lower and the upper end of the 95% interval.
    """
    values = torch.atleast_2d(values).double()
    runs, N = values.shape
    if clusters is None:
        clusters = torch.arange(N)
    sizes = torch.bincount(clusters)  # (clusters)
    sums = torch.zeros(runs, len(sizes), dtype=torch.float64)
    sums.index_add_(1, clusters, values)

    generator = torch.Generator().manual_seed(0)
    drawn_clusters = torch.randint(len(sizes), (samples, len(sizes)), generator=generator)
    run_means = sums[:, drawn_clusters].sum(-1) / sizes[drawn_clusters].sum(-1)  # (runs, samples)
    drawn_runs = torch.randint(runs, (runs, samples), generator=generator)
    means = run_means.gather(0, drawn_runs).mean(0)  # (samples)

    return means.quantile(TAIL).item(), means.quantile(1 - TAIL).item()
