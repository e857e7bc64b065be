"""A gradient for which a prompt is computed once for its rollouts (shared prefix, arXiv 2506.05433).

Rollouts without a gradient are left out, and those of similar length share a micro-batch. The gradient
is that of `train.backward`. The entropy is that of the rollouts that are computed.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from engine.config import Config
from fast.lean import lean
from rollout import Policy, Rollouts, head_logprobs, hidden_states, prompt_mask
from vpo import policy_loss


def backward(
    policy: Policy, reference: Policy | None, rollouts: Rollouts, advantages: Tensor, config: Config
) -> dict[str, Tensor | float]:
    """Add the gradient of the loss. Arguments and result are those of `train.backward`."""
    rows = list(range(len(advantages)))
    if reference is None and not config.entropy_coef:
        # Without an advantage a rollout has no gradient; its tokens count.
        rows = advantages.nonzero()[:, 0].tolist()
        rows = rows or list(range(rollouts.group_size))  # one group, so that the entropy is known
    n_tokens = sum(rollouts.lengths)
    n_computed = sum(rollouts.lengths[row] for row in rows)
    metrics: dict[str, Tensor | float] = {}
    with lean(policy.model):
        for chunk in prompt_chunks(rollouts, rows, config.micro_batch_tokens):
            ref_logprobs = reference_logprobs(reference, rollouts, chunk, config.temperature)
            shared = share_prompts(policy.model, rollouts, chunk.prompts)
            # The rollouts' gradients gather in these copies, d loss / d (keys, values). The chain rule
            # then takes them through the prompts once.
            leaves = shared.leaves()
            for batch, own_ref_logprobs in zip(chunk.batches, ref_logprobs, strict=True):
                index = torch.tensor(batch, device=policy.device)
                logprobs, entropy = logprobs_after(
                    policy.model, rollouts, batch, leaves, config.temperature
                )
                if not config.entropy_coef:
                    entropy = entropy.detach()  # or the logits of all chunks would be kept for it
                T = logprobs.shape[1]
                loss, parts = policy_loss(
                    logprobs,
                    rollouts.logprobs[index, :T],
                    advantages[index],
                    rollouts.token_mask[index, :T],
                    n_tokens,
                    ref_logprobs=own_ref_logprobs,
                    kl_coef=config.kl,
                    entropy=entropy,
                    entropy_coef=config.entropy_coef,
                )
                loss.backward()
                parts |= {"loss": loss.detach(), "entropy": entropy.detach().sum() / n_computed}
                for name, value in parts.items():
                    metrics[name] = metrics.get(name, 0.0) + value
            backward_through_prompts(shared, leaves)
            del shared, leaves  # before the next prompts are computed
    return metrics


class PromptLayer(DynamicLayer):
    """A layer of a KV cache that holds prompts and nothing after them, so that it can be reused.

    An empty layer stores the keys and values (P, heads, L, head size) that it is given first. Later
    ones are put behind the stored ones for the attention, but are not stored. It holds all positions,
    for sliding-window attention too: the model's own attention mask cuts the window out.
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None):
        super().__init__()
        self.keys = keys
        self.values = values
        self.is_initialized = keys is not None

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.keys = keys  # once more where the backward pass computes the layer again
            self.values = values
            return keys, values
        keys = torch.cat([self.keys, keys], 2)
        values = torch.cat([self.values, values], 2)
        return keys, values


def cache_of(layers: list[DynamicLayer]) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = layers
    return cache


@dataclass
class SharedPrompts:
    """Prompts that are computed once for their rollouts."""

    prompts: list[int]  # their rows in Rollouts.prompt_ids
    mask: Tensor  # (P, L) False on padding
    tensors: list[Tensor]  # (P, ...): last hidden states of the last tokens; keys, values by layer

    def leaves(self) -> "SharedPrompts":
        """The same values, cut off from the graph, with gradients of their own."""
        return replace(self, tensors=[x.detach().requires_grad_() for x in self.tensors])


def share_prompts(model: PreTrainedModel, rollouts: Rollouts, prompts: list[int]) -> SharedPrompts:
    """Run these prompts once, with gradients."""
    lengths = [rollouts.prompt_lengths[p] for p in prompts]
    ids = rollouts.prompt_ids[prompts, -max(lengths) :]  # (P, L)
    mask = prompt_mask(ids, lengths)
    n_layers = len(DynamicCache(config=model.config).layers)
    cache = cache_of([PromptLayer() for _ in range(n_layers)])
    tensors = [hidden_states(model, ids, mask, cache)[:, -1]]  # (P, H)
    for layer in cache.layers:
        tensors += [layer.keys, layer.values]  # (P, heads, L, head size)
    return SharedPrompts(prompts, mask, tensors)


def backward_through_prompts(shared: SharedPrompts, leaves: SharedPrompts) -> None:
    """Add the gradients that have gathered in the leaves to the model's."""
    # Keys and values have none if all rollouts are one token long.
    used = [i for i, leaf in enumerate(leaves.tensors) if leaf.grad is not None]
    gradients = [leaves.tensors[i].grad for i in used]
    torch.autograd.backward([shared.tensors[i] for i in used], gradients)


def token_logprobs(
    model: PreTrainedModel, rollouts: Rollouts, rows: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """`rollout.token_logprobs`, but T is the length of the longest of these rollouts."""
    indices = rows.tolist()
    prompts = sorted({row // rollouts.group_size for row in indices})
    shared = share_prompts(model, rollouts, prompts)
    return logprobs_after(model, rollouts, indices, shared, temperature)


def logprobs_after(
    model: PreTrainedModel,
    rollouts: Rollouts,
    rows: list[int],
    shared: SharedPrompts,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of B rollouts with gradient, (B, T). T is their greatest length.

    Args:
        shared: their prompts.
    """
    device = rollouts.tokens.device
    T = max(rollouts.lengths[row] for row in rows)
    index = torch.tensor(rows, device=device)
    tokens = rollouts.tokens[index, :T]
    token_mask = rollouts.token_mask[index, :T]
    owner = [shared.prompts.index(row // rollouts.group_size) for row in rows]
    owner = torch.tensor(owner, device=device)  # (B)
    hidden, *layers = [x.index_select(0, owner) for x in shared.tensors]
    hidden = hidden[:, None]  # (B, 1, H) predicts the first token
    if T > 1:
        pairs = zip(layers[::2], layers[1::2], strict=True)
        cache = cache_of([PromptLayer(keys, values) for keys, values in pairs])
        mask = torch.cat([shared.mask[owner], torch.ones_like(token_mask[:, :-1])], 1)
        rest = hidden_states(model, tokens[:, :-1], mask, cache)
        hidden = torch.cat([hidden, rest], 1)  # (B, T, H)

    of_tokens, entropies = head_logprobs(model, hidden[token_mask], tokens[token_mask], temperature)
    zeros = torch.zeros(token_mask.shape, device=device)
    logprobs = zeros.masked_scatter(token_mask, of_tokens)
    return logprobs, zeros.masked_scatter(token_mask, entropies)


def reference_logprobs(
    reference: Policy | None, rollouts: Rollouts, chunk: "PromptChunk", temperature: float
) -> list[Tensor | None]:
    """Log-probabilities (B, T) of each micro-batch under the reference policy, if there is one."""
    if reference is None:
        return [None for _ in chunk.batches]
    logprobs = []
    with torch.no_grad(), lean(reference.model), reference.adapter_off():
        shared = share_prompts(reference.model, rollouts, chunk.prompts)
        for rows in chunk.batches:
            logprobs.append(logprobs_after(reference.model, rollouts, rows, shared, temperature)[0])
    return logprobs


@dataclass
class PromptChunk:
    """Prompts that are computed together, and the micro-batches of their rollouts."""

    prompts: list[int]
    batches: list[list[int]]  # rows of rollouts


def prompt_chunks(rollouts: Rollouts, rows: list[int], token_budget: int) -> list[PromptChunk]:
    """Divide rollouts into micro-batches, and their prompts into chunks.

    A micro-batch, and the prompts of a chunk, hold at most `token_budget` padded tokens (0: all)
    or a single item. A rollout also takes a copy of its prompt's keys and values, so it counts for
    a quarter of the prompt's length at least.
    """
    G = rollouts.group_size
    sizes = []
    for row, length in enumerate(rollouts.lengths):
        sizes.append(max(length, rollouts.prompt_lengths[row // G] // 4))
    prompts = list(dict.fromkeys(row // G for row in rows))
    chunks = []
    for chunk_prompts in fill(prompts, rollouts.prompt_lengths, token_budget):
        chunk_rows = [row for row in rows if row // G in chunk_prompts]
        chunk_rows.sort(key=rollouts.lengths.__getitem__)  # less padding
        chunks.append(PromptChunk(chunk_prompts, fill(chunk_rows, sizes, token_budget)))
    return chunks


def fill(items: list[int], lengths: list[int], token_budget: int) -> list[list[int]]:
    """Divide items, in their order, into parts of at most `token_budget` padded tokens (0: all)."""
    parts: list[list[int]] = [[]]
    longest = 0
    for item in items:
        longest = max(longest, lengths[item])
        if parts[-1] and token_budget and longest * (len(parts[-1]) + 1) > token_budget:
            parts.append([])
            longest = lengths[item]
        parts[-1].append(item)
    return parts
