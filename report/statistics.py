"""Confidence intervals of what an evaluation measured."""

import torch
from torch import Tensor

TAIL = (1 - 0.95) / 2  # what a 95% interval leaves out at either end


def bootstrap_interval(
    values: Tensor, groups: Tensor | None = None, *, samples: int = 1000
) -> tuple[float, float]:
    """Percentile interval of the mean, from a bootstrap that resamples both runs and problems.

    Args:
        values: (N) or (runs, N), one measured value per run and problem.
        groups: (N), the number of each problem's group, from 0. The problems of a group are
            resampled together, because problems with the same prompt are not independent.
            None: every problem is a group of its own.
        samples: how many bootstrap samples are drawn, always the same ones.

    Returns:
        The lower and the upper end of the 95% interval.
    """
    values = torch.atleast_2d(values).double()
    runs, N = values.shape
    if groups is None:
        groups = torch.arange(N)
    sizes = torch.bincount(groups)  # (groups)
    sums = torch.zeros(runs, len(sizes), dtype=torch.float64)
    sums.index_add_(1, groups, values)

    generator = torch.Generator().manual_seed(0)
    drawn_groups = torch.randint(len(sizes), (samples, len(sizes)), generator=generator)
    run_means = sums[:, drawn_groups].sum(-1) / sizes[drawn_groups].sum(-1)  # (runs, samples)
    drawn_runs = torch.randint(runs, (runs, samples), generator=generator)
    means = run_means.gather(0, drawn_runs).mean(0)  # (samples)

    return means.quantile(TAIL).item(), means.quantile(1 - TAIL).item()
