"""Run folders: which configuration a command has, what a run stores, and what may join it later.

A folder holds config.json (all flags, and a history of commands), start/ (the start model), and per
method metrics.jsonl, samples.jsonl, snapshots.jsonl and checkpoint-STEP/.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import (
    MAY_DIFFER,
    Config,
    Parser,
    check_ranges,
    check_subset,
    check_types,
    flag_of,
    peak_rate,
    task_defaults,
)
from engine.files import write_text, writing
from engine.models import check_start
from engine.tasks import load_task, load_task_class
from rewards import Task, UserError
from vpo import ADVANTAGES, answers_per_rollout

NOT_STORED = ("resume", "out")


@dataclass
class StoredRun:
    """What a run folder holds."""

    config: Config
    history: list[dict]  # one record per command of train.py
    has_checkpoint: bool


@dataclass(frozen=True)
class StoredPolicy:
    """A policy on disk."""

    folder: Path
    m: int  # answers per rollout that it is asked for


def task_of(config: Config) -> Task:
    """The task of a configuration. Raises UserError if it cannot be made."""
    flags = dataclasses.asdict(config)
    return load_task(flags.pop("task"), **flags)


def read_config(argv: list[str], description: str) -> tuple[Config, Task, StoredRun | None]:
    """The configuration of a command of train.py, its task, and the run that it goes on with.

    Defaults are laid over one another: those of Config, of the task and the kind of model, of the
    run in the folder, then the flags of the command line.

    Raises:
        UserError: the folder is taken, or a flag may not differ from the run's.
    """
    parser = Parser(Config, "train.py", description)
    first = _first_look(argv)
    out = Path(first.out or f"runs/{Path(first.task).stem}-seed{first.seed}")
    stored = None if first.help else find_run(out)
    if first.resume and stored is None and not first.help:
        raise UserError(
            f"--resume: {out} holds no run; name the folder of one with --out{run_meant(out)}"
        )
    if stored is not None and not first.resume and not stored.has_checkpoint:
        stored = None  # nothing is lost: it is replaced
    if stored is None:
        task_class = load_task_class(first.task)
        of_task = task_defaults(task_class, first.model)
        for name in ("task", "model", "seed", "out", "resume"):
            if name in of_task:
                raise UserError(
                    f"task {task_class.name}: its defaults name {name}, which only a command can give"
                )
        parser.lay_over(of_task, f"task {task_class.name}")
    else:
        flags = dataclasses.asdict(stored.config)
        flags = {name: value for name, value in flags.items() if name not in NOT_STORED}
        if not first.resume:
            del flags["method"]
        parser.lay_over(flags, str(out))
    config = parser.parse_args_into_dataclasses(argv)[0]
    config.out = str(out)
    check_ranges(config)
    if stored is None:
        check_subset(config)
    else:
        own_rates = [entry for entry in stored.config.lr if entry not in config.lr]
        config.lr = own_rates + config.lr  # what is new may be the rate of a method that joins
        check_joins(config, stored)
    return config, task_of(config), stored


def _first_look(argv: list[str]) -> argparse.Namespace:
    """The flags on which the other flags' defaults depend. Mistakes in them are told later."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    defaults = Config()
    for name in ("task", "model", "out"):
        parser.add_argument(f"--{name}", default=getattr(defaults, name))
    parser.add_argument("--seed", default=defaults.seed)
    parser.add_argument("--resume", nargs="?", const="yes", default="no")
    parser.add_argument("--help", "-h", action="store_true")
    try:
        first = parser.parse_known_args(argv)[0]
    except argparse.ArgumentError:
        first = parser.parse_args([])
    first.resume = first.resume.lower() in ("yes", "true", "1", "t", "y")
    return first


def check_joins(config: Config, stored: StoredRun) -> None:
    """Check a command that goes on with a run, or adds a method to it.

    Raises:
        UserError: a flag may not differ, a method is there already, or the start model is missing.
    """
    out = Path(config.out)
    for field in dataclasses.fields(Config):
        own = getattr(stored.config, field.name)
        value = getattr(config, field.name)
        if field.name == "steps" and config.resume:
            check_more_steps(config.steps, out, stored.config)
        elif value != own and field.name not in MAY_DIFFER:
            raise UserError(
                f"--out {out}: holds another run, with {flag_of(field.name)} {own}, not {value}; drop "
                "the flag, or take another --out"
            )
    for method in stored.config.method:
        if peak_rate(config, method) != peak_rate(stored.config, method):
            raise UserError(
                f"--out {out}: holds another run, in which {method} has --lr "
                f"{peak_rate(stored.config, method):g}, not {peak_rate(config, method):g}; drop the "
                "flag, or take another --out"
            )
    present = [name for name in config.method if (out / name).exists()]
    if present and not config.resume:
        if all(steps_done(out / name) == config.steps for name in present):
            fix = f"finished; python eval.py {out} shows its table"
        else:
            fix = "--resume goes on with it"
        raise UserError(
            f"--out {out}: already holds {', '.join(present)}, {fix}; --method adds another, --out "
            f"{unused(out)} begins anew"
        )
    if stored.has_checkpoint:
        check_start(out / "start")


def check_more_steps(steps: int, out: Path, stored: Config) -> None:
    """Check the steps of a run that goes on for longer. Says what becomes of its learning rate."""
    for method in stored.method:
        done = steps_done(out / method)
        if steps < done:
            raise UserError(f"--steps {steps}: {method} has {done} already; give as many or more")
        is_longer = steps > stored.steps and done == stored.steps
        if is_longer and not (checkpoints(out / method)[-1] / "trainer.pt").exists():
            raise UserError(
                f"--steps {steps}: {method} has finished its {done} steps, and its optimizer's state is "
                f"kept only with --keep-optimizer; train anew, with --steps {steps} --out {unused(out)}"
            )
    if steps != stored.steps and stored.lr_schedule == "linear":
        print(
            f"--steps {steps}: the learning rate now falls over {steps} steps; until here it fell over "
            f"{stored.steps}, so this run is not the same as one that was begun with --steps {steps}",
            file=sys.stderr,
        )


def find_run(out: Path) -> StoredRun | None:
    """The run in an output folder, None if there is none yet. Raises UserError if it holds something else."""
    if (out / "config.json").exists():
        return load_run(out)
    if out.exists():
        leftovers = ("lock", "config.json.tmp")
        is_empty = out.is_dir() and all(path.name in leftovers for path in out.iterdir())
        if not is_empty:
            raise UserError(
                f"--out {out}: not empty, and no run of train.py; take another name{run_meant(out)}"
            )
    return None


def run_meant(folder: Path) -> str:
    """The end of a message about a folder inside a run: "; did you mean RUN?", or nothing."""
    for parent in list(folder.absolute().parents)[:2]:
        if (parent / "config.json").exists() and (parent / "start").is_dir():
            return f"; did you mean {os.path.relpath(parent)}?"
    return ""


def unused(out: Path) -> Path:
    """The first of OUT-2, OUT-3, ... that there is not."""
    n = 2
    while Path(f"{out}-{n}").exists():
        n += 1
    return Path(f"{out}-{n}")


def load_run(run: Path) -> StoredRun:
    """The config.json of a run folder.

    Raises:
        UserError: there is none, it is damaged, or a method of the run is unknown.
    """
    path = run / "config.json"
    is_model = (run / "trainer.pt").exists() or run.name == "start"
    if path.is_file():
        is_model = is_model or '"model_type"' in path.read_text(errors="replace")
    if is_model or not path.is_file():
        raise UserError(
            f"{run}: no config.json of a run in it, so it is no run of train.py; name the folder that "
            f"holds config.json and start/{run_meant(run)}"
        )
    try:
        record = json.loads(path.read_text())
        check_types(record["flags"], "flags")
        config = Config(**record["flags"], out=str(run))
        check_ranges(config)
        history = record["history"]
        has_checkpoint = any(checkpoints(run / method) for method in config.method)
    except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); restore it or train again") from error
    for method in config.method:
        if method not in ADVANTAGES:
            raise UserError(
                f"{run}: has the method {method}, which only the file that defines it knows; give the "
                "command from there (docs/own.md, Your own method)"
            )
    return StoredRun(config, history, has_checkpoint)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of one method, oldest first."""
    return sorted(folder.glob("checkpoint-" + 6 * "[0-9]"))


def steps_done(folder: Path) -> int:
    """The steps of a method's newest checkpoint, 0 if there is none."""
    saved = checkpoints(folder)
    return int(saved[-1].name.removeprefix("checkpoint-")) if saved else 0


def policies(run: Path, m: int) -> dict[str, StoredPolicy]:
    """The policies of a run by name: the start model, asked for one answer and for m, and every method's.

    Raises:
        UserError: there is no checkpoint yet.
    """
    by_name = {
        "start": StoredPolicy(run / "start", 1),
        "start_sets": StoredPolicy(run / "start", m),
    }
    for method in ADVANTAGES:
        saved = checkpoints(run / method)
        if saved:
            by_name[method] = StoredPolicy(saved[-1], answers_per_rollout(method, m))
    if len(by_name) == 2:
        raise UserError(f"{run}: holds no checkpoint yet; let train.py get further, or --resume it")
    return by_name


def progress(out: Path, config: Config) -> str:
    """Which methods of a run have steps left, such as "vpo: step 37 of 300, still training"."""
    notes = []
    for method in config.method:
        done = steps_done(out / method)
        if done < config.steps:
            notes.append(f"{method}: step {done} of {config.steps}")
    if notes and is_training(out):
        notes.append("still training")
    return ", ".join(notes)


def is_training(out: Path) -> bool:
    """Whether a process writes to a run folder now."""
    path = out / "lock"
    if not path.exists() or not os.access(path, os.W_OK):
        return False
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


@contextlib.contextmanager
def claim(config: Config, argv: list[str], stored: StoredRun | None) -> Iterator[None]:
    """Lock a run folder, and write its config.json: all flags, all methods, what each command ran on.

    Args:
        stored: the run that the command goes on with; None: what is in the folder is replaced.

    Raises:
        UserError: another process writes to the folder, or has written to it since.
    """
    out = Path(config.out)
    with writing(out):
        lock = (out / "lock").open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"--out {out}: another train.py is writing to it; wait, or take another name"
            ) from error
        found = find_run(out)
        has_changed = found != stored if stored else found is not None and found.has_checkpoint
        if has_changed:
            raise UserError(
                f"--out {out}: another train.py has just written to it; give the command again"
            )
        if stored is None:
            for name in ("start", *(found.config.method if found else ())):
                shutil.rmtree(out / name, ignore_errors=True)
        with writing(out):
            _write_config(config, argv, stored)
        yield


def _write_config(config: Config, argv: list[str], joined: StoredRun | None) -> None:
    is_cuda = config.device == "cuda"
    command = {
        "command": " ".join(["python", sys.argv[0], *argv]),
        "date": time.strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if is_cuda else None,
    }
    methods = list(config.method)
    history = [command]
    if joined is not None:
        methods = [*joined.config.method, *methods]
        history = [*joined.history, command]
    flags = dataclasses.asdict(config) | {"method": list(dict.fromkeys(methods))}
    for name in NOT_STORED:
        del flags[name]
    record = {"flags": flags, "history": history}
    write_text(Path(config.out) / "config.json", json.dumps(record, indent=1))
