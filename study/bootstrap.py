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
    means = resampled_means(torch.atleast_2d(values)[..., None], clusters, samples)[:, 0]
    return means.quantile(TAIL).item(), means.quantile(1 - TAIL).item()


def resampled_means(values: Tensor, clusters: Tensor | None, samples: int) -> Tensor:
    """The means of the bootstrap's samples, of several measures at once.

    Args:
        values: (runs, N, measures).
        clusters, samples: as of `bootstrap_interval`.

    Returns:
        (samples, measures).
    """
    runs, N, measures = values.shape
    if clusters is None:
        clusters = torch.arange(N)
    sizes = torch.bincount(clusters)  # (clusters)
    sums = torch.zeros(runs, len(sizes), measures, dtype=torch.float64)
    sums.index_add_(1, clusters, values.double())

    generator = torch.Generator().manual_seed(0)
    drawn_clusters = torch.randint(len(sizes), (samples, len(sizes)), generator=generator)
    n_drawn = sizes[drawn_clusters].sum(-1)  # (samples) problems
    run_means = sums[:, drawn_clusters].sum(2) / n_drawn[:, None]  # (runs, samples, measures)
    drawn_runs = torch.randint(runs, (runs, samples), generator=generator)
    index = drawn_runs[..., None].expand_as(run_means)
    return run_means.gather(0, index).mean(0)
