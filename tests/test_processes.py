"""Methods side by side: the same numbers, and nobody is lost when one process ends badly."""

import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_train import train_in_a_process
from tqdm import tqdm

import eval as evaluation
import train
from engine import processes
from engine.config import Config
from engine.interrupt import StopRequest
from engine.processes import jobs_by_default, run_all, settle_jobs
from rewards import UserError

QUICK = shlex.split(
    "--task toy --warm-steps 20 --steps 8 --prompts-per-step 2 --group-size 4 --save-every 3 "
    "--eval-problems 3 --pool 5 --device cpu --method grpo vpo max_at_k"
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are forked on Linux alone"
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def logs(run: Path) -> dict[str, list[dict]]:
    """The metrics of every method without those of time."""
    by_method = {}
    for path in sorted(run.glob("*/metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            del row["seconds"], row["tokens_per_second"]
        by_method[path.parent.name] = rows
    return by_method


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_results_come_in_the_order_of_the_work(jobs):
    """A tensor too: it must outlive the process that made it."""
    work = {"slow": lambda: time.sleep(0.3) or torch.ones(3), "quick": lambda: 2}
    results = run_all(work, jobs)
    assert list(results) == ["slow", "quick"] and results["quick"] == 2
    assert results["slow"].sum() == 3


def test_a_process_that_is_killed_while_it_draws_stops_no_other(tmp_path):
    """SIGKILL between the two halves of a progress bar; guards against a lock that nobody frees."""

    def die_drawing():
        tqdm.get_lock().acquire()
        (tmp_path / "locked").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def draw():
        while not (tmp_path / "locked").exists():
            time.sleep(0.01)
        for _ in tqdm(range(2)):
            pass
        (tmp_path / "drawn").touch()

    with pytest.raises(UserError, match="vpo: its process was killed by SIGKILL"):
        run_all({"vpo": die_drawing, "grpo": draw}, 2)
    assert (tmp_path / "drawn").exists()


def test_an_error_is_told_after_the_others_have_ended(tmp_path):
    def fail():
        raise UserError("vpo, step 3: the loss is not finite")

    def write():
        time.sleep(0.5)
        (tmp_path / "done").touch()

    with pytest.raises(UserError, match="vpo, step 3: the loss is not finite"):
        run_all({"vpo": fail, "grpo": write, "gdpo": write}, 2)
    assert (tmp_path / "done").exists()


def test_a_process_that_dies_is_named(tmp_path):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match="vpo: its process was killed by SIGKILL; --resume"):
        run_all({"vpo": die, "grpo": (tmp_path / "done").touch}, 2)
    assert (tmp_path / "done").exists()


def test_a_stop_reaches_those_that_run_and_nobody_begins(tmp_path):
    stop = StopRequest()

    def work():
        if os.getpid() != parent:
            (tmp_path / "begun").touch()
        while not stop.received:
            time.sleep(0.05)
        raise KeyboardInterrupt("vpo stopped after step 2")

    parent = os.getpid()
    with stop:
        later = tmp_path / "later"
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import os, signal, time; time.sleep(1); os.kill({parent}, signal.SIGINT)",
            ]
        )
        with pytest.raises(KeyboardInterrupt, match="vpo stopped after step 2"):
            run_all({"vpo": work, "grpo": work, "gdpo": later.touch}, 2, stop)
        child.wait()
    assert (tmp_path / "begun").exists() and not later.exists()


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def alone(shared_folder) -> Path:
    """A run whose methods went one by one, trained once for all tests that compare theirs with it."""
    out = shared_folder / "alone"
    if not out.exists():
        train.main([*QUICK, "--jobs", "1", "--out", str(out)])
    return out


def test_numbers_do_not_depend_on_jobs(alone):
    """Training and evaluation, bit for bit; the tables are printed in the same order."""
    together = Path("jobs3")
    train.main([*QUICK, "--jobs", "3", "--out", str(together)])
    assert logs(alone) == logs(together) and len(logs(alone)) == 3
    reports = [json.loads((run / "eval.json").read_text()) for run in (alone, together)]
    assert list(reports[0]["policies"]) == list(reports[1]["policies"])
    assert reports[0]["policies"] == reports[1]["policies"]
    evaluation.main([str(together), "--jobs", "2"])
    evaluated = json.loads((together / "eval.json").read_text())
    assert evaluated["policies"] == reports[0]["policies"]


def test_a_killed_run_leaves_no_process_and_resumes_bit_for_bit(alone):
    """SIGKILL of the parent: its processes die with it, so that a resume has the folder for itself."""
    child = train_in_a_process([*QUICK, "--eval-problems", "0", "--jobs", "3", "--out", "killed"])
    log = Path("killed/vpo/metrics.jsonl")
    while not log.exists() or log.read_text().count("\n") < 4:
        assert child.is_alive(), "the run ended before it could be killed"
        time.sleep(0.01)
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    child.kill()
    child.join()
    assert children
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() and is_alive(pid) for pid in children):
        assert time.monotonic() < deadline, "a process outlived its parent"
        time.sleep(0.05)
    train.main(["--resume", "--out", "killed", "--jobs", "2"])
    assert logs(Path("killed")) == logs(alone)


def is_alive(pid: str) -> bool:
    """Whether a process is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_jobs_that_cannot_be_had_are_refused(monkeypatch, capsys):
    """Before anything is computed."""
    config = Config(method=["grpo", "vpo"], jobs=2)
    settle_jobs(config, "cpu", need=lambda: 10, limit=20)
    with pytest.raises(UserError, match=r"--jobs 2: these methods take .* GiB together"):
        settle_jobs(config, "cpu", need=lambda: 11, limit=20)
    with pytest.raises(UserError, match="--jobs 2: on cuda"):
        settle_jobs(config, "cuda", need=lambda: 1, limit=20)
    with pytest.raises(SystemExit):
        train.main(["--jobs", "0"])
    assert "--jobs 0: must be a whole number, 1 to 64" in capsys.readouterr().err


def test_how_many_go_side_by_side_where_nobody_says(monkeypatch):
    """All of the tiny model; of a real model one per core, unless it can use many cores itself."""
    tiny = Config(method=["grpo", "vpo", "group_vpo"])
    real = Config(method=["grpo", "vpo"], model="a/model")
    monkeypatch.setattr(processes, "cores", lambda: 2)
    assert jobs_by_default(tiny, "cpu") == 3
    assert jobs_by_default(real, "cpu") == 2
    assert jobs_by_default(tiny, "cuda") == 1
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    settle_jobs(real, "cpu", need=lambda: 11, limit=20)
    assert real.jobs == 1  # two do not fit
    assert threads == [1]  # so the numbers are those of two jobs
    real.jobs = None
    monkeypatch.setattr(processes, "cores", lambda: 16)
    assert jobs_by_default(tiny, "cpu") == 3
    assert jobs_by_default(real, "cpu") == 1
    monkeypatch.setattr(processes, "cores", lambda: 1)
    assert jobs_by_default(tiny, "cpu") == 1


def test_two_processes_do_not_draw_at_once():
    context = multiprocessing.get_context("fork")

    def take_turns(log):
        for _ in range(200):
            with tqdm.get_lock(), tqdm.get_lock():
                with open(log, "a") as file:
                    file.write("in\n")
                with open(log, "a") as file:
                    file.write("out\n")

    drawing = [context.Process(target=take_turns, args=("log",)) for _ in range(2)]
    for process in drawing:
        process.start()
    for process in drawing:
        process.join(30)
    assert Path("log").read_text() == "in\nout\n" * 400
