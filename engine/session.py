"""One command of train.py, from its flags to the comparison. The training itself is handed in."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from engine.config import Config, check, resolve
from engine.doors import as_command, explain_machine
from engine.files import read_log
from engine.jobs import jobs_of, run_all
from engine.owner import owned
from engine.runs import checkpoints, read_config, steps_done, task_of, write_config
from engine.start import Demonstrations, start_policy, write_start
from eval import EvalFlags, evaluate
from rewards import Task, UserError
from vpo import ADVANTAGES

TrainMethod = Callable[[str, Config, Task, int], None]


def main(
    doc: str,
    warm_up: Callable,
    demonstrations: Demonstrations,
    train_method: TrainMethod,
    argv: list[str] | None = None,
) -> None:
    """Train what the flags ask for, then evaluate it.

    Args:
        doc: of train.py; its first paragraph stands in --help.
        warm_up, demonstrations, train_method: those of train.py.
    """

    def run() -> None:
        arguments = sys.argv[1:] if argv is None else argv
        config, task, stored = read_config(arguments, doc)
        resolve(config)
        check(config, task)
        if config.is_tiny or jobs_of(config) > 1:
            torch.set_num_threads(1)  # so that no number depends on the machine's cores
        out = Path(config.out)
        policy = None
        if stored is None or not (out / "start").exists():
            policy = start_policy(config, task, demonstrations)
        jobs = jobs_of(config)
        with owned(out):
            write_config(config, arguments, stored)
            if policy is not None:
                write_start(policy, task, config, warm_up, demonstrations)
                del policy  # which leaves its memory to the training
                gc.collect()  # a layer that is computed again refers to itself
            train_methods(config, task, jobs, train_method)
        if config.eval_problems:
            evaluate([out], EvalFlags(device=config.device, jobs=jobs))
            return
        newest = [str(checkpoints(out / method)[-1]) for method in config.method]
        print(f"checkpoints: {', '.join(newest)}\ntable and figures: python eval.py {out}")

    as_command("train.py", run)


def train_methods(config: Config, task: Task, jobs: int, train_method: TrainMethod) -> None:
    """Train the methods that have steps left, several at a time where --jobs says so."""
    done = {method: steps_done(Path(config.out) / method) for method in config.method}
    methods = [method for method in config.method if done[method] < config.steps]
    if not methods:
        print(f"{config.out}: all {config.steps} steps are done", file=sys.stderr)
        return
    for method in methods:
        if config.resume and not done[method]:
            print(f"{method}: no checkpoint yet, begins with step 1", file=sys.stderr)
    gradient = "train.backward" if config.plain else "fast.backward (--plain: train.backward)"
    print(f"{', '.join(methods)} on {config.device}; gradient: {gradient}", file=sys.stderr)
    way_on = f"go on with: python {sys.argv[0]} --resume --out {config.out}"
    try:
        if jobs == 1:
            for method in methods:
                train_one(train_method, method, config, task, 0)
            return
        work = {}
        for position, method in enumerate(methods):  # None: a process loads the task itself
            work[method] = (train_method, method, config, None, position)
        run_all(train_one, work, jobs, config.device)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {way_on}") from None
    except UserError as error:
        raise UserError(f"{error}; {way_on}") from error
    except Exception as error:
        error.add_note(f"stopped; {way_on}")
        raise


def train_one(
    train_method: TrainMethod, method: str, config: Config, task: Task | None, position: int
) -> None:
    """Train one method. What goes wrong names it."""
    if method not in ADVANTAGES:
        fix = "add it to vpo.ADVANTAGES outside of __main__, or take --jobs 1"
        raise UserError(f"--jobs {config.jobs}: a process does not know the method {method}; {fix}")
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
        if config.device == "cuda":
            gc.collect()  # a model whose layers are computed again refers to itself
