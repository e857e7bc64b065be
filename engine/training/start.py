"""The start of all methods: a model that can be sampled and scored, its checks and its warm-up."""

import copy
import hashlib
import inspect
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from engine.config import Config
from engine.errors import is_out_of_memory
from engine.files import whole_folder
from engine.models import OTHER_MODEL, has_plain_cache, merged_adapter, recompute_layers, save_model
from engine.prompts import check_rows
from engine.runs import file_digests
from engine.tasks import check_task, reward_vectors, take_problems
from engine.training.memory import fill_card, free_memory
from rewards import Task, UserError
from rollout import (
    Policy,
    SamplingOptions,
    build_prompt,
    encode,
    encode_prompts,
    load_policy,
    rollout_length,
    rollouts_of_texts,
    sample,
    token_logprobs,
)

PROBES = ["Hi", "Paint it!"]  # prompts that differ in their lengths
MADE_UP = 4000  # problems without a file whose tokens are counted
TINY_MADE_UP = 100  # of the tiny model, whose prompts are alike
CHECKED = 3  # steps of the warm-up whose demonstrations are read before it begins


def load_start(
    name: str, task: Task, *, seed: int = 0, device: str = "cpu", dtype: str = "float32"
) -> Policy:
    """A model as `rollout.load_policy` loads it. Raises UserError if it cannot be sampled or scored."""
    policy = load_policy(name, task, seed=seed, device=device, dtype=dtype)
    if not policy.is_tiny:
        check_model(policy, name)
    return policy


@torch.no_grad()
def check_model(policy: Policy, name: str) -> None:
    """Raise UserError for a model whose rollouts would never end, or would be scored wrongly."""
    if not policy.eos_ids:
        problem = f"its eos_token {policy.tokenizer.eos_token!r} has no row in its embeddings"
        advice = "set eos_token in its tokenizer_config.json, or no rollout would end"
        raise UserError(f"--model {name}: {problem}; {advice}")
    if not encode(policy, PROBES[0], special=False):
        kind = type(policy.tokenizer).__name__
        raise UserError(f"--model {name}: its tokenizer, a {kind} here, makes no tokens of texts")
    try:
        difference = nats_off(policy)
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        problem = f"{type(policy.model).__name__} takes no KV cache as others do ({error!s:.200})"
        raise UserError(f"--model {name}: {problem}; {OTHER_MODEL}") from error
    tolerance = 0.003 if policy.model.dtype == torch.float32 else 0.06  # of rounding
    if difference > tolerance:
        problem = "its log-probabilities change with a KV cache or padding, or are no LM head's"
        raise UserError(f"--model {name}: {problem}; {OTHER_MODEL}")


def nats_off(policy: Policy) -> float:
    """Nats per token between sampling and update, or between sampling and a plain forward pass."""
    endless = copy.copy(policy)
    endless.eos_ids = [-1]
    options = SamplingOptions(max_new_tokens=30, generator=torch.Generator().manual_seed(0))
    rollouts = sample(endless, PROBES, 2, options)
    rows = torch.arange(4, device=policy.device)
    update, _ = token_logprobs(policy.model, rollouts, rows, temperature=1.0)  # (4, T)
    differences = [(update - rollouts.logprobs).abs()]
    for row, tokens in enumerate(rollouts.tokens):
        p = row // 2
        prompt = rollouts.prompt_ids[p, -rollouts.prompt_lengths[p] :]
        logits = policy.model(torch.cat([prompt, tokens])[None]).logits[0].float()
        log_p = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)  # (T, V)
        plain = log_p.gather(1, tokens[:, None])[:, 0]
        differences.append((plain - rollouts.logprobs[row]).abs())
    return max(difference.mean().item() for difference in differences)


def start_policy(config: Config, task: Task, demonstrations: Callable) -> Policy:
    """The model that all methods start from, before the SFT warm-up.

    It is tried with the task's longest prompts and first demonstrations, before minutes are spent.
    """
    check_task(task, config.m)
    policy = load_start(
        config.model, task, seed=config.seed, device=config.device, dtype=config.dtype
    )
    if config.gradient_checkpointing:
        recompute_layers(policy.model)
    model = f"--model {config.model}"
    if policy.is_tiny != config.is_tiny:
        raise UserError(f"{model}: a tiny one, which knows one task; take --model tiny")
    if not policy.is_tiny and policy.tokenizer.chat_template is None:
        print(f"{model}: no chat template, so its prompts are plain text", file=sys.stderr)
    if not has_plain_cache(policy.model) and not config.plain:
        print(f"{model}: --plain, as its cache is not keys and values alone", file=sys.stderr)
        config.plain = True
    longest = longest_prompt(policy, task, config)
    check_demonstrations(policy, task, config, demonstrations)
    if config.device == "cuda":
        fill_card(config, policy, task, free_memory(), longest)
    return policy


def check_demonstrations(
    policy: Policy, task: Task, config: Config, demonstrations: Callable
) -> None:
    """Raise UserError for demonstrations that cannot be encoded or scored, or are longer than their task says."""
    # Of a file every one is read, of made-up problems one of each kind.
    n_checked = config.warm_steps if config.data else min(config.warm_steps, CHECKED)
    for step in range(n_checked):
        rollouts = rollouts_of_texts(policy, *demonstrations(policy, task, config, step))
        n_tokens = max(rollouts.lengths)
        if policy.is_tiny and step == 0 and n_tokens > rollout_length(task, 1, 0):
            problem = f"a demonstration takes {n_tokens} tokens, and answer_words + 3 are fewer"
            raise UserError(f"task {task.name}: {problem}; raise answer_words")
    if config.warm_steps:
        problem = take_problems(task, "demonstrations", 1, config.seed)[0]
        answer = task.demonstration(problem, random.Random(config.seed))
        reward_vectors(task, [(problem, answer)])


def longest_prompt(policy: Policy, task: Task, config: Config) -> int:
    """Tokens of a run's longest prompt. Raises UserError, which names the problem, if it is too long.

    Of a file all problems are looked at, of made-up ones the first that the run will use.
    """
    parts = getattr(task, "parts", {})
    used = {"train": config.steps * config.prompts_per_step * config.m}
    used["test"] = max(config.eval_problems, 4)  # snapshots show four
    if config.eval_every or parts.get("validation"):
        used["validation"] = 20
    most = TINY_MADE_UP if policy.is_tiny else MADE_UP
    special = policy.tokenizer.chat_template is None
    counts = []  # (tokens, id of the problem, prompt)
    for split, n in used.items():
        n = len(parts.get(split, ())) or min(n, most)
        problems = take_problems(task, split, n, config.seed if split == "train" else 0)
        for first in range(0, n, 500):  # tokens take far more memory than texts
            some = problems[first : first + 500]
            prompts = [build_prompt(policy, task, problem, config.m) for problem in some]
            rows = policy.tokenizer(prompts, add_special_tokens=special)["input_ids"]
            for problem, prompt, row in zip(some, prompts, rows, strict=True):
                check_rows(policy.model, policy.tokenizer, row)
                if policy.is_tiny:
                    encode(policy, prompt, special)  # raises for an unknown word
                counts.append((len(row), problem.id, prompt))
    length, id, prompt = max(counts)
    try:
        encode_prompts(policy, [prompt], rollout_length(task, config.m, config.max_new_tokens))
    except UserError as error:
        raise UserError(f"problem {id!r}: {error}") from error
    return length


def write_start(
    policy: Policy, task: Task, config: Config, warm_up: Callable, demonstrations: Callable
) -> None:
    """Write the start of all methods, after the SFT warm-up, into the run.

    A warm-up is kept in runs/start, where that can be written. Another run with the same one does
    not repeat it.
    """
    folder = Path(config.out) / "start"
    shutil.rmtree(folder, ignore_errors=True)
    if config.warm_steps:
        key = warm_up_key(policy, task, config, warm_up, demonstrations)
        kept = Path("runs/start") / f"{task.name}-{key}"
        if can_be_loaded(kept, task):
            with whole_folder(folder) as new:
                shutil.copytree(kept, new, dirs_exist_ok=True)
            return
        torch.manual_seed(config.seed)  # from which peft draws an adapter
        # The tiny model's weights are random: all of them must learn.
        with merged_adapter(policy.model, 0 if policy.is_tiny else config.lora_rank):
            warm_up(policy, task, config)
        try:
            shutil.rmtree(kept, ignore_errors=True)
            with whole_folder(kept) as new:
                save_model(policy.model, policy.tokenizer, new, config.temperature)
        except UserError as error:
            print(f"the warm-up is kept in this run alone: {error}", file=sys.stderr)
    with whole_folder(folder) as new:
        save_model(policy.model, policy.tokenizer, new, config.temperature)


def can_be_loaded(folder: Path, task: Task) -> bool:
    """Whether a folder holds a whole model. It may be missing, damaged or forbidden."""
    try:
        return os.path.exists(folder) and bool(load_policy(str(folder), task))
    except UserError:
        return False


def warm_up_key(
    policy: Policy, task: Task, config: Config, warm_up: Callable, demonstrations: Callable
) -> str:
    """A digest of all that shapes a warm-up. The first demonstrations stand for a task without files."""
    recipe = [torch.__version__, torch.get_num_threads(), config.device, config.seed]
    recipe += [config.warm_steps, config.m, config.temperature, config.max_new_tokens]
    recipe += [config.lora_rank, config.dtype]
    recipe += [inspect.getsource(warm_up), policy.model.config.to_json_string()]
    recipe += file_digests(config).values()
    for step in range(CHECKED):
        recipe.append(demonstrations(policy, task, config, step))
    for weight in policy.model.parameters():
        recipe.append(weight.detach().cpu().double().abs().sum().item())
    return hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
