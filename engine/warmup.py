"""The start of all methods: a model, and its SFT warm-up on demonstrations, cached in runs/start."""

import hashlib
import itertools
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from engine.checkpoints import check_folder
from engine.checks import check_task
from engine.config import Config
from engine.decoding import SamplingOptions, encode_prompts, rollouts_of_texts, sample
from engine.evaluations import held_out
from engine.files import replaced_file, write_folder
from engine.interrupt import StopRequest
from engine.kinds import kind_of
from engine.models import (
    Model,
    Tokenizer,
    load_config_and_tokenizer,
    load_policy,
    save_policy,
)
from engine.update import token_logprobs
from rewards import Problem, Task, UserError, parse_answers, take_problems, write_answers

VERSION = 2  # of the cache: raised when a change of the code changes what a warm-up learns
PARTIAL_EVERY = 60  # seconds between savings of an unfinished warm-up
SET_EVERY = 3  # of so many steps one shows sets of answers


@dataclass(frozen=True)
class WarmUp:
    """All that shapes a warm-up, beside the model and the task."""

    steps: int
    m: int  # answers in a set
    seed: int
    with_goals: bool = False  # prompts name random preference weights, which no answer heeds
    temperature: float = 1.0  # of a language model's own answers in sets
    max_new_tokens: int = 0  # of one of them


@dataclass
class Demonstrations:
    """What one step of the warm-up imitates."""

    prompts: list[str]  # P
    texts: list[str]  # P * G


def start_model(config: Config, task: Task, device: str) -> tuple[Model, Tokenizer]:
    """The model that all methods start from, before the SFT warm-up.

    Raises:
        UserError: a prompt and its rollout do not fit the model's context, or the tiny model lacks a
            word. This is found before minutes are spent.
    """
    check_task(task, config.m)
    check_prompts(config, task)
    is_tiny = config.model == "tiny"
    model, tokenizer = load_policy(
        config.model,
        task,
        seed=config.seed,
        device="cpu" if is_tiny else device,
        dtype="float32" if is_tiny or config.warm_steps else config.dtype,
    )
    if not is_tiny and tokenizer.chat_template is None:
        print(
            f"--model {config.model}: no chat template, so its prompts are plain text",
            file=sys.stderr,
        )
    # Of a file every demonstration is checked, of made-up problems one of each kind.
    n_checked = config.warm_steps if config.data else min(config.warm_steps, SET_EVERY)
    for step in range(n_checked):
        batch = demonstrations(task, tokenizer, warm_up_of(config), step)
        rollouts_of_texts(model, tokenizer, batch.prompts, batch.texts)
    return model, tokenizer


def check_prompts(config: Config, task: Task) -> None:
    """Raise UserError if one of the longest prompts of a task and its rollout do not fit the context."""
    model_config, tokenizer = load_config_and_tokenizer(config.model, task)
    kind = kind_of(tokenizer)
    n = 2000 if config.data else 32
    for split, m in (("train", 1), ("train", config.m), ("test", 1)):
        prompts = []
        for problem in held_out(task, split, n):
            prompts.append(kind.prompt(tokenizer, task, problem, m, None))
        longest = sorted(prompts, key=len)[-32:]
        new_tokens = kind.rollout_length(task, m, config.max_new_tokens)
        encode_prompts(model_config, tokenizer, longest, new_tokens)


def write_start(
    config: Config,
    task: Task,
    folder: Path,
    start: tuple[Model, Tokenizer],
    with_goals: bool = False,
) -> None:
    """Write what methods start from, after the SFT warm-up."""
    if config.warm_steps:
        start = warmed_up(*start, task, warm_up_of(config, with_goals))
    write_folder(folder, lambda path: save_policy(*start, path))


def write_goal_start(method: str, config: Config, task: Task, run: Path) -> None:
    """Write a start of its own for a goal-conditioned tiny model, which could not read goals otherwise."""
    folder = run / "start"
    if method == "goal_conditioned" and config.model == "tiny" and not folder.exists():
        start = load_policy(str(run.parent / "start"), task)
        write_start(config, task, folder, start, with_goals=True)


def warm_up_of(config: Config, with_goals: bool = False) -> WarmUp:
    """The warm-up that a configuration asks for; with goals a quarter of it, with single answers."""
    steps = config.warm_steps
    m = config.m
    if with_goals:
        steps = -(-steps // 4)
        m = 1
    return WarmUp(steps, m, config.seed, with_goals, config.temperature, config.max_new_tokens)


def warmed_up(
    model: Model, tokenizer: Tokenizer, task: Task, warm_up: WarmUp
) -> tuple[Model, Tokenizer]:
    """The model and tokenizer after a warm-up, from the cache if it has been done before.

    Raises:
        UserError: the loss is not finite, or the cache is damaged.
        KeyboardInterrupt: a stop was asked for. What was learnt is saved.
    """
    key = cache_key(model, tokenizer, task, warm_up)
    folder = Path("runs") / "start" / f"{task.name}-{key}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        imitate(model, tokenizer, task, warm_up, partial)
        write_folder(folder, lambda path: save_policy(model, tokenizer, path))
        partial.unlink(missing_ok=True)
    check_folder(folder)
    return load_policy(str(folder), task)


def cache_key(model: Model, tokenizer: Tokenizer, task: Task, warm_up: WarmUp) -> str:
    """A digest of all that shapes the result. The first demonstrations stand for the task."""
    recipe = [VERSION, warm_up, torch.__version__, torch.get_num_threads()]
    recipe.append(model.config.to_json_string())
    for step in range(SET_EVERY):
        recipe.append(demonstrations(task, tokenizer, warm_up, step))
    for parameter in model.parameters():
        recipe.append(parameter.detach().double().abs().sum().item())
    return hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]


def imitate(model: Model, tokenizer: Tokenizer, task: Task, warm_up: WarmUp, partial: Path) -> None:
    """Train on demonstrations: maximum likelihood with AdamW, a short ramp, then linear decay.

    Args:
        partial: a file that holds what was learnt so far, after a minute and when it is stopped. A
            warm-up that was interrupted goes on from it.
    """
    kind = kind_of(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=kind.warmup_lr)
    first = load_partial(partial, model, optimizer)
    saved = time.monotonic()
    bar = tqdm(
        range(first, warm_up.steps),
        "SFT warm-up",
        initial=first,
        total=warm_up.steps,
        unit="step",
    )
    with StopRequest() as stop:
        for step in bar:
            batch = demonstrations(task, tokenizer, warm_up, step, model)
            ramp = min(1.0, (step + 1) / 20)
            decay = 1 - 0.9 * step / warm_up.steps
            optimizer.param_groups[0]["lr"] = kind.warmup_lr * ramp * decay
            optimizer.zero_grad()
            loss = imitation_gradient(model, tokenizer, batch, kind.warmup_micro_batch)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")
            if not loss.isfinite():
                raise UserError(
                    f"SFT warm-up: loss {loss.item()}; are the demonstrations as they should be?"
                )
            if stop.received or time.monotonic() - saved > PARTIAL_EVERY:
                save_partial(partial, model, optimizer, step + 1)
                saved = time.monotonic()
            if stop.received:
                raise KeyboardInterrupt(
                    f"the SFT warm-up stopped after step {step + 1} of {warm_up.steps}, everything is "
                    "saved; give the same command again"
                )


def save_partial(
    path: Path, model: Model, optimizer: torch.optim.Optimizer, steps_done: int
) -> None:
    """Write what an unfinished warm-up needs to go on, as a whole or not at all."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "steps_done": steps_done,
    }
    with replaced_file(path) as temporary:
        torch.save(state, temporary)


def load_partial(path: Path, model: Model, optimizer: torch.optim.Optimizer) -> int:
    """Take up an unfinished warm-up, if there is one. Returns the steps that are done."""
    if not path.exists():
        return 0
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except Exception as error:  # of a damaged file there are many kinds
        raise UserError(f"{path}: damaged ({error!s:.100}); delete it") from error
    print(f"SFT warm-up: goes on after step {state['steps_done']} ({path})", file=sys.stderr)
    return state["steps_done"]


def imitation_gradient(
    model: Model, tokenizer: Tokenizer, batch: Demonstrations, micro_batch: int
) -> Tensor:
    """Add the gradient of the mean negative log-likelihood of all tokens, which is returned."""
    rollouts = rollouts_of_texts(model, tokenizer, batch.prompts, batch.texts)
    n_tokens = rollouts.token_mask.sum()
    loss = torch.zeros(())
    for rows in torch.arange(len(batch.texts)).split(micro_batch):
        logprobs, _ = token_logprobs(model, rollouts, rows.tolist())
        token_mask = rollouts.token_mask[rows, : logprobs.shape[1]]
        part = -logprobs[token_mask].mean() * (token_mask.sum() / n_tokens)
        part.backward()
        loss += part.item()
    return loss


def demonstrations(
    task: Task, tokenizer: Tokenizer, warm_up: WarmUp, step: int, model: Model | None = None
) -> Demonstrations:
    """What one step imitates. One step in three shows sets of m independent answers.

    Nothing in a set is diverse on purpose. Where a task has one reference per problem, a set of a
    language model holds m single answers that the model itself samples; where they cannot all be
    read, the step shows the reference alone.

    Args:
        model: a language model for sets; None: only single answers are shown.

    Raises:
        UserError: a demonstration is longer than Task.answer_words.
    """
    kind = kind_of(tokenizer)
    P = kind.warmup_prompts
    G = kind.warmup_rollouts
    m = 1
    if step % SET_EVERY == SET_EVERY - 1 and (model is not None or not kind.is_pretrained):
        m = warm_up.m
    rng = random.Random(f"demonstrations-{warm_up.seed}-{step}")
    problems = take_problems(task, "demonstrations", P, warm_up.seed, step * P)

    sets = []  # P * G lists of answers
    for problem in problems:
        for _ in range(G):
            sets.append([task.demonstration(problem, rng) for _ in range(m)])
    if not kind.is_pretrained:
        _check_lengths(sets, task)
    elif m > 1 and all(len(set(answers)) == 1 for answers in sets):
        options = SamplingOptions(
            max_new_tokens=kind.rollout_length(task, 1, warm_up.max_new_tokens),
            temperature=warm_up.temperature,
            generator=torch.Generator(model.device).manual_seed(rng.getrandbits(32)),
            stop=kind.stop_rule(tokenizer, task, 1),
        )
        sets = _own_sets(model, tokenizer, task, problems, sets, options)

    prompts = []
    for i, problem in enumerate(problems):
        goal = _random_weights(len(task.objectives), rng) if warm_up.with_goals else None
        prompts.append(kind.prompt(tokenizer, task, problem, len(sets[i * G]), goal))
    texts = [write_answers(task, answers) for answers in sets]
    return Demonstrations(prompts, texts)


def _check_lengths(sets: list[list[str]], task: Task) -> None:
    for answer in itertools.chain.from_iterable(sets):
        if not isinstance(answer, str) or len(answer.split()) > task.answer_words:
            raise UserError(
                f"task {task.name}: the demonstration {answer!r:.80} must be text of at most "
                f"answer_words = {task.answer_words} words"
            )


def _own_sets(
    model: Model,
    tokenizer: Tokenizer,
    task: Task,
    problems: list[Problem],
    references: list[list[str]],
    options: SamplingOptions,
) -> list[list[str]]:
    """Sets of m answers that the model samples one by one, or a reference alone.

    Args:
        references: m equal references for each problem.
    """
    m = len(references[0])
    prompts = [kind_of(tokenizer).prompt(tokenizer, task, problem, 1, None) for problem in problems]
    texts = sample(model, tokenizer, prompts, m, options).texts
    form = "```python\n{}\n```" if references[0][0].startswith("```") else "{}"
    sets = []
    for i, reference in enumerate(references):
        answers = []
        for text in texts[i * m : (i + 1) * m]:
            answers += [form.format(answer) for answer in parse_answers(text, task, 1)]
        sets.append(answers if len(answers) == m else reference[:1])
    return sets


def _random_weights(k: int, rng: random.Random) -> list[float]:
    """Preference weights w ~ Dirichlet(1)."""
    draws = [rng.expovariate(1) for _ in range(k)]
    total = sum(draws)
    return [draw / total for draw in draws]
