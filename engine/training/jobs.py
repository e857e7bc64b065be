"""The training of the methods: one after another, or side by side, each in a process of its own."""

import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from engine.config import Config, open_device
from engine.cores import cores
from engine.errors import explain_machine, quieten_transformers, way_on
from engine.files import read_log
from engine.runs import steps_done, task_of
from rewards import Task, UserError
from vpo import ADVANTAGES

PROCESS_BYTES = 0.6 * 2**30  # of a card, for driver and kernels of a process
TrainMethod = Callable[[str, Config, Task, int], None]  # train.train_method
# Imported once, by the server that begins processes, because they take seconds.
PRELOADED = ["torch", "transformers", "transformers.models.gpt2.modeling_gpt2"]


def jobs_of(config: Config) -> int:
    """How many methods are trained at a time: with the tiny model on several cores all of them."""
    n = len(config.method)
    if config.jobs:
        return possible(min(config.jobs, n))
    is_small = config.is_tiny and config.device == "cpu"
    return possible(n) if is_small and are_known(config) and cores() > 1 else 1


def possible(jobs: int) -> int:
    """As many jobs, or 1 where this machine lets no processes talk to one another, which is told."""
    return jobs if jobs == 1 or can_talk() else 1


@functools.cache
def can_talk() -> bool:
    """Whether processes can share a lock, a socket and a tensor. Else it says why not."""
    os.environ["PYTHONSAFEPATH"] = "1"  # they find Python's modules first, as this one does
    try:
        multiprocessing.RLock()
        Listener().close()
        torch.zeros(1).share_memory_()
    except (OSError, RuntimeError, ImportError) as error:
        needed = f"a short TMPDIR and /dev/shm, both to be written ({error!s:.200})"
        print(f"one by one, as with --jobs 1: several jobs need {needed}", file=sys.stderr)
        return False
    return True


def are_known(config: Config) -> bool:
    """Whether other processes know the methods. One of one's own may be known to this process alone."""
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
    """Train one method. What goes wrong names it."""
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


def run_all(
    function: Callable[..., Any],
    arguments: dict[str, tuple],
    jobs: int,
    device: str = "cpu",
    bar: tqdm | None = None,
) -> dict[str, Any]:
    """Call a function with each of several arguments, at most `jobs` at a time, each in a process.

    Processes on a card get equal shares of its free memory. The bar advances with every call that
    a process has done.

    Returns:
        name -> what the function returned.
    """
    if jobs == 1:
        return {name: function(*own) for name, own in arguments.items()}
    # A fork may not use a card, and Windows has none.
    may_fork = device != "cuda" and hasattr(os, "fork")
    context = multiprocessing.get_context("forkserver" if may_fork else "spawn")
    if may_fork:
        context.set_forkserver_preload(PRELOADED)
    share = 0.0
    if device == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        share = max((free / jobs - PROCESS_BYTES) / total, 0.01)
    with ProcessPoolExecutor(jobs, context, begin, (context.RLock(), device, share)) as pool:
        futures = {name: pool.submit(function, *own) for name, own in arguments.items()}
        try:
            for i, future in enumerate(as_completed(futures.values()), start=1):
                error = future.exception()
                is_killed = isinstance(error, BrokenProcessPool)  # which ends them all
                if error and not is_killed and i < len(futures):
                    tqdm.write(f"{error!r:.300}; the others go on", sys.stderr)
                if bar is not None:
                    bar.update(bar.total // len(futures))
            return {name: future.result() for name, future in futures.items()}
        except (BrokenProcessPool, KeyboardInterrupt) as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
            if isinstance(error, KeyboardInterrupt):
                raise
            reason = "maybe for want of memory, or of open files (ulimit -n)"
            raise UserError(f"a process was killed, {reason}; lower --jobs") from error


def begin(lock: Any, device: str, share: float) -> None:
    """What a process does first. It may take a share of the card's memory."""
    # Both reach the parent, which ends its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=die_with_parent, daemon=True).start()
    tqdm.set_lock(lock)  # the bars share a terminal
    quieten_transformers()
    os.environ["PYTHONSAFEPATH"] = ""  # for what a user's own code begins
    torch.set_num_threads(1)
    if device == "cuda":
        open_device(device)
        torch.cuda.set_per_process_memory_fraction(share)


def die_with_parent() -> None:
    """End this process when the one that asked for it ends, killed or not."""
    multiprocessing.parent_process().join()
    os._exit(1)
