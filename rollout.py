"""Rollouts: prompts in, answers and their scores out, with the log-probability of every sampled token.

    sample          P prompts -> P * G rollouts: each prompt is prefilled once, its KV cache handed to its group
    parse_answers   a rollout's text -> its tagged answers
    score           answers -> reward vectors

Conventions: the temperature is the only sampling knob and divides the logits here and in update.py alike; masks come from
positions, never from pad ids, and the first EOS counts as sampled; the model stays in eval mode, also in the update,
because dropout would score another policy than the one that was sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from policy import PromptLayer, cache_of, eos_ids, head, hidden_states, is_tiny, prefill, prompt_mask
from rewards import Problem, Task, UserError

CACHE_BLOCK = 16  # columns by which the KV cache of rollouts grows where no graph is replayed
CUDA_CHECK = 16  # decode steps between two looks at which rollouts have ended: each look waits for the device


@dataclass
class Rollouts:
    """A batch of P groups of G rollouts; row p * G + g is rollout g of prompt p. Tensors live on the model's device."""
    prompt_ids: Tensor  # (P, L) padded on the left
    prompt_lengths: list[int]  # P
    tokens: Tensor  # (P * G, T) sampled token ids, then padding
    logprobs: Tensor  # (P * G, T) float32, log-probability of each under the sampling temperature
    lengths: list[int]  # P * G, how many were sampled, the first EOS included
    texts: list[str]  # P * G, decoded without special tokens

    @property
    def group_size(self) -> int:
        return len(self.tokens) // len(self.prompt_ids)

    @property
    def mask(self) -> Tensor:
        """(P * G, T) bool, what was sampled."""
        lengths = torch.tensor(self.lengths, device=self.tokens.device)
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < lengths[:, None]


@dataclass
class Scored:
    """The rewards of a batch: P problems, G rollouts each, m answers each, k objectives; CPU tensors."""
    vectors: Tensor  # (P, G, m, k) zero where there is no answer
    scalars: Tensor  # (P, G, m) the task scalar, zero where there is no answer
    mask: Tensor  # (P, G, m) bool, the distinct answers: what a set is made of
    objective_mask: Tensor  # (P, k) bool, the objectives that each problem has


def score(task: Task, problems: list[Problem], answers: list[list[list[str]]], m: int) -> Scored:
    """Reward vectors of answers[p][g], the up to m answers of every rollout. Equal answers to a problem are scored once.

    Raises UserError if a reward and the task's objectives differ in length. An answer whose canonical form already stands
    in its rollout keeps its vector but leaves the mask.
    """
    P, G = len(problems), len(answers[0])
    # Where there is no answer at all, an empty one tells the number of objectives.
    distinct = [dict.fromkeys(answer for group in groups for answer in group) or {"": None} for groups in answers]
    pairs = [(p, answer) for p in range(P) for answer in distinct[p]]
    vectors = dict(zip(pairs, task.rewards([(problems[p], answer) for p, answer in pairs]), strict=True))
    rows = []  # one (G, m, objectives of p) tensor per problem
    exists = torch.tensor([[[j < len(group) for j in range(m)] for group in groups] for groups in answers])
    mask = torch.zeros(P, G, m, dtype=torch.bool)
    for p in range(P):
        sizes = {len(vectors[p, answer]) for answer in distinct[p]}
        if len(sizes) != 1 or sizes != {len(task.objectives) or max(sizes)}:
            raise UserError(f"task {task.name}: a reward of {max(sizes)} numbers for {len(task.objectives) or min(sizes)} objectives")
        rows.append(torch.zeros(G, m, *sizes))
        for g, group in enumerate(answers[p]):
            seen = set()
            for j, answer in enumerate(group):
                rows[p][g, j] = torch.tensor(vectors[p, answer])
                mask[p, g, j] = (form := task.canonical(answer)) not in seen
                seen.add(form)
    k = max(row.shape[-1] for row in rows)
    padded = torch.stack([torch.nn.functional.pad(row, (0, k - row.shape[-1])) for row in rows])
    objective_mask = torch.stack([torch.arange(k) < row.shape[-1] for row in rows])
    scalars = torch.stack([task.scalar(row) for row in rows]).masked_fill(~exists, 0.0)
    return Scored(padded, scalars, mask, objective_mask)


def build_prompt(tokenizer: PreTrainedTokenizerBase, task: Task, problem: Problem, m: int) -> str:
    """The text that the model sees: the tiny model's words, a chat template where there is one, else the plain prompt."""
    if is_tiny(tokenizer):
        return f"answers={m} {task.tiny_prompt(problem)}"
    if tokenizer.chat_template is None:
        return task.prompt(problem, m) + "\n"
    message = [{"role": "user", "content": task.prompt(problem, m)}]
    return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=False)


def write_answers(task: Task, answers: list[str]) -> str:
    """The counterpart of `parse_answers`: what a model should write to give these answers."""
    return " ".join(f"<{task.tag}_{i}> {answer} </{task.tag}_{i}>" for i, answer in enumerate(answers, 1))


def parse_answers(text: str, task: Task, m: int, *, distinct: bool = True) -> list[str]:
    """The answers tagged 1 to m in a rollout's text, in that order; one without both its tags is left out.

    An answer that holds a tag of another one was never closed properly and counts as malformed. With `distinct`, answers
    with equal `task.canonical` forms count once: that is the set S of the paper. Never raises, whatever the text.
    """
    answers: dict[str, str] = {}
    found = task.find_answers(text, m)
    for i, answer in enumerate(found or []):
        answers.setdefault(task.canonical(answer) if distinct else str(i), answer.strip())
    for i in range(1, m + 1) if found is None else ():
        _, opened, rest = text.partition(f"<{task.tag}_{i}>")
        answer, closed, _ = rest.partition(f"</{task.tag}_{i}>")
        if opened and closed and f"<{task.tag}_" not in answer and f"</{task.tag}_" not in answer:
            answers.setdefault(task.canonical(answer) if distinct else str(i), answer.strip())
    return list(answers.values())


def score_texts(task: Task, problems: list[Problem], texts: list[str], m: int) -> Scored:
    """Parse and score the rollouts of P problems: texts (P * G), those of one problem side by side."""
    G = len(texts) // len(problems)
    answers = [[parse_answers(text, task, m, distinct=False) for text in texts[i:i + G]] for i in range(0, len(texts), G)]
    return score(task, problems, answers, m)


def rollout_length(task: Task, tokenizer: PreTrainedTokenizerBase, m: int, max_new_tokens: int = 0) -> int:
    """New tokens that a rollout of m answers may take: max_new_tokens, or if 0 what the task's longest answers need."""
    return max_new_tokens or (m * (task.answer_words + 2) + 1 if is_tiny(tokenizer) else 256 * m)


def encode_prompts(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, prompts: list[str],
                   max_new_tokens: int, device: torch.device | str = "cpu") -> tuple[Tensor, list[int]]:
    """Token ids (P, L), padded on the left, and lengths. UserError if a prompt and its rollout exceed the model's context."""
    templated = tokenizer.chat_template is not None  # a template writes its own BOS
    rows = [tokenizer(prompt, add_special_tokens=not templated)["input_ids"] for prompt in prompts]
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or longest + max_new_tokens
    if longest + max_new_tokens > context:
        raise UserError(f"a prompt of {longest} tokens and {max_new_tokens} new ones need a context of "
                        f"{longest + max_new_tokens}; the model's is {context}: lower --max-new-tokens, --m or --size")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device), lengths


class RolloutLayer(DynamicLayer):
    """A static KV cache layer: keys and values of a prompt for each rollout of its group, and room after them.

    Tokens are written in place. With a `column` (1,), the tensor that says where the next token goes, there is room for
    the whole rollout, shapes never change and the mask hides what is not filled yet, as a CUDA graph needs it. Without,
    attention sees what is filled, and room is added in blocks: a cache without gaps is read faster on a CPU.
    """

    def __init__(self, prompt: PromptLayer, group_size: int, room: int, column: Tensor | None):
        super().__init__()
        self.length, self.room, self.column = prompt.keys.shape[2], room, column
        self.is_initialized, self.is_compileable = True, column is not None
        first = room if self.is_compileable else min(room, CACHE_BLOCK)
        self.keys, self.values = (torch.nn.functional.pad(x, (0, 0, 0, first)).repeat_interleave(group_size, 0)
                                  for x in (prompt.keys, prompt.values))
        self.room -= first

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.column is not None:
            self.keys.index_copy_(2, self.column, key_states)
            self.values.index_copy_(2, self.column, value_states)
            return self.keys, self.values
        if self.length == self.keys.shape[2]:
            more = min(self.room, CACHE_BLOCK)
            self.keys, self.values = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (self.keys, self.values))
            self.room -= more
        self.keys[:, :, self.length], self.values[:, :, self.length] = key_states[:, :, 0], value_states[:, :, 0]
        self.length += 1
        return self.keys[:, :, :self.length], self.values[:, :, :self.length]

    def get_seq_length(self) -> int | Tensor:
        return self.length if self.column is None else self.column[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.length + query_length if self.column is None else self.keys.shape[2]), 0


class Decoder:
    """P * G rollouts in flight. A decode step changes tensors in place and asks the host nothing, so it can be a CUDA graph.

    `static` keeps all shapes; without it attention sees only what is filled, which is less work where no graph is replayed.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, prompt_lengths: list[int], group_size: int, max_new_tokens: int,
                 temperature: float, generator: torch.Generator | None, ends: list[int], static: bool):
        self.model, self.temperature, self.generator = model, temperature, generator
        (P, L), device = ids.shape, ids.device
        B, self.room = P * group_size, max_new_tokens
        prompts, hidden = prefill(model, ids, prompt_lengths)
        logits = head(model, hidden)
        self.finite = (logits / temperature).isfinite().all()
        self.ends = torch.tensor(ends, device=device)
        self.tokens = torch.full((B, max_new_tokens), ends[0], device=device)
        self.logprobs = torch.zeros(B, max_new_tokens, device=device)
        self.lengths = torch.zeros(B, dtype=torch.long, device=device)
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)  # which token is drawn next
        self.column = torch.full((1,), L, device=device)  # where in the cache the next token goes
        # Of the rollouts that are not finished, and of finished ones that have not left the batch yet:
        self.rows = torch.arange(B, device=device)  # their rows in `tokens`
        self.alive = torch.ones(B, dtype=torch.bool, device=device)
        self.token = torch.zeros(B, 1, dtype=torch.long, device=device)
        self.start = torch.tensor(prompt_lengths, device=device).repeat_interleave(group_size)
        mask = prompt_mask(prompt_lengths, L, device, max_new_tokens)
        self.mask = None if mask is None else mask.repeat_interleave(group_size, 0)
        self.cache = cache_of(model, [RolloutLayer(layer, group_size, max_new_tokens, self.column if static else None)
                                      for layer in prompts.layers])
        self.static = static
        self._draw(logits.repeat_interleave(group_size, 0))

    def step(self) -> None:
        """Feed the tokens drawn last, draw the next ones."""
        mask = self.mask
        if mask is not None and not self.static:
            mask = mask[:, :self.cache.layers[0].length + 1]
        hidden = hidden_states(self.model, self.token, self.cache, self.start + self.step_index - 1, mask)
        self.column += 1
        self._draw(head(self.model, hidden[:, -1]))

    def _draw(self, logits: Tensor) -> None:
        """Sample from logits (rows, V) by inverting the cumulative distribution: one random number a rollout, not V."""
        log_p = torch.log_softmax(logits / self.temperature, -1)
        below = log_p.exp().cumsum(-1)
        uniform = torch.rand(below[:, :1].shape, generator=self.generator, device=below.device)
        token = torch.searchsorted(below, uniform * below[:, -1:], right=True)[:, 0].clamp_max(below.shape[1] - 1)
        self.token.copy_(token[:, None])
        self.tokens[self.rows, self.step_index] = torch.where(self.alive, token, self.ends[0])
        self.logprobs[self.rows, self.step_index] = log_p.gather(1, token[:, None])[:, 0].masked_fill(~self.alive, 0.0)
        self.lengths[self.rows] += self.alive
        self.alive &= (token[:, None] != self.ends).all(-1)
        self.step_index += 1

    def compact(self) -> None:
        """Finished rollouts leave the batch and the cache."""
        keep = self.alive.nonzero()[:, 0]
        self.cache.batch_select_indices(keep)
        self.rows, self.token, self.start, self.alive = (x[keep] for x in (self.rows, self.token, self.start, self.alive))
        self.mask = None if self.mask is None else self.mask[keep]

    def run(self) -> tuple[Tensor, Tensor, list[int]]:
        """Tokens and log-probabilities (B, T) and lengths (B), after all have ended or are full; UserError as in `sample`."""
        if not self.finite:
            raise UserError("the model's logits are not finite, it has diverged: try a lower --lr (or a higher --temperature)")
        on_cuda = self.token.device.type == "cuda"
        every, worth = (CUDA_CHECK, 0.5) if on_cuda else (1, 0.8)  # moving the cache costs a step, a new graph several
        step = None
        for t in range(self.room - 1):
            if t % every == 0:
                n_alive = int(self.alive.sum())
                if n_alive == 0:
                    break
                if n_alive < worth * len(self.rows):
                    step = None  # a graph holds memory
                    self.compact()
            if step is None:
                step = as_cuda_graph(self.step, self.generator) if on_cuda and self.static else self.step
            step()
        lengths = self.lengths.tolist()
        return self.tokens[:, :max(lengths)], self.logprobs[:, :max(lengths)], lengths


def as_cuda_graph(step: Callable[[], None], generator: torch.Generator | None) -> Callable[[], None]:
    """The same step with its hundreds of small kernels launched as one; UserError if it cannot be captured.

    The first call runs the step as it is (libraries set themselves up), the second captures it, all from then on replay.
    """
    graph, calls = torch.cuda.CUDAGraph(), 0

    def run() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            torch.cuda.current_stream().wait_stream(stream)
            return
        if calls == 2:
            try:
                if generator is not None:
                    graph.register_generator_state(generator)
                with torch.cuda.graph(graph):
                    step()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise UserError(f"a decode step of this model cannot be captured as a CUDA graph ({str(error).splitlines()[0]}); "
                                "--no-cuda-graph samples without one, slower") from error
        graph.replay()

    return run


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], group_size: int, *,
           max_new_tokens: int, temperature: float = 1.0, generator: torch.Generator | None = None, batch: int = 0,
           static: bool | None = None) -> Rollouts:
    """Sample group_size rollouts of every prompt; each ends at an EOS or after max_new_tokens.

    At most `batch` rollouts at a time (whole groups, one at least; 0: all). `static` keeps the shapes of a decode step
    (None: on CUDA only, where it is replayed as a graph). Raises UserError if the model's context is too short, if a step
    cannot be captured, or if the logits are not finite: a diverged model.
    """
    ids, prompt_lengths = encode_prompts(model.config, tokenizer, prompts, max_new_tokens, model.device)
    static = model.device.type == "cuda" if static is None else static
    ends, n, parts = eos_ids(model, tokenizer), max(1, batch // group_size) if batch else len(prompts), []
    for p in range(0, len(prompts), n):
        part, L = prompt_lengths[p:p + n], max(prompt_lengths[p:p + n])
        parts.append(Decoder(model, ids[p:p + n, -L:], part, group_size, max_new_tokens, temperature, generator, ends, static).run())
    T = max(tokens.shape[1] for tokens, _, _ in parts)
    tokens = torch.cat([torch.nn.functional.pad(tokens, (0, T - tokens.shape[1]), value=ends[0]) for tokens, _, _ in parts])
    logprobs = torch.cat([torch.nn.functional.pad(logprobs, (0, T - logprobs.shape[1])) for _, logprobs, _ in parts])
    lengths = [length for _, _, part in parts for length in part]
    texts = tokenizer.batch_decode([row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)],
                                   skip_special_tokens=True)
    return Rollouts(ids, prompt_lengths, tokens, logprobs, lengths, texts)


def demonstrations(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str],
                   texts: list[str]) -> Rollouts:
    """Given texts (P * G) as if they had been sampled, EOS included: what imitation needs; their logprobs are zero."""
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    lengths = [len(row) for row in rows]
    T = max(lengths)
    ids, prompt_lengths = encode_prompts(model.config, tokenizer, prompts, T, model.device)
    tokens = torch.tensor([row + [tokenizer.eos_token_id] * (T - len(row)) for row in rows], device=model.device)
    return Rollouts(ids, prompt_lengths, tokens, torch.zeros(tokens.shape, device=model.device), lengths, texts)
