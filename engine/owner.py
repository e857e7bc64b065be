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

from engine.files import writing
from rewards import UserError

FILE = "running.json"
TOUCH_SECONDS = 15  # the file is touched so often
SILENT_SECONDS = 90  # untouched for so long, the file of a process elsewhere was left behind


@dataclass(frozen=True)
class Owner:
    """A process that writes into a run folder."""

    process: int
    started: str  # as `start_of` tells it: another process may get the number later
    host: str
    since: str  # when it began to write


def this_process() -> Owner:
    since = time.strftime("%Y-%m-%d %H:%M")
    host = platform.node()
    with contextlib.suppress(OSError):  # containers of one name have process numbers of their own
        host += f" {os.readlink('/proc/self/ns/pid')}"
    return Owner(os.getpid(), start_of(os.getpid()), host, since)


def start_of(pid: int) -> str:
    """When a process began, in Linux's own words; empty if there is none, if it was killed, or elsewhere."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    fields = text.rpartition(")")[2].split()
    return fields[19] if fields and fields[0] != "Z" else ""


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
    own = this_process()
    fix = "let it end, or take another --out"
    is_own = owner is not None and (owner.process, owner.host) == (own.process, own.host)
    if owner and owner.host == own.host and own.started:
        is_running = start_of(owner.process) == owner.started
    else:  # on another host, or where nothing tells when a process began
        is_running = age < SILENT_SECONDS
        fix += f"; after a crash wait {SILENT_SECONDS} seconds"
    if is_running and not is_own:
        who = f"process {owner.process} on {owner.host}" if owner else "a process"
        since = f" since {owner.since}" if owner else ""
        raise UserError(f"--out {run}: {who} trains in it{since}; {fix}")
    return text


def keep_touching(path: Path, has_ended: threading.Event) -> None:
    """Show that this process runs to whom cannot look at it."""
    while not has_ended.wait(TOUCH_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)
