"""Credit per answer: each answer of a VPO rollout gets what it and the later ones add to the set.

    python study/reward_to_go.py --method vpo

The flags are those of train.py; `--sampler` and `--subset` have no effect. It needs the tiny model, in the
maze or the toy.

The paper gives all tokens of a rollout one advantage. Here the tokens of answer j get
R(S) - R(answers before j), normalised in the group. The expected gradient is the same, because the
answers before j do not depend on answer j. The gradient has less noise. This is an experiment on
train.py and no part of it; `python study/reproduce.py --only credit` measures it beside VPO.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from engine.update import MicroBatch, micro_batches
from rollout import Rollouts
from vpo import ADVANTAGES, group_normalize, policy_loss, sample_weights, set_reward

train_step = train.train_step


def credited_train_step(method, state, task, config):
    """train.train_step, which for VPO uses an advantage per answer."""
    if method != "vpo":
        return train_step(method, state, task, config)
    tags = [f"</{task.tag}_{i}>" for i in range(1, config.m + 1)]
    credit = AnswerCredit(torch.tensor(state.tokenizer.convert_tokens_to_ids(tags)))
    with (
        patch.dict(ADVANTAGES, vpo=credit.advantages),
        patch("train.rows_to_compute", credit.rows_to_compute),
        patch("train.micro_batches", credit.micro_batches),
        patch("train.policy_loss", credit.policy_loss),
    ):
        return train_step(method, state, task, config)


class AnswerCredit:
    """What one training step computes in another way than VPO, in the order of the calls."""

    def __init__(self, closing_tags: Tensor):
        self.closing_tags = closing_tags  # (m) token ids

    def advantages(
        self, rewards: Tensor, scalars: Tensor, answer_mask: Tensor, **options
    ) -> Tensor:
        """The advantages (P, G) of the first answers. Those of all are kept."""
        P, G, m, k = rewards.shape
        weights = sample_weights(
            P * options["n_weights"], k, alpha=options["alpha"], generator=options["generator"]
        ).view(P, -1, k)
        credits = self.credits(rewards, weights, answer_mask, options["missing_answer_reward"])
        advantages = [group_normalize(credit) for credit in credits]
        self.answer_advantages = torch.stack(advantages, -1).view(P * G, m)
        return advantages[0]

    def credits(
        self, rewards: Tensor, weights: Tensor, answer_mask: Tensor, missing_answer_reward: float
    ) -> list[Tensor]:
        """What each of the m answers is paid, (P, G) each. The first one's is VPO's own reward."""
        m = rewards.shape[2]
        rewards_of_first = []  # (P, G) each: R of the first 0, 1, ... m answers
        for n in range(m + 1):
            is_first = torch.arange(m) < n
            mask = answer_mask & is_first
            R = set_reward(rewards, weights, mask, missing_answer_reward)
            rewards_of_first.append(R)
        return [rewards_of_first[m] - R for R in rewards_of_first[:m]]

    def rows_to_compute(self, advantages: Tensor, with_reference: bool) -> list[int]:
        """All rollouts: an answer may have an advantage where the first one has none."""
        return list(range(len(advantages)))

    def micro_batches(
        self, model, reference, rollouts: Rollouts, rows: list[int], **options
    ) -> Iterator[MicroBatch]:
        """Keep the advantages (B, T) of each micro-batch's tokens until its loss is computed.

        A token belongs to the answer that the next closing tag ends, or else to the last answer.
        """
        closes = torch.isin(rollouts.tokens, self.closing_tags).long()  # (P * G, T)
        n_closed_before = closes.cumsum(1) - closes
        answers = n_closed_before.clamp_max(len(self.closing_tags) - 1)
        advantages = self.answer_advantages.gather(1, answers)  # (P * G, T)
        for batch in micro_batches(model, reference, rollouts, rows, **options):
            T = batch.logprobs.shape[1]
            self.token_advantages = advantages[batch.rows, :T]
            yield batch

    def policy_loss(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        token_mask: Tensor,
        *arguments,
        ref_logprobs: Tensor | None,
        **options,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """vpo.policy_loss, to which every token is a rollout of its own, with its own advantage."""
        if ref_logprobs is not None:
            ref_logprobs = ref_logprobs.reshape(-1, 1)
        return policy_loss(
            logprobs.reshape(-1, 1),
            old_logprobs.reshape(-1, 1),
            self.token_advantages.flatten(),
            token_mask.reshape(-1, 1),
            *arguments,
            ref_logprobs=ref_logprobs,
            **options,
        )


train.train_step = credited_train_step

if __name__ == "__main__":
    train.main()
