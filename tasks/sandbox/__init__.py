"""Run programs that a model wrote, and say which tests each of them passes.

    # One program, a function that is called with arguments:
    run_tests(program, [([2, 3], 5), ([1, 1], 2)], entry_point="add")
    # One program, a script that reads stdin and writes stdout:
    run_tests(program, [("2 3\\n", "5\\n")])
    # Many programs on all cores:
    with Sandbox() as sandbox:
        verdicts = sandbox.run([Job(program, tests), ...])

The programs run in other processes, see child.py. The expected outputs stay in this one.
This folder needs the standard library alone and can be copied. docs/sandbox.md says what is promised.
"""

import contextlib
import decimal
import hashlib
import json
import math
import os
import pickle
import re
import reprlib
import secrets
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from .child import MAX_PATIENCE, SCRIPTS_PER_CHILD, TIMED_OUT, is_plain

CHILD = Path(__file__).resolve().with_name("child.py")
MAX_OUTPUT = 4 * 2**20  # bytes that one child may write, besides what the tests expect
MAX_CACHED = 50_000  # programs whose outputs are remembered
MAX_CACHED_OUTPUT = 4096  # bytes of all outputs of such a program
MAX_DIGITS = 4000  # of an integer; to convert longer ones takes long, or Python refuses
NEEDED = {"LD_LIBRARY_PATH", "PYTHONHOME"}  # for an interpreter to start
INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*+)")
NUMBER = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*+)(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][-+]?[0-9]{1,3})?"
)  # that a program prints; 007 is text, and so is nan
NUMBER_TOLERANCE = decimal.Decimal("1e-6")  # relative
FULL_DECIMALS = 6  # a number with so many decimals may be a rounded one
NUMBERS = decimal.Context(prec=28, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)  # none overflows


class SandboxError(Exception):
    """Programs cannot be run here. The message says why and what to do."""


@dataclass(frozen=True)
class Job:
    """A program and its tests.

    A test is a pair: (list of arguments, expected result) for the function, or the method of
    `class Solution`, that is named `entry_point`; (stdin, stdout) for a script. A function's test
    may have a third item, the tolerance: (relative, absolute) as those of `math.isclose`, and
    maybe a share of the expected number that is added to the absolute one, as numpy does. A
    script's test may have "exact". With `each`, the expected result is a list, and each of its
    items gets its own verdict. With `true_is_one`, True equals 1, as in Python.
    """

    program: str
    tests: list[tuple]
    entry_point: str | None = None
    each: bool = False
    true_is_one: bool = False


@dataclass(frozen=True)
class Request:
    """All that a helper is sent of a job: it decides the program's outputs."""

    program: str
    entry_point: str | None
    inputs: tuple[str, ...]  # of each test the arguments as JSON, or stdin
    max_output: int = MAX_OUTPUT


def run_tests(
    program: str, tests: list[tuple], *, entry_point: str | None = None, **limits: float
) -> list[bool]:
    """One verdict per test of a program. `limits` and the exceptions are those of `Sandbox`."""
    with Sandbox(1, **limits) as sandbox:
        return sandbox.run([Job(program, tests, entry_point)])[0]


def check_tests(tests: list[tuple], entry_point: str | None) -> None:
    """Raise ValueError for malformed tests of a job."""
    wanted = "a pair of strings, stdin and stdout (for arguments name the entry_point)"
    if entry_point is not None:
        if not str(entry_point).isidentifier():
            raise ValueError(f"entry_point {entry_point!r:.60}: must be the name of a function")
        wanted = "a pair, a list of arguments and the expected output, all plain JSON values, at most 200 deep"
    for number, test in enumerate(tests):
        if not _is_test(test, entry_point):
            raise ValueError(f"tests[{number}]: must be {wanted}, not {reprlib.repr(test)}")


class Sandbox(contextlib.AbstractContextManager):
    """A pool of helper processes that run programs.

    Raises SandboxError where programs cannot be confined, unless `unconfined`, and once it is
    closed. Raises ValueError for limits out of range and for malformed jobs.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        seconds: float = 2.0,
        memory_mb: int = 512,
        unconfined: bool = False,
    ):
        """Run up to `workers` programs at once, by default one per core, each in a helper.

        A test may take `seconds` of CPU time (rounded up; by the clock twice that and one second
        more, besides the time that it waits for a core) and `memory_mb` MiB.
        """
        if sys.platform != "linux":
            raise SandboxError("programs need Linux or WSL: a filter of Linux confines them")
        self._workers = workers or len(os.sched_getaffinity(0))
        if not (0 < seconds < 1e6 and 64 <= memory_mb < 2**30 and self._workers >= 1):
            given = f"seconds={seconds}, memory_mb={memory_mb}, workers={workers}"
            raise ValueError(f"{given}: needs seconds > 0, memory_mb >= 64 and workers >= 1")
        self._limits = (seconds, memory_mb, unconfined)
        self._cache: dict[bytes, list[bytes | None]] = {}
        self._restart = threading.Lock()
        self._start()

    def _start(self) -> None:
        """Start the first helper of this process; others follow as programs run at once."""
        self._helpers: list[_Helper] = []
        self._idle: list[_Helper] = []
        self._threads = ThreadPoolExecutor(self._workers, "sandbox")
        self._end = weakref.finalize(self, _end, os.getpid(), self._threads, self._helpers)
        self._idle.append(self._new_helper())
        self._pid = os.getpid()

    def close(self) -> None:
        """End all helpers and the programs that they run."""
        self._end()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, jobs: list[Job]) -> list[list[bool]]:
        """The verdicts of each job, one per test. Programs with equal inputs run once."""
        if not self._end.alive:
            raise SandboxError("the sandbox is closed, by hand or by an interrupted run")
        if self._pid != os.getpid():  # a fork has no threads and must not use the helpers
            with self._restart:
                if self._pid != os.getpid():
                    self._end.detach()
                    self._start()
        indices_of: dict[Request, list[int]] = {}  # the jobs that wait for a program's outputs
        for index, job in enumerate(jobs):
            indices_of.setdefault(_request(job), []).append(index)

        verdicts: list[list[bool]] = [[] for _ in jobs]
        try:
            all_outputs = self._threads.map(self._outputs, indices_of)
            for outputs, indices in zip(all_outputs, indices_of.values(), strict=True):
                for index in indices:
                    verdicts[index] = _judge(jobs[index], outputs)
        except BaseException:  # mostly Ctrl-C: do not wait for programs that still run
            self.close()
            raise
        return verdicts

    def _outputs(self, request: Request) -> list[bytes | None]:
        """A program's outputs from the cache or from a helper."""
        digest = hashlib.sha256(repr(request).encode()).digest()
        if digest in self._cache:
            return self._cache[digest]
        try:
            helper = self._idle.pop()
        except IndexError:
            helper = self._new_helper()
        try:
            for _ in range(2):
                # A helper may have died while it was idle, which is not this program's doing.
                if helper.process.poll() is not None:
                    helper = self._new_helper()
                with contextlib.suppress(OSError):
                    outputs = helper.outputs(request)
                    size = sum(len(output or b"") for output in outputs)
                    is_small = size < MAX_CACHED_OUTPUT and len(self._cache) < MAX_CACHED
                    if is_small and not helper.has_timed_out:  # which another time it may not do
                        self._cache[digest] = outputs
                    return outputs
                helper.close()
        finally:
            self._idle.append(helper)
        message = f"a program killed two helpers and scores 0: {request.program!r:.200}"
        print(f"sandbox: {message}", file=sys.stderr)
        return [None] * len(request.inputs)

    def _new_helper(self) -> "_Helper":
        helper = _Helper(*self._limits)
        self._helpers.append(helper)
        if not self._end.alive:
            helper.close()
            raise SandboxError("the sandbox was closed while it ran programs")
        helper.check()
        return helper


def _end(pid: int, threads: ThreadPoolExecutor, helpers: list["_Helper"]) -> None:
    """End a sandbox of the process `pid`: it was closed or forgotten, or the interpreter ends."""
    if pid != os.getpid():  # a fork
        return
    threads.shutdown(wait=False, cancel_futures=True)
    for helper in helpers:
        helper.close()


def _request(job: Job) -> Request:
    """The request for a job, without expected outputs. ValueError if the job is malformed."""
    check_tests(job.tests, job.entry_point)
    inputs = [test[0] for test in job.tests]
    if job.entry_point is not None:
        inputs = [json.dumps(arguments) for arguments in inputs]
    longest = max((len(pickle.dumps(test[1])) for test in job.tests), default=0)
    max_output = MAX_OUTPUT * (1 + 8 * longest // MAX_OUTPUT)  # the same for nearly all tests
    return Request(job.program, job.entry_point, tuple(inputs), max_output)


def _is_test(test: object, entry_point: str | None) -> bool:
    match test:
        case [str(), str()] | [str(), str(), "exact"]:
            return entry_point is None
        case [list() | tuple(), _]:
            return entry_point is not None and is_plain(test)
        case [list() | tuple(), _, [float(), float()] | [float(), float(), float()]]:
            return entry_point is not None and is_plain(test)
    return False


# A program that tries what must fail, and returns what did not.
PROBE = """
import os, resource, socket, threading

def fork():
    if os.fork() == 0:
        os._exit(0)

def probe():
    threading.Thread(target=len, args=("",)).start()
    attempts = {
        "read files": lambda: os.open("/", os.O_RDONLY),
        "see files": lambda: os.stat("/"),
        "reach the network": socket.socket,
        "send signals": lambda: os.kill(os.getppid(), 0),
        "start processes": fork,
        "raise their limits": lambda: resource.setrlimit(resource.RLIMIT_CPU, (-1, -1)),
    }
    allowed = []
    for name, attempt in attempts.items():
        try:
            attempt()
            allowed.append(name)
        except (OSError, ValueError):
            pass
    return allowed
"""


class _Helper:
    """A process of child.py, which forks a child per program."""

    def __init__(self, seconds: float, memory_mb: int, unconfined: bool):
        self.unconfined = unconfined
        self.control, theirs = socket.socketpair()
        self.control.settimeout(20 + MAX_PATIENCE + 2 * seconds + 1)
        self.has_timed_out = False  # whether the clock ended a program of the last request
        arguments = (CHILD, theirs.fileno(), seconds, memory_mb, unconfined)
        # Not -I, which would ignore PYTHONHASHSEED: the order of sets must not change.
        command = [sys.executable, "-P", "-S", "-s", *map(str, arguments)]
        environment = {
            "PYTHONHASHSEED": "0",
            "PYTHONUTF8": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "MALLOC_ARENA_MAX": "1",
        }
        environment |= {name: os.environ[name] for name in NEEDED & os.environ.keys()}
        with theirs:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd="/",
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is for the trainer alone
            )

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()

    def check(self) -> None:
        """Wait until the helper is ready; SandboxError unless programs can compute and no more."""
        allowed = None  # what the probe could do; None: it did not run
        with contextlib.suppress(OSError):
            if self.control.recv(5) == b"ready":
                (output,) = self.outputs(Request(PROBE, "probe", ("[]",)))
                allowed = json.loads(output or b"null")
        if allowed == [] or (allowed and self.unconfined):
            return
        problem = f"they can {', '.join(allowed)}" if allowed else "a harmless program does not run"
        python = sys.version.split()[0]
        system = f"{sys.platform} {os.uname().machine}, user {os.geteuid()}"
        raise SandboxError(
            f"programs cannot be confined here: {problem} (Python {python}, {system}); use Linux on x86-64 or arm64, "
            "run as another user, or in a container that allows seccomp filters, or accept the risk by unconfined=True "
            "or the flag --unconfined"
        )

    def outputs(self, request: Request) -> list[bytes | None]:
        """The program's answer to each input: a result as JSON, or a script's stdout.

        None: no answer. OSError: the helper died.
        """
        self.has_timed_out = False
        run = self._function_outputs if request.entry_point else self._script_outputs
        outputs: list[bytes | None] = []
        while len(outputs) < len(request.inputs):
            # One child runs all tests. If it dies, the next child goes on where it died.
            outputs += run(replace(request, inputs=request.inputs[len(outputs) :]))
        return outputs

    def _function_outputs(self, request: Request) -> list[bytes | None]:
        """The results of the first tests, of one at least, from one child."""
        written, _ = self._run_child(request)
        lines = written.split(b"\n")[:-1]  # the last one is empty or was cut off
        if not lines:
            return [None]
        outputs = []
        for line in lines[: len(request.inputs)]:
            outputs.append(line[1:] if line.startswith(b"=") else None)
        return outputs

    def _script_outputs(self, request: Request) -> list[bytes | None]:
        """The script's stdout in the first tests, in one at least, from one child.

        The child writes a mark after each test that ended with status 0. No honest script writes
        the mark, which is random. One that finds it can change its own outputs alone.
        """
        mark = secrets.token_hex(16)
        with contextlib.ExitStack() as stack:
            files = []
            for stdin in request.inputs[:SCRIPTS_PER_CHILD]:
                file = stack.enter_context(open(os.memfd_create("stdin"), "w+b"))
                file.write(stdin.encode(errors="surrogatepass"))
                file.seek(0)
                files.append(file)
            written, status = self._run_child(replace(request, inputs=(mark,)), files)
        *outputs, rest = written.split(mark.encode())
        if outputs:
            return outputs[: len(files)]
        if status == 0 and len(rest) < request.max_output:  # it has left by os._exit
            return [rest]
        return [None]

    def _run_child(self, request: Request, files: Sequence[BinaryIO] = ()) -> tuple[bytes, int]:
        """Run one child. Return up to `max_output` bytes that it wrote, and its exit status.

        The status is negative if a signal ended the child. OSError: the helper died.

        Args:
            files: the stdin of every test of a script.
        """
        ours, theirs = socket.socketpair()
        with ours, ours.makefile("rb") as reader:
            ours.settimeout(self.control.gettimeout())
            with theirs:
                descriptors = [theirs.fileno(), *(file.fileno() for file in files)]
                socket.send_fds(self.control, [b"job"], descriptors)
            first_line = json.dumps([request.program, request.entry_point])
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may end early
                ours.sendall("\n".join([first_line, *request.inputs]).encode())
                ours.shutdown(socket.SHUT_WR)
            output = b""
            with contextlib.suppress(ConnectionResetError):
                output = reader.read(request.max_output)
        status = self.control.recv(9)
        if not status:
            raise ConnectionError("the helper died")
        self.has_timed_out |= int(status) == TIMED_OUT
        return output, int(status)


def _judge(job: Job, outputs: list[bytes | None]) -> list[bool]:
    """The verdicts of a job. Outputs and expected outputs meet here and nowhere else."""
    verdicts: list[bool] = []
    for output, test in zip(outputs, job.tests, strict=True):
        if job.entry_point is None:
            verdicts.append(output is not None and _same_output(output, *test[1:]))
        else:
            verdicts += _judge_result(output, test, job.each, job.true_is_one)
    return verdicts


def _same_output(output: bytes, expected: str, rule: str = "") -> bool:
    """Compare words as text or as numbers, and the blanks and line ends between them as text.

    Blanks at the end of a line and empty lines at the end do not count.

    Args:
        rule: "exact" compares words as text alone.
    """
    text = _without_trailing_blanks(output.decode(errors="replace"))
    expected = _without_trailing_blanks(expected)
    if text == expected or rule == "exact":
        return text == expected
    tokens = re.split(r"(\s+)", text)
    expected_tokens = re.split(r"(\s+)", expected)
    if len(tokens) != len(expected_tokens):
        return False
    return all(_same_token(*pair) for pair in zip(tokens, expected_tokens, strict=True))


def _without_trailing_blanks(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def _same_token(token: str, expected: str) -> bool:
    """Whether two words are the same text or the same number.

    An expected integer must be met exactly. Another number may be off by a millionth, or by
    rounding where one of the two has six decimals or more.
    """
    if token == expected:
        return True
    if not NUMBER.fullmatch(token) or not NUMBER.fullmatch(expected):
        return False
    ours = decimal.Decimal(token)
    wanted = decimal.Decimal(expected)
    if ours == wanted or INTEGER.fullmatch(expected):
        return ours == wanted
    with decimal.localcontext(NUMBERS):
        allowed = abs(wanted) * NUMBER_TOLERANCE
        decimals = min(_decimals(token), _decimals(expected))
        if decimals >= FULL_DECIMALS:
            allowed = max(allowed, decimal.Decimal(5).scaleb(-decimals - 1))
        return abs(ours - wanted) <= allowed


def _decimals(number: str) -> int:
    """The number of digits behind the point, 0 if there is an exponent."""
    return 0 if "e" in number.lower() else len(number.partition(".")[2])


def _judge_result(
    output: bytes | None, test: tuple, each: bool, true_is_one: bool = False
) -> list[bool]:
    """Compare a result in JSON with the expected one; with `each`, item by item."""
    expected = test[1] if each else [test[1]]
    tolerance = test[2] if len(test) == 3 else (0.0, 0.0)
    numbers = {int, float, bool} if true_is_one else {int, float}
    with contextlib.suppress(ValueError, ArithmeticError, RecursionError):
        result = json.loads(output or b"", parse_int=_parse_integer)
        results = result if each else [result]
        if isinstance(results, list):
            pairs = zip(results, expected, strict=True)
            return [_same(*pair, tolerance, numbers) for pair in pairs]
    return [False] * len(expected)


def _parse_integer(digits: str) -> int | decimal.Decimal:
    return int(digits) if len(digits) < MAX_DIGITS else decimal.Decimal(digits)


def _same(result: Any, expected: Any, tolerance: Sequence[float], numbers: set[type]) -> bool:
    """Compare plain JSON values: a tuple equals a list, and values of `numbers` by their value."""
    if isinstance(expected, dict):
        if not isinstance(result, dict) or result.keys() != expected.keys():
            return False
        return all(_same(result[key], expected[key], tolerance, numbers) for key in expected)
    if isinstance(expected, list | tuple):
        if not isinstance(result, list) or len(result) != len(expected):
            return False
        pairs = zip(result, expected, strict=True)
        return all(_same(*pair, tolerance, numbers) for pair in pairs)
    if isinstance(result, decimal.Decimal):  # a long integer
        is_long = type(expected) is int and abs(expected) > 10**3000
        return is_long and result == decimal.Decimal(expected)
    if {type(result), type(expected)} <= numbers:
        if expected != expected:  # NaN
            return result != result
        return result == expected or (
            max(tolerance) > 0 and _is_close(result, expected, *tolerance)
        )
    return type(result) is type(expected) and result == expected


def _is_close(
    result: float, expected: float, relative: float, absolute: float, share: float = 0.0
) -> bool:
    """Whether two numbers differ by no more than a tolerance, see `Job`."""
    # An integer may be larger than a float.
    if max(abs(result), abs(expected)) >= sys.float_info.max:
        return False
    absolute += share * abs(expected)
    return math.isclose(result, expected, rel_tol=relative, abs_tol=absolute)
