"""One process writes into a run folder: a second one is refused, what was left behind does not block."""

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.owner import FILE, SILENT_SECONDS, check_free, owned, this_process
from rewards import UserError

ROOT = Path(__file__).resolve().parent.parent
# A process that says whether it has the folder, and keeps it until all have said so.
TRY = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from engine.owner import owned
from rewards import UserError
print("ready", flush=True)
input()
try:
    with owned(Path("run")):
        print("has it", flush=True)
        input()
except UserError as error:
    print(error, flush=True)
    input()
"""


def begin() -> subprocess.Popen:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", TRY], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def write(age: float = 0.0, text: str = "", **changes: object) -> None:
    """The file of a process that is this one but for the changes, touched some seconds ago."""
    Path("run").mkdir(exist_ok=True)
    owner = dataclasses.replace(this_process(), **changes)
    path = Path("run", FILE)
    path.write_text(text or json.dumps(dataclasses.asdict(owner)), encoding="utf-8")
    then = time.time() - age
    os.utime(path, (then, then))


@pytest.mark.parametrize("is_left", [False, True])
def test_of_several_that_begin_at_once_one_has_the_folder(is_left):
    """Also where all of them find the file of a run that was killed. Guards against 129 log lines of 90 steps."""
    if is_left:
        write(process=2**22 - 1)
    processes = [begin() for _ in range(4)]
    for process in processes:
        print(file=process.stdin, flush=True)
    lines = [process.stdout.readline() for process in processes]
    for process in processes:
        process.communicate("\n")
    refused = [line for line in lines if line.startswith("--out run: ")]
    assert lines.count("has it\n") == 1 and len(refused) == 3, lines
    assert not list(Path("run").iterdir())


def test_a_process_that_runs_is_named_until_it_is_killed():
    """SIGKILL, also as long as its parent has not asked for its status."""
    first = begin()
    print(file=first.stdin, flush=True)
    assert first.stdout.readline() == "has it\n"
    with pytest.raises(UserError, match=f"^--out run: process {first.pid} on .* trains in it"):
        check_free(Path("run"))
    first.kill()
    time.sleep(0.5)
    with owned(Path("run")):
        first.communicate()
    assert not list(Path("run").iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        {},  # of a kernel whose last run could not even delete it
        {"process": 2**22 - 1},
        {"process": os.getppid(), "started": "1"},  # another process has the number
        {"host": "elsewhere", "age": SILENT_SECONDS + 9},
        {"text": '{"proc', "age": SILENT_SECONDS + 9},
    ],
)
def test_what_was_left_behind_does_not_block(changes):
    write(**changes)
    with owned(Path("run")):
        assert json.loads(Path("run", FILE).read_text("utf-8"))["process"] == os.getpid()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"host": platform.node(), "process": 2**22 - 1}, "after a crash"),  # another container
        ({"host": "elsewhere"}, "on elsewhere trains in it .*; after a crash wait 90 seconds"),
        ({"text": '{"proc'}, "a process trains in it; let it end"),
    ],
)
def test_a_process_elsewhere_that_was_heard_of_blocks(changes, told):
    write(**changes)
    with pytest.raises(UserError, match=told), owned(Path("run")):
        pytest.fail("two runs in one folder")
    assert Path("run", FILE).exists()


def test_where_nothing_tells_when_a_process_began_its_file_does(monkeypatch):
    """As on macOS and Windows."""
    monkeypatch.setattr("engine.owner.start_of", lambda pid: "")
    write(process=2**22 - 1)
    with pytest.raises(UserError, match="process 4194303 on .*; after a crash wait 90 seconds"):
        check_free(Path("run"))
    write(process=2**22 - 1, age=SILENT_SECONDS + 9)
    check_free(Path("run"))


def test_the_file_is_touched_and_goes_with_any_end(monkeypatch):
    """Guards against a notebook that must be restarted after Ctrl-C."""
    monkeypatch.setattr("engine.owner.TOUCH_SECONDS", 0.01)
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), owned(Path("run")):
            path = Path("run", FILE)
            os.utime(path, (0, 0))
            while path.stat().st_mtime < 1:
                time.sleep(0.01)
            raise error
        assert not list(Path("run").iterdir())
