"""The update: log-probabilities of rollouts under the current policy, in micro-batches.

Their gradients are those of the plain computation. But a prompt is computed once for all its
rollouts (shared prefix, arXiv 2506.05433), the LM head runs in chunks and on sampled tokens only,
and rollouts without a gradient are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.decoding import Rollouts
from engine.forward import (
    PromptLayer,
    adapter_off,
    attention_mask,
    cache_of,
    hidden_states,
    prefill,
)
from engine.lm_head import head_logprobs
from engine.models import Model


@dataclass
class MicroBatch:
    """B rollouts that are computed together, cut to the longest of them: T tokens."""

    rows: Tensor  # (B) long, their rows in the batch of rollouts
    logprobs: Tensor  # (B, T) in nats at the sampling temperature, with gradient; 0 after the end
    old_logprobs: Tensor  # (B, T) as they were when the tokens were sampled
    ref_logprobs: Tensor | None  # (B, T) under the reference policy
    token_mask: Tensor  # (B, T) bool, True on sampled tokens
    entropy: Tensor  # (B, T) in nats, without gradient; 0 after the end


def rows_to_compute(advantages: Tensor, with_reference: bool) -> list[int]:
    """The rows of rollouts that have a gradient: all with a KL term, else those with an advantage.

    Args:
        advantages: (P * G).
        with_reference: whether the loss has a KL term.
    """
    if with_reference:
        return list(range(len(advantages)))
    return advantages.nonzero()[:, 0].tolist()


def micro_batches(
    model: Model,
    reference: Model | None,
    rollouts: Rollouts,
    rows: list[int],
    *,
    temperature: float = 1.0,
    token_budget: int = 0,
) -> Iterator[MicroBatch]:
    """Log-probabilities of rollouts, one micro-batch after the other.

    The caller calls backward on a loss of each micro-batch before it takes the next one, and takes
    all of them. After the last micro-batch of a chunk of prompts the gradient goes on through these
    prompts. After the last of all every trainable weight has a gradient.

    Args:
        reference: the reference policy for a KL term: `model` itself if that trains an adapter.
        rows: of the rollouts that are computed.
        token_budget: padded tokens of a micro-batch; 0: no limit.
    """
    token_mask = rollouts.token_mask
    for chunk in prompt_chunks(rollouts, rows, token_budget):
        all_ref_logprobs = reference_logprobs(reference, rollouts, chunk, temperature)
        shared = share_prompts(model, rollouts, chunk.prompts)
        # The rollouts' gradients gather in these copies, and then pass through the prompts once.
        leaves = shared.leaves()

        for batch_rows, ref_logprobs in zip(chunk.batches, all_ref_logprobs, strict=True):
            logprobs, entropy = token_logprobs(
                model, rollouts, batch_rows, temperature=temperature, shared=leaves
            )
            index = torch.tensor(batch_rows, device=logprobs.device)
            T = logprobs.shape[1]
            yield MicroBatch(
                rows=index,
                logprobs=logprobs,
                old_logprobs=rollouts.logprobs[index, :T],
                ref_logprobs=ref_logprobs,
                token_mask=token_mask[index, :T],
                entropy=entropy,
            )

        backward_through_prompts(shared, leaves)
        del shared, leaves  # before the next prompts are computed

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@dataclass
class SharedPrompts:
    """What the rollouts of P prompts have in common."""

    prompts: list[int]  # their rows in Rollouts.prompt_ids
    hidden: Tensor  # (P, H) last hidden states of their last tokens
    layers: list[tuple[Tensor, Tensor]]  # keys and values, each (P, heads, L, head size)

    def leaves(self) -> "SharedPrompts":
        """The same values, cut off from the graph, with gradients of their own."""
        return SharedPrompts(
            self.prompts,
            self.hidden.detach().requires_grad_(),
            [
                (keys.detach().requires_grad_(), values.detach().requires_grad_())
                for keys, values in self.layers
            ],
        )

    def tensors(self) -> list[Tensor]:
        tensors = [self.hidden]
        for keys, values in self.layers:
            tensors += [keys, values]
        return tensors


def share_prompts(model: Model, rollouts: Rollouts, prompts: list[int]) -> SharedPrompts:
    """Run these prompts once, with gradients."""
    lengths = [rollouts.prompt_lengths[p] for p in prompts]
    ids = rollouts.prompt_ids[prompts, -max(lengths) :]
    cache, hidden = prefill(model, ids, lengths)
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    return SharedPrompts(prompts, hidden, layers)


def backward_through_prompts(shared: SharedPrompts, leaves: SharedPrompts) -> None:
    """Add the gradients that have gathered in the leaves to the model's."""
    tensors = []
    gradients = []
    for tensor, leaf in zip(shared.tensors(), leaves.tensors(), strict=True):
        if leaf.grad is not None:  # keys and values have none if all rollouts are one token long
            tensors.append(tensor)
            gradients.append(leaf.grad)
    torch.autograd.backward(tensors, gradients)


def reference_logprobs(
    reference: Model | None, rollouts: Rollouts, chunk: "PromptChunk", temperature: float
) -> list[Tensor | None]:
    """Log-probabilities (B, T) of each micro-batch under the reference policy, if there is one."""
    if reference is None:
        return [None for _ in chunk.batches]
    logprobs = []
    with torch.no_grad(), adapter_off(reference):
        shared = share_prompts(reference, rollouts, chunk.prompts)
        for rows in chunk.batches:
            batch_logprobs, _ = token_logprobs(
                reference, rollouts, rows, temperature=temperature, shared=shared
            )
            logprobs.append(batch_logprobs)
    return logprobs


def token_logprobs(
    model: Model,
    rollouts: Rollouts,
    rows: list[int],
    *,
    temperature: float = 1.0,
    shared: SharedPrompts | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, T) of the tokens of B rollouts, with gradients, and the entropies.

    Args:
        shared: their prompts as share_prompts gives them; None: they are computed here.

    Returns:
        Both (B, T) in nats at this temperature, 0 after a rollout's end. The entropies have no
        gradient.
    """
    if shared is None:
        prompts = {row // rollouts.group_size for row in rows}
        shared = share_prompts(model, rollouts, sorted(prompts))
    device = rollouts.tokens.device
    lengths = [rollouts.lengths[row] for row in rows]
    B = len(rows)
    T = max(lengths)
    tokens = rollouts.tokens[torch.tensor(rows, device=device), :T]
    hidden = hidden_before_tokens(model, rollouts, rows, tokens, shared)  # (B, T, H)

    # The LM head sees the sampled tokens alone, N of the B * T.
    sampled = []
    for b, length in enumerate(lengths):
        sampled += range(b * T, b * T + length)
    sampled = torch.tensor(sampled, device=device)  # (N)
    hidden = hidden.flatten(0, 1).index_select(0, sampled)  # (N, H)
    targets = tokens.flatten()[sampled]
    logprobs, entropy = head_logprobs(model, hidden, targets, temperature)
    zeros = torch.zeros(B * T, device=device)
    return (
        zeros.index_copy(0, sampled, logprobs).view(B, T),
        zeros.index_copy(0, sampled, entropy).view(B, T),
    )


def hidden_before_tokens(
    model: Model, rollouts: Rollouts, rows: list[int], tokens: Tensor, shared: SharedPrompts
) -> Tensor:
    """The last hidden states (B, T, H) from which the tokens (B, T) of rollouts are predicted.

    The prompt's last one predicts the first token. Each token predicts the next one.
    """
    device = tokens.device
    T = tokens.shape[1]
    prompts = [row // rollouts.group_size for row in rows]
    owner = torch.tensor([shared.prompts.index(p) for p in prompts], device=device)  # (B)
    first = shared.hidden.index_select(0, owner)[:, None]  # (B, 1, H)
    if T == 1:
        return first
    layers = [
        PromptLayer(keys.index_select(0, owner), values.index_select(0, owner))
        for keys, values in shared.layers
    ]
    start = [rollouts.prompt_lengths[p] for p in prompts]
    L = layers[0].keys.shape[2]
    rest = hidden_states(
        model,
        tokens[:, :-1],
        cache_of(layers),
        torch.tensor(start, device=device),
        attention_mask(start, L, device, T - 1),
    )
    return torch.cat([first, rest], 1)


@dataclass
class PromptChunk:
    """Prompts that are computed together, and the micro-batches of their rollouts."""

    prompts: list[int]
    batches: list[list[int]]  # rows of rollouts


def prompt_chunks(rollouts: Rollouts, rows: list[int], token_budget: int) -> list[PromptChunk]:
    """Divide rollouts into micro-batches of similar lengths, and their prompts into chunks.

    A micro-batch, and the prompts of a chunk, hold at most `token_budget` padded tokens (0: all)
    or a single item. A rollout also takes a copy of its prompt's keys and values, so it counts for
    a quarter of the prompt's length at least.
    """
    G = rollouts.group_size
    sizes = []
    for row, length in enumerate(rollouts.lengths):
        sizes.append(max(length, rollouts.prompt_lengths[row // G] // 4))
    longest_first = sorted(rows, key=lambda row: -rollouts.lengths[row])
    prompts = list(dict.fromkeys(row // G for row in rows))

    chunks = []
    for chunk_prompts in fill(prompts, rollouts.prompt_lengths, token_budget):
        chunk_rows = [row for row in longest_first if row // G in chunk_prompts]
        chunks.append(PromptChunk(chunk_prompts, fill(chunk_rows, sizes, token_budget)))
    return chunks


def fill(items: list[int], lengths: list[int], token_budget: int) -> list[list[int]]:
    """Divide items, in their order, into parts of at most `token_budget` padded tokens (0: all)."""
    parts = []
    part: list[int] = []
    longest = 0
    for item in items:
        longest = max(longest, lengths[item])
        if part and token_budget and longest * (len(part) + 1) > token_budget:
            parts.append(part)
            part = []
            longest = lengths[item]
        part.append(item)
    if part:
        parts.append(part)
    return parts
