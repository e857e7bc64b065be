"""Variants of the methods that were tried: one name, then the flags of train.py.

    python study/variants.py shared_mean --method vpo

    shared_mean   vpo          R = 3/4 E_w max w.r + 1/4 of the mean over the m answers
    half_mean     vpo          the same with 1/2 and 1/2
    tchebycheff   group_vpo    utility -max_i w_i (1 - r_i) instead of w.r, for rewards up to 1
    passes        maxrl        r = 1 where an answer is perfect in every objective, else 0

Each replaces one function in this process, so methods go one by one. `python study/reproduce.py --only
variant` measures them beside the method that they vary.
"""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
import vpo
from vpo import Options, Scored

maxrl = vpo.maxrl


def shared_mean(scored: Scored, options: Options, *, mean_share: float) -> Tensor:
    """VPO whose set reward also holds the mean of its answers, so that invalid ones cost something.

    An answer that repeats an earlier one of its rollout counts as a missing one in the mean.
    """
    P, _, _, k = scored.vectors.shape
    weights = vpo.sample_weights(
        P, options.n_weights, k, alpha=options.alpha, generator=options.generator
    )
    rewards, weights = vpo._without_absent(scored.vectors, weights, scored.objective_mask)
    best = vpo.set_reward(
        rewards, weights, scored.answer_mask, scored.minimum, options.subset or 1
    )  # (P, G)
    n_objectives = scored.objective_mask.sum(-1).clamp_min(1)  # (P)
    means = rewards.sum(-1) / n_objectives[:, None, None]  # (P, G, m)
    is_counted = scored.answer_mask & ~scored.repeat_mask
    mean = torch.where(is_counted, means, scored.minimum).mean(-1)  # (P, G)
    return vpo.group_normalize((1 - mean_share) * best + mean_share * mean)


def tchebycheff(
    rewards: Tensor,
    weights: Tensor,
    answer_mask: Tensor | None = None,
    missing_answer_reward: float = 0.0,
) -> Tensor:
    """`vpo.set_scores` with Tchebycheff utilities, (P, G, K).

    A linear utility is best at a corner of the front's convex hull. This one reaches every point of it.
    """
    shortfall = 1 - rewards[:, :, :, None]  # (P, G, m, 1, k)
    utilities = -(weights[:, None, None] * shortfall).amax(-1)  # (P, G, m, K)
    if answer_mask is not None:
        utilities = utilities.masked_fill(~answer_mask[..., None], -1.0)  # of a reward of 0
    return utilities.amax(2)


def passes(scored: Scored, options: Options) -> Tensor:
    """MaxRL with the binary reward that it is meant for, such as a program that passes all tests."""
    is_perfect = (scored.vectors >= 1) | ~scored.objective_mask[:, None, None]  # (P, G, 1, k)
    binary = is_perfect.all(-1).float()
    return maxrl(
        replace(scored, scalars=binary, missing_scalar=torch.zeros(len(binary), 1)), options
    )


# variant -> object, name in it, what stands there instead
CHANGES = {
    "shared_mean": (vpo.ADVANTAGES, "vpo", functools.partial(shared_mean, mean_share=0.25)),
    "half_mean": (vpo.ADVANTAGES, "vpo", functools.partial(shared_mean, mean_share=0.5)),
    "tchebycheff": (vars(vpo), "set_scores", tchebycheff),
    "passes": (vpo.ADVANTAGES, "maxrl", passes),
}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in CHANGES:
        sys.exit(f"{__doc__}\nerror: name one of {', '.join(CHANGES)}, then the flags of train.py")
    names, name, change = CHANGES[sys.argv[1]]
    names[name] = change
    train.main([*sys.argv[2:], "--jobs", "1"])
