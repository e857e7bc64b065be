"""The one process that may write into a run folder: a small file there names it while it trains."""

import contextlib
import dataclasses
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.files import writing
from rewards import UserError

FILE = "running.json"
TOUCH_SECONDS = 20  # the file is touched so often
SILENT_SECONDS = 180  # untouched for so long, the file of a process elsewhere was left behind


@dataclass(frozen=True)
class Owner:
    """A process that writes into a run folder."""

    process: int
    started: float  # seconds since 1970: another process may get the number later
    host: str
    container: str  # in which numbers of processes count; empty: none, or not Linux
    since: str  # when it began to write


def this_process() -> Owner:
    own = psutil.Process()
    space = Path("/proc/self/ns/pid")
    container = os.readlink(space) if space.is_symlink() else ""
    since = time.strftime("%Y-%m-%d %H:%M")
    return Owner(own.pid, own.create_time(), platform.node(), container, since)


@contextlib.contextmanager
def owned(run: Path) -> Iterator[None]:
    """Write into a run folder inside the block. Raises UserError while another process does."""
    path = run / FILE
    take(path)
    has_ended = threading.Event()
    threading.Thread(target=keep_touching, args=(path, has_ended), daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()
        with contextlib.suppress(OSError):
            path.unlink()


def take(path: Path) -> None:
    """Make the file of this process, in place of one that was left behind."""
    own = json.dumps(dataclasses.asdict(this_process()))
    with writing(path.parent):
        while True:
            with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
                file.write(own)
                return
            left = check_free(path.parent)
            aside = path.with_name(f"{FILE}.{os.getpid()}")
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.replace(path, aside)
                if aside.read_text("utf-8") == left:
                    aside.unlink()
                else:  # the new file of a faster one
                    os.replace(aside, path)


def check_free(run: Path) -> str:
    """Raise UserError while another process writes into a run folder. Returns its file's text."""
    path = run / FILE
    try:
        text = path.read_text("utf-8", "replace")
        age = time.time() - path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return ""
    owner = None
    with contextlib.suppress(ValueError, TypeError):  # it is just being written
        owner = Owner(**json.loads(text))
    if not is_running(owner, age):
        return text
    who = f"process {owner.process} on {owner.host}" if owner else "a process"
    since = f" since {owner.since}" if owner else ""
    fix = "let it end, or take another --out"
    if owner is None or owner.host != platform.node():
        fix += f"; after a crash wait {SILENT_SECONDS // 60} minutes"
    raise UserError(f"--out {run}: {who} trains in it{since}; {fix}")


def is_running(owner: Owner | None, age: float) -> bool:
    """Whether the process that a file names still runs, and is not this one.

    Args:
        owner: None: the file is not complete.
        age: seconds since the file was touched.
    """
    own = this_process()
    if owner is None or (owner.host, owner.container) != (own.host, own.container):
        return age < SILENT_SECONDS
    if owner.process == own.process:
        return False
    try:
        process = psutil.Process(owner.process)
        is_same = abs(process.create_time() - owner.started) < 2  # a clock may be set
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def keep_touching(path: Path, has_ended: threading.Event) -> None:
    """Show other hosts that this process runs."""
    while not has_ended.wait(TOUCH_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)
