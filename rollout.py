"""Rollouts: problem -> prompt -> rollout -> answers -> reward vectors.

    load_policy      a model and its tokenizer: the tiny one, or any causal model of Hugging Face
    build_prompt     a problem -> the text that asks for m answers
    sample           P prompts -> P * G rollouts, with the log-probability of every sampled token
    token_logprobs   the same log-probabilities under another policy, with gradient
    score            rollouts -> reward vectors (P, G, m, d), task scalars, and which answers there are

A prompt of the fence for the tiny model, and a rollout of two answers:

    answers=2 fence
    <answer_1> red red red red red red </answer_1> <answer_2> grey blue blue blue blue blue </answer_2>

Tokens are drawn from the whole distribution at a temperature, and scored at the same temperature.
Masks come from positions, never from pad ids, and the first EOS counts as sampled. The model stays
in eval mode, in the update too: dropout would make it another policy than the one that was sampled.
Beside the paper read `sample`, `token_logprobs`, `score`; skip `StopRule`, `decode`, `head_logprobs`.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine.answers import FIRST_NUMBER, open_thought, write_answers
from engine.bars import progress_bar
from engine.config import Config
from engine.errors import with_note
from engine.models import load_hugging_face, tiny_config, tiny_tokenizer
from engine.prompts import chat_prompt, check_context, check_rows, eos_ids, silent_ids
from engine.tasks import check_text, prompt_of, reward_vectors, task_scalars
from rewards import MAX_ANSWERS, Problem, Task, UserError, parse_answers
from vpo import Scored

# Drop ended rollouts once fewer than this share are alive; dropping copies the cache.
COMPACT_BELOW = 0.8
NEGLIGIBLE = -21.0  # no token of a smaller log-probability is drawn; see `draw`
LEAST_LOGPROB = -1e4  # in an entropy, in place of -inf
HEAD_BYTES = 2**27  # of the float32 logits that the LM head makes at a time


@dataclass
class Policy:
    """A language model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self):
        # Whether the model's language is the words of one task.
        self.is_tiny = f"answers={MAX_ANSWERS}" in self.tokenizer.get_vocab()
        self.eos_ids = eos_ids(self.model, self.tokenizer)  # every token id that ends a rollout
        self.silent_ids = silent_ids(self.tokenizer, self.eos_ids)  # those that stand for no text

    @property
    def device(self) -> torch.device:
        return self.model.device

    def decode(self, ids: Tensor) -> str:
        """The text of sampled token ids (T), on the CPU."""
        return self.tokenizer.decode(ids[~torch.isin(ids, self.silent_ids)])

    def adapter_off(self) -> contextlib.ExitStack:
        """A context in which a policy that trains an adapter is its own reference; else no change."""
        context = contextlib.ExitStack()
        if getattr(self.model, "_hf_peft_config_loaded", False):
            self.model.disable_adapters()
            context.callback(self.model.enable_adapters)
        return context


def load_policy(
    name: str, task: Task, *, seed: int = 0, device: str = "cpu", dtype: str = "float32"
) -> Policy:
    """`tiny` with fresh weights, or a Hugging Face checkpoint: a folder or a Hub id."""
    if name == "tiny":
        torch.manual_seed(seed)
        tokenizer = tiny_tokenizer(task)
        model = AutoModelForCausalLM.from_config(tiny_config(tokenizer)).eval()
        return Policy(model.to(device), tokenizer)
    policy = Policy(*load_hugging_face(name, dtype))
    policy.model.to(device)
    return policy


# Prompts.


def build_prompt(policy: Policy, task: Task, problem: Problem, m: int) -> str:
    """The text that a model sees: words for the tiny model, else the task's prompt in a chat template."""
    if policy.is_tiny:
        return f"answers={m} {task.tiny_prompt(problem)}"
    text = prompt_of(task, problem, m)
    prompt = f"{text}\n"
    if policy.tokenizer.chat_template is not None:
        prompt = chat_prompt(policy.tokenizer, text)
    begins_text = not prompt[-1].isalpha()  # else the model ends a header first, as gpt-oss does
    if task.form == "lines" and begins_text and not any(open_thought(prompt)):
        prompt += FIRST_NUMBER  # small models then go on with a list
    return prompt


def encode_prompts(
    policy: Policy, prompts: list[str], max_new_tokens: int
) -> tuple[Tensor, list[int]]:
    """Token ids (P, L) of prompts, padded on the left, and their P lengths."""
    # A chat template writes the BOS itself.
    special = policy.tokenizer.chat_template is None
    rows = [encode(policy, prompt, special) for prompt in prompts]
    lengths = [len(row) for row in rows]
    L = max(lengths)
    check_context(policy.model, L, max_new_tokens)
    padded = [[0] * (L - len(row)) + row for row in rows]
    return torch.tensor(padded, device=policy.device), lengths


def encode(policy: Policy, text: str, special: bool) -> list[int]:
    """Token ids of a text. `special` adds the tokenizer's special tokens, but no EOS."""
    check_text(text, "the text")
    ids = policy.tokenizer(text, add_special_tokens=special)["input_ids"]
    if special and len(ids) > 1 and ids[-1] in policy.eos_ids:
        ids.pop()  # the rollout would begin after its end
    check_rows(policy.model, policy.tokenizer, ids)
    # The tiny model's tokenizer turns an unknown word into padding.
    if policy.is_tiny and policy.tokenizer.pad_token_id in ids:
        word = text.split()[ids.index(policy.tokenizer.pad_token_id)]
        problem = f"the word {word!r} of {text!r:.100} is not in Task.words"
        raise UserError(f"--model tiny: {problem}; add it there")
    return ids


# Rollouts.


@dataclass
class Rollouts:
    """A batch of P groups of G rollouts; row p * G + g is rollout g of prompt p.

    The tensors live on the model's device.
    """

    prompt_ids: Tensor  # (P, L) padded on the left
    prompt_lengths: list[int]  # P
    tokens: Tensor  # (P * G, T) sampled token ids, after the end of a rollout an EOS
    logprobs: Tensor  # (P * G, T) float32, log-probability of each under the sampling temperature
    lengths: list[int]  # P * G, how many were sampled, the first EOS included
    texts: list[str]  # P * G; after a thought that the prompt opened they begin with its mark
    ended: list[bool]  # P * G, by an EOS or by the stop rule; the others were cut off

    @property
    def group_size(self) -> int:
        return len(self.tokens) // len(self.prompt_ids)

    @functools.cached_property
    def token_mask(self) -> Tensor:
        """(P * G, T) bool, True on the tokens that were sampled."""
        device = self.tokens.device
        columns = torch.arange(self.tokens.shape[1], device=device)
        return columns < torch.tensor(self.lengths, device=device)[:, None]

    def groups(self, first: int, end: int) -> "Rollouts":
        """The groups first .. end - 1 alone."""
        rows = slice(first * self.group_size, end * self.group_size)
        prompts = (self.prompt_ids[first:end], self.prompt_lengths[first:end])
        of_rows = (self.tokens, self.logprobs, self.lengths, self.texts, self.ended)
        return Rollouts(*prompts, *[values[rows] for values in of_rows])


@dataclass
class SamplingOptions:
    """How rollouts are sampled."""

    max_new_tokens: int  # of a whole rollout
    generator: torch.Generator  # on the CPU
    temperature: float = 1.0
    batch: int = 0  # rollouts sampled at a time, in whole groups; 0: all
    stop: "StopRule | None" = None


def sampling_options(
    policy: Policy, task: Task, config: Config, m: int, generator: torch.Generator
) -> SamplingOptions:
    """How a run samples rollouts of m answers in training. Evaluation changes temperature and batch."""
    return SamplingOptions(
        max_new_tokens=rollout_length(task, m, config.max_new_tokens),
        generator=generator,
        temperature=config.temperature,
        batch=config.sampling_batch,
        stop=None if policy.is_tiny else StopRule(policy, task, m),
    )


def random_generator(seed: int, step: int, purpose: str) -> torch.Generator:
    """Random numbers of one purpose ("rollouts", "weights") in one step of a run."""
    digest = hashlib.sha256(f"{seed} {step} {purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def rollout_length(task: Task, m: int, max_new_tokens: int) -> int:
    """New tokens of a rollout of m answers. `max_new_tokens` is of an answer; 0: as the tiny model needs."""
    if max_new_tokens:
        return m * max_new_tokens
    return m * (task.answer_words + 2) + 1  # two tags for each answer, and the EOS


class StopRule:
    """Ends a rollout with its m-th answer: nobody reads what follows, so no reward teaches to end.

    Only a token with one of a task's final characters can have ended an answer. The whole text is
    looked at after these alone.
    """

    def __init__(self, policy: Policy, task: Task, m: int):
        self.policy = policy
        self.task = task
        self.m = m
        self.opening = ""  # of a thought, with which the prompts end
        has_own_form = type(task).find_answers is not Task.find_answers
        self.ends = task.ends if has_own_form else ">\n"
        self.can_end: dict[int, bool] = {}  # token id -> whether it can end an answer

    def __call__(self, tokens: Tensor, is_alive: Tensor) -> Tensor:
        """Which live rollouts (B) have their m answers: tokens (B, t) on the CPU -> (B) bool."""
        has_stopped = torch.zeros_like(is_alive)
        newest = torch.where(is_alive, tokens[:, -1], -1).tolist()
        rows = [row for row, token in enumerate(newest) if token >= 0 and self.may_end(token)]
        for row in rows:
            text = self.opening + self.policy.decode(tokens[row])
            answers = parse_answers(text, self.task, self.m, finished=False)
            has_stopped[row] = len(answers) == self.m
        return has_stopped

    def may_end(self, token: int) -> bool:
        """Whether a token can end an answer."""
        if not self.ends:
            return True
        if token not in self.can_end:
            # Twice, because some decoders drop a text's first blank.
            text = self.policy.tokenizer.decode([token, token])
            ends = self.ends + "\ufffd"  # what a part of a character is decoded to
            self.can_end[token] = any(character in text for character in ends)
        return self.can_end[token]


@dataclass
class Decoded:
    """B rollouts as they are decoded."""

    tokens: Tensor  # (B, T) on the CPU, after the end of a rollout an EOS
    logprobs: Tensor  # (B, T) on the device, after the end of a rollout 0
    lengths: Tensor  # (B) on the CPU
    ended: Tensor  # (B) bool, on the CPU


def decode(
    policy: Policy, ids: Tensor, lengths: list[int], uniform: Tensor, options: SamplingOptions
) -> Decoded:
    """Sample the rollouts of P prompts, token by token, until the last of them has ended.

    A prompt is computed once for its group. Rollouts that have ended leave the batch, now and then:
    it copies the cache. The CPU holds the tokens and who is alive: it waits for the device once per
    token. On a card `fast.sample` has a decode of its own, unless --plain says otherwise.

    Args:
        ids: token ids (P, L) of the prompts, padded on the left.
        lengths: of the P prompts.
        uniform: a random number in [0, 1) for every rollout and position (B, T), B = P * G.
    """
    model = policy.model
    device = ids.device
    B, T = uniform.shape
    G = B // len(ids)
    ends = torch.tensor(policy.eos_ids)
    tokens = torch.full((B, T), policy.eos_ids[0])
    logprobs = torch.zeros(B, T, device=device)
    n_sampled = torch.zeros(B, dtype=torch.long)
    has_ended = torch.zeros(B, dtype=torch.bool)

    # 1. the prompts, whose keys and values every rollout of the group gets
    cache = DynamicCache(config=model.config)
    mask = prompt_mask(ids, lengths)  # (P, L)
    hidden = hidden_states(model, ids, mask, cache)[:, -1]  # (P, H)
    logits = lm_logits(model, hidden).repeat_interleave(G, 0)  # (B, V)
    cache.reorder_cache(torch.arange(len(ids), device=device).repeat_interleave(G))
    mask = mask.repeat_interleave(G, 0)  # (B, L)

    rows = torch.arange(B)  # those in the batch, b of them
    on_device = rows.to(device)
    is_alive = torch.ones(B, dtype=torch.bool)  # (b) those of them that go on
    bar = progress_bar(total=B * T, desc="rollouts", unit="token", leave=False, delay=10)  # seconds
    for t in range(T):
        # 2. a token of each rollout
        token, logprob = draw(logits / options.temperature, uniform[on_device, t])  # (b)
        logprobs[on_device, t] = torch.where(is_alive.to(device), logprob, 0.0)
        newest = token.cpu()
        tokens[rows, t] = torch.where(is_alive, newest, policy.eos_ids[0])
        n_sampled[rows] += is_alive
        bar.update(int(is_alive.sum()))

        # 3. who has ended, and leaves
        is_alive &= ~torch.isin(newest, ends)
        if options.stop:
            is_alive &= ~options.stop(tokens[rows, : t + 1], is_alive)
        has_ended[rows] = ~is_alive
        n_alive = int(is_alive.sum())
        if n_alive == 0 or t == T - 1:
            break
        if n_alive < COMPACT_BELOW * len(rows):
            keep = is_alive.nonzero()[:, 0]
            rows = rows[keep]
            is_alive = is_alive[keep]
            keep = keep.to(device)
            on_device = on_device[keep]
            cache.reorder_cache(keep)
            mask = mask[keep]
            token = token[keep]

        # 4. the logits of the next token
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        hidden = hidden_states(model, token[:, None], mask, cache)[:, -1]
        logits = lm_logits(model, hidden)
    bar.close()
    return Decoded(tokens, logprobs, n_sampled, has_ended)


def sample(
    policy: Policy,
    prompts: list[str],
    G: int,
    options: SamplingOptions,
    decode: Callable[..., Decoded] = decode,
) -> Rollouts:
    """Sample G rollouts of every prompt, up to an EOS, the stop rule or max_new_tokens.

    Every rollout and position has a random number of its own. So the tokens do not depend on how
    many rollouts are decoded at a time. `fast.sample` gives another `decode`.
    """
    # 1. the prompts, and a random number for every token
    P = len(prompts)
    opening, _ = open_thought(prompts[0])  # the prompts of a task end alike
    if options.stop:
        options.stop.opening = opening
    ids, lengths = encode_prompts(policy, prompts, options.max_new_tokens)
    uniform = torch.rand(P, G, options.max_new_tokens, generator=options.generator)
    uniform = uniform.to(policy.device)
    at_once = max(1, options.batch // G) if options.batch else P  # prompts

    # 2. the rollouts of some prompts at a time
    batches = []
    with torch.no_grad():
        for first in range(0, P, at_once):
            part = slice(first, first + at_once)
            L = max(lengths[part])
            part_uniform = uniform[part].flatten(0, 1)  # (B, T)
            # -L: cuts padding that only other prompts need.
            batches.append(decode(policy, ids[part, -L:], lengths[part], part_uniform, options))

    # 3. all of them, as wide as the longest, and their texts
    n_sampled = torch.cat([batch.lengths for batch in batches]).tolist()
    T = max(n_sampled)
    tokens = torch.cat([batch.tokens for batch in batches])[:, :T]  # on the CPU
    logprobs = torch.cat([batch.logprobs for batch in batches])[:, :T]
    if not logprobs.isfinite().all():
        advice = "try a lower --lr, a higher --temperature or another --model"
        raise UserError(f"the logits are not finite; {advice}")
    ended = torch.cat([batch.ended for batch in batches]).tolist()
    texts = []
    for row, length in zip(tokens, n_sampled, strict=True):
        texts.append(opening + policy.decode(row[:length]))
    tokens = tokens.to(policy.device)
    return Rollouts(ids, lengths, tokens, logprobs, n_sampled, texts, ended)


def rollouts_of_texts(policy: Policy, prompts: list[str], texts: list[str]) -> Rollouts:
    """Texts (P * G) as if they had been sampled to an EOS, for imitation. Their logprobs are 0."""
    eos = policy.eos_ids[0]
    rows = [encode(policy, text, special=False) + [eos] for text in texts]
    lengths = [len(row) for row in rows]
    T = max(lengths)
    tokens = torch.tensor([row + [eos] * (T - len(row)) for row in rows], device=policy.device)
    logprobs = torch.zeros(tokens.shape, device=policy.device)
    ids, prompt_lengths = encode_prompts(policy, prompts, T)
    return Rollouts(ids, prompt_lengths, tokens, logprobs, lengths, texts, [True] * len(texts))


def write_rollout(task: Task, prompt: str, answers: list[str]) -> str:
    """The text of a rollout that gives these answers to a prompt, as `read_answers` reads it."""
    _, closing = open_thought(prompt)
    with with_note("Task.demonstration must return a text"):
        return write_answers(task, answers, closing)


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token from each row of logits (B, V), by inverting the cumulative distribution.

    So one random number per rollout and position decides the token, whatever else is in the batch.
    By rounding the search may hit a token of probability 0. The likeliest one is then taken.

    Args:
        uniform: a random number in [0, 1) for every row (B).

    Returns:
        Token ids (B) and their log-probabilities (B) in nats.
    """
    log_p = torch.log_softmax(logits, -1)
    cumulative = log_p.exp().cumsum(-1)  # (B, V)
    threshold = uniform[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, threshold, right=True)  # (B, 1)
    token = token.clamp_max(logits.shape[1] - 1)
    is_negligible = log_p.gather(1, token) < NEGLIGIBLE
    token = torch.where(is_negligible, log_p.argmax(-1, keepdim=True), token)
    return token[:, 0], log_p.gather(1, token)[:, 0]


# Forward passes.


def prompt_mask(ids: Tensor, lengths: list[int]) -> Tensor:
    """Attention mask (P, L) of left-padded prompts, False on the padding."""
    L = ids.shape[1]
    padding = L - torch.tensor(lengths, device=ids.device)
    return torch.arange(L, device=ids.device) >= padding[:, None]


def hidden_states(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: DynamicCache | None = None
) -> Tensor:
    """Last hidden states (B, T, H) of tokens that follow those in the cache, if there is one.

    Args:
        ids: token ids (B, T).
        mask: attention mask (B, C + T) over the C tokens of the cache and these, False on padding.
    """
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]  # (B, T)
    output = model.base_model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
    )
    return output.last_hidden_state


def lm_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits (..., V) in float32 of hidden states (..., H)."""
    logits = model.get_output_embeddings()(hidden).float()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if cap is None:
        return logits
    return cap * torch.tanh(logits / cap)  # as in Gemma 2


def head_logprobs(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N) of tokens (N) after hidden states (N, H), and entropies (N), in nats.

    All logits of a batch of long rollouts would take gigabytes. They are made in chunks, and made
    again in the backward pass.
    """

    def of_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(lm_logits(model, hidden) / temperature, -1)  # (n, V)
        entropy = -(log_p.exp() * log_p.clamp_min(LEAST_LOGPROB)).sum(-1)  # 0 where p is 0
        return log_p.gather(1, targets[:, None])[:, 0], entropy

    rows = max(1, HEAD_BYTES // (4 * model.get_output_embeddings().weight.shape[0]))
    if len(hidden) <= rows:
        return of_chunk(hidden, targets)
    logprobs = []
    entropies = []
    for chunk in torch.arange(len(hidden), device=hidden.device).split(rows):
        chunk_logprobs, chunk_entropies = checkpoint(
            of_chunk, hidden[chunk], targets[chunk], use_reentrant=False, preserve_rng_state=False
        )
        logprobs.append(chunk_logprobs)
        entropies.append(chunk_entropies)
    return torch.cat(logprobs), torch.cat(entropies)


def token_logprobs(
    model: PreTrainedModel, rollouts: Rollouts, rows: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens of B rollouts under a model, and entropies, with gradient.

    Args:
        rows: (B) their rows in the batch of rollouts.

    Returns:
        Both (B, T) in nats at this temperature, 0 after the end of a rollout.
    """
    prompts = torch.div(rows, rollouts.group_size, rounding_mode="floor")  # (B)
    all_prompts_mask = prompt_mask(rollouts.prompt_ids, rollouts.prompt_lengths)
    token_mask = rollouts.token_mask[rows]  # (B, T)
    L = max(rollouts.prompt_lengths[p] for p in prompts.tolist())  # less padding
    ids = torch.cat([rollouts.prompt_ids[prompts, -L:], rollouts.tokens[rows]], 1)  # (B, L + T)
    mask = torch.cat([all_prompts_mask[prompts, -L:], token_mask], 1)  # (B, L + T)
    hidden = hidden_states(model, ids, mask)
    T = token_mask.shape[1]
    hidden = hidden[:, -T - 1 : -1]  # (B, T, H): from the state before a token it is predicted

    targets = rollouts.tokens[rows][token_mask]  # (N): the LM head sees sampled tokens alone
    hidden = hidden[token_mask]  # (N, H), of the first rollout's tokens, then of the second's, ...
    flat_logprobs, flat_entropy = head_logprobs(model, hidden, targets, temperature)  # (N)
    zeros = torch.zeros(token_mask.shape, device=ids.device)
    logprobs = zeros.masked_scatter(token_mask, flat_logprobs)  # (B, T) again
    entropy = zeros.masked_scatter(token_mask, flat_entropy)
    return logprobs, entropy


# Scores.


def read_answers(task: Task, rollouts: Rollouts, m: int) -> list[list[str]]:
    """The up to m answers of every rollout (P * G)."""
    answers = []
    for text, has_ended in zip(rollouts.texts, rollouts.ended, strict=True):
        answers.append(parse_answers(text, task, m, has_ended))
    return answers


def score(task: Task, problems: list[Problem], answers: list[list[str]], m: int) -> Scored:
    """Reward vectors of the up to m answers of every rollout.

    Two answers of a rollout are equal if their canonical forms are. Each distinct answer to a problem
    is scored once, and so is the empty one, which tells the number of objectives.

    Args:
        answers: of P * G rollouts, those of one problem side by side.
    """
    # 1. the reward vector of every distinct answer
    P = len(problems)
    G = len(answers) // P
    pairs = {(p, ""): None for p in range(P)}  # (number of the problem, answer)
    for row, row_answers in enumerate(answers):
        pairs |= {(row // G, answer): None for answer in row_answers}
    vectors = reward_vectors(task, [(problems[p], answer) for p, answer in pairs])
    vector_of = dict(zip(pairs, vectors, strict=True))
    sizes = torch.tensor([len(vector_of[p, ""]) for p in range(P)])  # (P)
    d = int(sizes.max())

    # 2. each where it stands; a place without an answer has the minimum
    rewards = torch.zeros(P, G, m, d, dtype=torch.float32)
    scalars = torch.zeros(P, G, m, dtype=torch.float32)
    answer_mask = torch.zeros(P, G, m, dtype=torch.bool)
    repeat_mask = torch.zeros(P, G, m, dtype=torch.bool)
    missing_scalar = torch.zeros(P, 1, dtype=torch.float32)
    for p, problem in enumerate(problems):
        missing = torch.full((sizes[p],), task.minimum, dtype=torch.float32)
        filled = missing.repeat(G, m, 1)  # (G, m, d of the problem)
        for g in range(G):
            forms = set()
            for j, answer in enumerate(answers[p * G + g]):
                filled[g, j] = torch.tensor(vector_of[p, answer], dtype=torch.float32)
                with with_note(f"Task.canonical of problem {problem.id!r}, answer {answer!r:.80}"):
                    form = str(task.canonical(problem, answer))
                answer_mask[p, g, j] = True
                repeat_mask[p, g, j] = form in forms
                forms.add(form)
        rewards[p, :, :, : sizes[p]] = filled
        scalars[p] = task_scalars(task, filled)
        missing_scalar[p] = task_scalars(task, missing)
    objective_mask = torch.arange(d) < sizes[:, None]  # (P, d)
    return Scored(
        rewards, scalars, answer_mask, repeat_mask, objective_mask, missing_scalar, task.minimum
    )
