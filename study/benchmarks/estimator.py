"""The estimator against a loop in NumPy and against one batched product: milliseconds and ratios.

    python study/benchmarks/estimator.py

One thread, K = 100 preference weights, the best of seven calls. The loop does for each group, and in it
for each rollout, what the equations say. "One product" is the estimator with a float32 product in the
place of its float64 one, which autocast and TF32 would round.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vpo import group_normalize, sample_weights, vpo_advantage

SHAPES = ((128, 8, 3, 4), (512, 16, 5, 16))  # P, G, m, k
K = 100


def loop(rewards: Tensor) -> list[numpy.ndarray]:
    """The advantages (P, G), group by group and rollout by rollout."""
    random = numpy.random.default_rng(0)
    advantages = []
    for group in rewards.numpy():  # (G, m, k)
        weights = random.dirichlet(numpy.ones(group.shape[-1]), K)  # (K, k)
        R = numpy.array([(answers @ weights.T).max(0).mean() for answers in group])  # (G)
        advantages.append((R - R.mean()) / (R.std() + 1e-6))
    return advantages


def one_product(rewards: Tensor) -> Tensor:
    """The advantages (P, G) with one batched product in float32."""
    P, G, m, k = rewards.shape
    weights = sample_weights(P, K, k)
    utilities = torch.bmm(rewards.view(P, G * m, k), weights.mT).view(P, G, m, K)
    return group_normalize(utilities.amax(2).mean(-1))


def milliseconds(function: Callable[[Tensor], object], rewards: Tensor) -> float:
    function(rewards)
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        function(rewards)
        best = min(best, time.perf_counter() - began)
    return 1000 * best


def main() -> None:
    torch.set_num_threads(1)
    print("| P, G, m, k | estimator, ms | loop, ms | loop / estimator | estimator / one product |")
    print("| --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        rewards = torch.rand(shape)
        own = milliseconds(vpo_advantage, rewards)
        slow = milliseconds(loop, rewards)
        product = milliseconds(one_product, rewards)
        name = ", ".join(map(str, shape))
        print(f"| {name} | {own:.2f} | {slow:.1f} | {slow / own:.1f} | {own / product:.2f} |")


if __name__ == "__main__":
    main()
