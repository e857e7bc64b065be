"""Decoding: P prompts in, P * G rollouts out, with the log-probability of every sampled token.

Tokens are drawn from the whole distribution at a temperature, without top-k or top-p. Masks come
from positions, never from pad ids. The first EOS counts as sampled. The model stays in eval mode, in
the update too: with dropout the update would score another policy than the one that was sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from engine.forward import (
    PromptLayer,
    attention_mask,
    cache_of,
    hidden_states,
    lm_logits,
    prefill,
)
from engine.models import Model, Tokenizer, eos_ids
from engine.tiny import is_tiny
from rewards import UserError

CACHE_BLOCK = 16  # tokens by which the KV cache of rollouts grows
# A batch drops its finished rollouts when fewer than this share go on: moving the cache costs a step.
COMPACT_BELOW = 0.8
# Below this log-probability no token is drawn. A cumulative sum that is computed in parallel may
# be uneven, or even fall, at a token that has no probability at all.
NEGLIGIBLE = -21.0


@dataclass
class Rollouts:
    """A batch of P groups of G rollouts; row p * G + g is rollout g of prompt p.

    The tensors live on the model's device.
    """

    prompt_ids: Tensor  # (P, L) padded on the left
    prompt_lengths: list[int]  # P
    tokens: Tensor  # (P * G, T) sampled token ids, then padding
    logprobs: Tensor  # (P * G, T) float32, log-probability of each under the sampling temperature
    lengths: list[int]  # P * G, how many were sampled, the first EOS included
    texts: list[str]  # P * G, decoded without special tokens
    ended: list[bool]  # P * G, by an EOS or by the stop rule; the others were cut off

    @property
    def group_size(self) -> int:
        return len(self.tokens) // len(self.prompt_ids)

    @property
    def token_mask(self) -> Tensor:
        """(P * G, T) bool, True on the tokens that were sampled."""
        device = self.tokens.device
        columns = torch.arange(self.tokens.shape[1], device=device)
        return columns < torch.tensor(self.lengths, device=device)[:, None]


@dataclass
class SamplingOptions:
    """How rollouts are sampled."""

    max_new_tokens: int
    temperature: float = 1.0
    batch: int = 0  # rollouts sampled at a time, rounded to whole groups, at least one; 0: all
    generator: torch.Generator | None = None
    stop: Callable[[str], bool] | None = None  # a rollout ends with the first text it accepts


def sample(
    model: Model, tokenizer: Tokenizer, prompts: list[str], G: int, options: SamplingOptions
) -> Rollouts:
    """Sample G rollouts of every prompt, up to an EOS, the stop rule or max_new_tokens.

    Raises:
        UserError: if a prompt and its rollout exceed the context, or logits are not finite.
    """
    ids, lengths = encode_prompts(
        model.config, tokenizer, prompts, options.max_new_tokens, model.device
    )
    prompts_at_once = len(prompts)
    if options.batch:
        prompts_at_once = max(1, options.batch // G)

    batches = []
    with torch.no_grad():
        for first in range(0, len(prompts), prompts_at_once):
            batch_lengths = lengths[first : first + prompts_at_once]
            batch_ids = ids[first : first + prompts_at_once, -max(batch_lengths) :]
            batches.append(decode(model, tokenizer, (batch_ids, batch_lengths), G, options))

    rollout_lengths = torch.cat([batch.lengths for batch in batches]).tolist()
    T = max(rollout_lengths)
    tokens = torch.cat([batch.tokens for batch in batches])[:, :T]
    logprobs = torch.cat([batch.logprobs for batch in batches])[:, :T]
    ended = torch.cat([batch.ended for batch in batches]).tolist()

    sampled = [row[:length] for row, length in zip(tokens.tolist(), rollout_lengths, strict=True)]
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    return Rollouts(ids, lengths, tokens, logprobs, rollout_lengths, texts, ended)


def rollouts_of_texts(
    model: Model, tokenizer: Tokenizer, prompts: list[str], texts: list[str]
) -> Rollouts:
    """Texts (P * G) as if they had been sampled to an EOS, for imitation. Their logprobs are 0."""
    eos = tokenizer.eos_token_id
    if eos is None:
        eos = eos_ids(model, tokenizer)[0]
    rows = [encode(tokenizer, text, special=False) + [eos] for text in texts]
    lengths = [len(row) for row in rows]
    T = max(lengths)
    padded = [row + [eos] * (T - len(row)) for row in rows]
    tokens = torch.tensor(padded, device=model.device)
    prompt_ids, prompt_lengths = encode_prompts(model.config, tokenizer, prompts, T, model.device)
    return Rollouts(
        prompt_ids=prompt_ids,
        prompt_lengths=prompt_lengths,
        tokens=tokens,
        logprobs=torch.zeros(tokens.shape, device=model.device),
        lengths=lengths,
        texts=texts,
        ended=[True] * len(texts),
    )


def encode_prompts(
    config: PreTrainedConfig,
    tokenizer: Tokenizer,
    prompts: list[str],
    max_new_tokens: int,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, list[int]]:
    """Token ids (P, L) of prompts, padded on the left, and their P lengths.

    Raises:
        UserError: if a prompt and max_new_tokens exceed the model's context.
    """
    # A chat template writes the BOS itself.
    special = tokenizer.chat_template is None
    rows = [encode(tokenizer, prompt, special) for prompt in prompts]
    lengths = [len(row) for row in rows]
    L = max(lengths)
    needed = L + max_new_tokens
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context and needed > context:
        raise UserError(
            f"a prompt of {L} tokens and {max_new_tokens} new ones need a context of {needed}; "
            f"the model's is {context}; in train.py lower --max-new-tokens, --m or --size, "
            "or take another --model"
        )
    padding = tokenizer.pad_token_id or 0
    padded = [[padding] * (L - len(row)) + row for row in rows]
    return torch.tensor(padded, device=device), lengths


def encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    """Token ids of a text.

    Raises:
        UserError: for a word that the tiny model's vocabulary lacks.
    """
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    # The tiny model's tokenizer turns an unknown word into padding.
    if is_tiny(tokenizer) and tokenizer.pad_token_id in ids:
        word = text.split()[ids.index(tokenizer.pad_token_id)]
        raise UserError(
            f"--model tiny: the word {word!r} of {text!r:.100} is not in Task.words; add it there"
        )
    return ids


@dataclass
class DecodedBatch:
    """B rollouts as `decode` samples them, with room for T tokens."""

    tokens: Tensor  # (B, T), after the end of a rollout an EOS
    logprobs: Tensor  # (B, T), after the end of a rollout 0
    lengths: Tensor  # (B)
    ended: Tensor  # (B) bool


def empty_batch(B: int, T: int, eos: int, device: torch.device) -> DecodedBatch:
    return DecodedBatch(
        tokens=torch.full((B, T), eos, device=device),
        logprobs=torch.zeros((B, T), device=device),
        lengths=torch.zeros(B, dtype=torch.long, device=device),
        ended=torch.ones(B, dtype=torch.bool, device=device),
    )


def decode(
    model: Model,
    tokenizer: Tokenizer,
    prompts: tuple[Tensor, list[int]],
    G: int,
    options: SamplingOptions,
) -> DecodedBatch:
    """Sample G rollouts of each of P prompts, given as token ids (P, L) and lengths, in one batch.

    Raises:
        UserError: if a token would be drawn from logits that are not finite.
    """
    T = options.max_new_tokens
    device = model.device
    end_ids = eos_ids(model, tokenizer)
    ends = torch.tensor(end_ids, device=device)
    eos = end_ids[0]
    decoder, logits = start_decoding(model, prompts, G, T)
    batch = empty_batch(len(logits), T, eos, device)
    # The decoder holds the rollouts that go on, and finished ones until it drops them.
    rows = torch.arange(len(logits), device=device)  # their rows in `batch`
    alive = torch.ones_like(rows, dtype=torch.bool)  # those that go on

    for t in range(T):
        uniform = torch.rand((len(rows), 1), generator=options.generator, device=device)
        token, logprob = draw(logits / options.temperature, uniform)
        logits = None  # freed before the next ones are allocated
        batch.tokens[rows, t] = torch.where(alive, token, eos)
        batch.logprobs[rows, t] = torch.where(alive, logprob, 0.0)
        batch.lengths[rows] += alive
        check_finite(batch.logprobs[:, t])

        alive &= ~torch.isin(token, ends)
        if options.stop:
            alive &= ~stopped(tokenizer, batch.tokens[rows, : t + 1], options.stop)
        n_alive = int(alive.sum())
        if n_alive == 0 or t == T - 1:
            break
        if n_alive < COMPACT_BELOW * len(rows):
            keep = alive.nonzero()[:, 0]
            decoder.keep(keep)
            rows = rows[keep]
            alive = alive[keep]
            token = token[keep]
        logits = decoder.feed(token)

    batch.ended[rows] = ~alive
    return batch


def check_finite(logprobs: Tensor) -> None:
    if not logprobs.isfinite().all():
        raise UserError(
            "the logits are not finite: training diverged, or --temperature is too low; "
            "try a lower --lr in train.py or a higher --temperature"
        )


def stopped(tokenizer: Tokenizer, tokens: Tensor, stop: Callable[[str], bool]) -> Tensor:
    """Whether the stop rule accepts the texts of token ids (B, t): (B) bool."""
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return torch.tensor([stop(text) for text in texts], device=tokens.device)


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token from each row of logits (B, V), by inverting the cumulative distribution.

    Args:
        uniform: a random number in [0, 1) for every row (B, 1). Gumbel noise would take V.

    Returns:
        Token ids (B) and their log-probabilities (B).
    """
    log_p = torch.log_softmax(logits, -1)
    cumulative = log_p.exp().cumsum(-1)  # (B, V)
    total = cumulative[:, -1:]
    token = torch.searchsorted(cumulative, uniform * total, right=True)  # (B, 1)
    token = token.clamp_max(logits.shape[1] - 1)
    is_negligible = log_p.gather(1, token) < NEGLIGIBLE
    token = torch.where(is_negligible, log_p.argmax(-1, keepdim=True), token)
    return token[:, 0], log_p.gather(1, token)[:, 0]


@dataclass
class Decoder:
    """The KV cache of B rollouts, and where each of them stands."""

    model: Model
    cache: DynamicCache  # of RolloutLayer
    position: Tensor  # (B) of the token that is fed next
    mask: Tensor | None  # (B, L + max_new_tokens) attention mask; None: no prompt is padded

    def feed(self, token: Tensor) -> Tensor:
        """Append a token (B) to each rollout and return the logits (B, V) of the next one."""
        mask = self.mask
        if mask is not None:
            mask = mask[:, : self.cache.get_seq_length() + 1]
        hidden = hidden_states(self.model, token[:, None], self.cache, self.position, mask)
        self.position = self.position + 1
        return lm_logits(self.model, hidden[:, -1])

    def keep(self, indices: Tensor) -> None:
        """Drop all rollouts but those of these indices."""
        self.cache.batch_select_indices(indices)
        self.position = self.position[indices]
        if self.mask is not None:
            self.mask = self.mask[indices]


def start_decoding(
    model: Model, prompts: tuple[Tensor, list[int]], G: int, max_new_tokens: int
) -> tuple[Decoder, Tensor]:
    """Run P prompts, token ids (P, L) and lengths, and hand the cache of each to its G rollouts.

    Returns:
        The decoder of the P * G rollouts and the logits (P * G, V) of their first tokens.
    """
    ids, lengths = prompts
    prompt_cache, hidden = prefill(model, ids, lengths)
    layers = [RolloutLayer(layer, G, max_new_tokens) for layer in prompt_cache.layers]
    mask = attention_mask(lengths, ids.shape[1], ids.device, max_new_tokens)  # (P, ...)
    if mask is not None:
        mask = mask.repeat_interleave(G, 0)
    position = torch.tensor(lengths, device=ids.device).repeat_interleave(G)
    decoder = Decoder(model, cache_of(layers), position, mask)
    return decoder, lm_logits(model, hidden).repeat_interleave(G, 0)


class RolloutLayer(DynamicLayer):
    """A layer of a KV cache: a prompt's keys and values for each of its G rollouts, then theirs.

    New ones are written in place. Memory for them is added in blocks, because attention over a
    slice with a large gap behind it is 10 to 25% slower on a CPU.
    """

    def __init__(self, prompt: PromptLayer, G: int, max_new_tokens: int):
        super().__init__()
        self.is_initialized = True
        self.length = prompt.keys.shape[2]  # columns filled
        first_block = min(max_new_tokens, CACHE_BLOCK)
        self.room = max_new_tokens - first_block  # columns that may be added later
        self.keys = pad(prompt.keys, (0, 0, 0, first_block)).repeat_interleave(G, 0)
        self.values = pad(prompt.values, (0, 0, 0, first_block)).repeat_interleave(G, 0)

    def grow(self, columns: int) -> None:
        """Add memory for so many tokens."""
        self.keys = pad(self.keys, (0, 0, 0, columns))
        self.values = pad(self.values, (0, 0, 0, columns))
        self.room -= columns

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        if self.length == self.keys.shape[2]:
            self.grow(min(self.room, CACHE_BLOCK))
        self.keys[:, :, self.length] = key_states[:, :, 0]
        self.values[:, :, self.length] = value_states[:, :, 0]
        self.length += 1
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length
