"""Files that appear whole or not at all, logs that survive a kill, and the lock of a run folder."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from engine.errors import stdout_refuses
from rewards import UserError

LOCK = ".lock"  # file of a run folder that the process which trains there holds
FORMER_NAMES = {"different": "distinct"}  # of metrics in older logs, by which figures are drawn


def listed(folder: Path, pattern: str = "*") -> list[Path]:
    """The paths in a folder, sorted, without those that begin with a dot: systems add such files."""
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Fill a folder, under another name, inside the block: it is there as a whole or not at all.

    If another process has written it, that one stays.
    """
    temporary = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if not folder.exists():
            os.replace(temporary, folder)
    except Exception as error:  # torch, safetensors and the system have kinds of their own
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        place = next(parent for parent in folder.absolute().parents if parent.exists())
        free = shutil.disk_usage(place).free >> 20
        problem = f"{folder}: cannot be written ({reason!s:.200})"
        raise UserError(f"{problem}; make room: its disk has {free} MiB") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make a folder for what is written inside the block. Raises UserError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        if error.filename is None and stdout_refuses():  # what is printed in the block
            raise UserError(f"stdout: {error}") from error
        problem = f"{folder}: cannot be written ({error.strerror})"
        raise UserError(f"{problem}; name another folder with --out, or make room") from error


def check_writable(*folders: Path) -> None:
    """Make folders, and write into them before minutes are spent. Raises UserError if one refuses."""
    for folder in folders:
        with writing(folder), tempfile.TemporaryFile(dir=folder):
            pass


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all, into a folder that is made if it is missing."""
    temporary = path.with_name(f".{path.name}.tmp")  # with a dot, for a full disk may leave it
    with writing(path.parent):
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)


@contextlib.contextmanager
def owned(run: Path) -> Iterator[None]:
    """Write into a run folder inside the block. Raises UserError while another process does.

    The system frees the lock when its process ends, killed or not, and the file stays. Where a file
    system has no locks the file itself is one, which a process that was killed leaves behind.
    """
    with writing(run):
        try:
            lock = FileLock(run / LOCK).acquire(timeout=0)
        except Timeout:
            advice = f"wait, or take another --out; after a crash elsewhere delete {run / LOCK}"
            raise UserError(f"--out {run}: another process trains in it; {advice}") from None
    with lock:
        yield


def check_free(run: Path) -> None:
    """Raise UserError while another process writes into a run folder."""
    if (run / LOCK).exists():
        with owned(run):
            pass


def add_record(path: Path, record: dict) -> None:
    """Add a record to a log, JSON Lines."""
    with writing(path.parent), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_log(path: Path, *keys: str) -> list[dict]:
    """The records of a log that have a step and these keys, by today's names.

    Lines that a kill cut off are left out.
    """
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    records = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                record = {FORMER_NAMES.get(name, name): value for name, value in record.items()}
                if {"step", *keys} <= record.keys():
                    records.append(record)
    return records


def cut_log(path: Path, step: int) -> None:
    """Leave out the records of later steps."""
    if path.exists():
        kept = [json.dumps(record) + "\n" for record in read_log(path) if record["step"] <= step]
        write_text(path, "".join(kept))
