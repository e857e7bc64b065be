"""A user's mistake is one line and exit code 2, without traceback."""

import contextlib
import difflib
import functools
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from errno import EACCES, EDQUOT, EMFILE, ENAMETOOLONG, ENOSPC, EPERM, EROFS

from rewards import UserError

# What every backend says of a lack of memory.
MEMORY_SIGNS = re.compile(
    "tried to allocate|out of memory|alloc_failed|allocation_failed|cannot allocate memory"
    "|can't start new thread|unable to allocate shared memory",
    re.IGNORECASE,
)
# The system's refusals of files: no right, no room, too many, too long a name.
REFUSED = (EACCES, EPERM, EROFS, EDQUOT, ENOSPC, EMFILE, ENAMETOOLONG)


@contextlib.contextmanager
def explain_machine() -> Iterator[None]:
    """Turn a lack of memory, and files that the system refuses, into a UserError."""
    try:
        yield
    except Exception as error:
        if getattr(error, "is_of_task", False):  # see `task_code`
            raise
        if is_out_of_memory(error):
            lower = "lower --micro-batch-tokens, --sampling-batch or --jobs"
            advice = f"{lower}, or begin a new run with --lora-rank 16 (docs/hardware.md)"
            raise UserError(f"out of memory ({error!s:.200}); {advice}") from error
        if isinstance(error, OSError) and error.errno in REFUSED:
            place = "stdout: " if error.filename is None and stdout_refuses() else ""
            raise UserError(f"{place}{error!s:.200}") from error
        raise


def stdout_refuses() -> bool:
    """Whether nothing can be printed, as on a full disk. What is left of it then goes nowhere."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, or a thread did not begin."""
    may_be = isinstance(error, RuntimeError | OSError)  # torch.OutOfMemoryError is a RuntimeError
    return isinstance(error, MemoryError) or (may_be and bool(MEMORY_SIGNS.search(str(error))))


@contextlib.contextmanager
def with_note(note: str, is_of_task: bool = False) -> Iterator[None]:
    """An error that is raised inside gets a note of what was done."""
    try:
        yield
    except UserError:  # one line says all
        raise
    except Exception as error:
        error.add_note(note)
        if is_of_task:
            error.is_of_task = True
        raise


task_code = functools.partial(with_note, is_of_task=True)  # what it raises keeps its traceback


@contextlib.contextmanager
def way_on(advice: str) -> Iterator[None]:
    """Whatever ends the block early is told together with how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {advice}") from None
    except UserError as error:
        raise UserError(f"{error}; {advice}") from error
    except Exception as error:
        error.add_note(f"stopped; {advice}")
        raise


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message about a misspelt name: "; did you mean vpo?", or nothing."""
    close = difflib.get_close_matches(word.lower(), list(names), 1)
    return f"; did you mean {close[0]}?" if close else ""


def quieten_transformers() -> None:
    """No progress bars and warnings of transformers between ours."""
    from transformers import utils  # here, because it takes a second to import

    utils.logging.disable_progress_bar()
    utils.logging.set_verbosity_error()  # it takes a sampled pad token for padding


def stop_once(number: int, _) -> None:
    """Ctrl-C, and deaf from then on: Slurm and its srun send the signal twice."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextlib.contextmanager
def as_command(script: str) -> Iterator[None]:
    """Run a script: a user's mistake is one line and exit code 2, Ctrl-C or SIGTERM one line and 130."""
    quieten_transformers()
    if threading.current_thread() is threading.main_thread():  # no other takes signals
        signal.signal(signal.SIGTERM, stop_once)  # what Slurm and Kubernetes send
    if isinstance(sys.stdout, io.TextIOWrapper):  # it may be ASCII, and "±" is not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with explain_machine():
            yield
            print(end="", flush=True)  # what a pipe or a full disk refuses
    except BrokenPipeError:  # of a reader, such as `head`, that has read enough
        stdout_refuses()
        sys.exit(141)  # what a shell reports of SIGPIPE
    except UserError as error:
        print(f"{script}: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        message = str(stop) or "stopped; give the same command again"
        print(f"\n{message}", file=sys.stderr)
        sys.exit(130)
