"""Decoding: P prompts in, P * G rollouts out, with the log-probability of every sampled token.
The temperature is the only sampling knob; masks come from positions, never from pad ids; the first EOS counts as
sampled; the model stays in eval mode, in the update too: dropout would score another policy than the one sampled."""

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from engine.models import (
    Model,
    PromptLayer,
    Tokenizer,
    cache_of,
    eos_ids,
    head,
    hidden_states,
    prefill,
    prompt_mask,
)
from engine.tiny import is_tiny
from rewards import UserError

CACHE_BLOCK = 16  # columns by which the KV cache of rollouts grows where no graph is replayed
CUDA_CHECK = 16  # decode steps between two looks at which rollouts have ended: each look waits for the device
NEGLIGIBLE = (
    -21.0
)  # log-probability below which a token is never drawn: rounding of a cumulative sum, not the model
GRAPH_DEVICES = {"cuda"}
GRAPH_WORKS: weakref.WeakKeyDictionary[Model, bool] = (
    weakref.WeakKeyDictionary()
)  # what a first batch showed


@dataclass
class Rollouts:
    """A batch of P groups of G rollouts; row p * G + g is rollout g of prompt p. Tensors live on the model's device."""

    prompt_ids: Tensor  # (P, L) padded on the left
    prompt_lengths: list[int]  # P
    tokens: Tensor  # (P * G, T) sampled token ids, then padding
    logprobs: Tensor  # (P * G, T) float32, log-probability of each under the sampling temperature
    lengths: list[int]  # P * G, how many were sampled, the first EOS included
    texts: list[str]  # P * G, decoded without special tokens
    ended: list[bool]  # P * G, by an EOS or a stop; the others were cut off

    @property
    def group_size(self) -> int:
        return len(self.tokens) // len(self.prompt_ids)

    @property
    def mask(self) -> Tensor:
        """(P * G, T) bool, what was sampled."""
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return place < torch.tensor(self.lengths, device=place.device)[:, None]


def sample(
    model: Model,
    tokenizer: Tokenizer,
    prompts: list[str],
    G: int,
    *,
    max_new_tokens: int,
    batch: int = 0,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    static: bool | None = None,
    stop: Callable[[str], bool] | None = None,
) -> Rollouts:
    """G rollouts of every prompt, to an EOS, max_new_tokens or the first token with which `stop` is true of the text;
    at most `batch` at a time (whole groups, one at least; 0: all). `static` keeps the shapes of a decode step (None: on
    CUDA only, where a graph replays it, unless its first batch is not what a plain forward pass gives). UserError: too
    short a context, logits that are not finite."""
    stopped = stop and (
        lambda tokens: torch.tensor(  # (rows, t) -> (rows)
            [stop(text) for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)],
            device=tokens.device,
        )
    )
    ids, prompt_lengths = encode_prompts(
        model.config, tokenizer, prompts, max_new_tokens, model.device
    )
    graphed, ends, parts = model.device.type in GRAPH_DEVICES, eos_ids(model, tokenizer), []
    static, n = graphed if static is None else static, max(1, batch // G) if batch else len(prompts)
    with torch.no_grad():
        for p in range(0, len(prompts), n):
            part = prompt_lengths[p : p + n]
            inputs = (
                model,
                ids[p : p + n, -max(part) :],
                part,
                G,
                max_new_tokens,
                temperature,
                generator,
                ends,
            )
            parts.append(Decoder(*inputs, static and GRAPH_WORKS.get(model, True)).run(stopped))
            if static and graphed and model not in GRAPH_WORKS:
                GRAPH_WORKS[model] = True
                if not agrees(model, inputs[1], part, *parts[-1], temperature):
                    graph_off(model, "its log-probabilities are not those of a plain forward pass")
                    parts[-1] = Decoder(*inputs, False).run(stopped)
    lengths = [length for part in parts for length in part[2]]
    tokens, logprobs = (torch.cat([part[i] for part in parts])[:, : max(lengths)] for i in (0, 1))
    for i in range(len(lengths) if stop else 0):  # it is noticed some tokens later
        while lengths[i] > 1 and stopped(tokens[i : i + 1, : lengths[i] - 1]):
            lengths[i] -= 1
        tokens[i, lengths[i] :], logprobs[i, lengths[i] :] = ends[0], 0.0
    sampled = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    ended = [
        row[-1] in ends or bool(stop and stop(text))
        for row, text in zip(sampled, texts, strict=True)
    ]
    return Rollouts(ids, prompt_lengths, tokens, logprobs, lengths, texts, ended)


def given_rollouts(
    model: Model, tokenizer: Tokenizer, prompts: list[str], texts: list[str]
) -> Rollouts:
    """Given texts (P * G) as if they had been sampled, EOS included: what imitation needs; their logprobs are zero."""
    rows, ends = [encode(tokenizer, text, False) for text in texts], eos_ids(model, tokenizer)
    eos = ends[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    lengths = [len(row) + 1 for row in rows]
    tokens = torch.tensor(
        [row + [eos] * (max(lengths) - len(row)) for row in rows], device=model.device
    )
    return Rollouts(
        *encode_prompts(model.config, tokenizer, prompts, max(lengths), model.device),
        tokens,
        torch.zeros(tokens.shape, device=model.device),
        lengths,
        texts,
        [True] * len(texts),
    )


def encode_prompts(
    config: PreTrainedConfig,
    tokenizer: Tokenizer,
    prompts: list[str],
    max_new_tokens: int,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, list[int]]:
    """Token ids (P, L), padded on the left, and lengths. UserError if a prompt and its rollout exceed the context."""
    rows = [
        encode(tokenizer, prompt, tokenizer.chat_template is None) for prompt in prompts
    ]  # a template writes a BOS
    lengths, padding = [len(row) for row in rows], tokenizer.pad_token_id or 0
    L, context = max(lengths), getattr(config.get_text_config(), "max_position_embeddings", None)
    if context and L + max_new_tokens > context:
        raise UserError(
            f"a prompt of {L} tokens and {max_new_tokens} new ones need a context of {L + max_new_tokens}; "
            f"the model's is {context}: lower --max-new-tokens, --m or --size, or take another --model"
        )
    return torch.tensor([[padding] * (L - len(row)) + row for row in rows], device=device), lengths


def encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    """Token ids of a text. Raises UserError for a word that the tiny model's vocabulary lacks."""
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    if (
        is_tiny(tokenizer) and tokenizer.pad_token_id in ids
    ):  # what a WordLevel tokenizer makes of an unknown word
        word = text.split()[ids.index(tokenizer.pad_token_id)]
        raise UserError(
            f"--model tiny: the word {word!r} of {text!r:.100} is not in Task.words; add it there"
        )
    return ids


class RolloutLayer(DynamicLayer):
    """A prompt's keys and values for each rollout of its group, and room to write after them. With a `column` (1,) to
    write to, as in a CUDA graph, all room is there from the start and the mask hides what is not filled; without,
    attention sees what is filled, and room comes in blocks: larger gaps make a CPU 10 to 25% slower."""

    def __init__(self, prompt: PromptLayer, G: int, room: int, column: Tensor | None):
        super().__init__()
        self.is_initialized, self.is_compileable, self.column = True, column is not None, column
        self.length, now = (
            prompt.keys.shape[2],
            room if self.is_compileable else min(room, CACHE_BLOCK),
        )
        self.keys, self.values = (
            pad(x, (0, 0, 0, now)).repeat_interleave(G, 0) for x in (prompt.keys, prompt.values)
        )
        self.room = room - now

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        if self.column is not None:
            self.keys.index_copy_(2, self.column, key_states)
            self.values.index_copy_(2, self.column, value_states)
            return self.keys, self.values
        if self.length == self.keys.shape[2]:
            more = min(self.room, CACHE_BLOCK)
            self.keys, self.values = (pad(x, (0, 0, 0, more)) for x in (self.keys, self.values))
            self.room -= more
        self.keys[:, :, self.length], self.values[:, :, self.length] = (
            key_states[:, :, 0],
            value_states[:, :, 0],
        )
        self.length += 1
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int | Tensor:
        return self.length if self.column is None else self.column[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.length + query_length if self.column is None else self.keys.shape[2]), 0


class Decoder:
    """P * G rollouts in flight; `step` works in place and asks the host nothing: with `static` shapes a CUDA graph."""

    def __init__(
        self,
        model: Model,
        ids: Tensor,
        lengths: list[int],
        group_size: int,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
        ends: list[int],
        static: bool,
    ):
        (P, self.L), device = ids.shape, ids.device
        self.model, self.temperature, self.generator, self.static = (
            model,
            temperature,
            generator,
            static,
        )
        prompts, hidden = prefill(model, ids, lengths)
        self.ends = torch.tensor(ends, device=device)
        self.tokens = torch.full((P * group_size, max_new_tokens), ends[0], device=device)
        self.logprobs = torch.zeros(self.tokens.shape, device=device)
        self.column = torch.full(
            (1,), self.L - 1, device=device
        )  # of the cache, where the token fed last is
        # Of the rollouts that are not finished, and of finished ones that have not left the batch yet:
        self.rows = torch.arange(len(self.tokens), device=device)  # their rows in `tokens`
        self.alive, self.token = (
            torch.ones_like(self.rows, dtype=torch.bool),
            torch.zeros_like(self.rows)[:, None],
        )
        self.uniform = torch.rand(
            self.token.shape, generator=generator, device=device
        )  # drawn outside of a graph
        lengths = [length for length in lengths for _ in range(group_size)]
        self.padding = self.L - torch.tensor(lengths, device=device)
        self.mask = prompt_mask(lengths, self.L, device, max_new_tokens)
        self.cache = cache_of(
            model,
            [
                RolloutLayer(layer, group_size, max_new_tokens, self.column if static else None)
                for layer in prompts.layers
            ],
        )
        self._draw(head(model, hidden).repeat_interleave(group_size, 0))

    def step(self) -> None:
        """Feed the tokens drawn last, draw the next ones."""
        mask = (
            None if self.mask is None else self.mask[:, : self.cache.layers[0].get_mask_sizes(1)[0]]
        )
        self.column += 1
        hidden = hidden_states(self.model, self.token, self.cache, self.column - self.padding, mask)
        self._draw(head(self.model, hidden[:, -1]))

    def _draw(self, logits: Tensor) -> None:
        """Sample from logits (rows, V) by inverting the cumulative distribution: one random number a rollout, not V."""
        log_p = torch.log_softmax(logits / self.temperature, -1)
        below = log_p.exp().cumsum(-1)
        token = torch.searchsorted(below, self.uniform * below[:, -1:], right=True).clamp_max(
            below.shape[1] - 1
        )
        # Summed in parallel the steps may be uneven, or even fall, where a token has no probability at all.
        token = torch.where(
            log_p.gather(1, token) < NEGLIGIBLE, log_p.argmax(-1, keepdim=True), token
        )
        self.token.copy_(token)
        place = self.rows, self.column - (self.L - 1)
        self.tokens[place] = torch.where(self.alive, token[:, 0], self.ends[0])
        self.logprobs[place] = log_p.gather(1, token)[:, 0].masked_fill(~self.alive, 0.0)
        self.alive &= (token != self.ends).all(-1)

    def compact(self) -> None:
        """Finished rollouts leave the batch and the cache."""
        keep = self.alive.nonzero()[:, 0]
        self.cache.batch_select_indices(keep)
        for name in (
            "rows",
            "alive",
            "token",
            "uniform",
            "padding",
            *(["mask"] if self.mask is not None else []),
        ):
            setattr(self, name, getattr(self, name)[keep])

    def run(
        self, stopped: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Tokens and log-probabilities (B, max_new_tokens), after a rollout's end EOS and 0, and lengths (B); a rollout
        leaves when `stopped` is true of its tokens (rows, t). UserError for a draw from logits that are not finite."""
        graphed, T, step = (
            self.static and self.token.device.type in GRAPH_DEVICES,
            self.tokens.shape[1],
            None,
        )
        every, worth = (
            (CUDA_CHECK, 0.5) if graphed else (1, 0.8)
        )  # moving the cache costs a step, a new graph several
        for t in range(T):
            if t % every == 0 or t == T - 1:
                if not self.logprobs.isfinite().all():
                    raise UserError(
                        "the logits are not finite: diverged; try a lower --lr or a higher --temperature"
                    )
                if stopped:
                    self.alive &= ~stopped(self.tokens[self.rows, : t + 1])
                n_alive = int(self.alive.sum())
                if n_alive == 0 or t == T - 1:
                    break
                if n_alive < worth * len(self.rows):
                    step = None  # a graph holds memory
                    self.compact()
            step = step or (as_cuda_graph(self.step, self.model).__next__ if graphed else self.step)
            self.uniform.copy_(
                torch.rand(self.uniform.shape, generator=self.generator, device=self.uniform.device)
            )
            step()
        goes_on = (self.tokens[..., None] != self.ends).all(-1).cumprod(1)  # 1 until the first EOS
        return self.tokens, self.logprobs, (goes_on.sum(1) + 1).clamp_max(T).tolist()


def as_cuda_graph(step: Callable[[], None], model: Model) -> Iterator[None]:
    """Each `next` is a step: the first as it is (libraries set themselves up), the second captured, and its hundreds of
    kernels replayed as one from then on; all as they are, and a line says so, if it cannot be captured."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    yield
    try:
        with torch.cuda.graph(graph):
            step()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        graph_off(model, str(error).partition("\n")[0])
    while True:
        graph.replay() if GRAPH_WORKS.get(model, True) else step()
        yield


def graph_off(model: Model, why: str) -> None:
    """From now on no graph for this model, and a line that says so."""
    GRAPH_WORKS[model] = False
    print(
        f"no CUDA graph for decoding here ({why}): sampling goes on without, slower",
        file=sys.stderr,
    )


def agrees(
    model: Model,
    ids: Tensor,
    prompt_lengths: list[int],
    tokens: Tensor,
    logprobs: Tensor,
    lengths: list[int],
    temperature: float,
) -> bool:
    """Whether log-probabilities (B, T) of the first group's tokens are those of a plain forward pass, to rounding."""
    differences, prompt = [], ids[0, -prompt_lengths[0] :]
    for row in range(len(tokens) // len(ids)):
        sampled = tokens[row, : min(lengths[row], 128)]
        logits = (
            model(input_ids=torch.cat([prompt, sampled])[None])
            .logits[0, len(prompt) - 1 : -1]
            .float()
        )
        fresh = torch.log_softmax(logits / temperature, -1).gather(1, sampled[:, None])[:, 0]
        differences.append((fresh - logprobs[row, : len(sampled)]).abs())
    # Rounding is below 1e-3 in float32 and seldom above 0.1 in bfloat16; a wrong mask or position costs nats.
    rounding = (0.2 if model.dtype == torch.bfloat16 else 0.01) / min(1.0, temperature)
    return torch.cat(differences).mean().item() < rounding
