"""Run folders: which configuration a command has, what a run stores, and what may join it later.

A folder holds config.json (all flags, and a history of commands), start/ (the start model), and per
method metrics.jsonl, samples.jsonl, snapshots.jsonl and checkpoint-STEP/
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from engine import __version__
from engine.config import (
    IGNORE_SUBSET,
    MAY_DIFFER,
    Config,
    Parser,
    check_ranges,
    device_of,
    flag_of,
    peak_rate,
    task_defaults,
)
from engine.errors import did_you_mean
from engine.files import check_free, listed, owned, write_text
from engine.models import load_config_and_tokenizer
from engine.tasks import check_text, load_task, load_task_class
from rewards import Task, UserError
from vpo import ADVANTAGES, answers_per_rollout


@dataclass
class StoredRun:
    """The configuration and the history of a run folder."""

    config: Config
    history: list[dict]  # one record per command of train.py
    has_checkpoint: bool


@dataclass(frozen=True)
class StoredPolicy:
    """A policy on disk."""

    folder: Path
    m: int  # answers per rollout that it is asked for

    @property
    def step(self) -> int:
        """The training steps of a checkpoint."""
        return step_of(self.folder)


def task_of(config: Config) -> Task:
    """The task of a configuration. Raises UserError if it cannot be made."""
    flags = dataclasses.asdict(config)
    return load_task(flags.pop("task"), **flags)


def read_config(argv: list[str], doc: str) -> tuple[Config, Task, StoredRun | None]:
    """The configuration of a command of train.py, its task, and the run that it goes on with.

    Defaults are laid over one another: those of Config, of the task and the kind of model, of the
    run in the folder, then the flags of the command line.
    """
    # The flags on which the other flags' defaults depend.
    first = Parser(Config, "train.py", doc, add_help=False).parse_known_args(argv)[0]
    out = Path(first.out or f"runs/{Path(first.task).stem}-seed{first.seed}")
    check_text(str(out), "--out")
    check_free(out)
    task_class = load_task_class(first.task)  # raises if there is none
    stored = find_run(out, first.resume)

    parser = Parser(Config, "train.py", doc)
    if stored is None:
        device = device_of(first.device, first.model == "tiny")
        defaults = task_defaults(task_class, first.model, device)
        for name in defaults.keys() - vars(Config()):
            parser.error(f"--task {first.task}: its default {name!r} is no flag")
        base = Config(**defaults)
    elif first.resume:
        base = stored.config
    else:
        base = dataclasses.replace(stored.config, method=first.method)
    parser.set_defaults(**vars(base))
    config, _ = parser.parse_args_into_dataclass(argv)
    config.out = str(out)
    config.method = list(dict.fromkeys(config.method))
    names = [str(entry).rpartition("=")[0] for entry in config.lr]
    twice = [name or "all methods" for name in names if names.count(name) > 1]
    if twice and config.lr is not base.lr:
        parser.error(f"--lr {' '.join(config.lr)}: two rates for {twice[0]}; drop one")
    vars(config).update(files_of(config))
    if stored is None and config.subset and set(config.method) <= IGNORE_SUBSET:
        parser.error(f"--subset {config.subset}: not used by {', '.join(config.method)}")
    if stored is not None:
        if all("=" in str(entry) for entry in config.lr):  # else they are for all methods
            old_rates = [entry for entry in stored.config.lr if entry not in config.lr]
            config.lr = old_rates + config.lr  # what is new may be the rate of a method that joins
        check_joins(config, stored)
    return config, task_of(config), stored


def check_joins(config: Config, stored: StoredRun) -> None:
    """Raise UserError for a command that cannot go on with a run, or add a method to it."""
    check_fits(config, stored.config)
    steps, old_steps = config.steps, stored.config.steps
    if steps != old_steps and config.lr_schedule == "linear":
        message = f"the learning rate now falls over {steps} steps, until here over {old_steps}"
        print(f"--steps {steps}: {message}", file=sys.stderr)


def check_fits(config: Config, old: Config) -> None:
    """Raise UserError for flags of a command that do not fit the run in its folder."""
    out = Path(config.out)
    other_run = f"--out {out}: holds another run"
    advice = "drop the flag, or take another --out"
    left_out = (*MAY_DIFFER, "steps") if config.resume else MAY_DIFFER
    for name, value in vars(old).items():
        new = getattr(config, name)
        if name not in left_out and new != value:
            raise UserError(f"{other_run}, with {flag_of(name)} {value!r}, not {new!r}; {advice}")
    for method in old.method:
        rate, new_rate = peak_rate(old, method), peak_rate(config, method)
        if rate != new_rate:
            difference = f"{method} has --lr {rate}, not {new_rate}"
            raise UserError(f"{other_run}, in which {difference}; {advice}")
        done = steps_done(out / method)
        if config.steps < done:
            problem = f"{method} has {done} already"
            raise UserError(f"--steps {config.steps}: {problem}; give as many or more")
        is_done = done == old.steps < config.steps
        if is_done and not (checkpoints(out / method)[-1] / "trainer.pt").exists():
            problem = f"{method} has finished its {done} steps, without --keep-optimizer"
            raise UserError(f"--steps {config.steps}: {problem}; train anew with another --out")
    present = [name for name in config.method if steps_done(out / name)]
    if present and not config.resume:
        ways = "--resume goes on with it, --method adds another, another --out begins anew"
        raise UserError(f"--out {out}: already holds {', '.join(present)}; {ways}")


def find_run(out: Path, resume: bool) -> StoredRun | None:
    """The run in an output folder that a command goes on with. None: a new one begins there."""
    if (out / "config.json").exists():
        stored = load_run(out)
        return stored if resume or stored.has_checkpoint else None  # else nothing is lost
    if resume:
        raise UserError(f"--resume: {out} holds no run; name the folder of one with --out")
    is_free = out.is_dir() and not listed(out)
    if out.exists() and not is_free:
        raise UserError(f"--out {out}: not empty, and no run of train.py; take another name")
    return None


def load_run(run: Path) -> StoredRun:
    """The config.json of a run folder. Raises UserError if there is none, or it cannot be used."""
    if not run.exists():
        beside = [other.name for other in listed(run.parent)]
        raise UserError(f"{run}: there is no such run{did_you_mean(run.name, beside)}")
    path = run / "config.json"
    try:
        record = json.loads(path.read_text("utf-8"))
        flags = record["flags"]
        gone = sorted(flags.keys() - vars(Config()).keys())
        known = {name: value for name, value in flags.items() if name not in gone}
        config = Config(**known, out=str(run))
        check_ranges(config)
        history = list(record.get("history", []))
        digests = dict(record.get("data", {}))
        version = history[0].get("vpo", "3") if history else __version__
        is_old = version.partition(".")[0] != __version__.partition(".")[0]
    except (OSError, UserError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"{path}: cannot be read as that of a run ({reason!s:.200})"
        advice = "name a run folder, restore it or train again"
        if any(run.glob("*.safetensors")) or any(run.glob("*-*/*.safetensors")):
            advice = "it holds models: name the run that they are of, for those of --save-mixed with --mix"
        raise UserError(f"{problem}; {advice}") from error
    if gone:
        shown = ", ".join(f"{flag_of(name)} {flags[name]}" for name in gone)
        tell_once(f"{run}: flags of another version are ignored: {shown}")
    if is_old:
        tell_once(f"{run}: trained by version {version}; docs/changes.md says what has changed")
    vars(config).update(files_of(config))
    has_checkpoint = any(checkpoints(run / method) for method in config.method)
    if has_checkpoint:
        check_files(config, digests)
        load_config_and_tokenizer(str(run / "start"))  # raises if it is damaged
    for method in config.method:
        if method not in ADVANTAGES:
            advice = "give the command from the file that defines it (docs/own.md)"
            raise UserError(f"{run}: has the method {method}, unknown here; {advice}")
    return StoredRun(config, history, has_checkpoint)


def check_files(config: Config, digests: dict[str, str]) -> None:
    """Raise UserError if the files of a run are not those that it was trained on: file -> digest."""
    present = file_digests(config).values()
    for file, digest in digests.items():
        if digest not in present:
            problem = f"{file}: is not there, or not the file that {config.out} was trained on"
            stored = f"{config.out}/config.json"
            ways = f"restore it, name its new place in {stored}, or train with another --out"
            raise UserError(f"{problem}; {ways}; if no reward changed, delete its line in {stored}")


@functools.cache
def tell_once(text: str) -> None:
    print(text, file=sys.stderr)


def files_of(config: Config) -> dict[str, str]:
    """The flags that name an own task or data, with full paths, which are found from any folder."""
    files = {"task": config.task} if config.task.endswith(".py") else {}
    files |= {"data": config.data, "test_data": config.test_data}
    return {name: os.path.abspath(file) for name, file in files.items() if os.path.isfile(file)}


def file_digests(config: Config) -> dict[str, str]:
    """The digests of the files of a run. What an own task imports is not among them."""
    paths = files_of(config).values()
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths}


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of one method, oldest first."""
    return listed(folder, "checkpoint-" + 6 * "[0-9]")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def steps_done(folder: Path) -> int:
    """The steps of a method's newest checkpoint, 0 if there is none."""
    saved = checkpoints(folder)
    return step_of(saved[-1]) if saved else 0


def policies(run: Path, m: int) -> dict[str, StoredPolicy]:
    """The policies of a run by name: the start model, asked for one answer and for m, and every method's."""
    start = run / "start"
    by_name = {"start": StoredPolicy(start, 1), "start_sets": StoredPolicy(start, m)}
    for method in ADVANTAGES:
        saved = checkpoints(run / method)
        if saved:
            by_name[method] = StoredPolicy(saved[-1], answers_per_rollout(method, m))
    if len(by_name) == 2:
        raise UserError(f"{run}: holds no checkpoint yet; let train.py get further, or --resume it")
    return by_name


@contextlib.contextmanager
def claimed(config: Config, argv: list[str], stored: StoredRun | None) -> Iterator[None]:
    """Train in a run folder inside the block, as the only process. Its config.json is written first.

    It holds all flags, all methods, and the commands of the run, each with its machine. `stored` is
    the run that the command goes on with.
    """
    out = Path(config.out)
    with owned(out):
        present = find_run(out, config.resume)
        if present and present != stored:  # another command has trained here in the meantime
            check_joins(config, present)
            stored = present
        command = {
            "command": " ".join(["python", sys.argv[0], *argv]),
            "date": time.strftime("%Y-%m-%d"),
            "vpo": __version__,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if config.device == "cuda" else None,
        }
        flags = dataclasses.asdict(config)
        del flags["resume"], flags["out"]
        history = [command]
        if stored is not None:
            flags["method"] = list(dict.fromkeys([*stored.config.method, *config.method]))
            history = [*stored.history, command]
        record = {"flags": flags, "history": history, "data": file_digests(config)}
        write_text(out / "config.json", json.dumps(record, indent=1))
        yield
