"""Methods side by side: the same numbers, and nobody is lost when one process ends badly."""

import inspect
import json
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from test_train import ROOT, fails, in_an_empty_folder, metrics  # noqa: F401 - a fixture

import eval as evaluation
import rewards
import train
import vpo
from engine import processes
from engine.config import Config
from engine.interrupt import StopRequest
from engine.processes import jobs_of, run_all
from rewards import UserError

QUICK = shlex.split(
    "--task toy --warm-steps 20 --steps 16 --prompts-per-step 2 --group-size 4 --save-every 3 "
    "--eval-problems 3 --pool 5 --device cpu --method grpo vpo"
)
METHODS = ("grpo", "vpo")


# Functions for other processes, which import them from here.


def ones(seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return torch.ones(3)


def fail(message: str) -> None:
    raise UserError(message)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def touch_later(path: str) -> None:
    time.sleep(0.5)
    Path(path).touch()


def work_until_stopped(path: str) -> None:
    with StopRequest(is_announced=True) as stop:
        Path(path).write_text(str(os.getpid()))
        while not stop.received:
            time.sleep(0.05)
    raise KeyboardInterrupt(f"{path} stopped after step 2")


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_the_work(jobs):
    """A tensor too: it must outlive the process that made it."""
    results = run_all(ones, {"slow": (0.5,), "quick": (0.0,)}, jobs)
    assert list(results) == ["slow", "quick"] and results["slow"].sum() == 3


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (fail, ("vpo, step 3: the loss is not finite",), "^vpo, step 3: the loss is not finite$"),
        (die, (), "^vpo: its process was killed by SIGKILL; --resume goes on from its last"),
        (os._exit, (3,), "^vpo: its process ended with code 3; --resume goes on"),
    ],
)
def test_an_error_is_told_after_the_others_have_ended(function, arguments, message):
    """Guards against a method that is lost because another one ends badly."""
    work = {"vpo": (function, *arguments), "grpo": (touch_later, "a"), "gdpo": (touch_later, "b")}
    with pytest.raises(UserError, match=message):
        run_all(call, work, 2)
    assert Path("a").exists() and Path("b").exists()


def call(function, *arguments):
    return function(*arguments)


def test_a_stop_reaches_those_that_run_and_nobody_begins():
    work = {name: (name,) for name in ("vpo", "gdpo", "grpo")}
    have_begun = lambda: Path("vpo").exists() and Path("gdpo").exists()  # noqa: E731
    with pytest.raises(KeyboardInterrupt) as stop:
        run_all(work_until_stopped, work, 2, was_stopped=have_begun)
    told = sorted(str(stop.value).splitlines())
    assert told == ["gdpo stopped after step 2", "vpo stopped after step 2"]
    assert not Path("grpo").exists()


def test_a_second_stop_ends_all_at_once():
    def interrupt() -> None:
        if Path("vpo").exists() and Path("vpo").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(work_until_stopped, {"vpo": ("vpo",), "grpo": ("grpo",)}, 2, watch=interrupt)
    wait_until_dead({int(Path("vpo").read_text())})


def assert_equal_runs(a: Path, b: Path) -> None:
    for method in METHODS:
        assert metrics(a / method) == metrics(b / method)
        models = [run / method / "checkpoint-000016/model.safetensors" for run in (a, b)]
        assert models[0].read_bytes() == models[1].read_bytes()


def policies_of(run: Path) -> dict[str, dict]:
    """What an evaluation measured of each policy, in the order of the table."""
    return json.loads((run / "eval.json").read_text())["policies"]


def train_in_a_fork(arguments: list[str]) -> None:
    """A fork has imported everything already. Its server of processes must be its own."""
    forkserver._forkserver.__init__()
    sys.argv = [str(ROOT / "train.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def wait_for(is_running: Callable[[], bool], log: Path, steps: int) -> None:
    while not log.exists() or log.read_text().count("\n") < steps:
        assert is_running(), "the run ended too early"
        time.sleep(0.01)


def descendants(pid: int) -> set[int]:
    """The processes that a process has begun, and those that they have begun."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found - {pid}
        found |= more


def is_alive(pid: int) -> bool:
    """Whether a process is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_dead(pids: set[int]) -> None:
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a process outlived its parent"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_run_ends_bit_for_bit_the_same():
    """SIGKILL of the parent: its processes die with it, so that a resume has the folder for itself.

    Two methods at a time, trained and evaluated, come to what they come to one by one.
    """
    alone = Path("alone")
    train.main([*QUICK, "--jobs", "1", "--out", "alone"])
    flags = [*QUICK, "--jobs", "2", "--out", "run"]
    child = multiprocessing.get_context("fork").Process(target=train_in_a_fork, args=(flags,))
    child.start()
    wait_for(child.is_alive, Path("run/vpo/metrics.jsonl"), 4)
    others = descendants(child.pid)
    assert len(others) >= 2
    child.kill()
    child.join()
    wait_until_dead(others)
    assert not Path("run/vpo/checkpoint-000016").exists(), "the kill came too late"
    train.main(["--resume", "--out", "run", "--jobs", "2"])
    assert_equal_runs(Path("run"), alone)
    expected = policies_of(alone)
    assert policies_of(Path("run")) == expected
    assert list(policies_of(Path("run"))) == list(expected), "the table has another order"
    evaluation.main(["run", "--jobs", "2"])
    assert policies_of(Path("run")) == expected


def test_a_task_and_a_method_of_ones_own_reach_the_processes(capsys):
    """A file given by its path, and a script that adds a method as docs/own.md does.

    Ctrl-C, which a terminal sends to all of them: no traceback of a child, and all is saved.
    """
    fence = inspect.getsource(rewards.Fence)
    Path("my_task.py").write_text(
        f"from random import Random\n\nfrom rewards import Problem, Task\n\n\n{fence}"
    )
    Path("my_method.py").write_text(
        f"import sys\n\nsys.path.append({str(ROOT)!r})\nfrom vpo import ADVANTAGES, grpo\n\n\n"
        "def mine(x, e):\n    return 2 * grpo(x, e)\n\n\n"
        'ADVANTAGES["mine"] = mine\n\nif __name__ == "__main__":\n    import train\n\n'
        "    train.main()\n"
    )
    flags = "--task my_task.py --method grpo mine --jobs 2 --out run --eval-problems 0 "
    flags += "--steps 500 --warm-steps 2"
    command = [sys.executable, "my_method.py", *QUICK, *flags.split()]
    # In a group of its own, as a terminal begins it.
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    for method in ("grpo", "mine"):
        wait_for(lambda: child.poll() is None, Path("run", method, "metrics.jsonl"), 2)
    os.killpg(child.pid, signal.SIGINT)
    told = child.communicate()[1]
    assert child.returncode == 130, told
    assert "everything is saved; go on with: python my_method.py --resume --out run" in told
    assert "Traceback" not in told and "leaked" not in told
    for method in ("grpo", "mine"):
        steps = len(metrics(Path("run", method)))
        assert 2 <= steps < 500
        assert Path("run", method, f"checkpoint-{steps:06d}").exists()
    fails(["--resume", "--out", "run"], capsys, "has the method mine, which only the file")


def test_a_method_that_only_this_process_knows_is_refused_there(monkeypatch, capsys):
    """Guards against methods of one's own that are trained as others: by default they go one by one."""
    monkeypatch.setitem(vpo.ADVANTAGES, "mine", lambda x, e: x.scalars[..., 0])
    message = "--jobs 2: a process of its own does not know the method mine"
    fails([*QUICK, "--method", "grpo", "mine", "--jobs", "2"], capsys, message)


def test_how_many_go_side_by_side_where_nobody_says(monkeypatch):
    """All of the tiny model on several cores; a language model, and methods of one's own, one by one."""
    monkeypatch.setattr(processes, "cores", lambda: 2)
    tiny = Config(method=["grpo", "vpo", "group_vpo"], device="cpu")
    assert jobs_of(tiny) == 3
    assert jobs_of(Config(method=["grpo", "vpo"], device="cpu", model="m")) == 1
    assert jobs_of(Config(method=["grpo", "vpo"], device="cpu", jobs=8)) == 2
    monkeypatch.setitem(vpo.ADVANTAGES, "vpo", lambda x, e: None)
    assert jobs_of(tiny) == 1
    monkeypatch.undo()
    monkeypatch.setattr(processes, "cores", lambda: 1)
    assert jobs_of(tiny) == 1
