"""The training of the methods: one after another, or side by side, each in a process of its own."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path

from engine.config import Config
from engine.cores import cores
from engine.errors import explain_machine, way_on
from engine.files import read_log
from engine.processes import possible, run_all
from engine.runs import steps_done, task_of
from rewards import Task, UserError
from vpo import ADVANTAGES

TrainMethod = Callable[[str, Config, Task, int], None]  # train.train_method


def jobs_of(config: Config) -> int:
    """How many methods are trained at a time: with the tiny model on several cores all of them."""
    n = len(config.method)
    if config.jobs:
        return possible(min(config.jobs, n))
    is_small = config.is_tiny and config.device == "cpu"
    return possible(n) if is_small and are_known(config) and cores() > 1 else 1


def are_known(config: Config) -> bool:
    """Whether all methods are those of vpo.py. Another process may not know a user's own."""
    return all(ADVANTAGES[name].__module__ == "vpo" for name in config.method)


def train_methods(train_method: TrainMethod, config: Config, task: Task) -> None:
    """Train the methods that have steps left, several at a time where --jobs says so."""
    out = Path(config.out)
    methods = [method for method in config.method if steps_done(out / method) < config.steps]
    if not methods:
        print(f"{out}: all {config.steps} steps are done", file=sys.stderr)
        return
    gradient = "train.backward" if config.plain else "fast.backward (--plain: train.backward)"
    print(f"{', '.join(methods)} on {config.device}; gradient: {gradient}", file=sys.stderr)
    gc.collect()  # the start model: one whose layers are computed again refers to itself
    jobs = jobs_of(config)
    work = {method: (train_method, method, config, task, 0) for method in methods}
    if jobs > 1:  # each process loads the task itself, and has its bar below the others
        for position, method in enumerate(methods):
            work[method] = (train_method, method, config, None, position)
    with way_on(f"go on with: python {sys.argv[0]} --resume --out {out}"):
        run_all(train_one, work, jobs, config.device)


def train_one(
    train_method: TrainMethod, method: str, config: Config, task: Task | None, position: int
) -> None:
    """Train one method. An error says in which method and step it was."""
    if method not in ADVANTAGES:
        problem = f"a process does not know the method {method}"
        advice = "add it to vpo.ADVANTAGES outside of __main__, or take --jobs 1"
        raise UserError(f"--jobs {config.jobs}: {problem}; {advice}")
    try:
        with explain_machine():
            train_method(method, config, task or task_of(config), position)
    except Exception as error:
        logged = len(read_log(Path(config.out) / method / "metrics.jsonl"))
        place = f"{method}, step {min(logged + 1, config.steps)}"
        if isinstance(error, UserError):
            raise UserError(f"{place}: {error}") from error
        error.add_note(f"method {place}")
        raise
    finally:
        gc.collect()  # as of the start model
