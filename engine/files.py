"""Files that appear whole or not at all, and logs that survive a kill."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rewards import UserError


def checksum(path: Path) -> str:
    """SHA-256 of a file, which may be larger than the memory that is left."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder atomically, and store the checksum of every file in it.

    If another process has written the same folder in the meantime, that one is whole and stays.

    Raises:
        UserError: it cannot be written, for instance because the disk is full.
    """
    temporary = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        sums = {path.name: checksum(path) for path in temporary.iterdir()}
        (temporary / "checksums.json").write_text(json.dumps(sums, indent=1))
        if not folder.exists():
            os.replace(temporary, folder)
    except Exception as error:  # torch, safetensors and the system have kinds of their own
        raise UserError(
            f"{folder}: cannot be written ({error!s:.200}); make room and --resume"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A temporary file to write to, which takes the place of `path` when the block ends.

    Raises:
        UserError: it cannot be written, for instance because the disk is full. The old file stays.
    """
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except Exception as error:  # torch and the system have kinds of their own for a full disk
        raise UserError(
            f"{path}: cannot be written ({error!s:.200}); make room and give the same command again"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make a folder for what is written inside the block. Raises UserError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); name another folder with --out"
        ) from error


def append(path: Path, record: dict) -> None:
    """Add a record to a log, JSON Lines."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_log(path: Path, *keys: str) -> list[dict]:
    """The records of a log that have a step and these keys. Lines that a kill cut off are left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and {"step", *keys} <= record.keys():
                records.append(record)
    return records
