"""Rollouts: models and tokenizers in, prompts in, answers out, with the log-probability of every sampled token.

    load_policy     `tiny` (own vocabulary, random weights), or any causal language model: a local folder or a Hub id
    sample          P prompts -> P * G rollouts: each prompt is prefilled once, its KV cache expanded to the group
    token_logprobs  the same log-probabilities with gradients: each prompt is computed once, its G rollouts share it
    parse_answers   a rollout's text -> its tagged answers

Conventions: the temperature is the only sampling knob and divides the logits in `sample` and in `token_logprobs` alike;
masks come from positions, never from pad ids, and the first EOS counts as sampled; the model stays in eval mode, also in
the update, because dropout would score another policy than the one that was sampled.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GPT2Config,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import DynamicLayer

from rewards import MAX_ANSWERS, Problem, Task, UserError

PAD, EOS = "<pad>", "<eos>"


@dataclass
class Rollouts:
    """A batch of P groups of G rollouts; row p * G + g is rollout g of prompt p. Tensors live on the model's device."""
    prompt_ids: Tensor  # (P, L) padded on the left
    prompt_mask: Tensor  # (P, L) bool, the prompt's own tokens
    tokens: Tensor  # (P * G, T) sampled token ids, then padding
    logprobs: Tensor  # (P * G, T) float32, log-probability of each under the sampling temperature
    mask: Tensor  # (P * G, T) bool, what was sampled, the first EOS included
    texts: list[str]  # (P * G) decoded without special tokens

    @property
    def group_size(self) -> int:
        return len(self.tokens) // len(self.prompt_ids)


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


def load_policy(name: str, task: Task, *, seed: int = 0, device: str = "cpu",
                dtype: str = "float32") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer: `tiny` with fresh weights, else an ordinary Hugging Face checkpoint, local or on the Hub.

    Weights are float32 whatever the dtype, which is what the forward pass computes in: at a learning rate of 1e-6 a
    bfloat16 weight would not move. Raises UserError if there is no such model, or if it cannot be read.
    """
    if name == "tiny":
        tokenizer = _tiny_tokenizer(task)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_tiny_config(tokenizer))
        model.compute_dtype = getattr(torch, dtype)
        return model.to(device).eval(), tokenizer
    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise UserError(f"--model {name}: there is no config.json in it, so it is no Hugging Face checkpoint")
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"--model {name}: no such folder; choose tiny, a local checkpoint, or a Hub id like Qwen/Qwen2.5-0.5B")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(name)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except Exception as error:  # transformers, safetensors, tokenizers and the Hub each raise their own kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"--model {name}: cannot be loaded ({lines[0]})") from error
    if not eos_ids(model, tokenizer):
        raise UserError(f"--model {name}: its tokenizer has no EOS token, so no rollout would ever end")
    model.compute_dtype = getattr(torch, dtype)
    return model.to(device).eval(), tokenizer


def _tiny_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """One token per word: specials, numbers of answers, tags, then the task's own words."""
    if not task.words:
        raise UserError(f"--model tiny: task {task.name} has no words for it here; take a language model, --model FOLDER or a Hub id, or give Task.words")
    numbers = range(1, MAX_ANSWERS + 1)
    tags = [tag.format(task.tag, i) for i in numbers for tag in ("<{}_{}>", "</{}_{}>")]
    words = [PAD, EOS, *(f"answers={m}" for m in numbers), *tags, *task.words]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))}, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS)


def _tiny_config(tokenizer: PreTrainedTokenizerFast) -> GPT2Config:
    """A GPT-2 of 0.1 to 0.2M parameters, no dropout.

    Learned positions, because the words of a tiny prompt stand at fixed places; weights of size 1/sqrt(width), because the
    usual 0.02 leaves so narrow a model's attention uniform for hundreds of steps.
    """
    return GPT2Config(vocab_size=len(tokenizer), n_embd=64, n_inner=192, n_layer=3, n_head=4, n_positions=512,
                      activation_function="gelu_pytorch_tanh",  # the fused form of GPT-2's own
                      initializer_range=0.1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
                      bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def is_tiny(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer is the embedded one, whose language is a task's own words."""
    word = f"answers={MAX_ANSWERS}"
    id = tokenizer.convert_tokens_to_ids(word)
    return id is not None and tokenizer.convert_ids_to_tokens(id) == word


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token id that ends a rollout: the model's generation config may name several, the tokenizer one more."""
    ids = model.generation_config.eos_token_id
    ids = set(ids if isinstance(ids, list) else [ids]) | {tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None)


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


def encode_prompts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str],
                   max_new_tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids and mask (P, L), padded on the left. UserError if a prompt and its rollout exceed the model's context."""
    templated = tokenizer.chat_template is not None  # a template writes its own BOS
    rows = [tokenizer(prompt, add_special_tokens=not templated)["input_ids"] for prompt in prompts]
    longest = max(map(len, rows))
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or longest + max_new_tokens
    if longest + max_new_tokens > context:
        raise UserError(f"a prompt of {longest} tokens and {max_new_tokens} new ones need a context of "
                        f"{longest + max_new_tokens}; the model's is {context}: lower --max-new-tokens or --size")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    return ids, torch.arange(longest, device=model.device) >= longest - lengths[:, None]


def _forward(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, start: Tensor, mask: Tensor | None,
             last_only: bool) -> Tensor:
    """Logits (B, T, V), or (B, 1, V) with last_only, of ids (B, T) at positions start (B, 1) onwards, cache extended.

    mask (B, everything in the cache + T) hides left padding; None where there is none, which is faster.
    """
    positions = (start + torch.arange(ids.shape[1], device=ids.device)).clamp_min(0)
    dtype = getattr(model, "compute_dtype", torch.float32)
    with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                    logits_to_keep=1 if last_only else 0)
    return out.logits


def _prefill(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[DynamicCache, Tensor]:
    """The KV cache of the prompts and the logits (P, V) after their last tokens."""
    cache = DynamicCache(config=model.config)
    start = mask.sum(1, keepdim=True) - mask.shape[1]  # negative: padding shifts the first token to the right
    logits = _forward(model, ids, cache, start, None if mask.all() else mask, last_only=True)
    return cache, logits[:, -1]


class RoomyLayer(DynamicLayer):
    """A cache layer that appends in place: DynamicLayer copies all keys and values for every new token."""

    def __init__(self, layer: DynamicLayer, room: int):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.length = layer.keys.shape[-2]
        self.keys, self.values = (torch.nn.functional.pad(x, (0, 0, 0, room)) for x in (layer.keys, layer.values))

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        new = slice(self.length, self.length + key_states.shape[-2])
        self.keys[:, :, new], self.values[:, :, new] = key_states, value_states
        self.length = new.stop
        return self.keys[:, :, :self.length], self.values[:, :, :self.length]

    def get_seq_length(self) -> int:
        return self.length


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], group_size: int, *,
           max_new_tokens: int, temperature: float = 1.0, generator: torch.Generator | None = None) -> Rollouts:
    """Sample group_size rollouts of every prompt; each ends at an EOS or after max_new_tokens.

    Raises UserError if the model's context is too short, or if its logits are not finite: a diverged model.
    """
    prompt_ids, prompt_mask = encode_prompts(model, tokenizer, prompts, max_new_tokens)
    cache, logits = _prefill(model, prompt_ids, prompt_mask)
    if not (logits.float() / temperature).isfinite().all():
        raise UserError("the model's logits are not finite, it has diverged: try a lower --lr (or a higher --temperature)")
    cache.batch_repeat_interleave(group_size)
    cache.layers = [RoomyLayer(x, max_new_tokens) if type(x) is DynamicLayer else x for x in cache.layers]
    logits = logits.repeat_interleave(group_size, 0)
    B, device = len(logits), logits.device
    start = prompt_mask.sum(1, keepdim=True).repeat_interleave(group_size, 0)
    seen = None if prompt_mask.all() else prompt_mask.repeat_interleave(group_size, 0)
    ends = torch.tensor(eos_ids(model, tokenizer), device=device)

    tokens = torch.full((B, max_new_tokens), int(ends[0]), device=device)
    logprobs = torch.zeros(B, max_new_tokens, device=device)
    mask = torch.zeros(B, max_new_tokens, dtype=torch.bool, device=device)
    rows = torch.arange(B, device=device)  # which rollout each row of the cache belongs to
    alive = torch.ones(B, dtype=torch.bool, device=device)
    for t in range(max_new_tokens):
        log_p = torch.log_softmax(logits.float() / temperature, -1)
        token = torch.multinomial(log_p.exp(), 1, generator=generator)
        tokens[rows, t] = torch.where(alive, token[:, 0], tokens[rows, t])
        logprobs[rows, t] = torch.where(alive, log_p.gather(1, token)[:, 0], 0.0)
        mask[rows, t] = alive
        alive &= ~torch.isin(token[:, 0], ends)
        n_alive = int(alive.sum())
        if n_alive == 0 or t + 1 == max_new_tokens:
            break
        if n_alive < 0.8 * len(rows):  # finished rows leave the batch, not one by one: moving the cache costs a step
            cache.batch_select_indices(alive.nonzero()[:, 0])
            rows, token, start, seen = rows[alive], token[alive], start[alive], None if seen is None else seen[alive]
            alive = alive[alive]
        if seen is not None:
            seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
        logits = _forward(model, token, cache, start + t, seen, last_only=True)[:, -1]
    T = t + 1
    tokens, logprobs, mask = tokens[:, :T], logprobs[:, :T], mask[:, :T]
    lengths = mask.sum(1).tolist()
    texts = tokenizer.batch_decode([row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)],
                                   skip_special_tokens=True)
    return Rollouts(prompt_ids, prompt_mask, tokens, logprobs, mask, texts)


def demonstrations(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str],
                   texts: list[str]) -> Rollouts:
    """Given texts (P * G) as if they had been sampled, EOS included: what imitation needs; their logprobs are zero."""
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    T = max(map(len, rows))
    prompt_ids, prompt_mask = encode_prompts(model, tokenizer, prompts, T)
    tokens = torch.tensor([row + [tokenizer.eos_token_id] * (T - len(row)) for row in rows], device=model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    mask = torch.arange(T, device=model.device) < lengths[:, None]
    return Rollouts(prompt_ids, prompt_mask, tokens, torch.zeros_like(mask, dtype=torch.float32), mask, texts)


def token_logprobs(model: PreTrainedModel, rollouts: Rollouts, first: int, last: int, *,
                   temperature: float = 1.0, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (B, T) of the sampled tokens of rollouts first .. last - 1; the policy's entropies (B, T) or None.

    In nats, at the sampling temperature; T is the longest of these rollouts. Gradients flow through the log-probabilities.
    Each prompt is computed once and its KV cache handed to its rollouts, so the gradients are those of the plain
    computation that repeats it G times (shared prefix, arXiv 2506.05433), for a fraction of the work.
    """
    owner = torch.arange(first, last, device=rollouts.tokens.device) // rollouts.group_size
    prompts = slice(int(owner[0]), int(owner[-1]) + 1)
    ids, prompt_mask = rollouts.prompt_ids[prompts], rollouts.prompt_mask[prompts]
    T = int(rollouts.mask[first:last].sum(1).max())
    tokens = rollouts.tokens[first:last, :T]

    cache, first_logits = _prefill(model, ids, prompt_mask)
    owner = owner - owner[0]
    cache.batch_select_indices(owner)
    logits = first_logits[owner, None]
    if T > 1:
        start = prompt_mask.sum(1, keepdim=True)[owner]
        seen = None if prompt_mask.all() else torch.nn.functional.pad(prompt_mask[owner], (0, T - 1), value=True)
        rest = _forward(model, tokens[:, :-1], cache, start, seen, last_only=False)
        logits = torch.cat([logits, rest], 1)  # (B, T, V)
    log_p = torch.log_softmax(logits.float() / temperature, -1)
    entropy = None
    if with_entropy:
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(2, tokens[..., None])[..., 0], entropy


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike) -> None:
    """An ordinary Hugging Face checkpoint: AutoModelForCausalLM and AutoTokenizer load it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_folder(folder: Path, write) -> None:
    """Fill a folder atomically: it appears whole, with the checksum of every file, or not at all."""
    temporary = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in temporary.iterdir()}
    (temporary / "checksums.json").write_text(json.dumps(sums, indent=1))
    try:
        os.replace(temporary, folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(temporary)  # another process was faster; what stands there is whole


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of one method, oldest first."""
    return sorted(run.glob("checkpoint-??????"))


def check_folder(folder: Path) -> None:
    """Raise UserError if a file of a checkpoint is missing or altered, and say which checkpoint to go back to."""
    older = [path for path in checkpoints(folder.parent) if path < folder]
    fix = (f"delete the folder {folder} and --resume goes on from {older[-1].name}" if older
           else f"delete the folder {folder.parent} and start again")
    try:
        sums = json.loads((folder / "checksums.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'checksums.json'}: missing or damaged; {fix}") from error
    for name, expected in sums.items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            raise UserError(f"{path}: missing or damaged; {fix}")
