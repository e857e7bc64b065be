"""Methods side by side: how many there are at a time, and one function, `run_all`."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import torch
from tqdm import tqdm

from engine.config import Config
from engine.doors import quieten_transformers
from rewards import UserError
from vpo import ADVANTAGES

WAKE_UP = 0.3  # seconds between looks at the processes
# Imported once, by the server that begins processes. It has computed nothing, so a fork of it is safe.
PRELOADED = ["torch", "transformers", "transformers.models.gpt2.modeling_gpt2"]
# tqdm's own lock is a semaphore that forks share. It stays locked for all if one is killed while it
# draws.
tqdm.set_lock(threading.RLock())


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def jobs_of(config: Config) -> int:
    """How many methods are trained at a time.

    Raises:
        UserError: --jobs asks for several methods at a time on a GPU.
    """
    if config.jobs > 1 and config.device != "cpu":
        raise UserError(
            f"--jobs {config.jobs}: on {config.device} methods go one by one; give --jobs 1"
        )
    if config.jobs:
        return min(config.jobs, len(config.method))
    # A method of one's own may be known to this process alone.
    are_known = all(ADVANTAGES[name].__module__ == "vpo" for name in config.method)
    is_small = config.is_tiny and config.device == "cpu"
    return len(config.method) if is_small and are_known and cores() > 1 else 1


def prepare_processes() -> BaseContext:
    """Begin the server of processes, whose imports take seconds, while there is other work."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    resource_tracker.ensure_running()  # the server would begin it, and unblock the signal with that
    # Ctrl-C reaches the parent alone, which asks its processes to stop: the server and what it
    # begins inherit the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context


def run_all(
    function: Callable[..., Any],
    arguments: dict[str, tuple],
    jobs: int,
    *,
    was_stopped: Callable[[], bool] = lambda: False,
    watch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Call a function with each of several arguments, at most `jobs` at a time, each in a process.

    Args:
        arguments: name -> arguments of its call.
        was_stopped: once it is true no more begin, and those that run are asked to stop, too.
        watch: called several times a second while processes run.

    Returns:
        name -> what the function returned.

    Raises:
        UserError: what functions raised, or processes that died, after all have ended.
        KeyboardInterrupt: of functions that were asked to stop.
    """
    if jobs == 1:
        return {name: function(*own) for name, own in arguments.items()}
    context = prepare_processes()
    waiting = list(arguments)
    running: dict[str, Running] = {}
    outcomes: dict[str, tuple[str, Any]] = {}
    try:
        while running or (waiting and not was_stopped()):
            while waiting and len(running) < jobs and not was_stopped():
                name = waiting.pop(0)
                running[name] = Running(context, function, arguments[name])
            if was_stopped():
                for own in running.values():
                    own.ask_to_stop()
            multiprocessing.connection.wait([own.outcome for own in running.values()], WAKE_UP)
            for name in [name for name, own in running.items() if own.has_ended()]:
                outcomes[name] = running.pop(name).result(name)
            watch()
    finally:
        for own in running.values():  # a second Ctrl-C: at once
            own.process.kill()
    return _results(outcomes, list(arguments))


class Running:
    """A function that runs in a process of its own."""

    def __init__(self, context: BaseContext, function: Callable[..., Any], arguments: tuple):
        self.outcome, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_call, args=(theirs, function, *arguments))
        self.process.start()
        theirs.close()
        self.was_asked = False

    def ask_to_stop(self) -> None:
        """Send Ctrl-C, once."""
        if not self.was_asked:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.process.pid, signal.SIGINT)
        self.was_asked = True

    def has_ended(self) -> bool:
        return self.outcome.poll() or not self.process.is_alive()

    def result(self, name: str) -> tuple[str, Any]:
        """What it sent: "result", "error" or "stop", and a value. It may have died instead."""
        message = None
        with contextlib.suppress(EOFError, OSError):
            message = pickle.loads(self.outcome.recv_bytes())
        self.process.join()
        if message:
            return message
        how = f"ended with code {self.process.exitcode}"
        if self.process.exitcode < 0:
            how = f"was killed by {signal.Signals(-self.process.exitcode).name}"
        return "error", f"{name}: its process {how}; --resume goes on from its last checkpoint"


def _results(outcomes: dict[str, tuple[str, Any]], names: list[str]) -> dict[str, Any]:
    """The results by name, in this order. Raises what `run_all` raises."""
    errors = [value for kind, value in outcomes.values() if kind == "error"]
    stops = [value for kind, value in outcomes.values() if kind == "stop"]
    results = {name: value for name, (kind, value) in outcomes.items() if kind == "result"}
    if errors:
        raise UserError("; ".join(errors))
    if len(results) < len(names):
        raise KeyboardInterrupt("\n".join(filter(None, stops)))
    return {name: results[name] for name in names}


def _call(outcome: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    """What a process does: it sends its result, an error or where it stopped."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.setsid()  # no terminal of its parent's
    quieten_transformers()
    torch.set_num_threads(1)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        message = ("result", function(*arguments))
    except (UserError, OSError) as error:
        message = ("error", str(error))
    except KeyboardInterrupt as error:
        message = ("stop", str(error))
    # Plain bytes: a pipe would send a tensor as a name of memory that this process frees as it ends.
    outcome.send_bytes(pickle.dumps(message))


def _die_with_parent() -> None:
    """End this process when the one that asked for it ends, killed or not."""
    multiprocessing.parent_process().join()
    os._exit(1)
