"""Several calls of a function side by side, each in a process of its own."""

import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Listener
from typing import Any

import torch
from tqdm import tqdm

from engine.config import open_device
from engine.errors import quieten_transformers
from rewards import UserError

PROCESS_BYTES = 0.6 * 2**30  # of a card, for driver and kernels of a process
# Imported once, by the server that begins processes, because they take seconds.
PRELOADED = ["torch", "transformers", "transformers.models.gpt2.modeling_gpt2"]


@functools.cache
def possible(jobs: int) -> int:
    """As many jobs, or 1 where processes share no lock, socket and tensor, which is told once."""
    if jobs == 1:
        return 1
    os.environ["PYTHONSAFEPATH"] = "1"  # they find Python's modules first, as this one does
    try:
        multiprocessing.RLock()
        Listener().close()
        torch.zeros(1).share_memory_()
    except (OSError, RuntimeError, ImportError) as error:
        needed = f"a short TMPDIR and /dev/shm, both to be written ({error!s:.200})"
        print(f"one by one, as with --jobs 1: several jobs need {needed}", file=sys.stderr)
        return 1
    return jobs


def run_all(
    function: Callable[..., Any],
    arguments: dict[Any, tuple],
    jobs: int,
    device: str = "cpu",
    bar: tqdm | None = None,
) -> dict[Any, Any]:
    """name -> what a function returns of these arguments, for `jobs` at a time, each in a process.

    Processes on a card get equal shares of its free memory. The bar advances when a call is done.
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
    """Prepare a new process. `share` is the part of a card's memory that it may take."""
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
