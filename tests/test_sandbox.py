"""The sandbox against hostile, cheating and honest programs: no wrong answer is rewarded, nothing is left behind.

Every hostile program is harmless where it escapes: it signals with 0, forks a few times, and writes into /tmp.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import CHEATS, DOUBLE, ENDLESS, HONEST, HONEST_SCRIPTS, RIGHT, SCRIPT_CHEATS, STDIO

from tasks import sandbox as sandbox_module
from tasks.sandbox import CHILD, Job, Sandbox, SandboxError, run_tests

ROOT = Path(__file__).resolve().parent.parent


def cases() -> list[tuple[str, Job, list[bool]]]:
    """Name, job and the verdicts that it must get."""
    found = [
        ("cheat: " + name, Job(program, DOUBLE, "f"), [False] * 3)
        for name, program in CHEATS.items()
    ]
    found += [
        ("endless: " + name, Job(program, DOUBLE[:1], "f"), [False])
        for name, program in ENDLESS.items()
    ]
    signals = "import os, signal\ndef f(pid):\n    os.kill(pid, signal.SIGURG)\n    return pid"
    job = Job(signals, [([os.getpid()], os.getpid())], "f")
    found.append(("cheat: signals the trainer by its number", job, [False]))
    found += [
        ("script cheat: " + name, Job(program, STDIO), [False] * 2)
        for name, program in SCRIPT_CHEATS.items()
    ]
    for kind, programs, entry_point in (
        ("honest", HONEST, "f"),
        ("honest script", HONEST_SCRIPTS, None),
    ):
        for name, (program, tests, *verdict) in programs.items():
            wanted = verdict[0] if verdict else [True] * len(tests)
            found.append((f"{kind}: {name}", Job(program, tests, entry_point), wanted))
    return found


def left_by(helpers: set[int]) -> list[str]:
    """What still runs of these helpers and their children, each helper a session of its own, and zombies of ours."""
    listing = subprocess.run(
        ["ps", "-eo", "ppid=,sid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [(line, line.split(None, 3)) for line in listing.splitlines()]
    return [
        line
        for line, (parent, session, state, *_) in rows
        if (int(parent) == os.getpid() if state.startswith("Z") else int(session) in helpers)
    ]


@pytest.fixture(scope="module")
def graded():
    """The whole suite in one run, with a canary that must survive it and a secret in the environment."""
    os.environ["SECRET_TOKEN"] = "2"
    signals = []
    watched = (
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGURG,
        signal.SIGALRM,
    )
    previous = {
        number: signal.signal(number, lambda number, frame: signals.append(number))
        for number in watched
    }
    canary = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    folders = [folder for folder in ("/tmp", "/dev/shm", "/") if os.path.isdir(folder)]
    files = {folder: set(os.listdir(folder)) for folder in folders}
    with Sandbox(4, seconds=1) as sandbox:  # some programs only wait
        verdicts = sandbox.run([job for _, job, _ in cases()])
    alive = canary.poll() is None
    left = left_by({helper.process.pid for helper in sandbox._helpers})
    new_files = {folder: set(os.listdir(folder)) - names for folder, names in files.items()}
    canary.kill()
    canary.wait()
    for number, handler in previous.items():
        signal.signal(number, handler)
    del os.environ["SECRET_TOKEN"]
    return verdicts, alive, left, new_files, signals


def test_the_suite_is_large():
    assert len(cases()) > 150 and len(HONEST) + len(HONEST_SCRIPTS) > 45


@pytest.mark.parametrize("index", range(len(cases())), ids=[name for name, _, _ in cases()])
def test_every_program_gets_what_it_deserves(graded, index):
    assert graded[0][index] == cases()[index][2]


def test_nothing_is_left_behind(graded):
    """Guards against stray processes, files, signals, and harm to a bystander."""
    _, canary_alive, processes_left, new_files, signals = graded
    assert canary_alive and not processes_left and not signals
    assert not any("written_in_the_sandbox" in names for names in new_files.values())


def test_the_childs_file_stands_alone():
    """Guards against code that knows expected outputs, or anything of the project, in the helper and its children."""
    source = CHILD.read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE))
    assert imported <= set(sys.stdlib_module_names) and not re.search(
        r"\b(_passes|_same|Job)\b", source
    )


def test_a_program_cannot_reach_the_ones_before_it():
    """Guards against a helper that keeps programs or answers in memory, from which a fork inherits them."""
    secret = "marker" + "_of_another_program"
    thief = (
        "import gc\ndef f(x):\n    objects = [o for o in gc.get_objects() if isinstance(o, (str, list, dict))]\n"
        "    return any('mark' + 'er_of_an' in repr(o) for o in objects)"
    )
    with Sandbox(1) as sandbox:
        assert sandbox.run(
            [Job(f"word = '{secret}'\ndef f(x): return word", [([1], secret)], "f")]
        ) == [[True]]
        assert sandbox.run([Job(thief, [([1], False)], "f")]) == [[True]]


def test_order_duplicates_and_repetition():
    """Guards against verdicts that depend on the order of jobs, on what ran before, or on the cache."""
    slow = ("loop", "memory")
    jobs = [
        job
        for name, job, _ in cases()
        if name.startswith("honest") and not any(word in name for word in slow)
    ]
    with Sandbox(2) as sandbox:
        first = sandbox.run(jobs)
        assert sandbox.run(jobs[::-1]) == first[::-1] and sandbox.run(jobs + jobs) == first + first
        assert sandbox.run([]) == [] and sandbox.run([Job(RIGHT, [], "f")]) == [[]]
        assert sandbox.run([Job(RIGHT, [([1], 2)], "f"), Job(RIGHT, [([1], 3)], "f")]) == [
            [True],
            [False],
        ]
    with Sandbox(1) as sandbox:
        assert sandbox.run(jobs) == first


def test_tolerance_only_where_asked_for():
    program, tests = "def f(x): return [x / 3, 1]", [([1], [0.333333, 1])]
    assert run_tests(program, tests, entry_point="f") == [False]
    assert run_tests(program, tests, entry_point="f", tolerance=1e-5) == [True]
    assert run_tests("def f(x): return True", [([1], 1)], entry_point="f", tolerance=1e-5) == [
        False
    ]
    assert run_tests(
        "def f(x): return 10 ** 400", [([1], 1.0)], entry_point="f", tolerance=1e-5
    ) == [False]


@pytest.mark.parametrize(
    ("tests", "entry_point", "message"),
    [
        ([([1], 2, 3, 4)], "f", r"test 0: must be a pair.*not \(\[1\], 2, 3, 4\)"),
        ([("a", 3)], None, r"must be a pair of strings, .*, not \('a', 3\)"),
        ([(1, 2)], "f", r"must be a pair, a list of arguments.*not \(1, 2\)"),
        ([([1], {2})], "f", r"all plain JSON.*\{2\}"),
        ([([object()], 2)], "f", "all plain JSON.*<object"),
        ([([1], 2)], "2x", "entry_point '2x': must be the name"),
    ],
)
def test_malformed_tests(tests, entry_point, message):
    """Guards against messages that say what is wanted, but not what was given."""
    with pytest.raises(ValueError, match=message):
        run_tests(RIGHT, tests, entry_point=entry_point)


def test_malformed_programs_and_limits():
    """A program that is no text, arguments too deep to be shown, limits out of range: ValueError with the value."""
    deep = []
    for _ in range(5000):
        deep = [deep]
    with Sandbox(1) as sandbox, pytest.raises(ValueError, match="program 3: must be text"):
        sandbox.run([Job(3, DOUBLE, "f")])
    with Sandbox(1) as sandbox, pytest.raises(ValueError, match="at most 200 deep, not"):
        sandbox.run([Job(RIGHT, [([deep], 2)], "f")])
    with pytest.raises(ValueError, match="seconds=0"):
        run_tests(RIGHT, DOUBLE, entry_point="f", seconds=0)
    with pytest.raises(ValueError, match="memory_mb=5"):
        run_tests(RIGHT, DOUBLE, entry_point="f", memory_mb=5)


def test_refuses_where_programs_cannot_be_confined(monkeypatch, tmp_path):
    """Guards against a silent loss of the filter: the helper is made to believe in another processor."""
    source = CHILD.read_text().replace('f"{sys.platform} {platform.machine()}"]', '"another"]')
    assert source != CHILD.read_text()
    (tmp_path / CHILD.name).write_text(source)
    monkeypatch.setattr(sandbox_module, "CHILD", tmp_path / CHILD.name)
    with pytest.raises(SandboxError, match=r"cannot be confined.*--unconfined"):
        run_tests(RIGHT, DOUBLE, entry_point="f")
    assert run_tests(RIGHT, DOUBLE, entry_point="f", unconfined=True) == [True] * 3


def test_refuses_where_the_filter_does_nothing(monkeypatch, tmp_path):
    """Guards against trust in a system call that says yes: the self-test tries what must fail, and names it."""
    source = CHILD.read_text().replace("(lambda: 0) if unconfined else confine", "lambda: 0")
    assert source != CHILD.read_text()
    (tmp_path / CHILD.name).write_text(source)
    monkeypatch.setattr(sandbox_module, "CHILD", tmp_path / CHILD.name)
    with pytest.raises(
        SandboxError, match="they can read files, see files, reach the network, send signals"
    ):
        run_tests(RIGHT, DOUBLE, entry_point="f")


def test_a_helper_that_dies_is_replaced_and_a_killer_scores_nothing(capsys):
    """Unconfined, a program may kill its helper: its job runs twice, scores 0, which is said; no other job notices."""
    killer = "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    return 2 * x"
    with Sandbox(2, unconfined=True) as sandbox:
        jobs = [Job(RIGHT + f"# {i}", DOUBLE, "f") for i in range(20)]
        verdicts = sandbox.run([*jobs[:10], Job(killer, DOUBLE, "f"), *jobs[10:]])
        assert verdicts.pop(10) == [False] * 3 and verdicts == [[True] * 3] * 20
        assert "killed two helpers" in capsys.readouterr().err
        for helper in sandbox._helpers:
            helper.process.kill()
            helper.process.wait()
        assert sandbox.run([Job(RIGHT + "# again", DOUBLE, "f")]) == [[True] * 3]
        assert not capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing_running():
    """Guards against Ctrl-C that waits for endless programs, and against helpers that survive it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    sandbox = Sandbox(1, seconds=1000)
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            sandbox.run([Job("def f(x):\n    while True: pass", DOUBLE, "f")])
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert sandbox._helpers[0].process.returncode is not None
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run([Job(RIGHT, DOUBLE, "f")])


def test_helpers_end_with_the_trainer():
    """Guards against processes that outlive a trainer killed without warning, in the midst of an endless program."""
    code = (
        "from tasks.sandbox import *\ns = Sandbox(1, seconds=60)\nprint(s._helpers[0].process.pid, flush=True)\n"
        "s.run([Job('while True: pass', [([], 1)], 'f')])"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    helper = int(trainer.stdout.readline())
    time.sleep(0.3)
    assert len(left_by({helper})) == 2, "the helper and the program"
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 20
    while left_by({helper}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left_by({helper})


def test_expected_outputs_never_reach_a_helper():
    """The key of a job is all that a helper is sent: no expected output is in it."""
    key = sandbox_module.check_job(RIGHT, [([1], 123456789)], "f")
    assert "123456789" not in json.dumps(key)
