"""The estimator against a loop in NumPy and against one batched product: milliseconds and ratios.

    python study/benchmarks/estimator.py

One thread, K = 100 preference weights, the best of nine calls. The loop does for each group, and in it
for each rollout, what the equations say. "One product" is a bare batched product with its maximum, mean
and normalisation. With drawn weights each side draws its own; that takes most of the estimator's time.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vpo import group_normalize, sample_weights, set_reward, vpo_advantage

SHAPES = ((128, 8, 3, 4), (512, 16, 5, 16))  # P, G, m, k
K = 100


def loop(rewards: Tensor, weights: Tensor | None) -> list[numpy.ndarray]:
    """The advantages (P, G), group by group and rollout by rollout."""
    random = numpy.random.default_rng(0)
    advantages = []
    for p, group in enumerate(rewards.numpy()):  # (G, m, k)
        if weights is None:
            w = random.dirichlet(numpy.ones(group.shape[-1]), K)  # (K, k)
        else:
            w = weights[p].numpy()
        R = numpy.array([(answers @ w.T).max(0).mean() for answers in group])  # (G)
        advantages.append((R - R.mean()) / (R.std() + 1e-6))
    return advantages


def one_product(rewards: Tensor, weights: Tensor | None) -> Tensor:
    """The advantages (P, G) with one batched product."""
    P, G, m, k = rewards.shape
    if weights is None:
        weights = sample_weights(P, K, k)
    utilities = torch.bmm(rewards.view(P, G * m, k), weights.mT).view(P, G, m, K)
    return group_normalize(utilities.amax(2).mean(-1))


def estimator(rewards: Tensor, weights: Tensor | None) -> Tensor:
    """The advantages (P, G) of vpo.py."""
    if weights is None:
        return vpo_advantage(rewards, n_weights=K)
    return group_normalize(set_reward(rewards, weights))


def milliseconds(function: Callable, rewards: Tensor, weights: Tensor | None) -> float:
    function(rewards, weights)
    best = float("inf")
    for _ in range(9):
        began = time.perf_counter()
        function(rewards, weights)
        best = min(best, time.perf_counter() - began)
    return 1000 * best


def main() -> None:
    torch.set_num_threads(1)
    print("| P, G, m, k | weights | estimator, ms | loop / estimator | estimator / one product |")
    print("| --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        rewards = torch.rand(shape)
        name = ", ".join(map(str, shape))
        given = sample_weights(shape[0], K, shape[3])
        for kind, weights in (("drawn", None), ("given", given)):
            own = milliseconds(estimator, rewards, weights)
            slow = milliseconds(loop, rewards, weights)
            product = milliseconds(one_product, rewards, weights)
            ratios = f"{slow / own:.1f} | {own / product:.2f}"
            print(f"| {name} | {kind} | {own:.2f} | {ratios} |")


if __name__ == "__main__":
    main()
