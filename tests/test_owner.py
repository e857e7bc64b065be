"""One process writes into a run folder: a second one is refused, a killed one does not block."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.files import check_free, owned
from rewards import UserError

ROOT = Path(__file__).resolve().parent.parent
# A process that says whether it has the folder, and keeps it until all have said so.
TRY = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from engine.files import owned
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


def test_of_several_that_begin_at_once_one_has_the_folder():
    """Guards against 129 log lines of 90 steps. And a killed process does not block."""
    pipe = subprocess.PIPE
    processes = []
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", TRY], stdin=pipe, stdout=pipe, text=True)
        processes.append(child)
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        print(file=process.stdin, flush=True)
    lines = [process.stdout.readline() for process in processes]
    refused = [line for line in lines if line.startswith("--out run: another process")]
    assert lines.count("has it\n") == 1 and len(refused) == 3, lines
    with pytest.raises(UserError, match="^--out run: another process trains in it"):
        check_free(Path("run"))
    for process in processes:
        process.kill()
        process.communicate()
    with owned(Path("run")):
        pass


def test_the_folder_is_free_after_any_end():
    """Guards against a notebook that must be restarted after Ctrl-C."""
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), owned(Path("run")):
            raise error
    check_free(Path("run"))
    check_free(Path("no run"))
