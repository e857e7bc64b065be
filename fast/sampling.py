"""Sampling in which a prompt is computed once for its group, and finished rollouts leave the batch."""

import functools

import torch
from torch import Tensor
from transformers import DynamicCache

import rollout
from rollout import Decoded, Policy, SamplingOptions, draw, hidden_states, lm_logits, prompt_mask

# A batch drops its finished rollouts when fewer than this share go on: moving the cache costs a step.
COMPACT_BELOW = 0.8


def decode(
    policy: Policy, ids: Tensor, lengths: list[int], uniform: Tensor, options: SamplingOptions
) -> Decoded:
    """Sample the rollouts of P prompts. Arguments and result are those of `rollout.decode`."""
    model = policy.model
    B, T = uniform.shape
    G = B // len(ids)
    device = ids.device
    ends = torch.tensor(policy.eos_ids, device=device)
    tokens = torch.full((B, T), policy.eos_ids[0], device=device)
    logprobs = torch.zeros(B, T, device=device)
    n_sampled = torch.zeros(B, dtype=torch.long, device=device)
    has_ended = torch.zeros(B, dtype=torch.bool, device=device)

    cache = DynamicCache(config=model.config)
    mask = prompt_mask(ids, lengths)  # (P, L)
    hidden = hidden_states(model, ids, mask, cache)[:, -1]  # (P, H)
    logits = lm_logits(model, hidden).repeat_interleave(G, 0)  # (B, V)
    cache.batch_repeat_interleave(G)
    mask = mask.repeat_interleave(G, 0)

    rows = torch.arange(B, device=device)  # those in the batch
    is_alive = torch.ones(B, dtype=torch.bool, device=device)  # those of them that go on
    for t in range(T):
        token, logprob = draw(logits / options.temperature, uniform[rows, t])
        tokens[rows, t] = torch.where(is_alive, token, policy.eos_ids[0])
        logprobs[rows, t] = torch.where(is_alive, logprob, 0.0)
        n_sampled[rows] += is_alive
        is_alive &= ~torch.isin(token, ends)
        if options.stop:
            is_alive &= ~options.stop(tokens[rows, : t + 1], is_alive)
        n_alive = int(is_alive.sum())
        if n_alive == 0 or t == T - 1:
            break
        if n_alive < COMPACT_BELOW * len(rows):
            keep = is_alive.nonzero()[:, 0]
            has_ended[rows[~is_alive]] = True
            cache.batch_select_indices(keep)
            rows = rows[keep]
            mask = mask[keep]
            token = token[keep]
            is_alive = is_alive[keep]
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        hidden = hidden_states(model, token[:, None], mask, cache)
        logits = lm_logits(model, hidden[:, -1])
    has_ended[rows] = ~is_alive
    return Decoded(tokens, logprobs, n_sampled, has_ended)


sample = functools.partial(rollout.sample, decoder=decode)  # rollout.sample with this decoder
