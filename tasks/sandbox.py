"""Run programs written by a model, say which tests each one passes, and pay nothing for cheating.

    run_tests(program, [([2, 3], 5), ([1, 1], 2)], entry_point="add")      one program, a function called with arguments
    run_tests(program, [("2 3\\n", "5\\n")])                               one program, a script from stdin to stdout
    with Sandbox() as sandbox: sandbox.run([Job(program, tests), ...])     many, on all cores, in order

Expected outputs stay at this end, programs run at the other, sandbox_child.py. docs/sandbox.md: what is promised."""

import contextlib
import decimal
import hashlib
import json
import math
import os
import reprlib
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tasks.sandbox_child import is_plain

CHILD = Path(__file__).resolve().with_name("sandbox_child.py")
MAX_OUTPUT, MAX_CACHED = (
    4 * 2**20,
    50_000,
)  # bytes of one child's answer; programs whose small outputs are remembered


class SandboxError(Exception):
    """Programs cannot be run here; the message says why and what to do."""


class Job(NamedTuple):
    """A program and its tests: (arguments, expected) for an entry point, a function or a method of `class Solution`, or
    (stdin, stdout); third, a tolerance (relative, absolute). With `each`, expected is a list judged item by item."""

    program: str
    tests: list[tuple]
    entry_point: str | None = None
    each: bool = False


def run_tests(
    program: str,
    tests: list[tuple],
    *,
    entry_point: str | None = None,
    seconds: float = 2.0,
    memory_mb: int = 512,
    tolerance: float = 0.0,
    unconfined: bool = False,
) -> list[bool]:
    """Which tests a program passes, one bool each; parameters and errors are those of `Job` and `Sandbox`. A tuple is a
    list, 2.0 is 2, True is not 1. A script must end with status 0; trailing blanks and empty lines do not count."""
    tests = [(*test, (tolerance, tolerance)) for test in tests] if tolerance else tests
    with Sandbox(1, seconds=seconds, memory_mb=memory_mb, unconfined=unconfined) as sandbox:
        return sandbox.run([Job(program, tests, entry_point)])[0]


class Sandbox(contextlib.AbstractContextManager):
    """A pool of helpers, one per core unless `workers` says otherwise. `seconds` of CPU time (rounded up), on the clock
    twice that and one more, and `memory_mb` MiB are limits per test. Raises SandboxError where programs cannot be
    confined, unless `unconfined`, or once it is closed, and ValueError for limits out of range or malformed jobs."""

    def __init__(
        self,
        workers: int | None = None,
        *,
        seconds: float = 2.0,
        memory_mb: int = 512,
        unconfined: bool = False,
    ):
        workers = workers or (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        if not (0 < seconds < 1e6 and 64 <= memory_mb < 2**30 and workers >= 1):
            raise ValueError(
                f"seconds={seconds}, memory_mb={memory_mb}, workers={workers}: needs seconds > 0, "
                "memory_mb >= 64 and workers >= 1"
            )
        self._limits = (seconds, memory_mb, unconfined)
        self._cache: dict[bytes, list[bytes | None]] = {}
        self._helpers = [_Helper(*self._limits) for _ in range(workers)]
        self._threads, self._idle = (
            ThreadPoolExecutor(workers, "sandbox"),
            self._helpers.copy(),
        )  # as many of each
        self._closed, self._end = False, weakref.finalize(self, _end, self._threads, self._helpers)
        try:
            for helper in self._helpers:
                helper.check()
        except BaseException:
            self.close()
            raise

    def close(self, *_: object) -> None:
        self._closed = True
        self._end()

    __exit__ = close

    def run(self, jobs: list[Job]) -> list[list[bool]]:
        """Verdicts in the order of the jobs, one bool per test; programs equal in text and inputs run once."""
        if self._closed:
            raise SandboxError("the sandbox is closed, by hand or by an interrupted run")
        jobs = [Job(*job) for job in jobs]
        asking: dict[tuple, list[int]] = {}  # who waits for the output of a program
        for i, job in enumerate(jobs):
            asking.setdefault(check_job(*job[:3]), []).append(i)
        verdicts, began = [[] for _ in jobs], time.monotonic()
        try:
            outcomes = zip(asking.values(), self._threads.map(self._outcome, asking), strict=True)
            for done, (waiting, outcome) in enumerate(outcomes, 1):
                for i in waiting:
                    for got, test in zip(outcome, jobs[i].tests, strict=True):
                        verdicts[i] += _passes(got, jobs[i], *test[1:])
                if sys.stderr.isatty() and time.monotonic() > began + 2:
                    print(
                        f"\rsandbox: {done} of {len(asking)}",
                        end="\n" * (done == len(asking)),
                        file=sys.stderr,
                    )
        except BaseException:  # Ctrl-C, above all: nobody waits for programs that still run
            self.close()
            raise
        return verdicts

    def _outcome(self, key: tuple) -> list[bytes | None]:
        """What the program answered to each input, None where it did not; a helper that dies is replaced, once."""
        digest = hashlib.sha256(repr(key).encode()).digest()
        if digest in self._cache:
            return self._cache[digest]
        helper = self._idle.pop()
        try:
            for _ in range(2):
                if (
                    helper.process.poll() is not None
                ):  # it died, maybe while idle, which is not this program's doing
                    if self._closed:
                        raise SandboxError("the sandbox was closed while it ran programs")
                    self._helpers.append(helper := _Helper(*self._limits))
                    helper.check()
                with contextlib.suppress(OSError):
                    outcome = helper.outcome(*key)
                    if (
                        sum(map(len, filter(None, outcome))) < 4096
                        and len(self._cache) < MAX_CACHED
                    ):
                        self._cache[digest] = outcome
                    return outcome
                helper.close()
        finally:
            self._idle.append(helper)
        print(
            f"sandbox: a program killed two helpers and scores 0: {key[0]!r:.200}", file=sys.stderr
        )
        return [None] * len(key[2])


def check_job(
    program: str, tests: list[tuple], entry_point: str | None
) -> tuple[str, str | None, tuple[str, ...]]:
    """What decides a program's output, and all that a helper gets to see of a job; ValueError if it is malformed."""
    if not isinstance(program, str):
        raise ValueError(f"program {reprlib.repr(program)}: must be text")
    if entry_point is not None and not entry_point.isidentifier():
        raise ValueError(
            f"entry_point {reprlib.repr(entry_point)}: must be the name of a function; None runs a script"
        )
    wanted = (
        "a pair of strings, stdin and stdout (for arguments name the entry_point)"
        if entry_point is None
        else "a pair, a list of arguments and the expected output, all plain JSON values, at most 200 deep"
    )
    for i, test in enumerate(tests):
        if len(test) not in (2, 3) or not (
            all(isinstance(text, str) for text in test[:2])
            if entry_point is None
            else isinstance(test[0], list | tuple) and is_plain(test)
        ):
            raise ValueError(f"test {i}: must be {wanted}, not {reprlib.repr(test)}")
    return (
        program,
        entry_point,
        tuple(test[0] if entry_point is None else json.dumps(test[0]) for test in tests),
    )


def _passes(
    got: bytes | None, job: Job, expected: Any, tolerance: tuple[float, float] = (0.0, 0.0)
) -> list[bool]:
    """The only place where answers and expected outputs meet."""
    if got is not None and job.entry_point is None:
        lines, wanted = (
            [line.rstrip() for line in text.rstrip().split("\n")]
            for text in (got.decode(errors="replace"), expected)
        )
        return [lines == wanted]
    with contextlib.suppress(
        ValueError, ArithmeticError, RecursionError
    ):  # int() may take quadratic time, or refuse
        answer = json.loads(
            got or b"", parse_int=lambda n: int(n) if len(n) < 4000 else decimal.Decimal(n)
        )
        answers, wanted = (answer, expected) if job.each else ([answer], [expected])
        if isinstance(answers, list):
            return [_same(*pair, *tolerance) for pair in zip(answers, wanted, strict=True)]
    return [False] * (len(expected) if job.each else 1)


def _same(got: Any, expected: Any, relative: float, absolute: float) -> bool:
    """Equality of plain JSON values: a tuple equals a list, 2.0 is 2, True is not 1."""
    if isinstance(expected, dict) and isinstance(got, dict) and got.keys() == expected.keys():
        got, expected = [got[key] for key in expected], list(expected.values())
    if isinstance(expected, list | tuple):
        return (
            isinstance(got, list)
            and len(got) == len(expected)
            and all(_same(*pair, relative, absolute) for pair in zip(got, expected, strict=True))
        )
    if isinstance(got, decimal.Decimal):
        return (
            type(expected) is int and abs(expected) > 10**3000 and got == decimal.Decimal(expected)
        )
    if {type(got), type(expected)} <= {int, float}:
        return got == expected or (
            max(relative, absolute) > 0
            and math.isclose(got, expected, rel_tol=relative, abs_tol=absolute)
        )
    return type(got) is type(expected) and got == expected


PROBE = """
import contextlib, os, socket, threading
def probe():
    threading.Thread(target=len, args=("",)).start()
    allowed = []
    for name, attempt in (("read files", lambda: os.open("/", os.O_RDONLY)), ("see files", lambda: os.stat("/")),
                          ("reach the network", socket.socket), ("send signals", lambda: os.kill(os.getppid(), 0)),
                          ("start processes", lambda: os.fork() or os._exit(0))):
        with contextlib.suppress(OSError):
            attempt()
            allowed.append(name)
    return allowed
"""


class _Helper:
    def __init__(self, seconds: float, memory_mb: int, unconfined: bool):
        self.control, theirs = socket.socketpair()
        self.unconfined = unconfined
        options = [
            str(option) for option in (CHILD, theirs.fileno(), seconds, memory_mb, int(unconfined))
        ]
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-S",
                    "-s",
                    *options,
                ],  # not -I: it ignores PYTHONHASHSEED, the order of sets
                env={
                    "PYTHONHASHSEED": "0",
                    "PYTHONUTF8": "1",
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "MALLOC_ARENA_MAX": "1",
                },
                cwd="/",
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # Ctrl-C on the terminal is the trainer's business
        self.control.settimeout(60 + 2 * seconds + 1)

    def check(self) -> None:
        """Wait until it is ready; SandboxError unless a program can compute here, and do nothing else."""
        problem = "a harmless program does not run in the sandbox"
        with contextlib.suppress(OSError):
            if (message := self.control.recv(1000)) != b"ready":
                problem = message.decode() or "the helper did not start"
            elif answer := self.outcome(PROBE, "probe", ("[]",))[0]:
                allowed = ", ".join(json.loads(answer))
                if not allowed or self.unconfined:
                    return
                problem = f"programs cannot be confined here, they can {allowed}"
        raise SandboxError(
            f"{problem} (Python {sys.version.split()[0]}, {sys.platform} {os.uname().machine}); use "
            "Linux on x86-64 or arm64, or accept the risk by unconfined=True or the flag --unconfined"
        )

    def outcome(
        self, program: str, entry_point: str | None, inputs: tuple[str, ...]
    ) -> list[bytes | None]:
        """The answer to each input: JSON, or a script's output; None where there is none."""
        outcome: list[bytes | None] = []
        if entry_point is None:
            for stdin in inputs:
                with (
                    open(os.memfd_create(""), "w+b")
                    if sys.platform == "linux"
                    else tempfile.TemporaryFile() as file
                ):
                    file.write(stdin.encode(errors="surrogatepass"))
                    file.seek(0)
                    output, status = self._run(program, None, (), file.fileno())
                outcome.append(output if status == 0 and len(output) < MAX_OUTPUT else None)
        while len(outcome) < len(
            inputs
        ):  # one child runs them all; if it dies, the next begins where it died
            output, _ = self._run(program, entry_point, inputs[len(outcome) :])
            lines = output.split(b"\n")[:-1][: len(inputs) - len(outcome)]
            outcome += [line[1:] if line[:1] == b"=" else None for line in lines] or [None]
        return outcome

    def _run(
        self, program: str, entry_point: str | None, inputs: tuple[str, ...], *files: int
    ) -> tuple[bytes, int]:
        """One child: up to MAX_OUTPUT bytes that it wrote, and its status, -1 if killed; OSError if the helper dies."""
        ours, theirs = socket.socketpair()
        output = bytearray()
        with ours:
            ours.settimeout(self.control.gettimeout())
            with theirs:
                socket.send_fds(self.control, [b"job"], [theirs.fileno(), *files])
            with contextlib.suppress(
                BrokenPipeError, ConnectionResetError
            ):  # a child may end early
                ours.sendall("\n".join([json.dumps([program, entry_point]), *inputs]).encode())
                ours.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while len(output) < MAX_OUTPUT and (part := ours.recv(2**16, socket.MSG_WAITALL)):
                    output += part
        if not (status := self.control.recv(9)):
            raise ConnectionError("the helper died")
        return bytes(output), int(status)

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


def _end(threads: ThreadPoolExecutor, helpers: list[_Helper]) -> None:
    """Also of a sandbox that nobody closed: when it is forgotten, or before the interpreter's modules go."""
    threads.shutdown(wait=False, cancel_futures=True)
    for helper in helpers:
        helper.close()
