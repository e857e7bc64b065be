"""The one process that may write into a run folder: it holds a lock there while it trains."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from engine.files import writing
from rewards import UserError

FILE = ".lock"


@contextlib.contextmanager
def owned(run: Path) -> Iterator[None]:
    """Write into a run folder inside the block. Raises UserError while another process does.

    The system frees the lock when its process ends, killed or not, and the file stays. Where a file
    system has no locks the file itself is one, which a process that was killed leaves behind.
    """
    lock = FileLock(run / FILE)
    with writing(run):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            fix = f"let it end, or take another --out; after a crash elsewhere delete {run / FILE}"
            what = f"another process trains in it; {fix}"
            raise UserError(f"--out {run}: {what}") from None
    try:
        yield
    finally:
        lock.release()


def check_free(run: Path) -> None:
    """Raise UserError while another process writes into a run folder."""
    if (run / FILE).exists():
        with owned(run):
            pass
