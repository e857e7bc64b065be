"""Credit per answer: each answer of a VPO rollout is paid what it and those after it add to the set.

    python examples/reward_to_go.py --method vpo      the flags of train.py; for the tiny model, in the maze or the toy

The paper gives all tokens of a rollout one advantage. Here those of answer j get R(S) - R(the answers before j),
normalised in the group: the same gradient in expectation, because what came before does not depend on them, with less
noise. An experiment on train.py, not a part of it; `python reproduce.py --only credit` measures it beside VPO.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import engine.update
import train
from vpo import ADVANTAGES, group_normalize, policy_loss, sample_weights, set_scores

now: dict[
    str, Tensor
] = {}  # of this step: the closing tags (m) and the answers' advantages (P * G, m)


def vpo(rewards: Tensor, scalars: Tensor, mask: Tensor, **options) -> Tensor:
    """The advantage of every rollout's first answer, which is VPO's own (P, G); all of them are kept for `backward`."""
    P, G, m, k = rewards.shape
    weights = sample_weights(
        P * options["n_weights"], k, alpha=options["alpha"], generator=options["generator"]
    )
    values = [
        set_scores(
            rewards, weights.view(P, -1, k), mask & (torch.arange(m) < j), options["floor"]
        ).mean(-1)
        for j in range(m + 1)
    ]  # R of the first 0, 1, .. m answers
    now["advantages"] = torch.stack(
        [group_normalize(values[m] - values[j]) for j in range(m)], -1
    ).view(P * G, m)
    return now["advantages"][:, 0].view(P, G)


def train_step(method, learner, task, args):
    tags = [f"</{task.tag}_{i + 1}>" for i in range(args.m)]
    now["closing"] = torch.tensor(learner.tokenizer.convert_tokens_to_ids(tags))
    return plain["train_step"](method, learner, task, args)


def backward(model, reference, rollouts, advantages, **options):
    """With an advantage per token: that of the answer which its closing tag ends."""
    if "advantages" in now:
        closed = torch.isin(rollouts.tokens, now["closing"]).long()
        answers = now.pop("advantages")
        advantages = answers.gather(
            1, (closed.cumsum(1) - closed).clamp_max(answers.shape[1] - 1)
        ).tolist()
    return plain["backward"](model, reference, rollouts, advantages, **options)


def loss(logprobs, old_logprobs, advantages, mask, n_tokens, ref_logprobs=None, **options):
    """vpo.policy_loss over tokens as if each were a rollout."""
    if advantages.ndim == 2:
        advantages = advantages[:, : logprobs.shape[1]].reshape(-1)
        logprobs, old_logprobs, mask = (x.reshape(-1, 1) for x in (logprobs, old_logprobs, mask))
        ref_logprobs = None if ref_logprobs is None else ref_logprobs.reshape(-1, 1)
    return policy_loss(
        logprobs, old_logprobs, advantages, mask, n_tokens, ref_logprobs=ref_logprobs, **options
    )


plain = {"train_step": train.train_step, "backward": train.backward}
train.train_step, train.backward, engine.update.policy_loss, ADVANTAGES["vpo"] = (
    train_step,
    backward,
    loss,
    vpo,
)

if __name__ == "__main__":
    train.main()
