"""The advantages of all methods on two small groups, printed in a few seconds.

python examples/advantages.py
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from vpo import ADVANTAGES, SEVERAL_ANSWERS, Estimator, Scored, sample_weights, set_reward

A = [1.0, 0.0]  # delights user 1
B = [0.0, 1.0]  # delights user 2
C = [0.55, 0.55]  # a compromise
F = [0.0, 0.0]  # a failure

SINGLE = {"A": [A], "A again": [A], "B": [B], "C": [C], "F": [F]}
WHY = {
    "grpo": "only the mean counts, and C has the highest",
    "dr_grpo": "grpo's, not divided by the standard deviation",
    "maxrl": "grpo's, divided by the group's mean instead",
    "gdpo": "each user's rewards normalised alone: B is rarer than A",
    "max_at_k": "the best mean in sets of two: only C raises it",
    "random_weighting": "one random w: this one cares more for user 1",
    "group_vpo": "averaged over all w: B is the only one for user 2",
    "multi_rlvr": "adds up the means of different answers: A + C is most",
    "vpo": "normalises R(S): the two specialists are most",
}
PAIRS = {"A + B": [A, B], "A + A": [A, A], "A + C": [A, C], "C + C": [C, C], "F + F": [F, F]}


def main() -> None:
    """Print a table of single answers and one of pairs of answers."""
    print("A delights user 1, B delights user 2, C is a compromise, F a failure.")
    print("\nA group of five rollouts with one answer each:\n")
    rewards = torch.tensor(list(SINGLE.values()))[None]  # (1, G, 1, k)
    print_row("", list(SINGLE))
    print_row("for user 1", numbers(rewards[..., 0, 0]))
    print_row("for user 2", numbers(rewards[..., 0, 1]))
    print_row("mean", numbers(rewards.mean((2, 3))))
    print("advantages")
    print_advantages(rewards, [name for name in ADVANTAGES if name not in SEVERAL_ANSWERS])

    print("\nA group of five rollouts with two answers each:\n")
    rewards = torch.tensor(list(PAIRS.values()))[None]  # (1, G, 2, k)
    users = sample_weights(1, 10_000, 2, generator=torch.Generator().manual_seed(0))
    print_row("", list(PAIRS))
    reason = "the better answer's utility, averaged over all w"
    print_row("R(S)", numbers(set_reward(rewards, users)), reason)
    print("advantages")
    print_advantages(rewards, SEVERAL_ANSWERS)


def print_advantages(rewards: Tensor, methods: Sequence[str]) -> None:
    """Print a row per method: the advantages of one group's rewards (1, G, m, k), and why."""
    answer_mask = torch.ones(rewards.shape[:3], dtype=torch.bool)  # (1, G, m)
    repeat_mask = torch.zeros_like(answer_mask)
    repeat_mask[:, :, 1:] = (rewards[:, :, 1:] == rewards[:, :, :1]).all(-1)
    objective_mask = torch.ones(1, rewards.shape[-1], dtype=torch.bool)  # (1, k)
    missing = torch.zeros(1, 1)
    scalars = rewards.mean(-1)
    scored = Scored(rewards, scalars, answer_mask, repeat_mask, objective_mask, missing)
    for method in methods:
        generator = torch.Generator().manual_seed(0)
        advantages = ADVANTAGES[method](scored, Estimator(n_weights=10_000, generator=generator))
        print_row(method, numbers(advantages), WHY.get(method, ""))


def print_row(name: str, cells: list[str], reason: str = "") -> None:
    columns = "".join(f"{cell:>9}" for cell in cells)
    print(f"{name:16}{columns}   {reason}".rstrip())


def numbers(values: Tensor) -> list[str]:
    """Those of the one group (1, G)."""
    return [f"{value:.2f}" for value in values[0].tolist()]


if __name__ == "__main__":
    main()
