"""Training: SFT warm-up, then GRPO, VPO and others from the same start, then their comparison.

    python train.py --task fence             three methods paint fences: a minute on a laptop
    python train.py                          the main job: mazes, GRPO, VPO and Group VPO
    python train.py --method multi_rlvr      one more method for the same comparison
    python train.py --resume                 go on where a killed run stopped, bit for bit on a CPU

One step: problems -> prompts -> rollouts -> answers -> reward vectors -> advantages -> loss -> update.

Departures from the paper:
1. Every method samples the same number of answers per step: a single-answer method gets m times as
   many prompts.
2. The learning rate rises for 10 steps and falls linearly to a tenth. With `--lr-schedule constant` it
   does not fall, as in the paper.
3. `--model tiny` has no pre-training, so it first imitates demonstrations. The result is the start of
   all methods, and their reference policy.
4. There is one update per batch of rollouts. The paper makes two. So the ratio is 1, and nothing is
   clipped.

All flags are fields of `Config` in engine/config.py. All random numbers of step t come from generators
seeded by (seed, t). Weights, the optimizer's moments and t are all that a resume needs.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C while the libraries are loaded, which takes seconds
    from engine.interrupt import stop_in_one_line

    stop_in_one_line()

import torch
from torch import Tensor
from tqdm import tqdm

import fast
from engine.answers import open_thought, write_answers
from engine.config import (
    Config,
    check,
    check_advantages,
    estimator_of,
    peak_rate,
    resolve,
)
from engine.disk import disk_line
from engine.doors import as_command, as_user_error, explain_out_of_memory
from engine.files import append, cut_log, last_record, write_folder
from engine.interrupt import StopRequest
from engine.messages import SILENT_STEPS, show_first_step, tell_no_signal, tell_unread
from engine.models import (
    adapter_off,
    add_adapter,
    check_peft,
    is_adapter,
    link_start,
    recompute_layers,
    save_model,
)
from engine.processes import jobs_of, prepare_processes, run_all
from engine.runs import StoredRun, checkpoints, claim, is_training, read_config, steps_done, task_of
from engine.snapshots import is_snapshot_step, write_snapshot
from engine.start import load_start
from engine.tasks import check_task, held_out, take_problems
from engine.trackers import open_tracker
from eval import diversity, evaluate, sample_pool
from rewards import Problem, Task, UserError
from rollout import (
    Policy,
    Rollouts,
    build_prompt,
    encode_prompts,
    load_policy,
    random_generator,
    read_answers,
    rollout_length,
    rollouts_of_texts,
    sample,
    sampling_options,
    score,
    token_logprobs,
)
from vpo import ADVANTAGES, Scored, answers_per_rollout, policy_loss

SHOWN_METRICS = ("reward", "diversity", "entropy")
LOGS = ("metrics", "samples", "snapshots")
SET_EVERY = 3  # of so many steps of the warm-up one shows sets of answers


# One step.


@dataclass
class TrainState:
    """What a training step reads and changes."""

    policy: Policy
    reference: Policy | None  # the reference policy: the frozen start; None without KL
    optimizer: "MasterWeightAdamW"
    step: int  # updates done


@dataclass
class StepResult:
    """What a training step leaves for the logs."""

    metrics: dict[str, float | Tensor]  # each is explained in docs/reference.md
    example: dict  # the rollouts of the step's first problem


def train_step(method: str, state: TrainState, task: Task, config: Config) -> StepResult:
    """One update of a method.

    Problems -> prompts -> rollouts -> answers -> reward vectors -> advantages -> gradient -> update.
    """
    t = state.step
    policy = state.policy
    m = answers_per_rollout(method, config.m)
    # Every method samples equally many answers: by default P is 12 for VPO and 36 for GRPO.
    P = config.prompts_per_step * config.m // m

    problems = take_problems(task, "train", P, config.seed, start=t * P)
    prompts = [build_prompt(policy, task, problem, m) for problem in problems]
    generator = random_generator(config.seed, t, "rollouts")
    options = sampling_options(policy, task, config, m, generator)
    rollouts = sample(policy, prompts, config.group_size, options)  # P * G
    answers = read_answers(task, rollouts, m)  # P * G lists of up to m
    scored = score(task, problems, answers, m)  # (P, G, m, k)
    advantages = step_advantages(method, scored, config, t)  # (P, G)

    row_advantages = advantages.flatten().to(policy.device)  # (P * G), row p * G + g
    gradient = backward if config.plain else fast.backward  # the same, sooner
    metrics = gradient(policy, state.reference, rollouts, row_advantages, config)
    metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(state.optimizer.weights, 1.0)
    check_finite(metrics, t)
    lr = learning_rate(config, method, t)
    state.optimizer.step(lr)
    policy.model.zero_grad()
    state.step += 1
    metrics |= {"lr": lr} | step_metrics(task, rollouts, scored, advantages)
    return StepResult(metrics, sample_record(problems, rollouts, scored, advantages))


def backward(
    policy: Policy,
    reference: Policy | None,
    rollouts: Rollouts,
    advantages: Tensor,
    config: Config,
) -> dict[str, Tensor]:
    """Add the gradient of the loss, a mean over all sampled tokens, to that of the weights.

    The rollouts go through the model in micro-batches. One number of tokens divides the losses of
    all of them, so their gradients add up to that of the whole batch. A rollout without an advantage
    counts in that number, and the KL term pulls it to the reference policy.

    Args:
        reference: the reference policy of the KL term; None: there is no such term.
        advantages: (P * G).

    Returns:
        The metrics of `policy_loss`, the loss, and the entropy in nats per token.
    """
    n_tokens = sum(rollouts.lengths)
    width = rollouts.prompt_ids.shape[1] + rollouts.tokens.shape[1]  # padded tokens of a row
    n_rows = len(advantages)
    if config.micro_batch_tokens:
        n_rows = max(1, config.micro_batch_tokens // width)
    metrics: dict[str, Tensor] = {}
    for rows in torch.arange(len(advantages), device=policy.device).split(n_rows):
        logprobs, entropy = token_logprobs(
            policy.model, rollouts, rows, config.temperature
        )  # (B, T)
        ref_logprobs = None
        if reference is not None:
            with torch.no_grad(), adapter_off(reference.model):  # with LoRA it is the policy itself
                ref_logprobs, _ = token_logprobs(
                    reference.model, rollouts, rows, config.temperature
                )
        loss, parts = policy_loss(
            logprobs,
            rollouts.logprobs[rows],  # of the policy that sampled
            advantages[rows],
            rollouts.token_mask[rows],
            n_tokens,
            ref_logprobs=ref_logprobs,
            kl_coef=config.kl,
        )
        loss.backward()
        parts |= {"loss": loss.detach(), "entropy": entropy.sum() / n_tokens}
        for name, value in parts.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return metrics


def step_advantages(method: str, scored: Scored, config: Config, t: int) -> Tensor:
    """The advantages (P, G) of a step's rollouts, from the method's function in vpo.py."""
    generator = random_generator(config.seed, t, "weights")
    with as_user_error(f"method {method} failed"):
        advantages = ADVANTAGES[method](scored, estimator_of(config, generator))
    check_advantages(method, advantages, scored.scalars.shape[:2])
    return advantages


def check_finite(metrics: dict[str, Tensor], t: int) -> None:
    """Raise UserError before an update that would ruin the weights."""
    loss = metrics["loss"].item()
    norm = metrics["grad_norm"].item()
    if math.isfinite(loss) and math.isfinite(norm):
        return
    fix = "try a lower --lr"
    if t == 0:
        fix = "no update came before, so look for the cause in the model or the loss"
    raise UserError(f"loss {loss}, gradient norm {norm}: {fix}")


def learning_rate(config: Config, method: str, t: int) -> float:
    """Of step t, counted from 0: the peak, times a rise over 10 steps, times the decay."""
    decay = 1.0
    if config.lr_schedule == "linear":
        decay = 1.0 - 0.9 * t / config.steps
    return peak_rate(config, method) * min(1.0, (t + 1) / 10) * decay


def step_metrics(
    task: Task, rollouts: Rollouts, scored: Scored, advantages: Tensor
) -> dict[str, float | Tensor]:
    """What the rollouts of a step say, before the update."""
    is_distinct = scored.answer_mask & ~scored.repeat_mask
    is_above = scored.vectors > task.minimum  # (P, G, m, k)
    is_earning = is_above & scored.objective_mask[:, None, None]
    metrics = {
        "reward": scored.scalars.mean(),
        "best_in_rollout": scored.scalars.amax(-1).mean(),
        "diversity": diversity(scored.vectors.flatten(1, 2)).mean(),
        "answers": is_distinct.float().mean(),
        "earned": is_earning.any(-1).float().mean(),
        "signal": (advantages != 0).any(1).float().mean(),
        "cut_off": 1 - sum(rollouts.ended) / len(rollouts.ended),
        "rollouts": len(rollouts.texts),
        "tokens": sum(rollouts.lengths),
    }
    means = scored.vectors.mean((0, 1, 2))  # (k)
    for name, mean in zip(task.objectives, means, strict=False):  # without names k may differ
        metrics[f"reward_{name}"] = mean
    return metrics


def sample_record(
    problems: list[Problem], rollouts: Rollouts, scored: Scored, advantages: Tensor
) -> dict:
    """The rollouts of a step's first problem, and the step's best one, for samples.jsonl."""
    records = []
    for g, A in enumerate(advantages[0].tolist()):
        vectors = scored.vectors[0, g].tolist()
        records.append({"text": rollouts.texts[g], "rewards": vectors, "advantage": A})
    best = scored.scalars.amax(-1).argmax().item()  # row p * G + g, the one with the best answer
    best_record = {
        "id": problems[best // len(records)].id,
        "text": rollouts.texts[best],
        "rewards": scored.vectors.flatten(0, 1)[best].tolist(),
    }
    return {
        "problem": dataclasses.asdict(problems[0]),
        "rollouts": records,
        "best": best_record,
    }


class MasterWeightAdamW:
    """torch's AdamW over float32 master weights: steps too small for bfloat16 weights add up."""

    def __init__(self, model: torch.nn.Module):
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.masters = self.weights
        if any(weight.dtype != torch.float32 for weight in self.weights):
            self.masters = [weight.detach().float().clone() for weight in self.weights]
        is_fused = self.weights[0].device.type in ("cpu", "cuda")
        self.adamw = torch.optim.AdamW(
            self.masters, betas=(0.9, 0.999), weight_decay=0.01, fused=is_fused
        )

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every weight once, with this learning rate.

        Gradients of 0 move them, too: by what is left of former steps, and by the weight decay.
        """
        for weight in self.weights:
            if weight.grad is None:  # it took no part, such as an expert that no token chose
                weight.grad = torch.zeros_like(weight)
        self.adamw.param_groups[0]["lr"] = lr
        if self.masters is self.weights:
            self.adamw.step()
            return
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None  # so that only one of them takes memory
        self.adamw.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None
            weight.copy_(master)

    def state_dict(self) -> dict:
        """All that a resumed run needs."""
        masters = [] if self.masters is self.weights else self.masters
        return {"adamw": self.adamw.state_dict(), "masters": masters}

    def load_state_dict(self, state: dict) -> None:
        """Take over a state_dict of the same model."""
        self.adamw.load_state_dict(state["adamw"])
        if self.masters is not self.weights:
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)


# The SFT warm-up.


def start_policy(config: Config, task: Task) -> Policy:
    """The model that all methods start from, before the SFT warm-up.

    Raises:
        UserError: a prompt and its rollout do not fit the model's context, or the tiny model lacks a
            word. This is found before minutes are spent.
    """
    check_task(task, config.m)
    policy = load_start(
        config.model,
        task,
        seed=config.seed,
        device=config.device,
        dtype="float32" if config.warm_steps else config.dtype,
    )
    if config.gradient_checkpointing:
        recompute_layers(policy.model)
    if not policy.is_tiny and policy.tokenizer.chat_template is None:
        print(
            f"--model {config.model}: no chat template, so its prompts are plain text",
            file=sys.stderr,
        )
    n = 2000 if config.data else 32
    for split, m in (("train", 1), ("train", config.m), ("test", 1)):
        problems = held_out(task, split, n)
        prompts = [build_prompt(policy, task, problem, m) for problem in problems]
        longest = sorted(prompts, key=len)[-32:]
        encode_prompts(policy, longest, rollout_length(task, m, config.max_new_tokens))
    # Of a file every demonstration is read, of made-up problems one of each kind.
    n_checked = config.warm_steps if config.data else min(config.warm_steps, SET_EVERY)
    for step in range(n_checked):
        prompts, texts = demonstrations(policy, task, config, step, may_sample=False)
        rollouts_of_texts(policy, prompts, texts)
    return policy


def write_start(policy: Policy, task: Task, config: Config, folder: Path) -> None:
    """Write the start of all methods, after the SFT warm-up.

    A warm-up is kept in runs/start. Another run with the same one does not repeat it.
    """
    if not config.warm_steps:
        write_folder(folder, lambda path: save_model(policy.model, policy.tokenizer, path))
        return
    cached = Path("runs/start") / f"{task.name}-{warm_up_key(policy, task, config)}"
    if not can_be_loaded(cached, task):
        shutil.rmtree(cached, ignore_errors=True)
        warm_up(policy, task, config)
        write_folder(cached, lambda path: save_model(policy.model, policy.tokenizer, path))
    write_folder(folder, lambda path: shutil.copytree(cached, path, dirs_exist_ok=True))


def can_be_loaded(folder: Path, task: Task) -> bool:
    """Whether there is a folder with a model that is not damaged."""
    if not folder.exists():
        return False
    try:
        load_policy(str(folder), task)
    except UserError:
        return False
    return True


def warm_up_key(policy: Policy, task: Task, config: Config) -> str:
    """A digest of all that shapes a warm-up. The first demonstrations stand for the task."""
    recipe = [torch.__version__, torch.get_num_threads(), config.device, config.seed]
    recipe += [
        config.warm_steps,
        config.m,
        config.temperature,
        config.max_new_tokens,
        policy.model.config.to_json_string(),
    ]
    for step in range(SET_EVERY):
        recipe.append(demonstrations(policy, task, config, step, may_sample=False))
    for weight in policy.model.parameters():
        recipe.append(weight.detach().cpu().double().abs().sum().item())
    return hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]


def warm_up(policy: Policy, task: Task, config: Config) -> None:
    """Imitate demonstrations: maximum likelihood with AdamW, a short ramp, then linear decay.

    Raises:
        UserError: the loss is not finite.
    """
    peak = 5e-3 if policy.is_tiny else 2e-5
    rows_at_once = 48 if policy.is_tiny else 1  # demonstrations of a language model may be long
    logprobs_of = token_logprobs if config.plain else fast.token_logprobs
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=peak)
    for step in tqdm(range(config.warm_steps), "SFT warm-up", unit="step"):
        prompts, texts = demonstrations(policy, task, config, step, may_sample=True)
        rollouts = rollouts_of_texts(policy, prompts, texts)
        optimizer.zero_grad()
        for rows in torch.arange(len(texts), device=policy.device).split(rows_at_once):
            logprobs, _ = logprobs_of(policy.model, rollouts, rows, temperature=1.0)
            loss = -logprobs.sum() / sum(rollouts.lengths)
            loss.backward()
            if not loss.isfinite():
                raise UserError(
                    f"SFT warm-up: loss {loss.item()}; are the demonstrations as they should be?"
                )
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        decay = 1 - 0.9 * step / config.warm_steps
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 20) * decay
        optimizer.step()


def demonstrations(
    policy: Policy, task: Task, config: Config, step: int, may_sample: bool
) -> tuple[list[str], list[str]]:
    """The prompts (P) and texts (P * G) that one step imitates. One step in three shows sets of m.

    Nothing in a set is diverse on purpose: its answers are independent. Where a task has one
    reference per problem, a set of a language model holds m single answers that the model samples.

    Args:
        may_sample: whether that is done; else only single answers are shown to a language model.

    Raises:
        UserError: a demonstration is longer than Task.answer_words.
    """
    P, G = (16, 3) if policy.is_tiny else (8, 1)
    shows_sets = step % SET_EVERY == SET_EVERY - 1 and (policy.is_tiny or may_sample)
    m = config.m if shows_sets else 1
    rng = random.Random(f"demonstrations-{config.seed}-{step}")
    problems = take_problems(task, "demonstrations", P, config.seed, start=step * P)
    sets = []  # P * G lists of m answers
    for problem in problems:
        for _ in range(G):
            sets.append([task.demonstration(problem, rng) for _ in range(m)])
    if policy.is_tiny:
        check_lengths(sets, task)
    elif m > 1 and all(len(set(answers)) == 1 for answers in sets):
        sets = own_sets(policy, task, config, problems, sets, step)
    prompts = []
    for i, problem in enumerate(problems):
        prompts.append(build_prompt(policy, task, problem, len(sets[i * G])))
    texts = []
    for i, answers in enumerate(sets):
        _, closing = open_thought(prompts[i // G])
        texts.append(write_answers(task, answers, closing))
    return prompts, texts


def check_lengths(sets: list[list[str]], task: Task) -> None:
    for answer in itertools.chain.from_iterable(sets):
        if not isinstance(answer, str) or len(answer.split()) > task.answer_words:
            raise UserError(
                f"task {task.name}: the demonstration {answer!r:.80} must be text of at most "
                f"answer_words = {task.answer_words} words"
            )


def own_sets(
    policy: Policy,
    task: Task,
    config: Config,
    problems: list[Problem],
    references: list[list[str]],
    step: int,
) -> list[list[str]]:
    """Sets of m answers that the model samples one by one, or the reference alone if they cannot be read."""
    m = config.m
    prompts = [build_prompt(policy, task, problem, 1) for problem in problems]
    generator = random_generator(config.seed, step, "rollouts")
    options = sampling_options(policy, task, config, 1, generator)
    rollouts = sample(policy, prompts, m, options)
    answers_of = read_answers(task, rollouts, 1)  # P * m lists of up to 1
    form = "```python\n{}\n```" if references[0][0].startswith("```") else "{}"
    sets = []
    for i, reference in enumerate(references):
        own = itertools.chain.from_iterable(answers_of[i * m : (i + 1) * m])
        answers = [form.format(answer) for answer in own]
        sets.append(answers if len(answers) == m else reference[:1])
    return sets


# The loop, its checkpoints and logs.


def train_method(method: str, config: Config, task: Task, shows_bar: bool = True) -> None:
    """Train one method from its newest checkpoint, or from the start model.

    Raises:
        UserError: the loss is not finite, or a checkpoint is damaged.
        KeyboardInterrupt: a stop was asked for. Everything is saved.
    """
    folder = Path(config.out) / method
    folder.mkdir(exist_ok=True)
    state = load_state(config, task, folder)
    first = state.step
    log = open_tracker(config.log, folder, first)
    bar = tqdm(
        range(first, config.steps),
        method,
        initial=first,
        total=config.steps,
        unit="step",
        disable=not shows_bar,
    )
    could_read = False  # an answer, in any step of this command
    silent = 0  # steps in a row in which no group had a signal
    was_told = False
    with StopRequest(is_announced=not shows_bar) as stop:
        for t in bar:
            with saved_on_failure(method, state, config, folder), explain_out_of_memory():
                metrics = logged_step(method, state, task, config, folder)
                log(metrics, state.step)
                if is_save_step(config, t + 1) or stop.received:
                    save_state(state, config, folder)
            could_read = could_read or metrics["answers"] > 0
            silent = 0 if metrics["signal"] else silent + 1
            if silent == SILENT_STEPS and not was_told:
                tell_no_signal(method, metrics)
                was_told = True
            bar.set_postfix({name: metrics[name] for name in SHOWN_METRICS})
            if stop.received:
                raise KeyboardInterrupt(
                    f"{method} stopped after step {t + 1} of {config.steps}, everything is saved; go "
                    f"on with: python {sys.argv[0]} --resume --out {config.out}"
                )
    if first < config.steps and not could_read:
        tell_unread(method, config, task, folder / "samples.jsonl")


@contextlib.contextmanager
def saved_on_failure(
    method: str, state: TrainState, config: Config, folder: Path
) -> Iterator[None]:
    """Save the state if a step fails, which is the one before its update if that has failed.

    Raises:
        UserError: names the step, and the checkpoint from which --resume goes on.
    """
    step = state.step + 1
    try:
        yield
    except Exception as error:
        is_full = isinstance(error, OSError)  # a log could not be written
        if state.step > steps_done(folder) and not is_full:
            state.policy.model.zero_grad()  # makes room
            with contextlib.suppress(Exception):  # the weights may be ruined
                save_state(state, config, folder)
        if not isinstance(error, UserError | OSError):
            raise
        saved = checkpoints(folder)
        good = saved[-1] if saved else "none was due yet, --resume begins anew"
        raise UserError(
            f"{method}, step {step}: {error}; the last good checkpoint: {good}"
        ) from error


def is_save_step(config: Config, step: int) -> bool:
    """Whether a checkpoint is due after this many updates."""
    if step == config.steps:
        return True
    return config.save_every > 0 and step % config.save_every == 0


def logged_step(
    method: str, state: TrainState, task: Task, config: Config, folder: Path
) -> dict[str, float]:
    """One training step, its logs and, if one is due, its snapshot. Returns the metrics."""
    began = time.perf_counter()
    result = train_step(method, state, task, config)
    metrics = {}
    for name, value in result.metrics.items():
        metrics[name] = value.item() if isinstance(value, Tensor) else value
    seconds = time.perf_counter() - began
    if state.step == 1 and not config.is_tiny:
        show_first_step(method, config, task, result.example, metrics)
        if config.device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"{method}: the first step took {peak:.1f} GiB at most", file=sys.stderr)
    metrics["tokens_per_second"] = metrics["tokens"] / seconds
    metrics["seconds"] = seconds
    append(folder / "metrics.jsonl", {"step": state.step} | metrics)
    if state.step % 10 == 1 or state.step == config.steps:
        append(folder / "samples.jsonl", {"step": state.step} | result.example)
    if is_snapshot_step(config, state.step):
        take_snapshot(method, state, task, config, folder)
    return metrics


def take_snapshot(method: str, state: TrainState, task: Task, config: Config, folder: Path) -> None:
    """Keep what the policy answers to a few held-out problems. Its random numbers are its own."""
    problems = held_out(task)
    m = answers_per_rollout(method, config.m)
    pool = sample_pool(
        state.policy,
        task,
        problems,
        config,
        m=m,
        size=min(30, config.pool),
        temperature=config.eval_temperature,
    )
    rewards = [pool.rewards[i][:, mask] for i, mask in enumerate(pool.objective_mask)]
    write_snapshot(folder / "snapshots.jsonl", state.step, problems, pool.answers, rewards)


def load_state(config: Config, task: Task, folder: Path) -> TrainState:
    """The state in a method's newest checkpoint, else in the start model. Its logs are cut there.

    Raises:
        UserError: a file is missing or damaged.
    """
    for leftover in folder.glob("checkpoint-*.tmp*"):  # of a process that was killed while saving
        shutil.rmtree(leftover)
    start = Path(config.out) / "start"
    saved = checkpoints(folder)
    newest = saved[-1] if saved else start

    policy = load_policy(str(newest), task, device=config.device, dtype=config.dtype)
    if config.lora_rank and not saved:
        torch.manual_seed(config.seed)  # from which peft draws the adapter
        add_adapter(policy.model, config.lora_rank)
    if config.gradient_checkpointing:
        recompute_layers(policy.model)
    reference = reference_policy(config, task, start, policy)
    state = TrainState(policy, reference, MasterWeightAdamW(policy.model), step=0)
    if saved:
        load_trainer(state, newest, config.steps)
    for log in LOGS:  # so that no step is logged twice
        cut_log(folder / f"{log}.jsonl", state.step)
    return state


def reference_policy(config: Config, task: Task, start: Path, policy: Policy) -> Policy | None:
    """The start model, None without KL; with an adapter the policy, whose adapter is switched off."""
    if not config.kl:
        return None
    if config.lora_rank:
        return policy
    return load_policy(str(start), task, device=config.device, dtype=config.dtype)


def load_trainer(state: TrainState, folder: Path, steps: int) -> None:
    """Read what a checkpoint holds beside the weights: nothing, if it is the last of all steps.

    Raises:
        UserError: it cannot be read.
    """
    path = folder / "trainer.pt"
    if steps_done(folder.parent) == steps and not path.exists():
        state.step = steps
        return
    try:
        trainer = torch.load(path, map_location="cpu", weights_only=True)
        state.optimizer.load_state_dict(trainer["optimizer"])
        state.step = trainer["step"]
    except Exception as error:  # of a damaged file there are many kinds
        raise UserError(
            f"{path}: missing or damaged ({error!s:.100}); delete the folder {folder}, and --resume "
            "does without it"
        ) from error


def save_state(state: TrainState, config: Config, folder: Path) -> None:
    """Write a checkpoint, and delete older ones.

    The last two are kept. With --save-every 0 it is the last one, and so it is when all steps are
    done; then the optimizer's state is left out, unless --keep-optimizer.

    Raises:
        UserError: the weights are not finite.
    """
    if not all(weight.isfinite().all() for weight in state.policy.model.parameters()):
        raise UserError("the weights are not finite: try a lower --lr")

    is_finished = state.step == config.steps and not config.keep_optimizer
    is_from_hub = not config.warm_steps and not Path(config.model).exists()

    def write(path: Path) -> None:
        save_model(state.policy.model, state.policy.tokenizer, path)
        if config.lora_rank:
            link_start(path, Path("../../start"), config.model if is_from_hub else "")
        if is_finished:
            return
        trainer = {"optimizer": state.optimizer.state_dict(), "step": state.step}
        torch.save(trainer, path / "trainer.pt")

    write_folder(folder / f"checkpoint-{state.step:06d}", write)
    n_kept = 1 if is_finished or not config.save_every else 2
    for old in checkpoints(folder)[:-n_kept]:
        shutil.rmtree(old)


# The command.


def run(argv: list[str]) -> None:
    """Train what the flags ask for, then evaluate it."""
    config, task, stored = read_config(argv, __doc__.split("\n\n")[0])
    out = Path(config.out)
    if is_training(out):
        raise UserError(
            f"--out {out}: another train.py is writing to it; wait, or take another name"
        )
    resolve(config)
    check(config, task)
    if config.lora_rank:
        check_peft(f"--lora-rank {config.lora_rank}")
    if is_adapter(config.model):
        raise UserError(
            f"--model {config.model}: an adapter, not a model; merge it first (merge_and_unload of peft)"
        )
    if config.is_tiny or config.jobs > 1:
        torch.set_num_threads(1)  # so that no number depends on the machine's cores
    jobs = jobs_of(config)
    if jobs > 1:
        prepare_processes()
    train_run(config, task, stored, argv, jobs)


def train_run(
    config: Config, task: Task, stored: StoredRun | None, argv: list[str], jobs: int
) -> None:
    """Write the start model if there is none yet, train all methods, and evaluate them."""
    out = Path(config.out)
    if stored and all(steps_done(out / method) == config.steps for method in config.method):
        way_on = f"to go on: --resume --steps {2 * config.steps}"
        if not (checkpoints(out / config.method[0])[-1] / "trainer.pt").exists():
            way_on = "it was trained without --keep-optimizer, so it cannot go on"
        print(
            f"{out}: all {config.steps} steps are done, nothing is left to train; {way_on}",
            file=sys.stderr,
        )
    needs_start = stored is None or not (out / "start").exists()
    start = start_policy(config, task) if needs_start else None
    with claim(config, argv, stored):
        if start is not None:
            write_start(start, task, config, out / "start")
        names = ", ".join(config.method)
        print(f"{names} on {config.device}, {disk_line(config, jobs)}", file=sys.stderr)
        train_methods(config, task, jobs)
    if config.eval_problems:
        evaluate([out], device=config.device, jobs=jobs)
        return
    newest = [str(checkpoints(out / method)[-1]) for method in config.method]
    print(f"checkpoints: {', '.join(newest)}\ntable and figures: python eval.py {out}")


def train_methods(config: Config, task: Task, jobs: int) -> None:
    """Train all methods, several at a time where --jobs says so."""
    if jobs == 1:
        for method in config.method:
            train_method(method, config, task)
        return
    bars = {}
    width = max(map(len, config.method))
    for position, method in enumerate(config.method):
        bars[method] = tqdm(
            desc=f"{method:{width}}",
            initial=steps_done(Path(config.out) / method),
            total=config.steps,
            unit="step",
            position=position,
        )

    def watch() -> None:
        for method, bar in bars.items():
            row = last_record(Path(config.out) / method / "metrics.jsonl", *SHOWN_METRICS)
            if row and row["step"] != bar.n:
                if bar.n == bar.initial:  # a method that had to wait begins to count now
                    bar.unpause()
                bar.set_postfix({name: row[name] for name in SHOWN_METRICS}, refresh=False)
                bar.update(row["step"] - bar.n)

    work = {method: (method, config) for method in config.method}
    with StopRequest() as stop:
        try:
            run_all(train_alone, work, jobs, was_stopped=lambda: stop.received, watch=watch)
        finally:
            for bar in bars.values():
                bar.close()
    if stop.received:
        raise KeyboardInterrupt(
            f"training is complete; for the table and figures: python eval.py {config.out}"
        )


def train_alone(method: str, config: Config) -> None:
    """Train one method in a process of its own, whose progress another one shows."""
    if method not in ADVANTAGES:
        raise UserError(
            f"--jobs {config.jobs}: a process of its own does not know the method {method}; add it "
            "to vpo.ADVANTAGES where a file is imported, not under __main__, or take --jobs 1"
        )
    with explain_out_of_memory():
        train_method(method, config, task_of(config), shows_bar=False)


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    as_command("train.py", lambda: run(arguments))


if __name__ == "__main__":
    main()
