"""Run folders: what a run writes, whole or not at all, who may write to it, and what may join it later.
A folder holds config.json (all flags, a history of commands), start/ (the start model; goal_conditioned may have its
own) and per method metrics.jsonl, samples.jsonl, snapshots.jsonl, checkpoint-STEP/ with the checksum of every file."""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.flags import FREE, fill_in, text_of, train_parser
from engine.models import Model, Tokenizer, load_policy, save_policy
from engine.update import AdamW
from rewards import Problem, Task, UserError, load_task, take_problems
from vpo import ADVANTAGES, answers_per_rollout


def checksum(path: Path) -> str:
    """Of a file, which may be larger than the memory that is left."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder atomically: it appears whole, with the checksum of every file, or not at all: UserError."""
    temporary = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        sums = {path.name: checksum(path) for path in temporary.iterdir()}
        (temporary / "checksums.json").write_text(json.dumps(sums, indent=1))
        with contextlib.suppress(
            OSError if folder.exists() else ()
        ):  # another process was faster: that one is whole
            os.replace(temporary, folder)
    except (
        Exception
    ) as error:  # torch, safetensors and the system have each their own for a full disk
        raise UserError(
            f"{folder}: cannot be written ({error!s:.200}); make room and --resume"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of one method, oldest first."""
    return sorted(run.glob("checkpoint-" + 6 * "[0-9]"))


def check_folder(folder: Path) -> None:
    """Raise UserError if a file of a checkpoint is missing or altered, and say how to go on without losing another."""
    older = [path for path in checkpoints(folder.parent) if path < folder]
    fix = (
        f"delete the folder {folder} and --resume goes on from {older[-1].name}"
        if older
        else f"delete the folder {folder.parent} and --resume trains {folder.parent.name} again"
        if folder.name[:11] == "checkpoint-"
        else f"delete the folder {folder}, which is only a cache"
        if folder.parent.name == "start"
        else "restore it from a copy, or train with another --out; what was trained from it stays as it is"
    )
    path = folder / "checksums.json"
    try:
        for name, expected in json.loads(path.read_text()).items():
            path = folder / name
            if checksum(path) != expected:
                raise ValueError
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: missing or damaged; {fix}") from error


def append(path: Path, record: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_log(path: Path, *keys: str) -> list[dict]:
    """Records of a log of ours that have these keys, none if it is missing; a line that a kill cut off is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [
        record
        for record in records
        if isinstance(record, dict) and {"step", *keys} <= record.keys()
    ]


def write_text(path: Path, text: str) -> None:
    """A file appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make a folder for what is written inside the block; UserError, which names --out, if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); name another folder with --out"
        ) from error


def load_config(run: Path) -> dict:
    """The config.json of a run folder: flags and history. UserError if there is none, or it was damaged or edited."""
    path = run / "config.json"
    if (run / "trainer.pt").exists() or run.name == "start":
        raise UserError(
            f"{run}: a checkpoint; name its run, the folder that holds config.json with flags and start/"
        )
    if not path.is_file() or '"model_type"' in path.read_text(errors="replace"):
        raise UserError(f"{run}: no config.json of a run in it, so it is no run of train.py")
    try:
        config = json.loads(path.read_text())
        missing = {"task", "m", "dtype", "seed", "method"} - config["flags"].keys()
        if missing or config.get("checksum", _sum(config["flags"])) != _sum(config["flags"]):
            raise ValueError("flags are missing or were edited")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); restore it or train again") from error
    return config


def _sum(flags: dict) -> str:
    return hashlib.sha256(json.dumps(flags, sort_keys=True).encode()).hexdigest()[:16]


def task_of(flags: dict) -> Task:
    """The task that the flags of a run name; UserError if its files are not those of the run."""
    task = load_task(flags["task"], **flags)
    if flags.get("fingerprint", task.fingerprint) != task.fingerprint:
        files = [text_of(name, flags[name]) for name in ("data", "test_data") if flags.get(name)]
        raise UserError(
            f"{' or '.join(files) or text_of('task', flags['task'])}: has changed since the run began; "
            "restore it, or train again"
        )
    return task


def comparable(
    runs: list[Path], out: Path | None, given: dict
) -> list[tuple[Path, dict, Task, dict, Path]]:
    """What evaluates each of several runs: folder, flags, task, settings (the run's own where not given, or None), and
    the folder for what is written. UserError if the runs cannot be compared, or out is no place for it."""
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError(f"{' '.join(map(str, runs))}: names a run twice")
    if out and (out.is_file() or len({run.name for run in runs}) < len(runs)):
        raise UserError(
            f"--out {out}: must be a folder, in which each run gets one of its own name, so no name twice"
        )
    plans = []
    for run in runs:
        flags = load_config(run)["flags"]
        task = task_of(flags)
        own = {
            "split": "test",
            "problems": flags["eval_problems"] or task.eval_problems,
            "size": flags["pool"],
            "temperature": flags["eval_temperature"],
        }
        settings = own | {name: value for name, value in given.items() if value is not None}
        name = "eval-{split}-{problems}x{size}-T{temperature:g}".format(**settings)
        plans.append((run, flags, task, settings, run if settings == own else run / name))
        if settings["size"] < flags["m"]:
            raise UserError(
                f"--pool {settings['size']}: must hold one rollout of the run's {flags['m']} answers"
            )
        if settings != plans[0][3] or flags["m"] != plans[0][1]["m"]:
            raise UserError(
                f"{run}: differs from {runs[0]} in m, or in --problems, --pool or --temperature: give them"
            )
        if any(flags.get(flag) != plans[0][1].get(flag) for flag in ("task", *task.flags)):
            raise UserError(f"{run}: has other problems than {runs[0]}, their mean says nothing")
    return plans


def start_of(name: str, task_name: str, cuda: bool) -> tuple[dict, Task, str]:
    """Flags, task, and folder or Hub id of a run's start, or of a model with a task's defaults. UserError if none."""
    if (Path(name) / "config.json").exists() and (Path(name) / "start").is_dir():
        flags = load_config(Path(name))["flags"]
        return flags, task_of(flags), str(Path(name) / "start")
    if name == "tiny" or name.startswith(("runs/", ".", "/")) and not Path(name).exists():
        raise UserError(
            f"--reward-geometry {name}: no run or model; python train.py --steps 1 --eval-problems 0 "
            "--out FOLDER makes the start of a run, then name its folder"
        )
    args = train_parser().parse_args(["--task", task_name, "--model", name])
    fill_in(args, task := task_of(vars(args)), cuda)
    return vars(args), task, name


def policies(run: Path, m: int) -> dict[str, tuple[Path, int]]:
    """The start model, asked for one answer and for m, and the newest checkpoint of every method: folder, answers a
    rollout. UserError if there is no checkpoint yet, or a file is damaged."""
    found = {"start": (run / "start", 1), "start_sets": (run / "start", m)}
    found |= {
        name: (new, answers_per_rollout(name, m))
        for name in ADVANTAGES
        for new in checkpoints(run / name)[-1:]
    }
    if len(found) == 2:
        raise UserError(f"{run}: holds no checkpoint yet; let train.py get further, or --resume it")
    return found


def read_config(out: Path) -> dict:
    """The config.json of the run in an output folder; {} if there is none. UserError if it holds something else."""
    if not (out / "config.json").exists():
        if out.exists() and (
            not out.is_dir() or {path.name for path in out.iterdir()} - {"lock", "config.json.tmp"}
        ):
            raise UserError(f"--out {out}: not empty, and no run of train.py; take another name")
        return {}
    return load_config(out)


def join_run(
    args: argparse.Namespace, given: dict[str, object], out: Path, config: dict
) -> argparse.Namespace:
    """The flags of the run in the folder, with those given now where they may change; UserError where one may not."""
    stored = config["flags"]
    for flag, value in given.items():
        if flag not in FREE and value is not None and stored.get(flag, value) != value:
            other = f"{out}-{flag.replace('_', '')}{Path(str(value)).name}"
            fix = "drop the flag" if args.resume else f"take another folder: --out {other}"
            raise UserError(
                f"--out {out}: holds another run, with {text_of(flag, stored[flag])}, not "
                f"{text_of(flag, value)}; {fix}"
            )
    method = given.get("method", stored["method"] if args.resume else args.method)
    if not args.resume and (taken := [name for name in method if (out / name).exists()]):
        raise UserError(
            f"--out {out}: already holds {', '.join(taken)}; --resume goes on with it, --method adds "
            f"another, --out {out}-2 begins anew"
        )
    if not (out / "start").is_dir() and trained(out, config):
        raise UserError(
            f"{out / 'start'}: is missing, the start and reference of all methods; restore it, or train "
            "again with another --out"
        )
    free = {flag: given[flag] for flag in FREE if flag in given}
    return argparse.Namespace(**vars(args) | stored | free | {"method": method})


def trained(out: Path, config: dict) -> bool:
    """Whether a run has a checkpoint that would be lost."""
    return any(checkpoints(out / method) for method in config["flags"]["method"])


@contextlib.contextmanager
def claim(
    out: Path, args: argparse.Namespace, argv: list[str], config: dict, joined: bool
) -> Iterator[None]:
    """Lock a folder, then say in config.json all flags, every method, and what each command ran on; a run not joined is
    replaced. UserError if another process writes to the folder, or has since `config` was read."""
    with writing(out):
        lock = (out / "lock").open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"--out {out}: another train.py is writing to it; wait, or take another name"
            ) from error
        if read_config(out) != config or (config and not joined and trained(out, config)):
            raise UserError(
                f"--out {out}: another train.py has just written to it; give the command again"
            )
        if config and not joined:
            for name in ("start", *config["flags"]["method"]):
                shutil.rmtree(out / name, ignore_errors=True)
            config = {}
        flags = {
            flag: value
            for flag, value in vars(args).items()
            if flag not in ("resume", "out", "plan")
        }
        flags["method"] = list(
            dict.fromkeys([*config.get("flags", {}).get("method", []), *args.method])
        )
        environment = {
            "command": " ".join(["python train.py", *argv]),
            "date": time.strftime("%Y-%m-%d"),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        }
        config = {
            "flags": flags,
            "checksum": _sum(flags),
            "history": [*config.get("history", []), environment],
        }
        write_text(out / "config.json", json.dumps(config, indent=1))
        yield


@dataclass
class Learner:
    model: Model
    tokenizer: Tokenizer
    reference: (
        Model | None
    )  # the frozen start; the model itself if it trains an adapter; None without KL
    optimizer: AdamW
    step: int  # updates done


def load(args: argparse.Namespace, task: Task, run: Path, device: str) -> Learner:
    """From a method's newest checkpoint, or the start model; its logs are cut there. UserError if a file is damaged."""
    for leftover in run.glob("checkpoint-*.tmp*"):  # of a process that was killed while saving
        shutil.rmtree(leftover)
    start, saved = (
        run / "start" if (run / "start").exists() else run.parent / "start",
        checkpoints(run)[-1:],
    )
    for folder in (start, *saved):
        check_folder(folder)
    lean = {"device": device, "dtype": args.dtype}
    model, tokenizer = load_policy(
        str(saved[0] if saved else start),
        task,
        seed=args.seed,
        lora_rank=args.lora_rank,
        gradient_checkpointing=args.gradient_checkpointing,
        **lean,
    )
    reference = (
        None
        if not args.kl
        else model
        if args.lora_rank
        else load_policy(str(start), task, **lean)[0]
    )
    learner = Learner(model, tokenizer, reference, AdamW(model), 0)
    if saved:
        state = torch.load(
            saved[0] / "trainer.pt", map_location="cpu", mmap=True, weights_only=True
        )
        learner.optimizer.load_state_dict(state["optimizer"])
        learner.step = state["step"]
    for log in (
        run / f"{name}.jsonl" for name in ("metrics", "samples", "snapshots")
    ):  # no step is logged twice
        write_text(
            log,
            "".join(json.dumps(row) + "\n" for row in read_log(log) if row["step"] <= learner.step),
        )
    return learner


def first_look(args: argparse.Namespace, method: str, t: int, metrics: dict, sample: dict) -> None:
    """Of a language model's first step: a rollout, its rewards, how many were cut off, before minutes are spent."""
    if t == 0 and args.model != "tiny":
        one = sample["rollouts"][0]
        print(
            f"\n{method}, its first rollout:\n{one['text'][:1000]}\nrewards: {one['rewards']}\nof all: "
            f"{metrics['answers']:.0%} of the slots hold an answer, {metrics['cut_off']:.0%} were cut off "
            f"(--max-new-tokens {args.max_new_tokens or 256} per answer)",
            file=sys.stderr,
        )


def save(learner: Learner, run: Path) -> None:
    """A checkpoint, of which the last two are kept. Raises UserError if the weights are not finite."""
    if not all(parameter.isfinite().all() for parameter in learner.model.parameters()):
        raise UserError("the weights are not finite: try a lower --lr")

    def write(folder: Path) -> None:
        save_policy(learner.model, learner.tokenizer, folder)
        torch.save(
            {"optimizer": learner.optimizer.state_dict(), "step": learner.step},
            folder / "trainer.pt",
        )

    write_folder(run / f"checkpoint-{learner.step:06d}", write)
    for old in checkpoints(run)[:-2]:
        shutil.rmtree(old)


def held_out(task: Task, split: str = "test", n: int = 4) -> list[Problem]:
    """The first n problems of a split, fewer where a finite set wraps around."""
    return list({problem.id: problem for problem in take_problems(task, split, n)}.values())


def snapshot(
    method: str, learner: Learner, task: Task, args: argparse.Namespace, run: Path, ask: Callable
) -> None:
    """What the policy answers to a few held-out problems, if one of --snapshots is due: evenly spaced, the first step
    and the last included. `ask` is eval.sample_pool: its random numbers are its own, so training stays as it is."""
    n = min(args.snapshots, args.steps)
    if learner.step in {args.steps - round(i * (args.steps - 1) / max(1, n - 1)) for i in range(n)}:
        pool = ask(
            method,
            (learner.model, learner.tokenizer),
            task,
            held_out(task),
            vars(args),
            training=True,
            size=min(30, args.pool),
            m=answers_per_rollout(method, args.m),
            temperature=args.eval_temperature,
        )
        append(
            run / "snapshots.jsonl",
            {
                "step": learner.step,
                "problems": [
                    {
                        "id": problem.id,
                        "answers": answers,
                        "rewards": rewards.double().round(decimals=6).tolist(),
                    }
                    for problem, answers, rewards in zip(
                        pool.problems, pool.answers, pool.vectors(), strict=True
                    )
                ],
            },
        )


def snapshots(
    run: Path,
) -> tuple[dict, Task, list[Problem], list[tuple[int, dict[str, list[dict]]]]]:
    """Flags, task and problems of a run, and by step what each method answered to them, at the nearest step where it
    has no snapshot of this one. UserError if there are none; a line names the methods that have none, or fewer."""
    config = load_config(run)
    problems = held_out(task := task_of(config["flags"]))
    logs = {
        method: [
            record
            for record in read_log(run / method / "snapshots.jsonl", "problems")
            if len(record["problems"]) == len(problems)
        ]
        for method in ADVANTAGES
        if (run / method).is_dir()
    }
    ends = {method: log[-1]["step"] if log else 0 for method, log in logs.items()}
    last = min([step for step in ends.values() if step], default=0)
    for names, text in (
        ([name for name in ends if not ends[name]], "no snapshots of {}"),
        (
            [name for name in ends if last == ends[name] < max(ends.values())],
            f"snapshots of {{}} end at step {last}, all is shown to there",
        ),
    ):
        why = (
            f"{run}: {text.format(', '.join(names) or 'any method')}; training keeps them: "
            f"{re.sub(' --out [^ ]+', '', config['history'][0]['command'])} --snapshots 20 --out {run}-2"
        )
        if not last:
            raise UserError(why)
        if names:
            print(why, file=sys.stderr)
    return (
        config["flags"],
        task,
        problems,
        [
            (
                step,
                {
                    method: min(log, key=lambda record, step=step: abs(record["step"] - step))[
                        "problems"
                    ]
                    for method, log in logs.items()
                    if log
                },
            )
            for step in sorted({record["step"] for log in logs.values() for record in log})
            if step <= last
        ],
    )
