"""Training: warm start, then GRPO, VPO and their like from the same start, then the comparison of what they learnt.

    python train.py                          the main job: maze, GRPO, VPO and Group VPO, minutes on a laptop
    python train.py --method multi_rlvr      one more method for the same comparison
    python train.py --task code              the same comparison on programs, judged test by test
    python train.py --resume                 go on where a killed run stopped, bit for bit on a CPU

One step: problems -> prompts -> rollouts -> answers -> reward vectors -> advantages -> loss -> one AdamW update.

Where this file departs from the paper:
1. Every method samples the same number of answers per step: a single-answer method gets m times as many prompts.
2. The learning rate warms up for 10 steps and decays linearly to a tenth (`--lr-schedule constant` keeps the paper's).
3. `--model tiny` has no pre-training, so it imitates demonstrations first; the result is the reference policy too.

All that is random in step t comes from generators seeded by (seed, t): weights, AdamW's moments and t make a resume."""

import signal
import sys

from engine.flags import as_command, fill_in, learning_rate, parse, train_parser

if __name__ == "__main__":
    parse(
        sys.argv[1:], __doc__
    )  # --help and mistakes are answered here: what follows takes seconds to import
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as_command takes Ctrl-C back

import argparse
import dataclasses
import functools
import math
import time
from pathlib import Path

import torch
from tqdm import tqdm

from engine import runs
from engine.decoding import given_rollouts
from engine.imitation import warm_start
from engine.memory import explain_out_of_memory, print_plan
from engine.models import (
    check_device,
    check_flags,
    check_task,
    load_config_and_tokenizer,
    load_policy,
    save_policy,
)
from engine.update import backward
from eval import diversity, evaluate_runs, sample_pool
from rewards import Problem, Task, UserError, take_problems
from rollout import (
    Rollouts,
    Scored,
    build_prompt,
    demonstrations,
    encode_prompts,
    rollout_length,
    sample,
    score_texts,
)
from vpo import ADVANTAGES, answers_per_rollout, sample_weights


def train_step(
    method: str, learner: runs.Learner, task: Task, args: argparse.Namespace
) -> tuple[dict, dict]:
    """One update of a method: the algorithm box of the paper. Returns the metrics and a sample of the rollouts."""
    t, model, tokenizer = learner.step, learner.model, learner.tokenizer
    m = answers_per_rollout(method, args.m)
    sampling = torch.Generator(model.device).manual_seed(2 * (args.seed * 1_000_003 + t))

    problems, prompts, max_new_tokens = ask(args, task, method, tokenizer, t)  # P
    rollouts = sample(
        model,
        tokenizer,
        prompts,
        args.group_size,
        max_new_tokens=max_new_tokens,
        temperature=args.temperature,
        generator=sampling,
        batch=args.sampling_batch,
        static=None if args.cuda_graph else False,
        task=task,
        m=m,
    )  # P * G
    scored = score_texts(task, problems, rollouts.texts, m)  # reward vectors (P, G, m, k)
    advantages = ADVANTAGES[method](
        scored.vectors,
        scored.scalars,
        scored.mask,
        objective_mask=scored.objective_mask,
        n_weights=args.n_weights,
        alpha=args.alpha,
        sampler=args.sampler,
        subset=args.subset,
        floor=task.minimum,
        generator=weighting(args, t),
    )  # (P, G)
    losses = backward(
        model,
        learner.reference,
        rollouts,
        advantages.flatten().tolist(),
        kl=args.kl,
        temperature=args.temperature,
        micro_batch_tokens=args.micro_batch_tokens,
    )
    grad_norm = torch.nn.utils.clip_grad_norm_(learner.optimizer.parameters, 1.0)
    lr = learning_rate(args, method, t)
    learner.optimizer.step(lr)
    model.zero_grad()
    learner.step += 1
    return describe(
        task, problems, rollouts, scored, advantages, losses | {"grad_norm": grad_norm, "lr": lr}
    )


def ask(
    args: argparse.Namespace, task: Task, method: str, tokenizer, t: int = 0
) -> tuple[list, list[str], int]:
    """Problems and prompts (P) of a step, and how many new tokens a rollout may take."""
    m = answers_per_rollout(method, args.m)
    P = args.prompts_per_step * args.m // m  # so that every method samples P * G * m answers
    problems, goals = take_problems(task, "train", P, args.seed, t * P), [None] * P
    if method == "goal_conditioned":  # the weights that its advantage will draw
        goals = sample_weights(
            P, len(task.objectives), alpha=args.alpha, generator=weighting(args, t)
        ).tolist()
    prompts = [
        build_prompt(tokenizer, task, *asked)
        for asked in zip(problems, [m] * P, goals, strict=True)
    ]
    return problems, prompts, rollout_length(task, tokenizer, m, args.max_new_tokens)


def weighting(args: argparse.Namespace, t: int) -> torch.Generator:
    """What a step's weightings are drawn from; they must not share their noise with its rollouts."""
    return torch.Generator().manual_seed(2 * (args.seed * 1_000_003 + t) + 1)


def describe(
    task: Task,
    problems: list[Problem],
    rollouts: Rollouts,
    scored: Scored,
    advantages: torch.Tensor,
    of_update: dict,
) -> tuple[dict, dict]:
    """The metrics of a step, each explained in docs/reference.md, and the rollouts of its first problem."""
    vectors = scored.vectors
    per_objective = (
        zip(task.objectives, vectors.mean((0, 1, 2)).tolist(), strict=True)
        if task.objectives
        else ()
    )
    metrics = {
        "reward": scored.scalars.mean(),
        "best_in_rollout": scored.scalars.amax(-1).mean(),
        "diversity": diversity(vectors.flatten(1, 2)).mean(),
        "answers": scored.mask.float().mean(),
        "signal": (advantages != 0).any(1).float().mean(),
        "cut_off": 1 - sum(rollouts.ended) / len(rollouts.ended),
        **{f"reward_{name}": value for name, value in per_objective},
        **of_update,
    }
    counts = {"rollouts": len(rollouts.texts), "tokens": sum(rollouts.lengths)}
    shown = zip(rollouts.texts, vectors[0].tolist(), advantages[0].tolist(), strict=False)
    return {name: float(value) for name, value in metrics.items()} | counts, {
        "problem": dataclasses.asdict(problems[0]),
        "rollouts": [
            {"text": text, "rewards": rewards, "advantage": A} for text, rewards, A in shown
        ],
    }


def train(
    args: argparse.Namespace, method: str, task: Task, out: Path, device: str, interrupted: list
) -> None:
    """Train one method from the start model in out/start; metrics, samples and checkpoints go to out/method.
    Goes on from the newest checkpoint if there is one. Raises UserError on a non-finite loss or a damaged checkpoint,
    and KeyboardInterrupt, with everything saved, once `interrupted` is not empty."""
    run = out / method
    run.mkdir(exist_ok=True)
    if method == "goal_conditioned" and args.model == "tiny" and not (run / "start").exists():
        write_start(
            args, task, run / "start", load_policy(str(out / "start"), task), goals=True
        )  # else it reads none
    learner = runs.load(args, task, run, device)
    first = learner.step
    answered, bar = (
        0.0,
        tqdm(range(first, args.steps), initial=first, total=args.steps, desc=method, unit="step"),
    )
    for t in bar:
        began = time.perf_counter()
        try:
            with explain_out_of_memory(args, device):
                metrics, rollouts = train_step(method, learner, task, args)
            seconds = time.perf_counter() - began
            runs.first_look(args, method, t, metrics, rollouts)
            if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
                raise UserError(
                    f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}: try a lower --lr"
                )
            metrics |= {"tokens_per_second": metrics["tokens"] / seconds, "seconds": seconds}
            runs.append(run / "metrics.jsonl", {"step": t + 1} | metrics)
            if t % 10 == 0 or t + 1 == args.steps:
                runs.append(run / "samples.jsonl", {"step": t + 1} | rollouts)
            with explain_out_of_memory(args, device):
                runs.snapshot(method, learner, task, args, run, sample_pool)
            stop = bool(interrupted)
            if stop or (t + 1) % args.save_every == 0 or t + 1 == args.steps:
                runs.save(learner, run)
        except UserError as error:
            good = ["none was due yet", *runs.checkpoints(run)][-1]
            raise UserError(
                f"{method}, step {t + 1}: {error}; the last good checkpoint: {good}"
            ) from error
        answered += metrics["answers"]
        bar.set_postfix(
            {key: f"{metrics[key]:.2f}" for key in ("reward", "diversity", "entropy")}
            | {"tokens/s": f"{metrics['tokens_per_second']:.0f}"}
        )
        if stop:
            raise KeyboardInterrupt(
                f"{method} stopped after step {t + 1} of {args.steps}, everything is saved; "
                f"go on with: python train.py --resume --out {out}"
            )
    if first < args.steps and not answered:
        print(
            f"{method}: no rollout held an answer that could be read, so nothing was learnt: too few --warm-steps, "
            f"or no room at --max-new-tokens {args.max_new_tokens}? See {run / 'samples.jsonl'}",
            file=sys.stderr,
        )


def start_model(args: argparse.Namespace, task: Task, device: str):
    """The model and tokenizer that all methods start from, before the warm start. Raises UserError, before minutes are
    spent, if a prompt and its rollout do not fit the model's context, or the tiny model lacks a word."""
    check_task(task, args.m)
    config, tokenizer = load_config_and_tokenizer(args.model, task)
    for split, m in dict.fromkeys([("train", 1), ("train", args.m), ("test", 1)]):
        problems = (
            runs.held_out(task, split, 2000)
            if args.data
            else take_problems(task, split, 32, args.seed)
        )
        prompts = sorted(
            (build_prompt(tokenizer, task, problem, m) for problem in problems), key=len
        )[-32:]
        encode_prompts(
            config, tokenizer, prompts, rollout_length(task, tokenizer, m, args.max_new_tokens)
        )
    if args.model != "tiny" and tokenizer.chat_template is None:
        print(
            f"--model {args.model}: no chat template, so its prompts are plain text",
            file=sys.stderr,
        )
    tiny = args.model == "tiny"
    model, tokenizer = load_policy(
        args.model,
        task,
        seed=args.seed,
        device="cpu" if tiny else device,
        dtype="float32" if tiny or args.warm_steps else args.dtype,
    )
    for step in (
        (0, 2) if tiny else range(args.warm_steps)
    ):  # single answers and sets; of a file whatever will be shown
        given_rollouts(model, tokenizer, *demonstrations(task, tokenizer, args.m, args.seed, step))
    return model, tokenizer


def write_start(
    args: argparse.Namespace, task: Task, folder: Path, start: tuple, goals: bool = False
) -> None:
    """What all methods start from, after the warm start; `goals`: on prompts that name a weighting."""
    if args.warm_steps:
        own = (
            {}
            if args.model == "tiny"
            else {"temperature": args.temperature, "max_new_tokens": args.max_new_tokens}
        )
        show = functools.partial(
            demonstrations, task, start[1], 1 if goals else args.m, args.seed, goals=goals, **own
        )
        start = warm_start(
            task,
            Path(args.task).stem,
            show,
            *start,
            steps=math.ceil(args.warm_steps / 4) if goals else args.warm_steps,
        )
    runs.write_folder(folder, lambda folder: save_policy(*start, folder))


def run(argv: list[str]) -> None:
    args, given = parse(argv, __doc__)
    out = Path(args.out)
    config = runs.read_config(out) if args.plan is None or args.resume else {}
    if args.resume and not config:
        raise UserError(f"--resume: {out} holds no run; name the folder of one with --out")
    joined = bool(config) and (
        args.resume or runs.trained(out, config)
    )  # else there is nothing in it to lose
    args = runs.join_run(args, given, out, config) if joined else args
    task = runs.task_of(vars(args))
    args.fingerprint = task.fingerprint
    fill_in(args, task, check_device(args.device, must_exist=args.plan is None) == "cuda")
    device = check_device(args.device, args.dtype, must_exist=args.plan is None)
    check_flags(args, task)
    with explain_out_of_memory(args, device):
        if args.plan is not None:
            print_plan(args, task, device, functools.partial(ask, args, task))
            return
        new = not (joined and (out / "start").exists())
        start = start_model(args, task, device) if new else None
        with runs.claim(out, args, argv, config, joined):
            if new:
                start = write_start(args, task, out / "start", start)  # None: makes room
            train_methods(args, task, out, device)
        if args.eval_problems:
            evaluate_runs([out], device=device)
        else:
            print(
                f"checkpoints: {', '.join(str(runs.checkpoints(out / method)[-1]) for method in args.method)}\n"
                f"table and figures: python eval.py {out}"
            )


def train_methods(args: argparse.Namespace, task: Task, out: Path, device: str) -> None:
    """One method after the other; the first Ctrl-C finishes and saves the step, the second does not wait."""
    interrupted = []

    def on_signal(number: int, frame) -> None:
        interrupted.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(
            "\nfinishing this step, then saving (Ctrl-C again: at once, without saving)",
            file=sys.stderr,
        )

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        for method in args.method:
            train(args, method, task, out, device, interrupted)
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupted:
        raise KeyboardInterrupt(
            f"training is complete; for the table and figures: python eval.py {out}"
        )


def main(argv: list[str] | None = None) -> None:
    as_command(train_parser(), lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    main()
