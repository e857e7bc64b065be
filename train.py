"""Training: warm start, then GRPO, VPO and their like from the same start, then the comparison of what they learnt.

    python train.py                          the main job: maze, GRPO and VPO, table and figures, minutes on a laptop
    python train.py --method multi_rlvr      one more method for the same comparison
    python train.py --task code              the same comparison on programs, judged test by test
    python train.py --task toy               the deceptive valley
    python train.py --resume                 go on where a killed run stopped, bit for bit on a CPU

One step: problems -> prompts -> rollouts -> answers -> reward vectors -> advantages -> loss -> one AdamW update.

Where this file departs from the paper:
1. Every method samples the same number of answers per step: a single-answer method gets m times as many prompts.
2. The learning rate warms up for 10 steps and decays linearly to a tenth (`--lr-schedule constant` keeps the paper's).
3. `--model tiny` has no pre-training, so it imitates demonstrations first; the result is the reference policy too.

Nothing random outlives a step: problems and samples of step t are drawn from generators seeded by (seed, t). So weights,
AdamW's moments and the step number are all that a resumed run needs.
"""

import argparse
import dataclasses
import fcntl
import hashlib
import inspect
import json
import math
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

import policy
import rollout
from eval import check_device, diversity, evaluate_runs
from folders import (
    append,
    check_folder,
    checkpoints,
    keep_steps_to,
    merge_flags,
    read_config,
    task_of,
    write_config,
    write_folder,
)
from memory import explain_out_of_memory, print_plan
from policy import ADAPTER, check_dtype, check_peft, load_config_and_tokenizer, load_policy, save_policy
from rewards import MAX_ANSWERS, TASKS, Problem, Task, UserError
from rollout import Scored, build_prompt, demonstrations, encode_prompts, rollout_length, sample, score_texts, write_answers
from update import AdamW, backward, token_logprobs
from vpo import ADVANTAGES, SAMPLERS, answers_per_rollout

# Peak learning rates of the tiny model, each the best of 2.5e-4, 5e-4, 8e-4 on validation problems; other tasks take the maze's.
TINY_LR = {"maze": {"grpo": 8e-4, "multi_rlvr": 8e-4, "vpo": 5e-4}, "code": {"grpo": 5e-4, "multi_rlvr": 5e-4, "vpo": 8e-4}}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Default values in the help, except where the help itself says what an absent or empty one means."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, "", False) else super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    """All flags, in titled groups."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=HelpFormatter)
    group = parser.add_argument_group("task and model")
    group.add_argument("--task", default="maze", help=f"{', '.join(TASKS)}, or a Python file that defines a Task")
    group.add_argument("--size", type=int, default=7, help="rows of a maze, 5 to 9; other tasks ignore it")
    group.add_argument("--data", default="", help="JSON Lines file of code problems: HumanEval, MBPP, LiveCodeBench or our own format")
    group.add_argument("--test-data", default="", help="held-out problems; empty: a part of --data")
    group.add_argument("--seconds", type=float, default=2.0, help="CPU seconds that a program may take for a test")
    group.add_argument("--memory-mb", type=int, default=512, help="MiB that a program may take")
    group.add_argument("--unconfined", action="store_true", help="run programs even where the system cannot confine them")
    group.add_argument("--model", default="tiny", help="tiny, a local Hugging Face checkpoint, or a Hub id")
    group.add_argument("--dtype", choices=["float32", "bfloat16"],
                       help="of weights and computation; not given: bfloat16 for other models than tiny on cuda, else float32")
    group.add_argument("--device", default="auto", help="auto (cuda if there is one, else cpu), cpu, cuda or mps")
    group = parser.add_argument_group("method")
    group.add_argument("--method", nargs="+", default=["grpo", "vpo"], help=f"one or several of {', '.join(ADVANTAGES)}")
    group.add_argument("--m", type=int, help="answers per rollout of VPO and Multi-RLVR; not given: toy 5, others 3")
    group.add_argument("--group-size", type=int, default=8, help="G, rollouts per prompt; at least 2")
    group.add_argument("--n-weights", type=int, default=100, help="K, weightings drawn per prompt (vpo)")
    group.add_argument("--alpha", type=float, default=1.0, help="of the Dirichlet; 1 is uniform on the simplex (vpo)")
    group.add_argument("--sampler", default="iid", help=f"of the weightings: {' or '.join(SAMPLERS)} (vpo)")
    group = parser.add_argument_group("optimisation")
    group.add_argument("--steps", type=int, help="updates, one per batch of rollouts; not given: the task's (maze 200, code 300, toy 60)")
    group.add_argument("--prompts-per-step", type=int, default=12, help="P; a single-answer method gets m times as many")
    group.add_argument("--lr", type=float, help="peak learning rate; not given: the task's, or tiny's best per method, others 1e-6")
    group.add_argument("--lr-schedule", default="linear", choices=["linear", "constant"], help="linear: down to a tenth")
    group.add_argument("--kl", type=float, default=1e-3, help="weight of KL(policy || start); 0: no reference policy is kept")
    group.add_argument("--warm-steps", type=int, help="imitation steps before RL, tiny model only; not given: the task's")
    group = parser.add_argument_group("memory")
    group.add_argument("--plan", type=float, nargs="?", const=0.0, metavar="GIB",
                       help="print where the memory goes and whether it fits the device, or one of so many GiB; train nothing")
    group.add_argument("--lora-rank", type=int, default=0, help="train a LoRA adapter of this rank instead of the weights, with peft; 0: no")
    group.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction,
                       help="compute layers again in the backward pass; not given: for all models but tiny")
    group.add_argument("--micro-batch-tokens", type=int, help="per backward pass, padding included; 0: all; not given: tiny 2048, others 4096")
    group.add_argument("--cuda-graph", action=argparse.BooleanOptionalAction, default=True, help="replay a decode step as a graph, on cuda")
    group.add_argument("--sampling-batch", type=int, help="rollouts sampled at a time; 0: all; not given: tiny 0, others 96")
    group = parser.add_argument_group("sampling and evaluation")
    group.add_argument("--temperature", type=float, default=1.0, help="of the rollouts in training")
    group.add_argument("--max-new-tokens", type=int, default=0, help="of a rollout; 0: what m answers of the task can take")
    group.add_argument("--eval-problems", type=int, help="held out, at most all; 0: none; not given: code 500, others 200")
    group.add_argument("--eval-temperature", type=float, default=0.7, help="of the candidates in the evaluation")
    group.add_argument("--pool", type=int, default=30, help="candidates per held-out problem, the largest k of best@k")
    group = parser.add_argument_group("run")
    group.add_argument("--seed", type=int, default=0, help="of the start model, problems, rollouts and weightings")
    group.add_argument("--out", default="", help="output folder; empty: runs/TASK-seedSEED")
    group.add_argument("--resume", action="store_true", help="go on with the run in the output folder, with its own flags")
    group.add_argument("--save-every", type=int, default=25, help="steps between checkpoints; the last two are kept")
    return parser


def fill_in_flags(args: argparse.Namespace, task: Task) -> None:
    """Give the flags that depend on task and model, where they were not given, their values."""
    tiny = args.model == "tiny"
    values = {"m": task.m, "steps": task.steps, "warm_steps": task.warm_steps, "lr": task.lr if tiny else None,
              "dtype": "bfloat16" if not tiny and args.device == "cuda" else "float32",
              "gradient_checkpointing": not tiny, "micro_batch_tokens": 2048 if tiny else 4096,
              "sampling_batch": 0 if tiny else 96, "eval_problems": task.eval_problems}
    for flag, value in values.items():
        if getattr(args, flag) is None:
            setattr(args, flag, value)


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for the first flag that is out of range, naming it, its value and what would do."""
    def require(ok: bool, flag: str, fix: str) -> None:
        if not ok:
            raise UserError(f"--{flag} {getattr(args, flag.replace('-', '_'))}: {fix}")

    for method in args.method:
        if method not in ADVANTAGES:
            raise UserError(f"--method {method}: unknown; choose from {', '.join(ADVANTAGES)}")
    require(len(set(args.method)) == len(args.method), "method", "names a method twice")
    require(args.sampler in SAMPLERS, "sampler", f"unknown; choose from {', '.join(SAMPLERS)}")
    require(1 <= args.m <= MAX_ANSWERS, "m", f"must be 1 to {MAX_ANSWERS} answers")
    require(args.group_size >= 2, "group-size", "a group of one cannot be normalised, take 2 or more")
    for flag in ("n-weights", "steps", "prompts-per-step", "save-every"):
        require(getattr(args, flag.replace("-", "_")) >= 1, flag, "must be at least 1")
    for flag in ("lora-rank", "micro-batch-tokens", "sampling-batch", "warm-steps", "max-new-tokens", "eval-problems", "seed"):
        require(0 <= getattr(args, flag.replace("-", "_")) < 2**31, flag, "must be 0 or more, below 2^31")
    require(args.pool >= args.m, "pool", f"must hold at least one rollout of --m {args.m} answers")
    for flag in ("alpha", "temperature", "eval-temperature"):
        require(0 < getattr(args, flag.replace("-", "_")) < math.inf, flag, "must be positive and finite")
    require(args.plan is None or 0 <= args.plan < math.inf, "plan", "must be the GiB of a card, or nothing for the device that is here")
    require(args.lr is None or 0 < args.lr < math.inf, "lr", "must be positive and finite")
    require(0 <= args.kl < math.inf, "kl", "must be finite and not negative")
    if args.lora_rank:
        check_peft(f"--lora-rank {args.lora_rank}")
    if (Path(args.model) / ADAPTER).exists():
        raise UserError(f"--model {args.model}: an adapter, not a model; merge it into one first, with merge_and_unload() of peft")


def learning_rate(args: argparse.Namespace, method: str, step: int) -> float:
    """Of update `step` (0-based): 10 warm-up steps, then constant or linear decay to a tenth of the peak."""
    peak = args.lr or (TINY_LR.get(args.task, TINY_LR["maze"]).get(method, 5e-4) if args.model == "tiny" else
                       1e-5 if args.lora_rank else 1e-6)
    decay = 1.0 if args.lr_schedule == "constant" else 1.0 - 0.9 * step / args.steps
    return peak * min(1.0, (step + 1) / 10) * decay


def warm_start(args: argparse.Namespace, task: Task, model, tokenizer):
    """The tiny model after imitating demonstrations; cached by all that shapes it."""
    sources = [inspect.getsource(code) for code in (sys.modules[type(task).__module__], policy, rollout, warm_start, show)]
    shown = [show(args, task, tokenizer, step) for step in range(3)]
    recipe = [sources, model.config.to_json_string(), shown, args.m, args.seed, args.warm_steps]
    key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
    cached = Path("runs") / "start" / f"{Path(args.task).stem}-{key}"
    if not cached.exists():
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
        bar = tqdm(range(args.warm_steps), desc="warm start", unit="step")
        for step in bar:
            prompts, texts = show(args, task, tokenizer, step)
            shown = demonstrations(model, tokenizer, prompts, texts)
            logprobs, _ = token_logprobs(model, shown, range(len(texts)))
            loss = -logprobs[shown.mask].mean()
            optimizer.param_groups[0]["lr"] = 5e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / args.warm_steps)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")
        if not loss.isfinite():
            raise UserError(f"warm start: loss {loss.item()} in the end; are the demonstrations what the task's words can say?")
        write_folder(cached, lambda folder: save_policy(model, tokenizer, folder))
    check_folder(cached)
    return load_policy(str(cached), task)


def show(args: argparse.Namespace, task: Task, tokenizer, step: int) -> tuple[list[str], list[str]]:
    """Prompts (16) and demonstrations (16 * 3) of one warm-up step.

    Two thirds of the steps show single answers, one third sets of m independent ones: no deliberate diversity in a set.
    """
    m = args.m if step % 3 == 2 else 1
    rng = random.Random(f"demonstrations-{args.seed}-{step}")
    problems = take_problems(task, "demonstrations", 16, args.seed, step * 16)
    texts = [write_answers(task, [task.demonstration(problem, rng) for _ in range(m)]) for problem in problems for _ in range(3)]
    return [build_prompt(tokenizer, task, problem, m) for problem in problems], texts


def take_problems(task: Task, split: str, n: int, seed: int, start: int) -> list[Problem]:
    """Exactly n problems of a split, or UserError."""
    problems = task.problems(split, n, seed, start)
    if len(problems) != n:
        raise UserError(f"task {task.name}: problems({split!r}, n={n}, start={start}) gave {len(problems)}; it should wrap around")
    return problems


def train(args: argparse.Namespace, method: str, task: Task, out: Path, interrupted: list) -> None:
    """Train one method from the start model in out/start; metrics, samples and checkpoints go to out/method.

    Goes on from the newest checkpoint if there is one. Raises UserError on a non-finite loss or a damaged checkpoint, and
    KeyboardInterrupt, with everything saved, once `interrupted` is not empty.
    """
    run = out / method
    run.mkdir(exist_ok=True)
    for leftover in run.glob("checkpoint-*.tmp*"):  # of a process that was killed while saving
        shutil.rmtree(leftover)
    saved = checkpoints(run)
    check_folder(out / "start")
    if saved:
        check_folder(saved[-1])
    source = saved[-1] if saved else out / "start"
    lean, reference, first = {"device": args.device, "dtype": args.dtype}, None, 0
    with explain_out_of_memory("loading", args):
        model, tokenizer = load_policy(str(source), task, seed=args.seed, lora_rank=args.lora_rank,
                                       gradient_checkpointing=args.gradient_checkpointing, **lean)
        if args.kl:  # with an adapter the reference is the same model, the adapter switched off
            reference = model if args.lora_rank else load_policy(str(out / "start"), task, **lean)[0]
        optimizer = AdamW(model)
        if saved:
            state = torch.load(saved[-1] / "trainer.pt", map_location="cpu", mmap=True, weights_only=True)
            optimizer.load_state_dict(state["optimizer"])
            first = state["step"]
    for name in ("metrics.jsonl", "samples.jsonl"):
        keep_steps_to(run / name, first)

    m = answers_per_rollout(method, args.m)
    P = args.prompts_per_step * args.m // m
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, desc=method, unit="step")
    max_new_tokens = rollout_length(task, tokenizer, m, args.max_new_tokens)

    def fail(why: str, step: int) -> None:
        last = f"the last good checkpoint is {checkpoints(run)[-1]}" if checkpoints(run) else "no checkpoint was due yet"
        raise UserError(f"{method}, step {step + 1}: {why}; {last}")

    answered = 0.0
    for step in bar:
        began = time.perf_counter()
        stream = 2 * (args.seed * 1_000_003 + step)  # even: rollouts, odd: weightings, which must not share their noise
        problems = take_problems(task, "train", P, args.seed, step * P)
        prompts = [build_prompt(tokenizer, task, problem, m) for problem in problems]
        try:
            with explain_out_of_memory("sampling", args):
                rollouts = sample(model, tokenizer, prompts, args.group_size, max_new_tokens=max_new_tokens,
                                  temperature=args.temperature, batch=args.sampling_batch, static=None if args.cuda_graph else False,
                                  generator=torch.Generator(args.device).manual_seed(stream))
            scored = score_texts(task, problems, rollouts.texts, m)
            advantages = ADVANTAGES[method](scored.vectors, scored.scalars, scored.mask, objective_mask=scored.objective_mask,
                                            n_weights=args.n_weights, alpha=args.alpha, sampler=args.sampler,
                                            generator=torch.Generator().manual_seed(stream + 1))
            with explain_out_of_memory("the update", args):
                losses = backward(model, reference, rollouts, advantages.flatten().tolist(), kl=args.kl,
                                  temperature=args.temperature, micro_batch_tokens=args.micro_batch_tokens)
                losses = {key: float(value) for key, value in losses.items()}
                grad_norm = torch.nn.utils.clip_grad_norm_(optimizer.parameters, 1.0)
                if not math.isfinite(losses["loss"]) or not torch.isfinite(grad_norm):
                    raise UserError(f"loss {losses['loss']}, gradient norm {float(grad_norm)}: try a lower --lr")
                lr = learning_rate(args, method, step)
                optimizer.step(lr)
                model.zero_grad()
        except UserError as error:
            fail(str(error), step)

        seconds = time.perf_counter() - began
        tokens = sum(rollouts.lengths)
        metrics = {"step": step + 1, **describe(task, scored, advantages), **losses, "grad_norm": float(grad_norm), "lr": lr,
                   "rollouts": len(rollouts.texts), "tokens": tokens, "tokens_per_second": tokens / seconds, "seconds": seconds}
        append(run / "metrics.jsonl", metrics)
        answered += metrics["answers"]
        if step % 10 == 0 or step + 1 == args.steps:
            append(run / "samples.jsonl", {"step": step + 1, "problem": dataclasses.asdict(problems[0]), "rollouts": [
                {"text": text, "rewards": rewards, "advantage": advantage} for text, rewards, advantage in
                zip(rollouts.texts, scored.vectors[0].tolist(), advantages[0].tolist(), strict=False)]})
        bar.set_postfix({key: f"{metrics[key]:.2f}" for key in ("reward", "diversity", "entropy")} |
                        {"tokens/s": f"{metrics['tokens_per_second']:.0f}"})
        if interrupted or (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            if not all(parameter.isfinite().all() for parameter in model.parameters()):
                fail("the weights are not finite: try a lower --lr", step)
            state = {"optimizer": optimizer.state_dict(), "step": step + 1}

            def write(folder: Path, state=state) -> None:
                save_policy(model, tokenizer, folder)
                torch.save(state, folder / "trainer.pt")

            write_folder(run / f"checkpoint-{step + 1:06d}", write)
            for old in checkpoints(run)[:-2]:
                shutil.rmtree(old)
        if interrupted:
            raise KeyboardInterrupt(f"{method} stopped after step {step + 1} of {args.steps}, everything is saved; "
                                    f"go on with: python train.py --resume --out {out}")
    if first < args.steps and not answered:
        print(f"{method}: no rollout held an answer that could be read, so nothing was learnt; look into {run / 'samples.jsonl'}, "
              f"and whether --max-new-tokens {args.max_new_tokens} leaves room for one", file=sys.stderr)


def describe(task: Task, scored: Scored, advantages: torch.Tensor) -> dict[str, float]:
    """The metrics of a batch of rollouts; each is explained in one sentence in the README."""
    vectors = scored.vectors
    per_objective = vectors.mean((0, 1, 2)).tolist() if len(task.objectives) == vectors.shape[-1] else []
    return {"reward": scored.scalars.mean().item(), "best_in_rollout": scored.scalars.amax(-1).mean().item(),
            "diversity": diversity(vectors.flatten(1, 2)).mean().item(), "answers": scored.mask.float().mean().item(),
            "signal": (advantages != 0).any(1).float().mean().item(),
            **{f"reward_{name}": value for name, value in zip(task.objectives, per_objective, strict=False)}}


def run(argv: list[str]) -> None:
    """The command."""
    args = build_parser().parse_args(argv)
    out = Path(args.out or f"runs/{Path(args.task).stem}-seed{args.seed}")
    config = read_config(out) if args.plan is None or args.resume else {}
    if args.resume and not config:
        raise UserError(f"--resume: {out} holds no run; name the folder of one with --out")
    if config:
        args = merge_flags(args, argv, config["flags"], out, build_parser())
    task = task_of(vars(args))
    args.fingerprint = task.fingerprint
    device = args.device
    args.device = check_device(device, must_exist=not args.plan)
    fill_in_flags(args, task)
    check_flags(args)
    if args.data and "data" not in task.flags:
        raise UserError(f"--data {args.data}: the task {args.task} takes no file; code does")
    if args.plan is not None:
        print_plan(args, task)
        return
    check_dtype(args.device, args.dtype)
    taken = [method for method in args.method if (out / method).exists()]
    if taken and not args.resume:
        raise UserError(f"--out {out}: already holds {', '.join(taken)}; --resume goes on with it, or take another --out")
    start, tiny = out / "start", args.model == "tiny"
    if not start.exists():
        model_config, tokenizer = load_config_and_tokenizer(args.model, task)
        for m in {1, args.m}:  # before minutes are spent: do prompts and rollouts fit the model's context?
            prompts = [build_prompt(tokenizer, task, problem, m) for problem in take_problems(task, "train", 32, args.seed, 0)]
            encode_prompts(model_config, tokenizer, prompts, rollout_length(task, tokenizer, m, args.max_new_tokens))
        if not tiny and tokenizer.chat_template is None:
            print(f"--model {args.model}: no chat template, so its prompts are plain text", file=sys.stderr)
        model, tokenizer = load_policy(args.model, task, seed=args.seed, dtype="float32" if tiny else args.dtype)
    write_config(argparse.Namespace(**vars(args) | {"device": device}), argv, config, out)
    with (out / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"--out {out}: another train.py is writing to it; wait for it, or take another name") from error
        if not start.exists():
            if tiny:
                model, tokenizer = warm_start(args, task, model, tokenizer)
            write_folder(start, lambda folder: save_policy(model, tokenizer, folder))
            del model
        train_methods(args, task, out)
    if args.eval_problems:
        with explain_out_of_memory("the evaluation", args):
            evaluate_runs([out], device=args.device)


def train_methods(args: argparse.Namespace, task: Task, out: Path) -> None:
    """One method after the other; the first Ctrl-C finishes and saves the step, the second does not wait."""
    interrupted = []

    def on_signal(number: int, frame) -> None:
        interrupted.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nfinishing this step, then saving (Ctrl-C again: at once, without saving)", file=sys.stderr)

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        for method in args.method:
            train(args, method, task, out, interrupted)
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupted:
        raise KeyboardInterrupt(f"training is complete; for the table and figures: python eval.py {out}")


def main(argv: list[str] | None = None) -> None:
    """The command, with a user's mistakes as one line and exit code 2."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # it takes a sampled pad token for padding and recommends a mask
    try:
        run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt as stop:
        print(f"\n{str(stop) or 'stopped; the same command, with --resume if training had begun, goes on'}", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
