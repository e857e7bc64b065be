"""Run folders: what a run stores about itself, who may write to it, and what may join it later.

A folder holds config.json (all flags, and a history of commands), start/ (the start model), and per
method metrics.jsonl, samples.jsonl, snapshots.jsonl and checkpoint-STEP/. The method goal_conditioned
may have a start/ of its own.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoints import checkpoints
from engine.config import MAY_CHANGE, Config, text_of
from engine.files import write_text, writing
from engine.fingerprints import changed_parts, fingerprint_of
from engine.kinds import kind_named
from rewards import Task, UserError
from tasks import load_task
from vpo import ADVANTAGES

NOT_STORED = ("resume", "out", "plan", "changed_task", "jobs")


@dataclass
class StoredRun:
    """What a run folder holds."""

    config: Config
    history: list[dict]  # one record per command of train.py
    has_checkpoint: bool


def load_run(run: Path) -> StoredRun:
    """The config.json of a run folder.

    Raises:
        UserError: there is none, it is damaged or edited, or a method of the run is unknown.
    """
    path = run / "config.json"
    is_model = (run / "trainer.pt").exists() or run.name == "start"
    if path.is_file():
        is_model = is_model or '"model_type"' in path.read_text(errors="replace")
    if is_model or not path.is_file():
        raise UserError(
            f"{run}: no config.json of a run in it, so it is no run of train.py; name the folder that "
            "holds config.json and start/"
        )
    try:
        record = json.loads(path.read_text())
        flags = record["flags"]
        if record.get("checksum", checksum_of(flags)) != checksum_of(flags):
            raise ValueError("flags were edited")
        known = {field.name for field in dataclasses.fields(Config)}
        config = Config(**{name: value for name, value in flags.items() if name in known})
        config.out = str(run)
        history = record["history"]
        has_checkpoint = any(checkpoints(run / method) for method in config.method)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); restore it or train again") from error
    for method in config.method:
        if method not in ADVANTAGES:
            raise UserError(
                f"{run}: has the method {method}, which only the file that defines it knows; give the "
                "command from there (docs/own.md, Your own method)"
            )
    return StoredRun(config, history, has_checkpoint)


def checksum_of(flags: dict) -> str:
    """What tells that flags in config.json were edited."""
    text = json.dumps(flags, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_run(out: Path) -> StoredRun | None:
    """The run in an output folder, None if there is none yet. Raises UserError if it holds something else."""
    if (out / "config.json").exists():
        return load_run(out)
    if out.exists():
        leftovers = ("lock", "config.json.tmp")
        is_empty = out.is_dir() and all(path.name in leftovers for path in out.iterdir())
        if not is_empty:
            raise UserError(f"--out {out}: not empty, and no run of train.py; take another name")
    return None


def task_of(config: Config) -> Task:
    """The task of a configuration, whose fingerprint is set where it has none yet.

    Raises:
        UserError: its problems or rewards are not those that the run began with.
    """
    task = task_like(config)
    fingerprint = fingerprint_of(task, config.task)
    changed = changed_parts(config.fingerprint, fingerprint, task, config.task)
    if changed and not config.changed_task:
        source = f"--data {config.data}" if config.data else f"--task {config.task}"
        raise UserError(
            f"{source}: the {', '.join(changed)} have changed since the run began; restore them, train "
            f"again, or accept this with: python train.py --resume --changed-task --out {config.out}"
        )
    config.fingerprint = fingerprint
    return task


def task_like(config: Config) -> Task:
    """The task of a configuration whose fingerprint has been looked at."""
    task = load_task(config.task, **dataclasses.asdict(config))
    kind_named(config.model).prepare(task)
    return task


def is_joined(config: Config, stored: StoredRun | None) -> bool:
    """Whether a command adds to the run in its folder.

    A run without a checkpoint has nothing to lose. It is replaced, unless it is resumed.
    """
    return stored is not None and (config.resume or stored.has_checkpoint)


def join_run(config: Config, flags_given: set[str], stored: StoredRun) -> Config:
    """The configuration of the run in a folder, with the flags given now where they may change.

    Raises:
        UserError: a flag may not change, a method is there already, or the start model is missing.
    """
    out = Path(config.out)
    changes = {name: getattr(config, name) for name in NOT_STORED}
    if not config.resume:
        changes["method"] = config.method
    for name in flags_given:
        value = getattr(config, name)
        own = getattr(stored.config, name)
        if name in MAY_CHANGE:
            changes[name] = value
        elif name == "steps" and config.resume:
            changes[name] = extended_steps(value, out, stored.config)
        elif value != own:
            raise UserError(
                f"--out {out}: holds another run, with {text_of(name, own)}, not "
                f"{text_of(name, value)}; drop the flag, or take another --out"
            )
    joined = dataclasses.replace(stored.config, **changes)
    present = [name for name in joined.method if (out / name).exists()]
    if present and not config.resume:
        raise UserError(
            f"--out {out}: already holds {', '.join(present)}; --resume goes on with it, --method adds "
            f"another, --out {out}-2 begins anew"
        )
    if stored.has_checkpoint and not (out / "start").is_dir():
        raise UserError(
            f"{out / 'start'}: is missing, the start and reference of all methods; restore it, or "
            "train again with another --out"
        )
    return joined


def extended_steps(steps: int, out: Path, stored: Config) -> int:
    """The steps of a run that goes on for longer, checked. Says what becomes of its learning rate."""
    for method in stored.method:
        done = steps_done(out / method)
        if steps < done:
            raise UserError(f"--steps {steps}: {method} has {done} already; give as many or more")
    if steps != stored.steps and stored.lr_schedule == "linear":
        print(
            f"--steps {steps}: the learning rate now falls over {steps} steps; until here it fell over "
            f"{stored.steps}, so this run is not the same as one that was begun with --steps {steps}",
            file=sys.stderr,
        )
    return steps


def steps_done(run: Path) -> int:
    """The steps of a method's newest checkpoint, 0 if there is none."""
    saved = checkpoints(run)
    return int(saved[-1].name.removeprefix("checkpoint-")) if saved else 0


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


def progress(out: Path, config: Config) -> str:
    """Which methods of a run have steps left, such as "vpo: step 37 of 300, still training"."""
    notes = []
    for method in config.method:
        done = steps_done(out / method)
        if done < (config.steps or 0):
            notes.append(f"{method}: step {done} of {config.steps}")
    if notes and is_training(out):
        notes.append("still training")
    return ", ".join(notes)


@contextlib.contextmanager
def claim(config: Config, argv: list[str], stored: StoredRun | None) -> Iterator[None]:
    """Lock a run folder, and write its config.json: all flags, all methods, what each command ran on.

    Args:
        stored: the run that was in the folder when the command began.

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
        if find_run(out) != stored:
            raise UserError(
                f"--out {out}: another train.py has just written to it; give the command again"
            )
        if stored is not None and not is_joined(config, stored):
            for name in ("start", *stored.config.method):
                shutil.rmtree(out / name, ignore_errors=True)
            stored = None
        _write_config(config, argv, stored)
        yield


def _write_config(config: Config, argv: list[str], joined: StoredRun | None) -> None:
    command = {
        "command": " ".join(["python", sys.argv[0], *argv]),
        "date": time.strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    methods = list(config.method)
    history = [command]
    if joined is not None:
        methods = [*joined.config.method, *methods]
        history = [*joined.history, command]
    flags = dataclasses.asdict(config) | {"method": list(dict.fromkeys(methods))}
    for name in NOT_STORED:
        del flags[name]
    record = {"flags": flags, "checksum": checksum_of(flags), "history": history}
    write_text(Path(config.out) / "config.json", json.dumps(record, indent=1))
