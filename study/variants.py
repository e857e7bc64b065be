"""Variants of the methods that were tried: one name, then the flags of train.py.

    python study/variants.py shapley --method vpo

    passes        maxrl  r = 1 where an answer is perfect in every objective, else 0
    reward_to_go  vpo    credit per answer: what it and the later ones add to the set
    shapley       vpo    credit per answer: its Shapley value in the set

Each replaces one function in this process, so methods go one by one. `python study/reproduce.py --only
variant` measures them beside the method that they vary. Credit per answer needs the tiny model, in the
maze or the toy, and ignores `--subset`: in place of one advantage per rollout all tokens of an answer get
that of the answer. By reward-to-go the expected gradient is VPO's, with less noise, because the
answers before an answer do not depend on it.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
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
from vpo import Options, Scored

maxrl = vpo.maxrl
usual_train_step = train.train_step
usual_backward = train.backward


def passes(scored: Scored, options: Options) -> Tensor:
    """MaxRL with the binary reward that it is meant for, such as a program that passes all tests."""
    is_perfect = (scored.vectors >= 1) | ~scored.objective_mask[:, None, None]  # (P, G, 1, d)
    binary = is_perfect.all(-1).float()
    return maxrl(
        replace(scored, scalars=binary, missing_scalar=torch.zeros(len(binary), 1)), options
    )


# Credit per answer.


def train_step(
    method: str,
    state: train.TrainState,
    task: Task,
    config: Config,
    *,
    credit: Callable[[Scored, Tensor], Tensor],
) -> tuple[dict, dict]:
    """`train.train_step`, in which VPO has an advantage per answer.

    Args:
        credit: what each answer is paid (P, G, m), from preference weights (P, K, d).
    """
    if method != "vpo":
        return usual_train_step(method, state, task, config)
    found = {}

    def advantages(scored: Scored, options: Options) -> Tensor:
        """Those of the first answers (P, G), which the metrics show; all are kept."""
        P, _, m, k = scored.vectors.shape
        weights = vpo.sample_weights(
            P, options.n_weights, k, alpha=options.alpha, generator=options.generator
        )
        credits = credit(scored, weights)  # (P, G, m)
        of_answers = [vpo.group_normalize(credits[..., j]) for j in range(m)]  # (P, G) each
        found["advantages"] = torch.stack(of_answers, -1)  # (P, G, m)
        return found["advantages"][..., 0]

    def backward(policy, reference, rollouts, _, config) -> dict[str, Tensor]:
        n_groups = len(rollouts.prompt_ids)  # of this update; the next one has the others
        of_tokens = token_advantages(policy, task, rollouts, found["advantages"][:n_groups])
        found["advantages"] = found["advantages"][n_groups:]
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


def reward_to_go(scored: Scored, weights: Tensor) -> Tensor:
    """R(set) - R(answers before j) for every answer j, (P, G, m). The first one's is VPO's own reward."""
    m = scored.answer_mask.shape[-1]
    rewards_of_first = []  # (P, G) each: R of the first 0, 1, ... m answers
    for n in range(m + 1):
        mask = scored.answer_mask & (torch.arange(m) < n)
        rewards_of_first.append(vpo.set_reward(scored.vectors, weights, mask, scored.minimum))
    return torch.stack([rewards_of_first[m] - R for R in rewards_of_first[:m]], -1)


def shapley(scored: Scored, weights: Tensor) -> Tensor:
    """The Shapley value of every answer (P, G, m). A repeated answer adds nothing."""
    utilities = torch.einsum("pgmk,pwk->pgwm", scored.vectors, weights)  # (P, G, K, m)
    counts = scored.answer_mask & ~scored.repeat_mask  # (P, G, m)
    utilities = utilities.masked_fill(~counts[:, :, None], 0.0)
    return shapley_values(utilities).mean(2)


def shapley_values(utilities: Tensor) -> Tensor:
    """The Shapley value of every answer where a set is worth its best utility: the airport game.

    Let u_1 <= ... <= u_m be the utilities. The step from u_{l-1} to u_l is shared equally by the
    m - l + 1 answers that reach u_l.

    Args:
        utilities: (..., m), not negative.

    Returns:
        (..., m), which add up to the largest utility.
    """
    m = utilities.shape[-1]
    ranked, order = utilities.sort(-1)  # (..., m), the smallest first
    steps = ranked.diff(dim=-1, prepend=torch.zeros_like(ranked[..., :1]))
    sharers = torch.arange(m, 0, -1)  # m answers reach the smallest utility, one the largest
    values = (steps / sharers).cumsum(-1)
    return torch.empty_like(values).scatter(-1, order, values)


# The command.

# variant -> object, name in it, what stands there instead
CHANGES = {
    "passes": (vpo.ADVANTAGES, "maxrl", passes),
    "reward_to_go": (vars(train), "train_step", functools.partial(train_step, credit=reward_to_go)),
    "shapley": (vars(train), "train_step", functools.partial(train_step, credit=shapley)),
}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in CHANGES:
        sys.exit(f"{__doc__}\nerror: name one of {', '.join(CHANGES)}, then the flags of train.py")
    names, name, change = CHANGES[sys.argv[1]]
    names[name] = change
    train.main([*sys.argv[2:], "--jobs", "1"])
