"""Exercise 11 of docs/lesson.ipynb, five broken versions of vpo_advantage: solve it before you read on."""

import torch
from torch import Tensor

from vpo import EPS, group_normalize, sample_weights, set_reward

BUGS = {1: "d", 2: "a", 3: "e", 4: "b", 5: "c"}  # the letters are those of the exercise


def version(
    number: int,
    rewards: Tensor,
    answer_mask: Tensor | None = None,
    objective_mask: Tensor | None = None,
) -> Tensor:
    """The advantages (P, G) by one version of `vpo.vpo_advantage`, always under the same weights.

    Args:
        number: 0 is right, 1 to 5 have a bug each.
        rewards: (P, G, m, d).
        answer_mask: (P, G, m) bool, False where an answer is missing.
        objective_mask: (P, d) bool, which objectives a prompt has.
    """
    P, G, m, d = rewards.shape
    if answer_mask is None:
        answer_mask = torch.ones(P, G, m, dtype=torch.bool)
    if objective_mask is None:
        objective_mask = torch.ones(P, d, dtype=torch.bool)
    # Asked here, because a traceback from below would show the bugs.
    assert G > 1, "a group has at least two rollouts"
    assert answer_mask.shape == (P, G, m), f"answer_mask: its shape must be {(P, G, m)}"
    assert objective_mask.shape == (P, d), f"objective_mask: its shape must be {(P, d)}"
    has_answer = answer_mask.any(-1)  # (P, G)
    bug = BUGS.get(number)
    if bug == "b":  # each rollout counts as a prompt, with weights of its own
        rewards = rewards.reshape(P * G, 1, m, d)
        answer_mask = answer_mask.reshape(P * G, 1, m)
        objective_mask = objective_mask.repeat_interleave(G, 0)
    generator = torch.Generator().manual_seed(0)
    weights = sample_weights(len(rewards), 100, d, generator=generator)
    if bug != "e":
        weights = weights * objective_mask[:, None]
        weights = weights / weights.sum(-1, keepdim=True)
    if bug == "a":  # the best answer to the mean user
        weights = weights.mean(1, keepdim=True)
    R = set_reward(rewards, weights, answer_mask).view(P, G)
    if bug == "d":
        return normalize_some(R, has_answer)
    advantages = group_normalize(R)
    if bug == "c":
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + EPS)
    return advantages


def normalize_some(R: Tensor, is_in: Tensor) -> Tensor:
    """`group_normalize` of the rollouts that are in (P, G), among themselves; 0 for the others."""
    n = is_in.sum(1, keepdim=True).clamp_min(1)
    centered = R - (R * is_in).sum(1, keepdim=True) / n
    centered = centered * is_in
    std = (centered.square().sum(1, keepdim=True) / n).sqrt()
    return torch.where(std < EPS, 0.0, centered / (std + EPS))
