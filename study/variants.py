"""Variants of the methods that were tried: one name, then the flags of train.py.

    python study/variants.py shared_mean --method vpo

    literal_sum   multi_rlvr   pays repeated answers too, as the paper's formula has it
    shared_mean   vpo          R = 3/4 E_w max w.r + 1/4 of the mean over the m answers
    half_mean     vpo          the same with 1/2 and 1/2
    tchebycheff   group_vpo    utility -max_i w_i (1 - r_i) instead of w.r, for rewards up to 1
    annealed      group_vpo    sets of s rollouts, s from half the group down to 1 over the training
    passes        maxrl        r = 1 where an answer is perfect in every objective, else 0

Each replaces one function in this process, so methods go one by one. `python study/reproduce.py --only
variant` measures them beside the method that they vary.
"""

import functools
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
import vpo

maxrl = vpo.maxrl
train_step = train.train_step


def literal_sum(rewards: Tensor, scalars: Tensor, answer_mask: Tensor, **options) -> Tensor:
    """Multi-RLVR with the sum of all m task scalars, repeated answers too."""
    return vpo.group_normalize(scalars.sum(-1))


def shared_mean(  # noqa: PLR0913 - the options of `vpo.vpo_advantage`
    rewards: Tensor,
    scalars: Tensor,
    answer_mask: Tensor,
    *,
    mean_share: float,
    n_weights: int,
    missing_answer_reward: float = 0.0,
    repeat_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    **options,
) -> Tensor:
    """VPO whose set reward also holds the mean of its answers, so that invalid ones cost something.

    An answer that repeats an earlier one of its rollout counts as a missing one in the mean.
    """
    P, _, _, k = rewards.shape
    weights = vpo.sample_weights(P, n_weights, k, generator=generator)
    best = vpo.set_reward(rewards, weights, answer_mask, missing_answer_reward)  # (P, G)
    is_counted = answer_mask if repeat_mask is None else answer_mask & ~repeat_mask
    mean = torch.where(is_counted, rewards.mean(-1), missing_answer_reward).mean(-1)  # (P, G)
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


def annealed(
    rewards: Tensor,
    scalars: Tensor,
    answer_mask: Tensor,
    *,
    progress: float,
    subset: int = 0,
    **options,
) -> Tensor:
    """Group VPO with s = G/2 at the start of the training and s = 1 at its end, linearly."""
    largest = vpo.default_subset(rewards.shape[1])
    s = max(1, round(largest * (1 - progress)))
    return vpo.vpo(rewards, scalars, answer_mask, subset=s, **options)


def annealed_train_step(method, state, task, config):
    """`train.train_step`, in which Group VPO knows how much of the training is over."""
    progress = state.step / config.steps
    vpo.ADVANTAGES["group_vpo"] = functools.partial(annealed, progress=progress)
    return train_step(method, state, task, config)


def passes(
    rewards: Tensor,
    scalars: Tensor,
    answer_mask: Tensor,
    *,
    objective_mask: Tensor | None = None,
    **options,
) -> Tensor:
    """MaxRL with the binary reward that it is meant for, such as a program that passes all tests."""
    is_perfect = rewards >= 1  # (P, G, 1, k)
    if objective_mask is not None:
        is_perfect = is_perfect | ~objective_mask[:, None, None]
    return maxrl(rewards, is_perfect.all(-1).float(), answer_mask)


# variant -> object, name in it, what stands there instead
CHANGES = {
    "literal_sum": (vpo.ADVANTAGES, "multi_rlvr", literal_sum),
    "shared_mean": (vpo.ADVANTAGES, "vpo", functools.partial(shared_mean, mean_share=0.25)),
    "half_mean": (vpo.ADVANTAGES, "vpo", functools.partial(shared_mean, mean_share=0.5)),
    "tchebycheff": (vars(vpo), "set_scores", tchebycheff),
    "annealed": (vars(train), "train_step", annealed_train_step),
    "passes": (vpo.ADVANTAGES, "maxrl", passes),
}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in CHANGES:
        sys.exit(f"{__doc__}\nerror: name one of {', '.join(CHANGES)}, then the flags of train.py")
    names, name, change = CHANGES[sys.argv[1]]
    names[name] = change
    train.main([*sys.argv[2:], "--jobs", "1"])
