"""Estimators against brute force over all subsets, and the measures of variety by hand."""

import itertools

import pytest
import torch

import eval as evaluation
from report.statistics import bootstrap_interval


def random_rewards(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", range(1, 8))
def test_best_at_k_is_the_mean_over_all_subsets(k):
    """Guards against the max of the first k (depends on order) and a bootstrap with replacement (biased low)."""
    scores = random_rewards(0, 3, 7)
    brute = torch.tensor(
        [[max(subset) for subset in itertools.combinations(row, k)] for row in scores.tolist()]
    ).mean(1)
    torch.testing.assert_close(evaluation.best_at_k(scores, k).float(), brute)


@pytest.mark.parametrize("n, c", [(6, 0), (6, 2), (6, 6), (5, 1)])
def test_pass_at_k_is_the_mean_over_all_subsets(n, c):
    for k in range(1, n + 1):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert evaluation.pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_a_bootstrap_is_biased_low():
    """The naive estimate that draws k of n with replacement, shown to fail: so nobody simplifies to it."""
    scores = random_rewards(1, 1, 10)
    draws = (
        scores[0, torch.randint(10, (20_000, 10), generator=torch.Generator().manual_seed(0))]
        .amax(1)
        .mean()
    )
    assert draws < evaluation.best_at_k(scores, 10).item() - 0.01


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: evaluation.pass_at_k(5, 6, 1), "c=6"),
        (lambda: evaluation.pass_at_k(5, 1, 6), "k=6"),
        (lambda: evaluation.best_at_k(torch.zeros(2, 5), 6), "k=6"),
        (lambda: evaluation.best_at_k(torch.zeros(2, 5), 0), "k=0"),
    ],
)
def test_impossible_budgets_are_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_weighted_best_at_k():
    """One objective: best@k itself. Two opposite specialists: E max(u, 1 - u) = 3/4 at k = 2, 1/2 at k = 1."""
    scores = random_rewards(2, 4, 6, 1)
    one = torch.ones(4, 1, dtype=torch.bool)
    torch.testing.assert_close(
        evaluation.weighted_best_at_k(scores, 3, one), evaluation.best_at_k(scores[..., 0], 3)
    )
    specialists = torch.eye(2)[None]
    two = torch.ones(1, 2, dtype=torch.bool)
    for k, expected in ((1, 0.5), (2, 0.75)):
        value = evaluation.weighted_best_at_k(specialists, k, two).item()
        assert value == pytest.approx(expected, abs=0.01)


def test_diversity_is_the_mean_over_pairs():
    """Guards against dividing by n squared, which makes pools of different size incomparable."""
    rewards = random_rewards(3, 2, 5, 4)
    brute = [
        sum((a - b).abs().sum() for a, b in itertools.combinations(pool, 2)) / 10
        for pool in rewards
    ]
    torch.testing.assert_close(evaluation.diversity(rewards), torch.stack(brute))
    assert (
        evaluation.diversity(torch.ones(1, 5, 4)).item() == 0
        and evaluation.diversity(torch.ones(1, 1, 4)).item() == 0
    )


def test_pareto_share_and_coverage():
    pool = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.0]]])
    assert evaluation.pareto_share(pool).item() == pytest.approx(
        2 / 4
    )  # a repeated vector counts once
    assert evaluation.coverage(pool, 2).item() == pytest.approx((0.5 + 0.75) / 2)
    assert evaluation.coverage(pool, 1).item() == pytest.approx(pool.mean().item())


def test_bootstrap_interval_covers():
    """95% intervals of 300 samples of 50 normals: about 94% hold the truth; below 88% has odds of one in 10,000."""
    samples = torch.randn(300, 50, generator=torch.Generator().manual_seed(4))
    held = sum(low <= 0 <= high for low, high in map(bootstrap_interval, samples))
    assert 0.88 < held / 300 < 0.99
