"""Credit per answer: each answer of a VPO rollout gets what it and the later ones add to the set.

    python study/reward_to_go.py --method vpo

The flags are those of train.py; `--subset` has no effect. It needs the tiny model, in the maze or the
toy. The paper gives all tokens of a rollout one advantage. Here the tokens of answer j get
R(S) - R(answers before j), normalised in the group. The expected gradient is the same, because the
answers before j do not depend on answer j. The gradient has less noise.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
import vpo
from engine.config import Config
from rewards import Task
from rollout import Policy, Rollouts
from vpo import Options, Scored, group_normalize, sample_weights, set_reward

usual_train_step = train.train_step
usual_backward = train.backward


def reward_to_go(scored: Scored, weights: Tensor) -> Tensor:
    """What each answer is paid (P, G, m). The first one's is VPO's own reward.

    Args:
        weights: preference weights (P, K, k).
    """
    m = scored.answer_mask.shape[-1]
    rewards_of_first = []  # (P, G) each: R of the first 0, 1, ... m answers
    for n in range(m + 1):
        mask = scored.answer_mask & (torch.arange(m) < n)
        rewards_of_first.append(set_reward(scored.vectors, weights, mask, scored.minimum))
    return torch.stack([rewards_of_first[m] - R for R in rewards_of_first[:m]], -1)


def train_step(
    method: str,
    state: train.TrainState,
    task: Task,
    config: Config,
    credit: Callable[[Scored, Tensor], Tensor] = reward_to_go,
) -> tuple[dict, dict]:
    """`train.train_step`, in which VPO has an advantage per answer."""
    if method != "vpo":
        return usual_train_step(method, state, task, config)
    found = {}

    def advantages(scored: Scored, options: Options) -> Tensor:
        """Those of the first answers (P, G), which the metrics show; all are kept."""
        P, _, m, k = scored.vectors.shape
        weights = sample_weights(
            P, options.n_weights, k, alpha=options.alpha, generator=options.generator
        )
        credits = credit(scored, weights)  # (P, G, m)
        of_answers = [group_normalize(credits[..., j]) for j in range(m)]  # (P, G) each
        found["advantages"] = torch.stack(of_answers, -1)  # (P, G, m)
        return found["advantages"][..., 0]

    def backward(policy, reference, rollouts, _, config) -> dict[str, Tensor]:
        of_tokens = token_advantages(policy, task, rollouts, found["advantages"])
        return usual_backward(policy, reference, rollouts, of_tokens, config)

    with (
        patch.dict(vpo.ADVANTAGES, vpo=advantages),
        patch("train.backward", backward),
        patch("fast.backward", backward),
    ):
        return usual_train_step(method, state, task, config)


def token_advantages(policy: Policy, task: Task, rollouts: Rollouts, advantages: Tensor) -> Tensor:
    """The advantages (P * G, T) of all tokens, those of their answers (P, G, m).

    A token belongs to the answer that the next closing tag ends, or else to the last answer.
    """
    m = advantages.shape[-1]
    tags = [f"</{task.tag}_{i}>" for i in range(1, m + 1)]
    closing = torch.tensor(policy.tokenizer.convert_tokens_to_ids(tags), device=policy.device)
    closes = torch.isin(rollouts.tokens, closing).long()  # (P * G, T)
    n_closed_before = closes.cumsum(1) - closes
    answers = n_closed_before.clamp_max(m - 1)
    return advantages.flatten(0, 1).to(policy.device).gather(1, answers)


if __name__ == "__main__":
    train.train_step = train_step
    train.main([*sys.argv[1:], "--jobs", "1"])
