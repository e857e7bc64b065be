"""The sandbox's other end: the helper, which forks a child per program, and the child, which gives up every right.
tasks/sandbox.py starts it as a script; it imports the standard library alone and never sees an expected output."""

import atexit
import builtins
import contextlib
import ctypes
import gc
import json
import math
import os
import platform
import random
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import types
from collections.abc import Callable


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether it is JSON data, at most 200 deep; asked on both sides, so that {1: 2} never becomes {"1": 2}."""
    if isinstance(value, dict):
        return depth < 200 and all(
            isinstance(key, str) and is_plain(item, depth + 1) for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return depth < 200 and all(is_plain(item, depth + 1) for item in value)
    return value is None or isinstance(value, str | int | float)


# A child cannot open files, so this is all that it can import, besides what is imported above and built into Python.
PRELOADED = """
    __future__ argparse array ast base64 bisect calendar cmath collections.abc concurrent.futures.thread contextvars
    copy csv dataclasses datetime _strptime decimal difflib doctest encodings.ascii encodings.latin_1 fileinput
    fractions graphlib hashlib heapq html inspect itertools locale logging numbers pathlib pickle pprint queue re sched
    secrets shlex shutil statistics string subprocess tempfile textwrap timeit tokenize traceback typing unicodedata
    unittest uuid zlib"""

ALLOWED = {  # (x86-64, arm64) numbers of what a child may call, besides clone for threads and prlimit64 on itself
    "read": (0, 63),
    "write": (1, 64),
    "futex": (202, 98),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "times": (100, 153),
    "getrusage": (98, 165),
    "sched_yield": (24, 124),
    "getrandom": (318, 278),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
# column of the table, audit id, numbers of clone, prlimit64, openat and newfstatat
ARCHITECTURES = {
    "linux x86_64": (0, 0xC000003E, 56, 302, 257, 262),
    "linux aarch64": (1, 0xC00000B7, 220, 261, 56, 79),
}


def _confinement() -> Callable[[], int]:
    """A function that confines the process which calls it, for good, and returns 0; KeyError where there is none."""
    libc, long = ctypes.CDLL(None), ctypes.c_ulong
    if sys.platform == "darwin":
        return lambda: libc.sandbox_init(
            b"pure-computation", ctypes.c_uint64(1), ctypes.byref(ctypes.c_char_p())
        )
    column, audit, clone, prlimit, openat, access = ARCHITECTURES[
        f"{sys.platform} {platform.machine()}"
    ]
    load, equal, any_bit, give = (
        0x20,
        0x15,
        0x45,
        0x06,
    )  # BPF: load a word, jump if equal or if a bit is set, return
    allow, kill = 0x7FFF0000, 0x80000000
    refuse, missing, unknown = 0x00050001, 0x00050002, 0x00050026  # EPERM, ENOENT, ENOSYS
    numbers = [pair[column] for pair in ALLOWED.values()]
    rows = [(load, 0, 0, 4), (equal, 1, 0, audit), (give, 0, 0, kill), (load, 0, 0, 0)]
    rows += [(equal, len(numbers) - i + 9, 0, number) for i, number in enumerate(numbers)]
    rows += [
        (equal, 0, 2, clone),
        (load, 0, 0, 16),
        (any_bit, 7, 6, 0x10000),  # CLONE_THREAD
        (equal, 0, 2, prlimit),
        (load, 0, 0, 16),
        (equal, 4, 3, 0),
        (equal, 4, 0, 435),  # clone3 hides its flags in memory; libc falls back to clone
        (equal, 4, 0, openat),
        (equal, 3, 0, access),  # programs look for files that they can do without
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
        (give, 0, 0, unknown),
        (give, 0, 0, missing),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rows), ctypes.addressof(code)))

    def confine() -> int:
        libc.prctl(38, long(1), long(0), long(0), long(0))  # PR_SET_NO_NEW_PRIVS
        return libc.prctl(22, long(2), program, code)  # PR_SET_SECCOMP; code: keeps it alive

    return confine


def _helper(control: socket.socket, cpu: float, memory_mb: int, unconfined: bool) -> None:
    """Fork, wait, kill, report; until the trainer is gone."""
    for name in PRELOADED.split():
        __import__(name)
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
    resource.setrlimit(
        resource.RLIMIT_STACK, (100 * 2**20 if hard == resource.RLIM_INFINITY else hard, hard)
    )
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
        while (
            pid := libc.fork()
        ) < 0:  # os.fork runs hooks of many modules, for threads: they cost as much again
            time.sleep(0.05)  # no process is free: another program's threads will end
        if pid == 0:
            try:
                if sys.platform == "linux":
                    libc.prctl(
                        1, ctypes.c_ulong(signal.SIGKILL)
                    )  # PR_SET_PDEATHSIG: die with the helper
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
        control.send(b"%d" % _wait(pid, control, 2 * cpu + 1))


def _wait(pid: int, control: socket.socket, seconds: float) -> int:
    """The exit status of a child, -1 if a signal ended it: ours at the deadline, or when the trainer is gone."""
    deadline, watched = time.monotonic() + seconds, [control.fileno()]
    with contextlib.suppress(AttributeError, OSError):  # not on macOS, nor on old kernels
        watched.append(os.pidfd_open(pid))
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        left = max(0, deadline - time.monotonic())
        if (
            not left
            or watched[0]
            in select.select(watched, [], [], left if watched[1:] else min(left, 0.005))[0]
        ):
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
    job, *inputs = b"".join(iter(lambda: channel.recv(2**16), b"")).decode().split("\n")
    program, entry_point = json.loads(job)
    sys.argv = ["solution.py"]
    if not entry_point:
        os.dup2(channel.fileno(), 1)
    if confine() == 0:
        _call(channel.detach(), program, entry_point, inputs) if entry_point else _script(program)


def _fstat(descriptor: int) -> os.stat_result:
    """The size of a held file: the C library asks by a call that could ask about any file, so the filter refuses it."""
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    size = os.lseek(descriptor, 0, os.SEEK_END)
    os.lseek(descriptor, position, os.SEEK_SET)
    return os.stat_result((0o100400, 0, 0, 1, 0, 0, size, 0, 0, 0))


def _call(channel: int, program: str, entry_point: str, inputs: list[str]) -> None:
    """One line per test: '=' and the JSON of what the function returned, or '!' where it did not return plain data.
    The program may patch all of this, and thereby only change its own answers."""
    write, dumps, loads, code = os.write, json.dumps, json.loads, None
    for number, line in enumerate(inputs):
        answer = "!\n"
        sys.set_int_max_str_digits(
            4300
        )  # Python's own limit, which the last answer may have lifted
        try:
            code = code or compile(program, "solution.py", "exec", dont_inherit=True)
            module = sys.modules["solution"] = types.ModuleType(
                "solution"
            )  # fresh; main guards do not run
            exec(code, module.__dict__)
            solution = getattr(module, "Solution", None)
            function = getattr(
                solution() if hasattr(solution, entry_point) else module, entry_point
            )
            value = function(*loads(line))
            if is_plain(value):
                sys.set_int_max_str_digits(0)
                answer = "=" + dumps(value) + "\n"
        except MemoryError:
            if number:  # what earlier tests have left behind: this one gets a child of its own
                os._exit(1)
        except (
            BaseException
        ):  # SystemExit and KeyboardInterrupt included: the other tests still count
            pass
        module = solution = function = value = None
        data = memoryview(answer.encode())
        while data:
            data = data[write(channel, data) :]
    os._exit(0)


def _script(program: str) -> None:
    """Ends as an interpreter does: threads joined, atexit handlers run, output flushed, status 1 after an exception."""
    status: object = 0
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    module.__dict__.clear()  # closes the files that it opened on descriptor 1
    gc.collect()
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(
            ValueError, AttributeError
        ):  # closed, or replaced by something else
            stream.flush()
    os._exit((status if isinstance(status, int) else 0 if status is None else 1) & 255)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as trainer:
        _helper(trainer, float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
