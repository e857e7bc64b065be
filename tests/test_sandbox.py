"""The sandbox against hostile, cheating and honest programs.

No wrong answer is rewarded and nothing is left behind. A hostile program that escapes does no harm:
it signals with 0, forks a few times, and writes into /tmp.
"""

import ctypes
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import programs
import pytest
from helpers import ROOT, left_by, wait_until
from programs import DOUBLE, RIGHT, STDIO

from engine.cores import cores
from tasks import sandbox as sandbox_module
from tasks.sandbox import CHILD, Job, Sandbox, SandboxError, check_tests, run_tests

pytestmark = pytest.mark.linux


# Of each table of tests/programs.py: what its programs are, the function's name, the tests, and whether they pass.
TABLES = [
    (programs.CHEATS, "cheat", "f", DOUBLE, False),
    (programs.SCRIPT_CHEATS, "script cheat", None, STDIO, False),
    (programs.ENDLESS, "endless", "f", DOUBLE[:1], False),
    (programs.HONEST_DOUBLES, "honest", "f", DOUBLE, True),
    (programs.HONEST_ADDS, "honest script", None, STDIO, True),
    (programs.HONEST, "honest", "f", None, True),  # with tests of their own, and maybe verdicts
    (programs.HONEST_SCRIPTS, "honest script", None, None, True),
]
# Cheats that take long, and therefore get one test.
LONG = ("returns a lot", "returns a huge integer", "recursion in C")


def build_cases() -> dict[str, tuple[Job, list[bool]]]:
    """Programs by name, and the verdicts that they must get."""
    cases = {}
    for table, kind, entry_point, usual_tests, passes in TABLES:
        for name, row in table.items():
            program, tests, *verdicts = row if usual_tests is None else (row, usual_tests)
            if name in LONG:
                tests = tests[:1]
            expected = verdicts[0] if verdicts else [passes] * len(tests)
            cases[f"{kind}: {name}"] = (Job(program, tests, entry_point), expected)
    return cases


# Programs that use up the time of each test.
ENDLESS = ("endless", "script cheat: flood", "honest: one loops", "honest script: loops")
CASES = build_cases()


SIGNALS = [getattr(signal, f"SIG{name}") for name in ["TERM", "HUP", "USR1", "USR2", "URG", "ALRM"]]
FOLDERS = [folder for folder in (Path("/tmp"), Path("/dev/shm"), Path("/")) if folder.is_dir()]


@dataclass
class Graded:
    """What is known after all programs have run."""

    verdicts: dict[str, list[bool]]  # by the name of the case
    left: list[str]  # processes
    signals: list[int]  # that the trainer received
    canary_lives: bool


@pytest.fixture(scope="module")
def graded() -> Iterator[Graded]:
    """All programs, with a bystander that must survive them and a secret in the environment."""
    received = []
    previous = {}
    for number in SIGNALS:
        previous[number] = signal.signal(number, lambda number, frame: received.append(number))
    canary = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.environ["SECRET_TOKEN"] = "2"
    endless = [name for name in CASES if name.startswith(ENDLESS)]
    others = [name for name in CASES if name not in endless]
    graded = Graded({}, [], received, canary_lives=False)
    grade(graded, endless, workers=5, seconds=0.01)
    grade(graded, others, workers=2, seconds=1)
    graded.canary_lives = canary.poll() is None
    yield graded

    del os.environ["SECRET_TOKEN"]
    canary.kill()
    canary.wait()
    for number, handler in previous.items():
        signal.signal(number, handler)


def grade(graded: Graded, names: list[str], workers: int, seconds: float) -> None:
    with Sandbox(workers, seconds=seconds) as sandbox:
        verdicts = sandbox.run([CASES[name][0] for name in names])
    graded.verdicts |= zip(names, verdicts, strict=True)
    graded.left += left_by({helper.process.pid for helper in sandbox._helpers})


@pytest.mark.parametrize("name", CASES)
def test_every_program_gets_the_right_verdict(graded, name):
    _, expected = CASES[name]
    assert graded.verdicts[name] == expected


def test_nothing_is_left_behind(graded):
    """Guards against stray processes, files, signals, and harm to a bystander."""
    assert graded.canary_lives
    assert not graded.left
    assert not graded.signals
    assert not [folder for folder in FOLDERS if (folder / "written_in_the_sandbox").exists()]


def test_the_childs_file_stands_alone():
    """Guards against code that knows expected outputs, or anything of the project, in the helper."""
    source = CHILD.read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE))
    assert imported <= set(sys.stdlib_module_names)
    assert not re.search(r"\b(_judge|_same|Job)\b", source)
    request = sandbox_module._request(Job(RIGHT, [([1], 123456789)], "f"))  # all that it is sent
    assert "123456789" not in repr(request)


def test_a_program_cannot_reach_the_ones_before_it():
    """Guards against a helper that keeps programs or answers in memory, which a fork inherits."""
    secret = "marker" + "_of_another_program"
    keeper = Job(f"word = '{secret}'\ndef f(x): return word", [([1], secret)], "f")
    thief = (
        "import gc\ndef f(x):\n    objects = [o for o in gc.get_objects() if isinstance(o, (str, list, dict))]\n"
        "    return any('mark' + 'er_of_an' in repr(o) for o in objects)"
    )
    with Sandbox(1) as sandbox:
        assert sandbox.run([keeper]) == [[True]]
        assert sandbox.run([Job(thief, [([1], False)], "f")]) == [[True]]


def test_tolerance_only_where_asked_for():
    thirds = "def f(x): return [x / 3, 1]"
    test = ([1], [0.333333, 1])
    bounds = [(0.0, 1e-5), (1e-5, 0.0), (1e-7, 1e-7), (0.0, 3e-7, 1e-7), (0.0, 2e-7, 1e-6)]
    tests = [test, *((*test, bound) for bound in bounds)]
    verdicts = [False, True, True, False, False, True]
    assert run_tests(thirds, tests, entry_point="f") == verdicts
    tests = [([True], 1, (1e-5, 1e-5)), ([10**400], 1.0, (1e-5, 1e-5))]
    assert run_tests("def f(x): return x", tests, entry_point="f") == [False, False]


DIGITS = "123456789" * 600  # more digits than Python turns into an int


def test_numbers_that_a_script_prints():
    """Guards against right programs that fail over how they write a number, and wrong ones that pass."""
    same = """0.5 | 0.50 ; 1.0 2. | 1 2 ; 1e5 | 100000 ; -0.0 | 0 ; 3.141592653590 | 3.141593 ;
        0.142857142857 | 0.142857 ; 0.123457 | 0.123456789012 ; 1000000.5 | 1000000.0 ; nan | nan"""
    different = """1000000.5 | 1000000 ; 9007199254740992.0 | 9007199254740993 ; 0.100001 | 0.100002 ;
        0.0000001 | 0.0000002 ; 7 | 007 ; 007 | 7 ; 5 | +5 ; nan | 0.5 ; inf | 1e400 ; 1e999 | 1 ;
        yes 0.5 | Yes 0.50 ; 0.5  1 | 0.50 1 ; 0.5 1 | 0.50"""
    tests = [(f"{DIGITS}.0", DIGITS), (f"{DIGITS}1", f"{DIGITS}2")]
    tests += [("0.5", "0.50", "exact"), ("0.50 ", "0.50", "exact")]
    expected = [True, False, False, True]
    for pairs, verdict in ((same, True), (different, False)):
        for pair in pairs.split(";"):
            printed, wanted = pair.split("|")
            tests.append((printed.strip(), wanted.strip()))
            expected.append(verdict)
    assert run_tests("print(input())", tests) == expected


TOKENS = (
    "1e999 -1e-999 .5 1. 0.123457 nan inf NaN - 1e9999999 \u0663 \uff11 \0 \x1c \u2028 {} 0x1 1_0"
)
ODD = TOKENS.split(" ")
ODD += ["", " ", "\n", "[" * 9999, '"\\ud800"', "9" * 5000, "1" * 1_000_001, "0." + "1" * 1_000_001]
PLAIN = [*programs.VALUES, 0, 10**400, -1e308, True, [[1.5]], int("9" * 4200)]


def test_nothing_that_a_program_gives_raises():
    """Guards against an output that ends a training for good: the same step would meet it again."""
    rng = random.Random(0)
    for _ in range(100):
        output, expected = ("".join(rng.choices(ODD, k=3)) for _ in range(2))
        for rule in ("", "exact"):
            assert isinstance(sandbox_module._same_output(output.encode(), expected, rule), bool)
            assert sandbox_module._same_output(expected.encode(), expected, rule)
        noise = bytes(rng.choices(range(256), k=9))
        for data in (output.encode(), noise, output.encode("utf-16")):
            for test in (([], rng.choice(PLAIN)), ([], rng.choice(PLAIN), (1e-6, 1e-6))):
                assert sandbox_module._judge_result(data, test, each=False) in ([True], [False])


def test_helpers_start_as_they_are_needed():
    """Guards against a helper for each core of a large machine, of which most never run a program."""
    with Sandbox(64) as sandbox:
        assert len(sandbox._helpers) == 1
        jobs = [Job(f"{RIGHT}# {i}", DOUBLE, "f") for i in range(3)]
        assert sandbox.run(jobs * 20) == [[True] * 3] * 60
        assert len(sandbox._helpers) <= 3


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu.max": "max 100000\n"}, 128),
        ({}, 128),
    ],
)
def test_a_containers_quota_counts(files, allowed, tmp_path, monkeypatch):
    """Guards against 128 helpers in a container that may use two of 128 cores."""
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("engine.cores.CGROUP", tmp_path)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    assert cores() == allowed


def test_a_fork_has_helpers_of_its_own():
    """Guards against reward workers that wait for ever, and against their end that ends the parent's helpers."""
    program = "def f(x): return 2 * x  # "
    context = multiprocessing.get_context("fork")  # a child without its parent's threads
    ours, theirs = context.Pipe()
    with Sandbox(1) as sandbox:
        assert sandbox.run([Job(program, DOUBLE, "f")]) == [[True] * 3]
        job = Job(f"{program}of a fork", DOUBLE, "f")
        process = context.Process(target=lambda: theirs.send(sandbox.run([job, job])))
        process.start()
        assert ours.poll(30), "it hangs"
        process.join(30)
        assert ours.recv() == [[True] * 3] * 2
        assert sandbox._helpers[0].process.poll() is None
        assert sandbox.run([Job(f"{program}again", DOUBLE, "f")]) == [[True] * 3]


def drop_rights() -> None:
    """Leave root its name alone, as `docker --cap-drop=ALL` does."""
    for right in range(64):
        ctypes.CDLL(None).prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_without_rights_is_confined():
    """Guards against "use Linux" on Linux. The libraries of the interpreter are found where the trainer finds them."""
    code = (
        "from tasks.sandbox import *\ns = Sandbox(1)\nenvironment = open(f'/proc/{s._helpers[0].process.pid}/environ')\n"
        "print(s.run([Job('import os\\ndef f(x): return [*os.environ]', [([1], [])], 'f')]), environment.read())"
    )
    command = [sys.executable, "-c", code]
    environment = os.environ | {"LD_LIBRARY_PATH": "/libraries"}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, preexec_fn=drop_rights, **options)
    assert done.stdout.startswith("[[True]]"), done.stderr
    assert "LD_LIBRARY_PATH=/libraries" in done.stdout


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"memory_mb": 1}, {"workers": -1}])
def test_limits_that_cannot_work(limits):
    with pytest.raises(ValueError, match="needs seconds > 0, memory_mb >= 64 and workers >= 1"):
        Sandbox(**limits)


@pytest.mark.parametrize(
    ("tests", "entry_point", "message"),
    [
        ([([1], 2, 3, 4)], "f", r"tests\[0\]: must be a pair.*not \(\[1\], 2, 3, 4\)"),
        ([("a", 3)], None, r"must be a pair of strings, .*, not \('a', 3\)"),
        ([([1], {2})], "f", r"all plain JSON.*\{2\}"),
        ([([1], 2.0, (0.0, 0.1, "x"))], "f", r"must be a pair.*'x'"),
        ([([1], 2)], "Solution.f", r"entry_point 'Solution.f': must be the name of a function"),
    ],
)
def test_malformed_tests(tests, entry_point, message):
    """The message shows what is wanted and what was given."""
    with pytest.raises(ValueError, match=message):
        check_tests(tests, entry_point)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("platform.machine()", '"another"', "cannot be confined.*--unconfined"),
        ("confine = _make_confine()", "pass", "they can read files, see files, reach the network"),
    ],
)
def test_refuses_where_programs_cannot_be_confined(old, new, message, monkeypatch, tmp_path):
    """Guards against a silent loss of the filter: the helper believes in another processor, or sets no filter."""
    source = CHILD.read_text()
    assert old in source
    (tmp_path / CHILD.name).write_text(source.replace(old, new))
    monkeypatch.setattr(sandbox_module, "CHILD", tmp_path / CHILD.name)
    with pytest.raises(SandboxError, match=message):
        run_tests(RIGHT, DOUBLE, entry_point="f")
    if new != "pass":
        assert run_tests(RIGHT, DOUBLE, entry_point="f", unconfined=True) == [True] * 3


def test_a_helper_that_dies_is_replaced_and_a_killer_scores_nothing(capsys):
    """Unconfined, a program may kill its helper: it runs twice and scores 0. No other job notices."""
    killer = "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    return 2 * x"
    jobs = [Job(f"{RIGHT}# {i}", DOUBLE, "f") for i in range(20)]
    jobs.insert(10, Job(killer, DOUBLE, "f"))
    with Sandbox(2, unconfined=True) as sandbox:
        verdicts = sandbox.run(jobs)
        assert verdicts.pop(10) == [False] * 3
        assert verdicts == [[True] * 3] * 20
        assert "killed two helpers" in capsys.readouterr().err
        for helper in sandbox._helpers:
            helper.process.kill()
            helper.process.wait()
        assert sandbox.run([Job(f"{RIGHT}# again", DOUBLE, "f")]) == [[True] * 3]
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
    """Guards against processes that outlive a killed trainer, in the midst of an endless program."""
    code = (
        "from tasks.sandbox import *\ns = Sandbox(1, seconds=60)\nprint(s._helpers[0].process.pid, flush=True)\n"
        "s.run([Job('while True: pass', [([], 1)], 'f')])"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    helper = int(trainer.stdout.readline())
    assert wait_until(lambda: len(left_by({helper})) == 2), "the helper and the program"
    trainer.kill()
    trainer.wait()
    assert wait_until(lambda: not left_by({helper}))


def test_a_busy_machine_fails_no_program():
    """Guards against a limit on CPU time that is one on the machine's load. Two other processes want
    the core of a program that needs half of its second."""
    spins = "import time\ndef f(x):\n    while time.process_time() < 0.5: pass\n    return 2 * x"
    (core, *_) = os.sched_getaffinity(0)
    busy = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    command = [sys.executable, "-c", busy]
    others = [subprocess.Popen(command, start_new_session=True) for _ in range(2)]
    try:
        with Sandbox(1, seconds=0.01) as sandbox:
            os.sched_setaffinity(sandbox._helpers[0].process.pid, [core])
            assert sandbox.run([Job(spins, [([1], 2)], "f")]) == [[True]]
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_what_the_clock_ended_is_run_again():
    """Guards against a verdict of a busy moment that stays for the whole run."""
    waits = Job("import time\ndef f(x): time.sleep(9)", DOUBLE[:1], "f")
    with Sandbox(1, seconds=0.1) as sandbox:
        assert sandbox.run([waits]) == [[False]] and not sandbox._cache
        assert sandbox.run([Job(RIGHT, DOUBLE, "f")]) == [[True] * 3] and len(sandbox._cache) == 1
        assert sandbox.run([]) == [] and sandbox.run([Job(RIGHT, [], "f")]) == [[]]
