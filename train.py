"""Training: SFT warm-up, then GRPO, VPO and others from the same start, then their comparison.

    python train.py                          the main job: maze, GRPO, VPO and Group VPO, on a laptop
    python train.py --method multi_rlvr      one more method for the same comparison
    python train.py --task code              the same comparison on programs, judged test by test
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
docs/reference.md has the whole list.

All random numbers of step t come from generators seeded by (seed, t). Weights, the optimizer's moments
and t are all that a resume needs.
"""

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from engine.advice import show_first_rollout, tell_unread
from engine.checkpoints import TrainState, checkpoints, load_state, save_state
from engine.checks import check_advantages
from engine.config import Config, Parser, as_command, parse
from engine.evaluations import held_out, is_snapshot_step, write_snapshot
from engine.files import append
from engine.interrupt import StopRequest
from engine.kinds import kind_named
from engine.memory import (
    StepPrompts,
    explain_out_of_memory,
    memory_limit,
    planned_bytes,
    print_plan,
    return_freed_memory,
)
from engine.models import Tokenizer, load_config_and_tokenizer
from engine.prepare import PreparedRun, prepare
from engine.processes import (
    jobs_of,
    progress_line,
    run_all,
    settle_jobs,
)
from engine.run_folder import claim, steps_done, task_like
from engine.trackers import open_tracker
from engine.update import MicroBatch, micro_batches, rows_to_compute
from engine.warmup import start_model, write_goal_start, write_start
from eval import Policy, diversity, evaluate_runs, sample_pool
from rewards import Problem, Task, UserError, take_problems
from rollout import (
    Rollouts,
    SamplingOptions,
    Scored,
    build_prompt,
    sample,
    sampling_options,
    score_texts,
)
from tasks import as_user_error
from vpo import ADVANTAGES, answers_per_rollout, policy_loss, sample_weights

SHOWN_METRICS = ("reward", "diversity", "entropy", "tokens_per_second")
LOSS_METRICS = ("loss", "policy_loss", "clip_fraction", "entropy")
USAGE = "[--task TASK] [--method METHOD ...] [--out FOLDER] [--resume] [--FLAG VALUE ...]"


@dataclass
class StepResult:
    """What a training step leaves for the logs."""

    metrics: dict[str, float | torch.Tensor]  # each is explained in docs/reference.md
    example: dict  # the rollouts of the step's first problem


def train_step(method: str, state: TrainState, task: Task, config: Config) -> StepResult:
    """One update of a method: the algorithm box of the paper."""
    model = state.model
    t = state.step
    m = answers_per_rollout(method, config.m)

    problems, prompts = build_batch(method, state.tokenizer, task, config, t)  # P each
    options = step_options(state, task, config, m)
    rollouts = sample(model, state.tokenizer, prompts, config.group_size, options)  # P * G
    scored = score_texts(task, problems, rollouts.texts, m, finished=rollouts.ended)  # (P, G, m)
    advantages = step_advantages(method, scored, task, config, t)  # (P, G)

    row_advantages = advantages.flatten().to(model.device)  # (P * G), row p * G + g
    # Without a KL term a rollout whose advantage is 0 has no gradient and is left out. Its tokens count.
    rows = rows_to_compute(row_advantages, with_reference=state.reference is not None)
    n_tokens = sum(rollouts.lengths)
    metrics = dict.fromkeys(LOSS_METRICS, 0.0)  # there may be no row to compute
    # A prompt is computed once for its rollouts. The generator passes their gradients on through it
    # after its last micro-batch, so the loop must run to its end.
    for batch in micro_batches(
        model,
        state.reference,
        rollouts,
        rows,
        temperature=config.temperature,
        token_budget=config.micro_batch_tokens,
    ):
        loss, loss_metrics = policy_loss(
            batch.logprobs,
            batch.old_logprobs,
            row_advantages[batch.rows],
            batch.token_mask,
            n_tokens,
            ref_logprobs=batch.ref_logprobs,
            kl_coef=config.kl,
        )
        loss.backward()
        loss_metrics |= {"loss": loss.detach(), "entropy": mean_entropy(batch, rollouts, rows)}
        for name, value in loss_metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value  # only a KL term adds the name kl

    metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(state.optimizer.parameters, 1.0)
    lr = learning_rate(config, method, t)
    state.optimizer.step(lr)
    model.zero_grad()
    state.step += 1
    metrics["lr"] = lr
    metrics |= step_metrics(task, rollouts, scored, advantages)
    return StepResult(metrics, sample_record(problems, rollouts, scored, advantages))


def build_batch(
    method: str, tokenizer: Tokenizer, task: Task, config: Config, t: int
) -> tuple[list[Problem], list[str]]:
    """The problems and prompts of step t, P each, so that every method samples equally many answers."""
    m = answers_per_rollout(method, config.m)
    # With 12 prompts per step and --m 3 VPO has 12, GRPO 36.
    P = config.prompts_per_step * config.m // m
    problems = take_problems(task, "train", P, config.seed, t * P)
    goals = [None] * P
    if method == "goal_conditioned":  # the preference weights that its advantage will draw
        generator = weight_generator(config, t)
        k = len(task.objectives)
        goals = sample_weights(P, k, alpha=config.alpha, generator=generator).tolist()
    prompts = []
    for problem, goal in zip(problems, goals, strict=True):
        prompts.append(build_prompt(tokenizer, task, problem, m, goal))
    return problems, prompts


def step_options(state: TrainState, task: Task, config: Config, m: int) -> SamplingOptions:
    """How the rollouts of a step are sampled."""
    return sampling_options(
        state.tokenizer,
        task,
        m,
        config.max_new_tokens,
        temperature=config.temperature,
        batch=config.sampling_batch,
        generator=rollout_generator(config, state.step, state.model.device),
    )


def step_advantages(
    method: str, scored: Scored, task: Task, config: Config, t: int
) -> torch.Tensor:
    """The advantages (P, G) of a step's rollouts, from the method's function in vpo.py."""
    with as_user_error(f"method {method} failed"):
        advantages = ADVANTAGES[method](
            scored.vectors,
            scored.scalars,
            scored.answer_mask,
            objective_mask=scored.objective_mask,
            n_weights=config.n_weights,
            alpha=config.alpha,
            sampler=config.sampler,
            subset=config.subset,
            missing_answer_reward=task.minimum,
            generator=weight_generator(config, t),
        )
    check_advantages(method, advantages, scored.scalars.shape[:2])
    return advantages


def rollout_generator(config: Config, t: int, device: torch.device) -> torch.Generator:
    """What the rollouts of step t are drawn from."""
    return torch.Generator(device).manual_seed(2 * (config.seed * 1_000_003 + t))


def weight_generator(config: Config, t: int) -> torch.Generator:
    """What the preference weights of step t are drawn from. They share no noise with its rollouts."""
    return torch.Generator().manual_seed(2 * (config.seed * 1_000_003 + t) + 1)


def learning_rate(config: Config, method: str, t: int) -> float:
    """Of step t, counted from 0: the peak, times a rise over 10 steps, times the decay.

    A linear decay falls from 1 to a tenth over all steps, so the peak itself is not reached.
    """
    peak = config.lr or kind_named(config.model).peak_lr(config, method)
    decay = 1.0
    if config.lr_schedule == "linear":
        decay = 1.0 - 0.9 * t / config.steps
    return peak * min(1.0, (t + 1) / 10) * decay


def mean_entropy(batch: MicroBatch, rollouts: Rollouts, rows: list[int]) -> torch.Tensor:
    """A micro-batch's part of the mean entropy over the tokens of all computed rows.

    The loss is a mean over all tokens instead: rows without a gradient count as zeros there.
    """
    return batch.entropy.sum() / sum(rollouts.lengths[row] for row in rows)


def step_metrics(
    task: Task, rollouts: Rollouts, scored: Scored, advantages: torch.Tensor
) -> dict[str, float | torch.Tensor]:
    """What the rollouts of a step say, before the update."""
    metrics = {
        "reward": scored.scalars.mean(),
        "best_in_rollout": scored.scalars.amax(-1).mean(),
        "diversity": diversity(scored.vectors.flatten(1, 2)).mean(),
        "answers": scored.answer_mask.float().mean(),
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
    problems: list[Problem], rollouts: Rollouts, scored: Scored, advantages: torch.Tensor
) -> dict:
    """The rollouts of a step's first problem, for samples.jsonl."""
    records = []
    for g, A in enumerate(advantages[0].tolist()):
        vectors = scored.vectors[0, g].tolist()
        records.append({"text": rollouts.texts[g], "rewards": vectors, "advantage": A})
    return {"problem": dataclasses.asdict(problems[0]), "rollouts": records}


@dataclass
class Trainer:
    """The training of one method: its logs and checkpoints go to folder = OUT/METHOD."""

    method: str
    config: Config
    task: Task
    folder: Path
    device: str
    stop: StopRequest

    def train(self) -> None:
        """Train from the newest checkpoint, or from the start model.

        Raises:
            UserError: the loss is not finite, or a checkpoint is damaged.
            KeyboardInterrupt: a stop was asked for. Everything is saved.
        """
        config = self.config
        self.folder.mkdir(exist_ok=True)
        write_goal_start(self.method, config, self.task, self.folder)
        state = load_state(config, self.task, self.folder, self.device)
        first = state.step
        bar = tqdm(
            range(first, config.steps),
            initial=first,
            total=config.steps,
            desc=self.method,
            unit="step",
            position=progress_line(),
        )
        could_read = False  # an answer, in any step of this command
        with contextlib.closing(open_tracker(config.log, self.folder, first)) as tracker:
            for t in bar:
                with self.located(t):
                    metrics = self.step(state)
                    tracker.log(state.step, metrics)
                    could_read = could_read or metrics["answers"] > 0
                    is_save_step = (t + 1) % config.save_every == 0 or t + 1 == config.steps
                    is_stopping = self.stop.received
                    if is_save_step or is_stopping:
                        save_state(state, self.folder)
                bar.set_postfix({name: metrics[name] for name in SHOWN_METRICS})
                if is_stopping:
                    raise KeyboardInterrupt(
                        f"{self.method} stopped after step {t + 1} of {config.steps}, everything is "
                        f"saved; go on with: python train.py --resume --out {self.folder.parent}"
                    )
        if first < config.steps and not could_read:
            tell_unread(self.method, config, self.task, self.folder / "samples.jsonl")

    @contextlib.contextmanager
    def located(self, t: int) -> Iterator[None]:
        """Name method, step and last good checkpoint in an error."""
        try:
            yield
        except UserError as error:
            saved = checkpoints(self.folder)
            good = saved[-1] if saved else "none was due yet"
            raise UserError(
                f"{self.method}, step {t + 1}: {error}; the last good checkpoint: {good}"
            ) from error

    def step(self, state: TrainState) -> dict[str, float]:
        """One training step, its logs and, if one is due, its snapshot. Returns the metrics."""
        began = time.perf_counter()
        # The tiny model frees little, and to fetch it again would take a twentieth of a step.
        if self.device == "cpu" and kind_named(self.config.model).is_pretrained:
            return_freed_memory()
        with explain_out_of_memory(self.device):
            result = train_step(self.method, state, self.task, self.config)
        metrics = {}
        for name, value in result.metrics.items():
            metrics[name] = value.item() if isinstance(value, torch.Tensor) else value
        seconds = time.perf_counter() - began
        if state.step == 1 and kind_named(self.config.model).is_pretrained:
            show_first_rollout(self.method, self.config, self.task, result.example, metrics)
        if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
            fix = "try a lower --lr"
            if state.step == 1:
                fix = "no update came before, so look for the cause in the model or the loss"
            raise UserError(f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}: {fix}")
        metrics["tokens_per_second"] = metrics["tokens"] / seconds
        metrics["seconds"] = seconds
        append(self.folder / "metrics.jsonl", {"step": state.step} | metrics)
        if state.step % 10 == 1 or state.step == self.config.steps:
            append(self.folder / "samples.jsonl", {"step": state.step} | result.example)
        if is_snapshot_step(self.config, state.step):
            self.take_snapshot(state)
        return metrics

    def take_snapshot(self, state: TrainState) -> None:
        """What the policy answers to a few held-out problems. Its random numbers are its own."""
        config = self.config
        policy = Policy(
            self.method,
            state.model,
            state.tokenizer,
            answers_per_rollout(self.method, config.m),
        )
        problems = held_out(self.task)
        with explain_out_of_memory(self.device):
            pool = sample_pool(
                policy,
                self.task,
                problems,
                config,
                size=min(30, config.pool),
                temperature=config.eval_temperature,
                in_training=True,
            )
        log = self.folder / "snapshots.jsonl"
        write_snapshot(log, state.step, problems, pool.answers, pool.vectors())


def run(argv: list[str], parser: Parser) -> None:
    """Train what the flags ask for, then evaluate it."""
    config, flags_given = parse(parser, Config, argv)
    prepared = prepare(config, flags_given)
    config = prepared.config
    if config.plan is not None:
        print_plan(config, prepared.task, prepared.device, step_prompts(config, prepared.task))
        return
    settle_jobs(
        config,
        prepared.device,
        need=lambda: planned_bytes(
            config, prepared.task, prepared.device, step_prompts(config, prepared.task)
        ),
        limit=memory_limit(config, prepared.device),
    )
    with explain_out_of_memory(prepared.device):
        train_run(prepared, argv)


def train_run(prepared: PreparedRun, argv: list[str]) -> None:
    """Write the start model if there is none yet, train all methods, and evaluate them."""
    config = prepared.config
    out = Path(config.out)
    if all(steps_done(out / method) == config.steps for method in config.method):
        print(
            f"{out}: all {config.steps} steps are done, nothing is left to train; to go on: "
            f"python train.py --resume --steps {2 * config.steps} --out {out}",
            file=sys.stderr,
        )
    needs_start = prepared.needs_start()
    start = start_model(config, prepared.task, prepared.device) if needs_start else None
    with claim(config, argv, prepared.stored):
        if needs_start:
            write_start(config, prepared.task, out / "start", start)
            del start  # makes room
        with StopRequest() as stop:
            train_methods(config, prepared.task, prepared.device, stop)
        if stop.received:
            raise KeyboardInterrupt(
                f"training is complete; for the table and figures: python eval.py {out}"
            )
    if config.eval_problems:
        evaluate_runs([out], device=prepared.device, jobs=config.jobs)
        return
    newest = [str(checkpoints(out / method)[-1]) for method in config.method]
    print(f"checkpoints: {', '.join(newest)}\ntable and figures: python eval.py {out}")


def train_methods(config: Config, task: Task, device: str, stop: StopRequest) -> None:
    """Train all methods, several at a time where --jobs says so."""
    jobs = jobs_of(config, device)

    def train(method: str) -> None:
        own_task = task if jobs == 1 else task_like(config)  # a process needs a sandbox of its own
        Trainer(method, config, own_task, Path(config.out) / method, device, stop).train()

    work = {method: functools.partial(train, method) for method in config.method}
    run_all(work, jobs, stop)


def step_prompts(config: Config, task: Task) -> dict[str, StepPrompts]:
    """The prompts of each method's first step, from which its memory is computed."""
    _, tokenizer = load_config_and_tokenizer(config.model, task)
    by_method = {}
    for method in config.method:
        m = answers_per_rollout(method, config.m)
        _, prompts = build_batch(method, tokenizer, task, config, t=0)
        options = sampling_options(tokenizer, task, m, config.max_new_tokens)
        by_method[method] = StepPrompts(prompts, options.max_new_tokens)
    return by_method


def main(argv: list[str] | None = None) -> None:
    parser = Parser("train.py", __doc__, USAGE)
    arguments = sys.argv[1:] if argv is None else argv
    as_command(parser, lambda: run(arguments, parser))


if __name__ == "__main__":
    main()
