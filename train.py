"""Training: SFT warm-up, then GRPO, VPO and others from the same start, then their comparison.

    python train.py --task fence             three methods paint fences: a minute on a laptop
    python train.py                          the main job: mazes, GRPO, VPO and Group VPO
    python train.py --method multi_rlvr      one more method for the same comparison
    python train.py --resume                 go on where a killed run stopped, bit for bit on a CPU

A step: problems -> prompts -> rollouts -> answers -> vectors -> advantages -> loss -> update.
By default fast/ samples and computes the gradient. The plain versions, here and in rollout.py, do
the same and run with --plain.

Departures from the paper that matter here; docs/paper.md has all of them:
1. All methods sample equally many answers: a single-answer method gets m times as many prompts.
2. The learning rate rises, then falls linearly. The paper's is constant: `--lr-schedule constant`.
3. The tiny model first imitates demonstrations. All methods start there: their reference policy.
4. One update takes the whole batch. The paper's two take half of the prompts each: `--updates 2`.

All flags are fields of `Config` in engine/config.py. All random numbers of step t come from
generators seeded by (seed, t). A resume needs the weights, the optimizer's moments and t alone.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # even with PYTHONSAFEPATH set
from engine import is_no_part_of_python

sys.path.sort(key=is_no_part_of_python)  # a user's queue.py hides no module of Python
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import fast
from engine.bars import progress_bar
from engine.config import Config, check, check_advantages, options_of, peak_rate, resolve
from engine.errors import as_command, way_on
from engine.runs import claimed, read_config
from engine.tasks import held_out, take_problems
from engine.training import checkpoints
from engine.training.jobs import jobs_of, train_methods
from engine.training.logs import MethodLog, sample_record, snapshot_steps
from engine.training.start import start_policy, write_start
from eval import EvalFlags, diversity, evaluate, measure, sample_pool, weighted_best_at_k
from rewards import Problem, Task, UserError
from rollout import (
    Policy,
    Rollouts,
    build_prompt,
    random_generator,
    read_answers,
    rollouts_of_texts,
    sample,
    sampling_options,
    score,
    token_logprobs,
    write_rollout,
)
from vpo import ADVANTAGES, Scored, answers_per_rollout, policy_loss


@dataclass
class TrainState:
    """The state of a method's training."""

    policy: Policy
    reference: Policy | None  # the reference policy: the frozen start; None without KL
    optimizer: checkpoints.MasterWeightAdamW
    peak_lr: float
    step: int  # training steps done


def train_step(
    method: str, state: TrainState, task: Task, config: Config
) -> tuple[dict[str, float | Tensor], dict]:
    """One step of a method, such as Vector Policy Optimization: metrics, and rollouts to read."""
    t = state.step
    policy = state.policy
    m = answers_per_rollout(method, config.m)
    P = config.groups_per_step(method)

    # 1. rollouts: G of each prompt
    problems = take_problems(task, "train", P, config.seed, start=t * P)
    prompts = [build_prompt(policy, task, problem, m) for problem in problems]
    generator = random_generator(config.seed, t, "rollouts")
    options = sampling_options(policy, task, config, m, generator)
    sampler = sample if config.plain else fast.sample  # the same, on a card sooner
    rollouts = sampler(policy, prompts, config.group_size, options)  # P * G

    # 2. reward vectors
    answers = read_answers(task, rollouts, m)  # P * G lists of up to m
    scored = score(task, problems, answers, m)  # (P, G, m, d)

    # 3. advantages
    method_options = options_of(config, random_generator(config.seed, t, "weights"))
    advantages = ADVANTAGES[method](scored, method_options)  # (P, G)
    check_advantages(method, advantages, scored)

    # 4. gradient and update; of several updates each takes its own part of the groups
    lr = learning_rate(state.peak_lr, t, config)
    gradient = backward if config.plain else fast.backward  # the same gradient, sooner
    n_groups = P // config.updates
    for first in range(0, P, n_groups):
        part = rollouts.groups(first, first + n_groups)
        row_advantages = advantages[first : first + n_groups].flatten()  # row p * G + g
        metrics = gradient(policy, state.reference, part, row_advantages.to(policy.device), config)
        norm = torch.nn.utils.clip_grad_norm_(state.optimizer.weights, 1.0)
        if not norm.isfinite():  # an update would ruin the weights
            problem = f"diverged: loss {metrics['loss']:.3g}, gradient norm {norm:.3g}"
            raise UserError(f"{problem}; try a lower --lr")
        state.optimizer.step(lr)
        policy.model.zero_grad()
    state.step += 1
    metrics |= {"lr": lr, "grad_norm": norm}
    metrics |= step_metrics(task, problems, answers, rollouts, scored, advantages, config.m)
    return metrics, sample_record(task, prompts, problems, answers, rollouts, scored, advantages)


def train_method(method: str, config: Config, task: Task, position: int = 0) -> None:
    """Train one method from its newest checkpoint or the start. Its bar is on line `position`."""
    folder = Path(config.out) / method
    policy, reference, optimizer, step = checkpoints.load(config, task, folder)
    state = TrainState(policy, reference, optimizer, peak_rate(config, method), step)
    log = MethodLog(method, config, task, step)
    m = answers_per_rollout(method, config.m)
    if step == 0:
        log_held_out(log, policy, task, config, m, 0)
    steps = range(step, config.steps)
    bar = progress_bar(
        steps, method, initial=step, total=config.steps, unit="step", position=position
    )
    for _ in bar:
        began = time.perf_counter()
        metrics, example = train_step(method, state, task, config)
        metrics["seconds"] = time.perf_counter() - began
        bar.set_postfix(log.write(state.step, metrics, example), refresh=False)
        log_held_out(log, policy, task, config, m, state.step)
        if checkpoints.is_due(config, state.step):
            checkpoints.save(policy, optimizer, state.step, config, folder)


# Its parts.


def backward(
    policy: Policy, reference: Policy | None, rollouts: Rollouts, advantages: Tensor, config: Config
) -> dict[str, Tensor]:
    """Add the gradient of the loss to that of the weights. Without --plain `fast.backward` runs.

    The loss is a mean over all sampled tokens. The rollouts go through the model in micro-batches.
    One number of tokens divides the losses of all of them, so their gradients add up to that of the
    whole batch. A rollout with an advantage of 0 counts in that number, and the KL term pulls it to
    the reference policy.

    Args:
        reference: the reference policy of the KL term; None: there is no such term.
        advantages: (P * G).

    Returns:
        The metrics of `policy_loss`, the loss, and the entropy in nats per token.
    """
    temperature = config.temperature
    n_tokens = sum(rollouts.lengths)
    n_rows = micro_batch_rows(rollouts, config)
    metrics: dict[str, Tensor] = {}
    for rows in torch.arange(len(advantages), device=policy.device).split(n_rows):
        # 1. log-probabilities under the policy
        logprobs, entropy = token_logprobs(policy.model, rollouts, rows, temperature)  # (B, T)
        if not config.entropy_coef:
            entropy = entropy.detach()  # or the logits of all chunks would be kept for it

        # 2. and under the reference policy
        ref_logprobs = None
        if reference is not None:
            with torch.no_grad(), reference.adapter_off():  # with LoRA it is the policy itself
                ref_logprobs, _ = token_logprobs(reference.model, rollouts, rows, temperature)

        # 3. the loss of these rollouts, and its gradient
        loss, parts = policy_loss(
            logprobs,
            rollouts.logprobs[rows],  # of the policy that sampled
            advantages[rows],
            rollouts.token_mask[rows],
            n_tokens,
            ref_logprobs=ref_logprobs,
            kl_coef=config.kl,
            entropy=entropy,
            entropy_coef=config.entropy_coef,
        )
        loss.backward()
        parts |= {"loss": loss.detach(), "entropy": entropy.detach().sum() / n_tokens}
        for name, value in parts.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return metrics


def learning_rate(peak: float, t: int, config: Config) -> float:
    """The rate of step t, from 0: the peak; if linear, times a rise at first, times a decay."""
    if config.lr_schedule == "constant":
        return peak
    decay = 1.0 - 0.9 * t / config.steps
    n_rising = max(1, min(10, config.steps // 6))  # in a short run the decay would eat the peak
    return peak * min(1.0, (t + 1) / n_rising) * decay


def step_metrics(
    task: Task,
    problems: list[Problem],
    answers: list[list[str]],
    rollouts: Rollouts,
    scored: Scored,
    advantages: Tensor,
    m: int,
) -> dict[str, float | Tensor]:
    """Metrics of a step's rollouts. W@m, VPO's objective, is logged for every method."""
    G = advantages.shape[1]
    forms = set()  # the distinct answers of each group
    for row, row_answers in enumerate(answers):
        p = row // G
        forms |= {(p, str(task.canonical(problems[p], answer))) for answer in row_answers}
    if scored.vectors.shape[2] == 1:  # single answers: m of a prompt's G rollouts form a set
        sets = scored.vectors[:, :, 0]  # (P, G, d)
        objective_mask = scored.objective_mask
    else:
        sets = scored.vectors.flatten(0, 1)  # (P * G, m, d) the answers of each rollout
        objective_mask = scored.objective_mask.repeat_interleave(G, 0)
    m = min(m, sets.shape[1])
    is_distinct = scored.answer_mask & ~scored.repeat_mask
    is_rewarded = (scored.vectors > task.minimum) & scored.objective_mask[:, None, None]
    metrics = {
        # the mean task scalar of all answers, and of the best answer of each rollout
        "reward": scored.scalars.mean(),
        "best_in_rollout": scored.scalars.amax(-1).mean(),
        # the expected utility of the best of m answers under random preferences
        "W@m": weighted_best_at_k(sets, m, objective_mask, n_weights=512).mean(),
        # the mean distance between the reward vectors of two answers to a prompt
        "diversity": diversity(scored.vectors.flatten(1, 2)).mean(),
        # shares of the places for answers: distinct in their rollout, in their group, with a reward
        "answers": is_distinct.float().mean(),
        "distinct": len(forms) / is_distinct.numel(),
        "rewarded": is_rewarded.any(-1).float().mean(),
        # shares of the groups with an advantage, and of the rollouts that were cut off
        "signal": (advantages != 0).any(1).float().mean(),
        # the largest difference between two rewards in a group; much below 1e-5 it is rounding
        "gap": (scored.vectors.amax((1, 2)) - scored.vectors.amin((1, 2))).max(),
        "cut_off": 1 - sum(rollouts.ended) / len(rollouts.ended),
        "rollouts": len(rollouts.texts),
        "tokens": sum(rollouts.lengths),
    }
    means = scored.vectors.mean((0, 1, 2))  # (d)
    rewarded = is_rewarded.float().mean((0, 1, 2))  # (d)
    for i, name in enumerate(task.objectives):  # without names d may differ
        metrics |= {f"reward_{name}": means[i], f"rewarded_{name}": rewarded[i]}
    return metrics


def micro_batch_rows(rollouts: Rollouts, config: Config) -> int:
    """How many rollouts go through the model at a time."""
    if not config.micro_batch_tokens:
        return len(rollouts.tokens)
    width = rollouts.prompt_ids.shape[1] + rollouts.tokens.shape[1]  # padded tokens of a row
    return max(1, config.micro_batch_tokens // width)


def log_held_out(
    log: MethodLog, policy: Policy, task: Task, config: Config, m: int, step: int
) -> None:
    """Log, where they are due after a step, answers for page and film, and measures of validation problems."""
    if step in snapshot_steps(config):
        problems = held_out(task, "test", 4)
        pool = sample_pool(policy, task, problems, config, m, min(30, config.pool))
        log.write_snapshot(step, pool)
    if config.eval_every and step % config.eval_every == 0:
        problems = held_out(task, "validation", 20)
        pool = sample_pool(policy, task, problems, config, m, config.pool)
        log.write_evaluation(step, measure(pool, task))


# The SFT warm-up.


def warm_up(policy: Policy, task: Task, config: Config) -> None:
    """Imitate demonstrations: maximum likelihood with AdamW, a short ramp, then linear decay."""
    peak = 5e-3 if policy.is_tiny else 2e-5  # random weights bear far larger steps
    if config.lora_rank and not policy.is_tiny:
        peak = 2e-4  # of an adapter
    logprobs_of = token_logprobs if config.plain else fast.token_logprobs
    optimizer = checkpoints.MasterWeightAdamW(policy.model, may_fuse=False)  # as in stored runs
    for step in progress_bar(range(config.warm_steps), "SFT warm-up", unit="step"):
        prompts, texts = demonstrations(policy, task, config, step)
        rollouts = rollouts_of_texts(policy, prompts, texts)
        policy.model.zero_grad()
        # Undivided, the tiny model's start does not depend on --micro-batch-tokens.
        n_rows = len(texts) if policy.is_tiny else micro_batch_rows(rollouts, config)
        for rows in torch.arange(len(texts), device=policy.device).split(n_rows):
            logprobs = logprobs_of(policy.model, rollouts, rows, temperature=1.0)[0]
            loss = -logprobs.sum() / sum(rollouts.lengths)  # of all parts, whose gradients add up
            loss.backward()
            if not loss.isfinite():
                raise UserError(f"SFT warm-up: loss {loss.item()}; look at the demonstrations")
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        decay = 1 - 0.9 * step / config.warm_steps
        optimizer.step(peak * min(1.0, (step + 1) / 20) * decay)


def demonstrations(
    policy: Policy, task: Task, config: Config, step: int
) -> tuple[list[str], list[str]]:
    """The prompts (P) and texts (P * G) that one step imitates. One step in three shows sets of m.

    Nothing in a set is diverse on purpose: its answers are independent. A language model is shown
    single answers alone where a task has one reference per problem: m copies would teach copies.
    """
    P, G = (16, 3) if policy.is_tiny else (8, 1)
    m = config.m if step % 3 == 2 else 1
    rng = random.Random(f"demonstrations-{config.seed}-{step}")
    problems = take_problems(task, "demonstrations", P, config.seed, start=step * P)
    sets = []  # P * G lists of m answers
    for problem in problems:
        for _ in range(G):
            sets.append([task.demonstration(problem, rng) for _ in range(m)])
    if not policy.is_tiny and all(len(set(answers)) == 1 for answers in sets):
        m = 1
        sets = [answers[:1] for answers in sets]
    prompts = [build_prompt(policy, task, problem, m) for problem in problems]
    texts = [write_rollout(task, prompts[i // G], answers) for i, answers in enumerate(sets)]
    return prompts, texts


# The job.


@as_command("train.py")
def main(argv: list[str] | None = None) -> None:
    """Train the methods of the flags, then compare them. A user's mistake is one line."""
    arguments = sys.argv[1:] if argv is None else argv

    # 1. the configuration, and the run in its folder that it goes on with, if there is one
    config, task, stored = read_config(arguments, __doc__)
    resolve(config)
    check(config, task)
    if config.is_tiny or jobs_of(config) > 1:
        torch.set_num_threads(1)  # so that no number depends on the machine's cores

    # 2. the model that all methods start from, tried before minutes are spent
    out = Path(config.out)
    policy = None
    if stored is None or not (out / "start").exists():
        policy = start_policy(config, task, demonstrations)

    with claimed(config, arguments, stored):  # its folder has a config.json, and no other writer
        # 3. its SFT warm-up, unless another run has kept the same one
        if policy is not None:
            write_start(policy, task, config, warm_up, demonstrations)
            del policy  # which leaves its memory to the training

        # 4. the methods, one by one or side by side
        train_methods(train_method, config, task)

    # 5. their comparison
    if config.eval_problems:
        with way_on(f"table and figures: python eval.py {out}"):
            evaluate([out], EvalFlags(device=config.device, jobs=jobs_of(config)))
        return
    print(f"checkpoints: {out}/METHOD/checkpoint-{config.steps:06d}")
    print(f"table and figures: python eval.py {out}")


if __name__ == "__main__":
    main()
