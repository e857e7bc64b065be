"""Methods side by side: on a CPU each is trained and evaluated in a process of its own."""

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from tqdm import tqdm

from engine.config import Config
from engine.interrupt import StopRequest
from rewards import UserError

GIB = 2**30
PR_SET_PDEATHSIG = 1  # of Linux's prctl: a signal for this process when its parent dies
WAKE_UP = 0.2  # seconds between looks at a stop request
FEW_CORES = 4  # on more, one real model at a time uses them better


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def jobs_by_default(config: Config, device: str) -> int:
    """How many methods are computed at a time where --jobs does not say.

    With the tiny model these are all. The system divides the cores among them, so that none of the
    cores idles while the last method is trained.
    """
    can_fork = device == "cpu" and sys.platform == "linux"
    if not can_fork or cores() == 1:
        return 1
    if config.model == "tiny":
        return len(config.method)
    if cores() > FEW_CORES:
        return 1
    return min(len(config.method), cores())


def jobs_of(config: Config, device: str) -> int:
    """How many methods are computed at a time."""
    if config.jobs is None:
        return jobs_by_default(config, device)
    return min(config.jobs, len(config.method))


def settle_jobs(config: Config, device: str, need: Callable[[], int], limit: int) -> None:
    """Check --jobs, or choose it, and set the number of threads.

    Args:
        need: gives the bytes that the training of one method takes.
        limit: bytes that there are.

    Raises:
        UserError: the device or its memory does not hold so many jobs.
    """
    check_device_of_jobs(config, device)
    jobs = jobs_of(config, device)
    is_known_to_fit = config.model == "tiny" and config.jobs is None
    if jobs > 1 and not is_known_to_fit and jobs * need() > limit:
        if config.jobs is not None:
            raise UserError(
                f"--jobs {jobs}: these methods take {jobs * need() / GIB:.1f} GiB together, and there "
                f"are {limit / GIB:.1f} GiB; take fewer jobs"
            )
        config.jobs = 1
    set_threads(config, device)


def check_device_of_jobs(config: Config, device: str) -> None:
    """Raise UserError for several jobs on a device that they cannot share."""
    jobs = jobs_of(config, device)
    if jobs > 1 and (device != "cpu" or sys.platform != "linux"):
        raise UserError(
            f"--jobs {jobs}: on {device} and {sys.platform} methods go one by one; leave it out"
        )


def set_threads(config: Config, device: str) -> None:
    """One thread for each method wherever methods go side by side by default, whatever --jobs says.

    So no number depends on --jobs.
    """
    if jobs_by_default(config, device) > 1:
        torch.set_num_threads(1)


class DrawingLock:
    """Lets one thread of one process at a time draw progress bars.

    The system frees it when a process is killed. tqdm's own lock then stays locked, and all other
    processes wait for ever.
    """

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process ends
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """What the threads of the parent hold is nothing to a child."""
        self.threads = threading.RLock()
        self.depth = 0  # how often the thread that holds it has acquired it

    def acquire(self) -> None:
        self.threads.acquire()
        if self.depth == 0:
            fcntl.lockf(self.file, fcntl.LOCK_EX)
        self.depth += 1

    def release(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            fcntl.lockf(self.file, fcntl.LOCK_UN)
        self.threads.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


tqdm.set_lock(DrawingLock())

_line = 0  # of the terminal, for the progress bars of this process


def progress_line() -> int:
    """The line below the first that the progress bars of this process may use."""
    return _line


def run_all(
    work: dict[str, Callable[[], Any]], jobs: int, stop: StopRequest | None = None
) -> dict[str, Any]:
    """Call functions: one after the other, or at most `jobs` at a time in processes of their own.

    Args:
        work: name -> a function.
        stop: asked for, no more begin, and those that run are asked to stop, too.

    Returns:
        name -> what the function returned.

    Raises:
        UserError: what functions raised, or processes that died; side by side after all have ended.
        KeyboardInterrupt: the stop was asked for.
    """
    if jobs == 1:
        return {name: function() for name, function in work.items()}
    return SideBySide(work, jobs, stop or StopRequest()).run()


class SideBySide:
    """Functions in processes. The first ones begin first, the next when one has ended."""

    def __init__(self, work: dict[str, Callable[[], Any]], jobs: int, stop: StopRequest):
        self.work = work
        self.waiting = list(work)
        self.jobs = jobs
        self.stop = stop
        self.running: dict[Connection, multiprocessing.Process] = {}
        self.ended: dict[str, tuple[str, Any]] = {}  # name -> what its process sent

    def run(self) -> dict[str, Any]:
        """Call all functions, see `run_all`."""
        were_told = False
        try:
            self.start_more()
            while self.running:
                if self.stop.received and not were_told:
                    were_told = True
                    for process in self.running.values():
                        os.kill(process.pid, signal.SIGINT)
                self.collect()
                self.start_more()
        finally:
            for process in self.running.values():  # a second Ctrl-C: at once
                process.kill()
        errors = self.sent("error")
        if errors:
            raise UserError("; ".join(errors))
        if self.stop.received:
            raise KeyboardInterrupt("\n".join(self.sent("stop")))
        return {name: self.ended[name][1] for name in self.work}

    def sent(self, wanted: str) -> list[Any]:
        """The values of all outcomes of a kind: "result", "error" or "stop"."""
        return [value for kind, value in self.ended.values() if kind == wanted]

    def start_more(self) -> None:
        """Begin with what waits, while there is room."""
        # A fork begins at once and knows what the user's script has changed. With one thread it is safe.
        context = multiprocessing.get_context("fork")
        while self.waiting and len(self.running) < self.jobs and not self.stop.received:
            name = self.waiting.pop(0)
            line = list(self.work).index(name)
            ours, theirs = context.Pipe(duplex=False)
            arguments = (self.work[name], line, theirs, os.getpid(), self.stop)
            process = context.Process(target=_run, args=arguments, name=name)
            process.start()
            theirs.close()
            self.running[ours] = process

    def collect(self) -> None:
        """Wait a moment for outcomes."""
        for outcome in wait(list(self.running), WAKE_UP):
            process = self.running.pop(outcome)
            self.ended[process.name] = _outcome_of(process, outcome)


def _run(
    function: Callable[[], Any],
    line: int,
    outcome: Connection,
    parent: int,
    stop: StopRequest,
) -> None:
    """What a process does: it sends its result, an error or where it stopped."""
    global _line
    _line = line
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it died in between
    os.setsid()  # Ctrl-C reaches the parent alone, which asks for a stop
    torch.set_num_threads(1)
    stop.is_announced = True  # by the parent
    try:
        message = ("result", function())
    except UserError as error:
        message = ("error", str(error))
    except KeyboardInterrupt as error:
        message = ("stop", str(error))
    # Plain bytes: a pipe would send a tensor as a name of memory that this process frees as it ends.
    outcome.send_bytes(pickle.dumps(message))


def _outcome_of(process: multiprocessing.Process, outcome: Connection) -> tuple[str, Any]:
    """What a process sent: "result", "error" or "stop", and a value. It may have died instead."""
    message = None
    with contextlib.suppress(EOFError):
        message = pickle.loads(outcome.recv_bytes())
    process.join()
    if message:
        return message
    how = f"ended with code {process.exitcode}"
    if process.exitcode < 0:
        how = f"was killed by {signal.Signals(-process.exitcode).name}"
    return "error", f"{process.name}: its process {how}; --resume goes on from its last checkpoint"
