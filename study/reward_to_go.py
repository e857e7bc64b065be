"""Credit per answer: each answer of a VPO rollout gets what it and the later ones add to the set.

    python study/reward_to_go.py --method vpo

The flags are those of train.py; `--subset` has no effect. It needs the tiny model, in the maze or the
toy.

The paper gives all tokens of a rollout one advantage. Here the tokens of answer j get
R(S) - R(answers before j), normalised in the group. The expected gradient is the same, because the
answers before j do not depend on answer j. The gradient has less noise.

`train_step` is that of train.py but for the lines that end in "per answer". `python study/reproduce.py
--only credit` measures it beside VPO.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from engine.config import Config
from engine.logs import sample_record
from engine.tasks import take_problems
from rewards import Task
from rollout import (
    Policy,
    Rollouts,
    build_prompt,
    random_generator,
    read_answers,
    sample,
    sampling_options,
    score,
)
from vpo import Scored, group_normalize, policy_loss, sample_weights, set_reward

Credit = Callable[[Scored, Tensor, float], Tensor]
usual_train_step = train.train_step


def reward_to_go(scored: Scored, weights: Tensor, minimum: float) -> Tensor:
    """What each answer is paid (P, G, m). The first one's is VPO's own reward.

    Args:
        weights: preference weights (P, K, k).
        minimum: the task's, of a rollout without answers.
    """
    m = scored.answer_mask.shape[-1]
    rewards_of_first = []  # (P, G) each: R of the first 0, 1, ... m answers
    for n in range(m + 1):
        is_first = torch.arange(m) < n
        R = set_reward(scored.vectors, weights, scored.answer_mask & is_first, minimum)
        rewards_of_first.append(R)
    return torch.stack([rewards_of_first[m] - R for R in rewards_of_first[:m]], -1)


def train_step(
    method: str,
    state: train.TrainState,
    task: Task,
    config: Config,
    credit: Credit = reward_to_go,
) -> tuple[dict, dict]:
    """`train.train_step`, which for VPO has an advantage per answer."""
    if method != "vpo":
        return usual_train_step(method, state, task, config)
    t = state.step
    policy = state.policy
    m = config.m
    P = config.prompts_per_step

    problems = take_problems(task, "train", P, config.seed, start=t * P)
    prompts = [build_prompt(policy, task, problem, m) for problem in problems]
    generator = random_generator(config.seed, t, "rollouts")
    options = sampling_options(policy, task, config, m, generator)
    rollouts = sample(policy, prompts, config.group_size, options)  # P * G
    answers = read_answers(task, rollouts, m)  # P * G lists of up to m
    scored = score(task, problems, answers, m)  # (P, G, m, k)
    advantages = answer_advantages(scored, task, config, t, credit)  # (P, G, m), per answer

    of_tokens = token_advantages(policy, task, rollouts, advantages)  # (P * G, T), per answer
    lr = train.learning_rate(state.peak_lr, t, config)
    for _ in range(config.updates):
        with patch("train.policy_loss", policy_loss_of_tokens):  # per answer
            metrics = train.backward(policy, state.reference, rollouts, of_tokens, config)
        metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(state.optimizer.weights, 1.0)
        train.check_finite(metrics)
        state.optimizer.step(lr)
        policy.model.zero_grad()
    state.step += 1
    first = advantages[..., 0]  # (P, G), of the first answers
    metrics |= train.step_metrics(task, problems, answers, rollouts, scored, first, m)
    return metrics | {"lr": lr}, sample_record(prompts, problems, rollouts, scored, first)


def answer_advantages(scored: Scored, task: Task, config: Config, t: int, credit: Credit) -> Tensor:
    """The advantage of every answer (P, G, m): its credit, normalised in the group."""
    P, _, m, k = scored.vectors.shape
    generator = random_generator(config.seed, t, "weights")
    weights = sample_weights(P, config.n_weights, k, alpha=config.alpha, generator=generator)
    credits = credit(scored, weights, task.minimum)  # (P, G, m)
    return torch.stack([group_normalize(credits[..., j]) for j in range(m)], -1)


def token_advantages(policy: Policy, task: Task, rollouts: Rollouts, advantages: Tensor) -> Tensor:
    """The advantages (P * G, T) of all tokens, those of their answers.

    A token belongs to the answer that the next closing tag ends, or else to the last answer.
    """
    m = advantages.shape[-1]
    tags = [f"</{task.tag}_{i}>" for i in range(1, m + 1)]
    closing = torch.tensor(policy.tokenizer.convert_tokens_to_ids(tags), device=policy.device)
    closes = torch.isin(rollouts.tokens, closing).long()  # (P * G, T)
    n_closed_before = closes.cumsum(1) - closes
    answers = n_closed_before.clamp_max(m - 1)
    return advantages.flatten(0, 1).to(policy.device).gather(1, answers)


def policy_loss_of_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_mask: Tensor,
    n_tokens: int,
    *,
    ref_logprobs: Tensor | None,
    entropy: Tensor,
    **options: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`vpo.policy_loss` with advantages (B, T): every token is a rollout of its own."""
    if ref_logprobs is not None:
        ref_logprobs = ref_logprobs.reshape(-1, 1)
    return policy_loss(
        logprobs.reshape(-1, 1),
        old_logprobs.reshape(-1, 1),
        advantages.flatten(),
        token_mask.reshape(-1, 1),
        n_tokens,
        ref_logprobs=ref_logprobs,
        entropy=entropy.reshape(-1, 1),
        **options,
    )


if __name__ == "__main__":
    train.train_step = train_step
    train.main([*sys.argv[1:], "--jobs", "1"])
