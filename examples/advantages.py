"""The advantages of all methods on two small groups, printed in a few seconds.

python examples/advantages.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from vpo import ADVANTAGES, SEVERAL_ANSWERS


def main() -> None:
    """Print a table of single answers and one of pairs of answers."""
    specialist_a = [1.0, 0.0]
    specialist_b = [0.0, 1.0]
    compromise = [0.55, 0.55]
    failure = [0.0, 0.0]
    single = {
        "A (1, 0)": [specialist_a],
        "A again": [specialist_a],
        "B (0, 1)": [specialist_b],
        "C (.55, .55)": [compromise],
        "F (0, 0)": [failure],
    }
    print("One group of five rollouts with one answer each; the advantage of each rollout:\n")
    print_advantages(single, [name for name in ADVANTAGES if name not in SEVERAL_ANSWERS])
    print(
        "\ngrpo, dr_grpo and maxrl pay the compromise C most, because its mean is highest. max_at_k pays "
        "nothing else.\ngdpo normalises each objective by itself, so it pays the rarer B more than A. "
        "random_weighting and\ngoal_conditioned pay what one random w wants. group_vpo pays B most: only "
        "B and C serve those who want\nthe second objective. The two A stand in for each other; one A "
        "alone would be paid like B.\n"
    )
    sets = {
        "A + B": [specialist_a, specialist_b],
        "A + A": [specialist_a, specialist_a],
        "A + C": [specialist_a, compromise],
        "C + C": [compromise, compromise],
        "F + F": [failure, failure],
    }
    print("One group of five rollouts with two answers each:\n")
    print_advantages(sets, list(SEVERAL_ANSWERS))
    print(
        "\nmulti_rlvr adds up the means of the distinct answers, so it pays a specialist with the "
        "compromise most,\nand C + C as one C. vpo pays the two specialists most."
    )


def print_advantages(rollouts: dict[str, list[list[float]]], methods: list[str]) -> None:
    """Print a row per method: the advantages of one group of rollouts, given by name."""
    rewards = torch.tensor(list(rollouts.values()))[None]  # (1, G, m, k)
    answer_mask = torch.ones(rewards.shape[:3], dtype=torch.bool)  # (1, G, m)
    for g, answers in enumerate(rollouts.values()):
        for i, answer in enumerate(answers):
            answer_mask[0, g, i] = answer not in answers[:i]
    print(" " * 18 + "".join(f"{name:>14}" for name in rollouts))
    for method in methods:
        generator = torch.Generator().manual_seed(0)
        advantages = ADVANTAGES[method](
            rewards, rewards.mean(-1), answer_mask, n_weights=10_000, generator=generator
        )
        cells = [f"{advantage:14.2f}" for advantage in advantages[0].tolist()]
        print(f"{method:18}" + "".join(cells))


if __name__ == "__main__":
    main()
