"""Methods side by side: the same numbers, and nobody outlives the command."""

import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import LEARNING, ROOT, fails, left_by, metrics, wait_until, write_fence

import eval as evaluation
import train
import vpo
from engine import processes
from engine.config import Config
from engine.processes import run_all
from engine.training.jobs import jobs_of
from rewards import UserError

QUICK = [*LEARNING, *shlex.split("--save-every 2 --eval-problems 2 --method grpo vpo")]


# Functions for other processes, which import them from here.


def ones(seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return torch.ones(3)


def fail(seconds: float = 0.0) -> None:
    time.sleep(seconds)
    raise UserError("vpo, step 3: the loss is not finite")


def fail_with_a_note() -> None:
    error = KeyError("mistake")
    error.add_note("method vpo, step 3")
    raise error


@pytest.mark.parametrize("n", [1, 2])
def test_results_come_in_the_order_of_the_work(n):
    """A tensor too: it must outlive the process that made it."""
    results = run_all(ones, {"slow": (0.3,), "quick": (0.0,)}, n)
    assert list(results) == ["slow", "quick"] and results["slow"].sum() == 3


def test_what_a_process_raises_is_told(capsys):
    """A user's mistake, a mistake in their code with its note, and a process that is killed."""
    with pytest.raises(UserError, match="^vpo, step 3: the loss is not finite$"):
        run_all(fail, {"vpo": ()}, 2)
    with pytest.raises(KeyError) as raised:
        run_all(fail_with_a_note, {"vpo": ()}, 2)
    assert raised.value.__notes__ == ["method vpo, step 3"]
    with pytest.raises(UserError, match="a process was killed"):
        run_all(os._exit, {"grpo": (3,), "vpo": (3,)}, 2)
    assert not capsys.readouterr().err
    with pytest.raises(UserError):
        run_all(fail, {"grpo": (1.0,), "vpo": (0.0,)}, 2)
    assert capsys.readouterr().err.count("the others go on") == 1, "also after the last"


@pytest.mark.parametrize("place", [(processes, "Listener"), (multiprocessing, "RLock")])
def test_where_processes_cannot_talk_methods_go_one_by_one(place, monkeypatch, capsys):
    """Guards against "AF_UNIX path too long" (a long TMPDIR) and a bare "[Errno 30]" (of /dev/shm)."""
    processes.possible.cache_clear()
    monkeypatch.setattr(*place, Mock(side_effect=OSError("AF_UNIX path too long")))
    train.main([*QUICK, "--jobs", "2", "--out", "run", "--steps", "2"])
    evaluation.main(["run", "--jobs", "2", "--problems", "1"])
    told = capsys.readouterr().err
    assert told.count("one by one, as with --jobs 1: several jobs need a short TMPDIR") == 1
    processes.possible.cache_clear()


def wait_for(child: subprocess.Popen, log: Path, steps: int) -> None:
    while not log.exists() or log.read_text("utf-8").count("\n") < steps:
        assert child.poll() is None, "the run ended too early"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_run_ends_bit_for_bit_the_same():
    """SIGKILL of the parent: its processes die with it, so that a resume has the folder for itself.
    Two methods at a time, trained and evaluated, come to what they come to one by one."""
    train.main([*QUICK, "--jobs", "1", "--out", "alone"])
    flags = [*QUICK, "--jobs", "2", "--out", "run"]
    command = [sys.executable, ROOT / "train.py", *flags]
    child = subprocess.Popen(command, start_new_session=True)
    wait_for(child, Path("run/vpo/metrics.jsonl"), 3)
    threads = Path(f"/proc/{child.pid}/task").glob("*/children")
    assert len(" ".join(path.read_text() for path in threads).split()) >= 2
    child.kill()
    child.wait()
    assert wait_until(lambda: not left_by({child.pid})), "a process outlived its parent"
    assert not Path("run/vpo/checkpoint-000008").exists(), "the kill came too late"
    train.main(["--resume", "--out", "run", "--jobs", "2"])
    for method in ("grpo", "vpo"):
        assert metrics(Path("alone", method)) == metrics(Path("run", method))
        weights = f"{method}/checkpoint-000008/model.safetensors"
        assert Path("alone", weights).read_bytes() == Path("run", weights).read_bytes()
    tables = [json.loads(Path(run, "eval.json").read_text("utf-8")) for run in ("alone", "run")]
    alone, side_by_side = [list(table["policies"].items()) for table in tables]
    assert alone == side_by_side


def test_a_task_and_a_method_of_ones_own_reach_the_processes(capsys):
    """A file given by its path, and a script that adds a method as docs/own.md does. SIGTERM, which Slurm sends to all
    of them, as a terminal sends Ctrl-C: no traceback of a child, and the way on."""
    write_fence("", "my_task.py")
    Path("my_method.py").write_text(
        f"import sys\n\nsys.path.append({str(ROOT)!r})\nfrom vpo import ADVANTAGES, grpo\n\n\n"
        "def mine(x, e):\n    return 2 * grpo(x, e)\n\n\n"
        'ADVANTAGES["mine"] = mine\n\nif __name__ == "__main__":\n    import train\n\n'
        "    train.main()\n",
        encoding="utf-8",
    )
    flags = "--task my_task.py --method grpo mine --jobs 2 --out run --eval-problems 0 "
    flags += "--steps 500 --warm-steps 2"
    command = [sys.executable, "my_method.py", *QUICK, *flags.split()]
    # In a group of its own, as a terminal begins it.
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    for method in ("grpo", "mine"):
        wait_for(child, Path("run", method, "metrics.jsonl"), 3)
    os.killpg(child.pid, signal.SIGTERM)
    told = child.communicate()[1]
    assert child.returncode == 130, told
    assert "go on with: python my_method.py --resume --out run" in told.splitlines()[-1]
    assert "Traceback" not in told and "leaked" not in told
    assert list(Path("run/mine").glob("checkpoint-*"))
    fails(["--resume", "--out", "run"], capsys, "has the method mine, unknown here")


def test_a_method_that_only_this_process_knows_is_refused_there(monkeypatch, capsys):
    """Guards against methods of one's own that are trained as others: by default they go one by one."""
    monkeypatch.setitem(vpo.ADVANTAGES, "mine", lambda x, e: vpo.center(x.scalars[..., 0]))
    message = "--jobs 2: a process does not know the method mine"
    fails([*QUICK, "--method", "grpo", "mine", "--jobs", "2"], capsys, message)


def test_how_many_go_side_by_side_where_nobody_says(monkeypatch):
    """All of the tiny model on several cores; a language model, and methods of one's own, one by one."""
    monkeypatch.setattr("engine.training.jobs.cores", lambda: 2)
    tiny = Config(method=["grpo", "vpo", "group_vpo"], device="cpu")
    assert jobs_of(tiny) == 3
    assert jobs_of(Config(method=["grpo", "vpo"], device="cpu", model="m")) == 1
    assert jobs_of(Config(method=["grpo", "vpo"], device="cpu", jobs=8)) == 2
    monkeypatch.setitem(vpo.ADVANTAGES, "vpo", lambda x, e: None)
    assert jobs_of(tiny) == 1


@pytest.mark.linux
@pytest.mark.parametrize("name", ["queue", "types"])
def test_a_task_may_have_the_name_of_a_module_of_python(name):
    """In the folder of the scripts. Guards against a library that imports the task in its place."""
    for part in ("vpo", "rewards", "rollout", "train", "eval", "engine", "fast", "tasks", "report"):
        path = next(ROOT.glob(f"{part}*"))
        Path(path.name).symlink_to(path)
    write_fence("", f"{name}.py")
    flags = [*QUICK, "--task", f"{name}.py", "--jobs", "2", "--eval-problems", "0", "--out", "run"]
    done = subprocess.run([sys.executable, "train.py", *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
