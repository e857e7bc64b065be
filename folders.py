"""Run folders: what a run writes, whole or not at all, and what may join it later.

A folder holds config.json (all flags, and a history of the commands that wrote to it), start/ (the start model), and for
each method metrics.jsonl, samples.jsonl and checkpoint-STEP/ with the checksum of every file.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch

from rewards import Task, UserError, load_task

# Flags that may change in a run: what it does not depend on, and what makes it fit its device.
FREE = ("method", "resume", "out", "plan", "device", "save_every", "eval_problems", "eval_temperature", "pool", "unconfined",
        "max_new_tokens", "cuda_graph", "sampling_batch", "micro_batch_tokens", "gradient_checkpointing")


def checksum(path: Path) -> str:
    """Of a file, which may be larger than the memory that is left."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_folder(folder: Path, write) -> None:
    """Fill a folder atomically: it appears whole, with the checksum of every file, or not at all."""
    temporary = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    sums = {path.name: checksum(path) for path in temporary.iterdir()}
    (temporary / "checksums.json").write_text(json.dumps(sums, indent=1))
    try:
        os.replace(temporary, folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(temporary)  # another process was faster; what stands there is whole


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of one method, oldest first."""
    return sorted(run.glob("checkpoint-??????"))


def check_folder(folder: Path) -> None:
    """Raise UserError if a file of a checkpoint is missing or altered, and say which checkpoint to go back to."""
    older = [path for path in checkpoints(folder.parent) if path < folder]
    fix = (f"delete the folder {folder} and --resume goes on from {older[-1].name}" if older
           else f"delete the folder {folder.parent} and start again")
    try:
        sums = json.loads((folder / "checksums.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'checksums.json'}: missing or damaged; {fix}") from error
    for name, expected in sums.items():
        path = folder / name
        if not path.is_file() or checksum(path) != expected:
            raise UserError(f"{path}: missing or damaged; {fix}")


def append(path: Path, record: dict) -> None:
    """One JSON line more."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def keep_steps_to(path: Path, step: int) -> None:
    """Drop the lines of later steps, and one that was cut off by a kill, so that a resumed run does not log a step twice."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)


def load_config(run: Path) -> dict:
    """The config.json of a run folder: flags and history. Raises UserError if there is none or it is damaged."""
    path = run / "config.json"
    if not path.is_file():
        raise UserError(f"{run}: no config.json in it, so it is no run of train.py")
    try:
        config = json.loads(path.read_text())
        if not {"task", "m", "dtype", "seed", "method"} <= config["flags"].keys():
            raise KeyError("flags are missing")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); restore it or train again") from error
    return config


def task_of(flags: dict) -> Task:
    """The task that the flags of a run name."""
    task = load_task(flags["task"], **flags)
    if flags.get("fingerprint", task.fingerprint) != task.fingerprint:
        raise UserError(f"--data {flags['data']}: has changed since the run began; restore it, or train again")
    return task


def read_config(out: Path) -> dict:
    """The config.json of the run in an output folder; {} if there is none. UserError if the folder holds something else."""
    if not (out / "config.json").exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"--out {out}: not empty, and no run of train.py; take another name")
        return {}
    return load_config(out)


def merge_flags(args: argparse.Namespace, argv: list[str], stored: dict, out: Path,
                parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags of the run in the folder with those given now; UserError if one of them contradicts it.

    Without --resume, as when a method is added, flags that are not given are compared too: they have their defaults.
    """
    parser.set_defaults(**dict.fromkeys(vars(args)))
    given = {flag: value for flag, value in vars(parser.parse_args(argv)).items() if value is not None}
    for flag, value in (given if args.resume else vars(args)).items():
        if flag not in FREE and value is not None and stored.get(flag, value) != value:
            raise UserError(f"--out {out}: holds another run, with --{flag.replace('_', '-')} {stored[flag]}, not {value}; "
                            + ("drop the flag" if args.resume else "take another --out, or --resume to go on with that run"))
    if not args.resume:
        given["method"] = args.method
    return argparse.Namespace(**vars(args) | stored | {flag: given[flag] for flag in FREE if flag in given})


def write_config(args: argparse.Namespace, argv: list[str], config: dict, out: Path) -> None:
    """Claim the folder: all flags, every method that it will hold, and what each command that wrote to it ran on."""
    flags = {flag: value for flag, value in vars(args).items() if flag not in ("resume", "out")}
    before = config.get("flags", {}).get("method", [])
    flags["method"] = before + [method for method in args.method if method not in before]
    environment = {"command": " ".join(["python train.py", *argv]), "date": time.strftime("%Y-%m-%d"),
                   "python": sys.version.split()[0], "torch": torch.__version__, "cpus": os.cpu_count(),
                   "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / "config.json.tmp"
    temporary.write_text(json.dumps({"flags": flags, "history": [*config.get("history", []), environment]}, indent=1))
    os.replace(temporary, out / "config.json")
