"""The one process that may write into a run folder: a small file there names it while it trains."""

import contextlib
import ctypes
import dataclasses
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.files import writing
from rewards import UserError

FILE = "running.json"
TOUCH_SECONDS = 20  # the file is touched so often
SILENT_SECONDS = 180  # untouched for so long, the file of a process elsewhere was left behind


@dataclass(frozen=True)
class Owner:
    """A process that writes into a run folder."""

    process: int
    started: str  # as `start_of` tells it: another process may get the number later
    host: str
    container: str  # in which numbers of processes count; empty: none, or not Linux
    since: str  # when it began to write


def this_process() -> Owner:
    space = Path("/proc/self/ns/pid")
    container = os.readlink(space) if space.is_symlink() else ""
    since = time.strftime("%Y-%m-%d %H:%M")
    return Owner(os.getpid(), start_of(os.getpid()), platform.node(), container, since)


def start_of(pid: int) -> str:
    """When a process began, in the system's own words; empty if there is none, or a killed one."""
    if sys.platform == "win32":
        return start_on_windows(pid)
    if sys.platform != "linux":
        return start_by_ps(pid)
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    fields = text.rpartition(")")[2].split()
    return fields[19] if fields and fields[0] != "Z" else ""


def start_by_ps(pid: int) -> str:
    command = ["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)]
    usual = {"LC_ALL": "C", "TZ": "UTC"}
    told = subprocess.run(command, env=usual, capture_output=True, text=True).stdout.strip()
    state, _, start = told.partition(" ")
    return "" if state.startswith("Z") else start.strip()


def start_on_windows(pid: int) -> str:
    kernel = ctypes.windll.kernel32
    handle = kernel.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
    exit_code = ctypes.c_ulong()
    kernel.GetExitCodeProcess(handle, ctypes.byref(exit_code))
    times = [ctypes.c_uint64() for _ in range(4)]  # of start, end, in the kernel, outside of it
    kernel.GetProcessTimes(handle, *map(ctypes.byref, times))
    kernel.CloseHandle(handle)
    return str(times[0].value) if exit_code.value == 259 else ""  # STILL_ACTIVE


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
    if owner and (owner.host, owner.container) == (own.host, own.container):
        started = start_of(owner.process)
        is_running = owner.process != own.process and started == owner.started != ""
    else:
        is_running = age < SILENT_SECONDS
        fix += f"; after a crash wait {SILENT_SECONDS // 60} minutes"
    if is_running:
        who = f"process {owner.process} on {owner.host}" if owner else "a process"
        since = f" since {owner.since}" if owner else ""
        raise UserError(f"--out {run}: {who} trains in it{since}; {fix}")
    return text


def keep_touching(path: Path, has_ended: threading.Event) -> None:
    """Show other hosts that this process runs."""
    while not has_ended.wait(TOUCH_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)
