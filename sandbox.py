"""Sandbox: run programs written by a model, say which tests each one passes, and pay nothing for cheating.

    run_tests(program, [([2, 3], 5), ([1, 1], 2)], entry_point="add")      one program, a function called with arguments
    run_tests(program, [("2 3\\n", "5\\n")])                                 one program, a script from stdin to stdout
    with Sandbox() as sandbox: sandbox.run([Job(program, tests), ...])     many, on all cores, in order

A policy under RL is paid for finding holes in its grader, so what is compared never meets what is judged:

    trainer   has the expected outputs, receives plain JSON or text, and compares it itself
    helper    a fresh, small interpreter per core: no torch, no environment, no secrets; as root it becomes nobody.
              It forks a child per program, kills it at its deadline, and never reads a byte of program or answer
    child     runs the program under rlimits and a system call filter: it may compute, tell the time, start threads and
              read and write what it was handed; no file, network, process or signal. It talks to the trainer through a
              socket of its own, so nothing of one program is left where the next could find it

Promised on Linux (x86-64, arm64). On macOS sandbox_init takes the place of the filter, which nobody has tried yet;
Windows is not supported. Not promised: safety against bugs of the kernel (take a virtual machine), packages beyond the
standard library, and that a program has not memorised the tests.
"""

import atexit
import builtins
import contextlib
import ctypes
import decimal
import gc
import hashlib
import importlib
import itertools
import json
import logging
import math
import os
import platform
import queue
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

MAX_OUTPUT = 4 * 2**20  # bytes that one child may answer
MAX_CACHED = 50_000  # programs whose small outputs are remembered
ADVICE = "use Linux on x86-64 or arm64, or accept the risk: unconfined=True, on the command line --unconfined"


class SandboxError(Exception):
    """Programs cannot be run here; the message says why and what to do."""


class Job(NamedTuple):
    """A program and its tests: (arguments, expected) with an entry point, else (stdin, stdout).

    A third element, (relative, absolute), is the tolerance for numbers that a function returns. With `each`, expected is a
    list that is judged element by element: as many verdicts as it is long.
    """
    program: str
    tests: list[tuple]
    entry_point: str | None = None
    each: bool = False


def run_tests(program: str, tests: list[tuple], *, entry_point: str | None = None, seconds: float = 2.0,
              memory_mb: int = 512, tolerance: float = 0.0, unconfined: bool = False) -> list[bool]:
    """Which tests a program passes, one bool each; the parameters are those of `Job` and `Sandbox`.

    With entry_point, a test is (list of arguments, expected), all plain JSON values, and the function of that name (module
    level, or a method of `class Solution`) is called; a tuple equals a list, True is not 1, 2.0 is 2. Without, a test is
    (stdin, stdout): the program runs as a script, must end with status 0, and its output is compared line by line without
    trailing blanks and trailing empty lines. `tolerance`, relative and absolute, is for numbers that the function returns.
    Raises ValueError for malformed tests, SandboxError where programs cannot be confined.
    """
    if tolerance:
        tests = [(*test, (tolerance, tolerance)) for test in tests]
    with Sandbox(1, seconds=seconds, memory_mb=memory_mb, unconfined=unconfined) as sandbox:
        return sandbox.run([Job(program, tests, entry_point)])[0]


class Sandbox(contextlib.AbstractContextManager):
    """A pool of helpers, one per core unless `workers` says otherwise.

    `seconds` of CPU time (rounded up) and `memory_mb` MiB are limits per test; the clock may show twice the seconds and one
    more. `unconfined` goes on where the system cannot confine programs. Raises SandboxError otherwise, ValueError for limits
    out of range.
    """
    _closed = True  # until the helpers run

    def __init__(self, workers: int | None = None, *, seconds: float = 2.0, memory_mb: int = 512, unconfined: bool = False):
        workers = workers or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
        if not (0 < seconds < 1e6 and 64 <= memory_mb < 2**30 and workers >= 1):
            raise ValueError(f"seconds={seconds}, memory_mb={memory_mb}, workers={workers}: needs seconds > 0, "
                             "memory_mb >= 64 and workers >= 1")
        self._limits = (seconds, memory_mb, unconfined)
        self._cache: dict[bytes, list[bytes | None]] = {}
        self._idle: queue.SimpleQueue[_Helper] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, "sandbox")
        self._helpers = [_Helper(*self._limits) for _ in range(workers)]
        self._closed = False
        try:
            for helper in self._helpers:
                helper.check()
                self._idle.put(helper)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    __del__ = __exit__

    def close(self) -> None:
        """End the helpers, and with them whatever still runs."""
        if not self._closed:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            for helper in self._helpers:
                helper.close()

    def run(self, jobs: list[Job]) -> list[list[bool]]:
        """Verdicts in the order of the jobs, one bool per test. Equal programs with equal inputs run once, also across calls.

        After two seconds a line on the terminal counts the programs done. Raises ValueError for a malformed job.
        """
        if self._closed:
            raise SandboxError("the sandbox is closed, by hand or by an interrupted run")
        jobs = [Job(*job) for job in jobs]
        asking: dict[tuple, list[int]] = {}  # who waits for the output of a program
        for i, job in enumerate(jobs):
            asking.setdefault(check_job(*job[:3]), []).append(i)
        verdicts: list[list[bool]] = [[] for _ in jobs]
        began = time.monotonic()
        try:
            for done, (key, outcome) in enumerate(zip(asking, self._threads.map(self._outcome, asking), strict=True), 1):
                for i in asking[key]:
                    passed = [_passes(got, jobs[i], *test[1:]) for got, test in zip(outcome, jobs[i].tests, strict=True)]
                    verdicts[i] = list(itertools.chain(*passed))
                if sys.stderr.isatty() and time.monotonic() > began + 2:
                    end = "" if done < len(asking) else "\n"
                    print(f"\rsandbox: {done} of {len(asking)} programs", end=end, file=sys.stderr)
        except BaseException:  # Ctrl-C, above all: nobody waits for programs that still run
            self.close()
            raise
        return verdicts

    def _outcome(self, key: tuple) -> list[bytes | None]:
        """What the program answered to each input, None where it did not; a helper that dies is replaced, once per job."""
        digest = hashlib.sha256(repr(key).encode()).digest()
        if digest in self._cache:
            return self._cache[digest]
        for _ in range(2):
            helper = self._idle.get()
            try:
                if helper.process.poll() is not None:  # it died while idle, which is not this job's doing
                    helper = self._replace(helper)
                outcome = helper.outcome(*key)
                if sum(map(len, filter(None, outcome))) < 4096 and len(self._cache) < MAX_CACHED:
                    self._cache[digest] = outcome
                return outcome
            except OSError:
                helper = self._replace(helper)
            finally:
                self._idle.put(helper)
        logging.getLogger("sandbox").warning("a program killed two helpers and scores 0: %.200r", key[0])
        return [None] * len(key[2])

    def _replace(self, helper: "_Helper") -> "_Helper":
        if self._closed:
            raise SandboxError("the sandbox was closed while it ran programs")
        helper.close()
        self._helpers.append(new := _Helper(*self._limits))
        new.check()
        return new


def check_job(program: str, tests: list[tuple], entry_point: str | None) -> tuple[str, str | None, tuple[str, ...]]:
    """What decides a program's output, and all that a helper gets to see of a job; ValueError if it is malformed."""
    if not isinstance(program, str):
        raise ValueError(f"program: must be text, not {type(program).__name__}")  # noqa: TRY004 - as below
    if entry_point is not None and not entry_point.isidentifier():
        raise ValueError(f"entry_point {entry_point!r}: must be the name of a function; None runs the program as a script")
    for i, test in enumerate(tests):
        if len(test) not in (2, 3):
            raise ValueError(f"test {i}: must be a pair, (arguments, expected) or (stdin, stdout)")
        if entry_point is None and not all(isinstance(text, str) for text in test[:2]):
            raise ValueError(f"test {i}: stdin and stdout must be strings; for arguments name the entry_point")
        if entry_point is not None and not (isinstance(test[0], list | tuple) and _is_plain(test)):
            raise ValueError(f"test {i}: must be a list of arguments and the expected output, all plain JSON values, at most "
                             "200 deep")
    return program, entry_point, tuple(test[0] if entry_point is None else json.dumps(test[0]) for test in tests)


def _passes(got: bytes | None, job: Job, expected: Any, tolerance: tuple[float, float] = (0.0, 0.0)) -> list[bool]:
    """The only place where answers and expected outputs meet."""
    failed = [False] * (len(expected) if job.each else 1)
    if got is None:
        return failed
    if job.entry_point is None:
        lines = [[line.rstrip() for line in text.rstrip().split("\n")] for text in (got.decode(errors="replace"), expected)]
        return [lines[0] == lines[1]]
    try:
        # A long answer may hold integers that take int() quadratic time, or more than it allows.
        got = json.loads(got, parse_int=_parse_int if len(got) > 4000 else None)
        if not job.each:
            return [_same(got, expected, *tolerance)]
        if isinstance(got, list) and len(got) == len(expected):
            return [_same(*pair, *tolerance) for pair in zip(got, expected, strict=True)]
    except (ValueError, ArithmeticError, RecursionError):
        pass
    return failed


def _parse_int(digits: str) -> int | decimal.Decimal:
    return int(digits) if len(digits) < 4000 else decimal.Decimal(digits)


def _same(got: Any, expected: Any, relative: float, absolute: float) -> bool:
    """Equality of plain JSON values: a tuple equals a list, 2.0 is 2, True is not 1."""
    if isinstance(expected, list | tuple):
        return isinstance(got, list) and len(got) == len(expected) and all(
            _same(*pair, relative, absolute) for pair in zip(got, expected, strict=True))
    if isinstance(expected, dict) and isinstance(got, dict):
        return got.keys() == expected.keys() and all(_same(got[key], expected[key], relative, absolute) for key in expected)
    if isinstance(got, decimal.Decimal):
        return type(expected) is int and abs(expected) > 10**3000 and got == decimal.Decimal(expected)
    if {type(got), type(expected)} <= {int, float}:
        return got == expected or max(relative, absolute) > 0 and math.isclose(got, expected, rel_tol=relative, abs_tol=absolute)
    return type(got) is type(expected) and got == expected


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether it is JSON data, at most 200 deep; on both sides, so that {1: 2} never becomes {"1": 2}."""
    if isinstance(value, dict):
        return depth < 200 and all(isinstance(key, str) and _is_plain(item, depth + 1) for key, item in value.items())
    if isinstance(value, list | tuple):
        return depth < 200 and all(_is_plain(item, depth + 1) for item in value)
    return value is None or isinstance(value, str | int | float)


PROBE = """
import os, socket, threading
def probe():
    threading.Thread(target=len, args=("",)).start()
    attempts = {"read files": lambda: os.open("/", os.O_RDONLY), "see files": lambda: os.stat("/"),
                "reach the network": socket.socket, "send signals": lambda: os.kill(os.getppid(), 0),
                "start processes": lambda: os.fork() or os._exit(0)}
    for name, attempt in list(attempts.items()):
        try:
            attempt()
        except OSError:
            del attempts[name]
    return list(attempts)
"""


class _Helper:
    """The trainer's end of one helper process."""

    def __init__(self, seconds: float, memory_mb: int, unconfined: bool):
        self.control, theirs = socket.socketpair()
        self.unconfined = unconfined
        environment = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1", "MALLOC_ARENA_MAX": "1"}
        with theirs:
            # Not -I, which ignores PYTHONHASHSEED: the order of a set would change rewards.
            command = [sys.executable, "-P", "-S", "-s", os.path.abspath(__file__), str(theirs.fileno()), str(seconds),
                       str(memory_mb), str(int(unconfined))]
            self.process = subprocess.Popen(command, env=environment, cwd="/", pass_fds=[theirs.fileno()],
                                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                            start_new_session=True)  # Ctrl-C on the terminal is the trainer's business
        self.control.settimeout(60 + 2 * seconds + 1)

    def check(self) -> None:
        """Wait until it is ready; SandboxError unless a program can compute here, and do nothing else."""
        problem, answer = "a harmless program does not run in the sandbox", None
        with contextlib.suppress(OSError):
            if (message := self.control.recv(1000)) == b"ready":
                answer, = self.outcome(PROBE, "probe", ("[]",))
            else:
                problem = message.decode() or "the helper did not start"
        if answer and (allowed := json.loads(answer)) and not self.unconfined:
            problem, answer = f"programs cannot be confined here, they can {', '.join(allowed)}", None
        if answer is None:
            raise SandboxError(f"{problem} (Python {platform.python_version()}, {sys.platform} {platform.machine()}); {ADVICE}")

    def outcome(self, program: str, entry_point: str | None, inputs: tuple[str, ...]) -> list[bytes | None]:
        """The answer to each input: JSON, or a script's output; None where there is none."""
        outcome: list[bytes | None] = []
        if entry_point is None:
            for stdin in inputs:
                with _file(stdin.encode(errors="surrogatepass")) as file:
                    output, status = self._run(program, "", "", file.fileno())
                outcome.append(output if status == 0 and len(output) < MAX_OUTPUT else None)
        while len(outcome) < len(inputs):  # one child runs them all; if it dies, the next begins with the test it died in
            output, _ = self._run(program, entry_point, "\n".join(inputs[len(outcome):]))
            lines = output.split(b"\n")[:-1][:len(inputs) - len(outcome)]
            outcome += [line[1:] if line[:1] == b"=" else None for line in lines] or [None]
        return outcome

    def _run(self, program: str, entry_point: str, inputs: str, *files: int) -> tuple[bytes, int]:
        """One child: what it wrote, up to MAX_OUTPUT bytes, and its exit status, -1 if killed. OSError if the helper dies."""
        code, name, rest = (text.encode(errors="surrogatepass") for text in (program, entry_point, inputs))
        ours, theirs = socket.socketpair()
        output = bytearray()
        with ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(self.control.gettimeout()), 0))
            with theirs:
                socket.send_fds(self.control, [b"job"], [theirs.fileno(), *files])
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a child may end early
                ours.sendall(struct.pack("!II", len(code), len(name)) + code + name + rest)
                ours.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while len(output) < MAX_OUTPUT and (part := ours.recv(2**16, socket.MSG_WAITALL)):
                    output += part
        if len(status := self.control.recv(4)) != 4:
            raise ConnectionError("the helper died")
        return bytes(output), struct.unpack("!i", status)[0]

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


def _file(data: bytes) -> Any:
    """A nameless file that holds the data."""
    file = open(os.memfd_create("stdin"), "w+b") if sys.platform == "linux" else tempfile.TemporaryFile()  # noqa: SIM115
    file.write(data)
    file.seek(0)
    return file


# From here on: what runs in the helper, and in the children that it forks.

# A child cannot open files, so this is all that it can import, besides what is imported above and built into Python.
PRELOADED = """__future__ argparse array ast base64 bisect calendar cmath collections.abc contextvars copy csv dataclasses datetime
    _strptime difflib doctest encodings.ascii encodings.latin_1 fileinput fractions graphlib heapq html inspect locale numbers
    pathlib pickle pprint re sched secrets shlex shutil statistics string textwrap timeit tokenize traceback typing unicodedata
    unittest uuid zlib"""

# (x86-64, arm64) numbers of what a child may call
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "futex": (202, 98), "mmap": (9, 222), "munmap": (11, 215), "brk": (12, 214),
    "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "clock_gettime": (228, 113), "clock_nanosleep": (230, 115), "times": (100, 153), "getrusage": (98, 165), "sched_yield": (24, 124),
    "getrandom": (318, 278), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173),
    "set_robust_list": (273, 99), "rseq": (334, 293), "exit": (60, 93), "exit_group": (231, 94)}
# column of the table, audit id, numbers of clone, prlimit64, openat and newfstatat
ARCHITECTURES = {"linux x86_64": (0, 0xC000003E, 56, 302, 257, 262), "linux aarch64": (1, 0xC00000B7, 220, 261, 56, 79)}


def _filter() -> bytes:
    """The seccomp program: allow the calls above, `clone` for threads only, `prlimit64` on oneself only; refuse the rest."""
    column, audit, clone, prlimit, openat, access = ARCHITECTURES[f"{sys.platform} {platform.machine()}"]
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06  # BPF: load a word, jump if equal, jump if a bit is set, return
    allow, refuse, missing, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050002, 0x00050026, 0x80000000  # EPERM, ENOENT, ENOSYS
    numbers = [pair[column] for pair in ALLOWED.values()]
    rows = [(load, 0, 0, 4), (equal, 1, 0, audit), (give, 0, 0, kill), (load, 0, 0, 0)]
    rows += [(equal, len(numbers) - i + 9, 0, number) for i, number in enumerate(numbers)]
    rows += [(equal, 0, 2, clone), (load, 0, 0, 16), (any_bit, 7, 6, 0x10000),  # CLONE_THREAD
             (equal, 0, 2, prlimit), (load, 0, 0, 16), (equal, 4, 3, 0),
             (equal, 4, 0, 435),  # clone3 hides its flags in memory; libc falls back to clone
             (equal, 4, 0, openat), (equal, 3, 0, access),  # programs look for files that they can do without
             (give, 0, 0, refuse), (give, 0, 0, allow), (give, 0, 0, unknown), (give, 0, 0, missing)]
    return b"".join(struct.pack("HBBI", *row) for row in rows)


def _confinement() -> Callable[[], int]:
    """A function that confines the process which calls it, for good, and returns 0; KeyError where there is no such thing."""
    libc = ctypes.CDLL(None)
    if sys.platform == "darwin":
        return lambda: libc.sandbox_init(b"pure-computation", ctypes.c_uint64(1), ctypes.byref(ctypes.c_char_p()))
    rows = ctypes.create_string_buffer(_filter())
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rows) // 8, ctypes.addressof(rows)))
    number = ctypes.c_ulong

    def confine() -> int:
        libc.prctl(38, number(1), number(0), number(0), number(0))  # PR_SET_NO_NEW_PRIVS
        return libc.prctl(22, number(2), program, rows)  # PR_SET_SECCOMP; rows: keeps them alive
    return confine


def _helper(control: socket.socket, cpu: float, memory_mb: int, unconfined: bool) -> None:
    """Fork, wait, kill, report; until the trainer is gone."""
    for name in PRELOADED.split():
        importlib.import_module(name)
    builtins.exit = builtins.quit = sys.exit  # -S leaves them out
    try:
        confine = _confinement()
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
    except (OSError, KeyError) as error:  # root may lack the right to become nobody
        if not unconfined:
            control.send(f"programs cannot be confined here ({error!r})".encode())
            return
    for name, limit in (("AS", memory_mb * 2**20), ("FSIZE", 0), ("CORE", 0), ("NOFILE", 16)):
        _limit(getattr(resource, f"RLIMIT_{name}"), limit)
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (100 * 2**20 if hard == resource.RLIM_INFINITY else hard, hard))
    libc, helper = ctypes.PyDLL(None), os.getpid()
    os.fstat = _fstat
    random.seed(0)
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 3, 2)
        if not message:
            return
        # os.fork runs hooks of many modules, which cost as much again and serve threads alone.
        while (pid := libc.fork()) < 0:
            time.sleep(0.05)  # no process is free: another program's threads will end
        if pid == 0:
            try:
                if sys.platform == "linux":
                    libc.prctl(1, ctypes.c_ulong(signal.SIGKILL))  # PR_SET_PDEATHSIG: die with the helper
                if os.getppid() != helper:
                    return
                control.close()
                if descriptors[1:]:
                    os.dup2(descriptors[1], 0)
                _limit(resource.RLIMIT_CPU, math.ceil(cpu))
                _child(socket.socket(fileno=descriptors[0]), (lambda: 0) if unconfined else confine)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(struct.pack("!i", _wait(pid, control, 2 * cpu + 1)))


def _wait(pid: int, control: socket.socket, seconds: float) -> int:
    """The exit status of a child, -1 if a signal ended it; at the deadline, or when the trainer is gone, the signal is ours."""
    deadline, watched = time.monotonic() + seconds, [control.fileno()]
    with contextlib.suppress(AttributeError, OSError):  # not on macOS, nor on old kernels
        watched.append(os.pidfd_open(pid))
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        left = max(0, deadline - time.monotonic())
        if not left or watched[0] in select.select(watched, [], [], left if len(watched) > 1 else min(left, 0.005))[0]:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
            break
    for descriptor in watched[1:]:
        os.close(descriptor)
    return max(-1, os.waitstatus_to_exitcode(ended[1]))


def _limit(number: int, limit: int) -> None:
    hard = resource.getrlimit(number)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(number, (limit, limit))


def _child(channel: socket.socket, confine: Callable[[], int]) -> None:
    """Read the job, give up every right, run it."""
    sizes = struct.unpack("!II", channel.recv(8, socket.MSG_WAITALL))
    program, entry_point = (channel.recv(size, socket.MSG_WAITALL).decode(errors="surrogatepass") for size in sizes)
    sys.argv = ["solution.py"]
    if not entry_point:
        os.dup2(channel.fileno(), 1)
    if confine() == 0:
        _call(channel.detach(), program, entry_point) if entry_point else _script(program)


def _fstat(descriptor: int) -> os.stat_result:
    """The size of a held file: the C library asks by a call that could ask about any file, so the filter refuses it."""
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    size = os.lseek(descriptor, 0, os.SEEK_END)
    os.lseek(descriptor, position, os.SEEK_SET)
    return os.stat_result((0o100400, 0, 0, 1, 0, 0, size, 0, 0, 0))


def _call(channel: int, program: str, entry_point: str) -> None:
    """One line per test: '=' and the JSON of what the function returned, or '!' where it did not return plain data.

    The program may patch all of this, and thereby only change its own answers.
    """
    write, dumps, loads, code, first = os.write, json.dumps, json.loads, None, True
    for line in b"".join(iter(lambda: os.read(channel, 2**16), b"")).decode().split("\n"):
        try:
            code = code or compile(program, "solution.py", "exec", dont_inherit=True)
            module = sys.modules["solution"] = types.ModuleType("solution")  # fresh for every test; main guards do not run
            exec(code, module.__dict__)  # noqa: S102 - what a sandbox is for
            solution = getattr(module, "Solution", None)
            function = getattr(solution() if hasattr(solution, entry_point) else module, entry_point)
            value = function(*loads(line))
            if not _is_plain(value):
                raise TypeError
            try:
                answer = "=" + dumps(value) + "\n"
            except ValueError:  # an integer of more than 4300 digits
                sys.set_int_max_str_digits(0)
                answer = "=" + dumps(value) + "\n"
        except MemoryError:
            if not first:  # what earlier tests have left behind: this one gets a child of its own
                os._exit(1)
            answer = "!\n"
        except BaseException:  # noqa: BLE001 - SystemExit and KeyboardInterrupt included: the other tests still count
            answer = "!\n"
        module = solution = function = value = None
        first = False
        data = memoryview(answer.encode())
        while data:
            data = data[write(channel, data):]
    os._exit(0)


def _script(program: str) -> None:
    """Ends as an interpreter would: threads joined, atexit handlers run, output flushed, status 1 after an exception."""
    status: Any = 0
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    except SystemExit as stop:
        status = stop.code
    except BaseException:  # noqa: BLE001
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    module.__dict__.clear()  # closes the files that it opened on descriptor 1
    gc.collect()
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(ValueError, AttributeError):  # closed, or replaced by something else
            stream.flush()
    os._exit((status if isinstance(status, int) else 0 if status is None else 1) & 255)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as trainer:
        _helper(trainer, float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
