"""Sampling in which a prompt is computed once for its group, and finished rollouts leave the batch."""

import functools

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

import rollout
from rollout import Decoded, Policy, SamplingOptions, draw, hidden_states, lm_logits, prompt_mask

# A batch drops its finished rollouts when fewer than this share go on, because this copies the cache.
COMPACT_BELOW = 0.8


class RoomyLayer(DynamicLayer):
    """A layer of a KV cache with room for all tokens of B = P * G rollouts.

    One that grows by a token at a time would cut a card's memory into pieces. It holds all positions,
    for sliding-window attention too: the model's own attention mask cuts the window out.
    """

    def __init__(self, room: int, G: int):
        super().__init__()
        self.room = room  # tokens
        self.G = G
        self.stored: list[Tensor] = []  # keys and values, each (B, heads, room, head size)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        if not self.stored:  # the prompts: a copy for each of their rollouts
            for states in (key_states, value_states):
                P, heads, L, size = states.shape
                own = states.new_empty(P * self.G, heads, self.room, size)
                own[:, :, :L] = states.repeat_interleave(self.G, 0)
                self.stored.append(own)
            self.is_initialized = True
            self.show(key_states.shape[2])
            return key_states, value_states
        begin = self.keys.shape[2]
        end = begin + key_states.shape[2]
        self.stored[0][:, :, begin:end] = key_states
        self.stored[1][:, :, begin:end] = value_states
        self.show(end)
        return self.keys, self.values

    def show(self, length: int) -> None:
        """Let the layer hold this many tokens."""
        self.keys, self.values = [own[:, :, :length] for own in self.stored]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Nothing: `update` has done it."""

    def batch_select_indices(self, indices: Tensor) -> None:
        self.stored = [own[indices] for own in self.stored]
        self.show(self.keys.shape[2])


def decode(
    policy: Policy, ids: Tensor, lengths: list[int], uniform: Tensor, options: SamplingOptions
) -> Decoded:
    """Sample the rollouts of P prompts. Arguments and result are those of `rollout.decode`."""
    model = policy.model
    B, T = uniform.shape
    G = B // len(ids)
    device = ids.device
    ends = torch.tensor(policy.eos_ids)
    tokens = torch.full((B, T), policy.eos_ids[0])
    logprobs = torch.zeros(B, T, device=device)
    n_sampled = torch.zeros(B, dtype=torch.long)
    has_ended = torch.zeros(B, dtype=torch.bool)

    cache = DynamicCache(config=model.config)
    if device.type != "cpu":
        cache.layers = [RoomyLayer(ids.shape[1] + T, G) for _ in cache.layers]
    mask = prompt_mask(ids, lengths)  # (P, L)
    hidden = hidden_states(model, ids, mask, cache)[:, -1]  # (P, H)
    logits = lm_logits(model, hidden).repeat_interleave(G, 0)  # (B, V)
    cache.batch_repeat_interleave(G)
    mask = mask.repeat_interleave(G, 0)

    rows = torch.arange(B)  # those in the batch
    device_rows = rows.to(device)
    is_alive = torch.ones(B, dtype=torch.bool)  # those of them that go on
    for t in range(T):
        token, logprob = draw(logits / options.temperature, uniform[device_rows, t])
        logprobs[device_rows, t] = torch.where(is_alive.to(device), logprob, 0.0)
        newest = token.cpu()
        tokens[rows, t] = torch.where(is_alive, newest, policy.eos_ids[0])
        n_sampled[rows] += is_alive
        is_alive &= ~torch.isin(newest, ends)
        if options.stop:
            is_alive &= ~options.stop(tokens[rows, : t + 1], is_alive)
        n_alive = int(is_alive.sum())
        if n_alive == 0 or t == T - 1:
            break
        if n_alive < COMPACT_BELOW * len(rows):
            keep = is_alive.nonzero()[:, 0]
            has_ended[rows[~is_alive]] = True
            rows = rows[keep]
            is_alive = is_alive[keep]
            keep = keep.to(device)
            cache.batch_select_indices(keep)
            device_rows = device_rows[keep]
            mask = mask[keep]
            token = token[keep]
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        hidden = hidden_states(model, token[:, None], mask, cache)
        logits = lm_logits(model, hidden[:, -1])
    has_ended[rows] = ~is_alive
    return Decoded(tokens, logprobs, n_sampled, has_ended)


sample = functools.partial(rollout.sample, decoder=decode)  # rollout.sample with this decoder
