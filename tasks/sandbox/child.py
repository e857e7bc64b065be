"""The untrusted side of the sandbox: it runs programs that a model wrote, without any right.

__init__.py starts this file as a script, the helper. The helper forks a child for each
program. The child gives up every right before it runs the program. This file imports the standard
library alone, and no expected output is ever sent to it.
"""

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import math
import os
import pkgutil
import platform
import random
import select
import signal
import socket
import struct
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import TextIO

OPEN = open  # the builtin function, which `_open` replaces
STACK_SIZE = threading.stack_size  # which `_stack_size` replaces
RECURSION_LIMIT = sys.getrecursionlimit()
HELPER_MB = 64  # MiB that Python and its library take
MAX_DEPTH = 200  # of nested lists and dictionaries
MAX_PATIENCE = 40  # seconds that a child may wait for a core beyond its deadline
TIMED_OUT = -2  # the status of a child that was killed at its deadline
SCRIPTS_PER_CHILD = 8  # tests of a script; each has a descriptor, and a child may have 16
NOBODY = 65534  # user and group

# A child cannot open files, so its helper imports the standard library, but for these packages: they
# draw on a screen, install software, or do something as soon as they are imported.
LEFT_OUT = """
    antigravity curses _curses _curses_panel distutils ensurepip idlelib lib2to3 pydoc_data readline rlcompleter test
    this tkinter _tkinter turtle turtledemo venv"""
FILES = {"/dev/stdin": 0, "/dev/stdout": 1}  # that `_open` knows, and their descriptors

# System calls that a child may make: name, number on x86-64, number on arm64.
ALLOWED = """
    read                0   63
    write               1   64
    futex             202   98
    mmap                9  222
    munmap             11  215
    brk                12  214
    mremap             25  216
    mprotect           10  226
    madvise            28  233
    close               3   57
    close_range       436  436
    dup2               33   24
    dup3              292   24
    fstat               5   80
    lseek               8   62
    clock_gettime     228  113
    clock_nanosleep   230  115
    times             100  153
    getrusage          98  165
    sched_yield        24  124
    getrandom         318  278
    rt_sigaction       13  134
    rt_sigprocmask     14  135
    rt_sigreturn       15  139
    sigaltstack       131  132
    restart_syscall   219  128
    getpid             39  172
    gettid            186  178
    getppid           110  173
    setitimer          38  103
    alarm              37  103
    select             23   72
    pselect6          270   72
    set_robust_list   273   99
    rseq              334  293
    exit               60   93
    exit_group        231   94
"""
# System calls that are answered in their own way, see `_filter`. All others are refused.
CLONE = (56, 220)
PRLIMIT64 = (302, 261)
SCHED_GETAFFINITY = (204, 123)
CLONE3 = 435  # everywhere
OPENAT = (257, 56)
NEWFSTATAT = (262, 79)
# Column of the numbers above, and the number by which the kernel knows the architecture.
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# Operations of the kernel's filter language, BPF.
LOAD = 0x20
JUMP_IF_EQUAL = 0x15
JUMP_IF_ANY_BIT = 0x45
RETURN = 0x06
# Offsets of what the filter can load: fields of the kernel's struct seccomp_data.
CALL_NUMBER_OFFSET = 0
ARCHITECTURE_OFFSET = 4
ARGUMENT_OFFSET = 16  # of the call's first argument
# Verdicts of the filter on a system call.
ALLOW = 0x7FFF0000
KILL = 0x80000000
NOT_PERMITTED = 0x00050001  # the call fails with EPERM
NO_SUCH_FILE = 0x00050002  # ENOENT
NOT_IMPLEMENTED = 0x00050026  # ENOSYS

PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
CLONE_THREAD = 0x10000

Instruction = tuple[int, int, int, int]  # operation, rows to skip if true, if false, operand


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether a value is JSON data, nested at most MAX_DEPTH deep.

    Both sides ask this, because `json.dumps` would turn {1: 2} into {"1": 2}.
    """
    if isinstance(value, dict):
        keys_are_text = all(isinstance(key, str) for key in value)
        return keys_are_text and is_plain(list(value.values()), depth)
    if isinstance(value, list | tuple):
        return depth < MAX_DEPTH and all(is_plain(item, depth + 1) for item in value)
    return value is None or isinstance(value, str | int | float)


def serve(control: socket.socket, seconds: float, memory_mb: int, unconfined: bool) -> None:
    """Run one child after the other until the trainer is gone.

    Each message on `control` carries the descriptor of a socket for the job, and for a script those
    of stdin in every test. The answer is the child's exit status.
    """
    _preload()
    os.environ.clear()
    builtins.exit = builtins.quit = sys.exit  # Python's option -S leaves them out
    os.fstat = _fstat
    builtins.open = io.open = _open
    threading.stack_size = _stack_size
    _become_nobody()
    confine = None
    if not unconfined:
        confine = _make_confine()
    _limit_resources(memory_mb)
    random.seed(0)
    gc.collect()
    gc.freeze()

    helper = os.getpid()
    control.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 3, 1 + SCRIPTS_PER_CHILD)
        if not message:
            return
        pid = _fork()
        if pid == 0:
            try:
                control.close()
                _die_with(helper)
                _limit(resource.RLIMIT_CPU, math.ceil(seconds))
                _run_job(descriptors, confine)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        status = _wait(pid, control, 2 * seconds + 1)
        control.send(str(status).encode())


def _preload() -> None:
    """Import all modules of the standard library that this Python and this system have."""
    names = sorted(sys.stdlib_module_names.difference(LEFT_OUT.split()), reverse=True)
    while names:
        name = names.pop()
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            for part in pkgutil.iter_modules(getattr(module, "__path__", ())):
                if part.name not in ("__main__", "test", "tests"):
                    names.append(f"{name}.{part.name}")


def _become_nobody() -> None:
    """Give up the rights of root. In some containers root may not, and has none."""
    if os.geteuid() == 0:
        for give_up, argument in ((os.setgroups, []), (os.setgid, NOBODY), (os.setuid, NOBODY)):
            with contextlib.suppress(OSError):
                give_up(argument)


def _make_confine() -> Callable[[], int]:
    """A function that confines the process which calls it, for good, and returns 0.

    KeyError: this processor is not supported.
    """
    rows = _filter(platform.machine())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    header = struct.pack("@HP", len(rows), ctypes.addressof(code))
    program = ctypes.create_string_buffer(header)

    def confine() -> int:
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        # The kernel ignores the argument `code`. It is passed so that it stays in memory.
        return _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, code)

    return confine


def _prctl(option: int, value: int, *pointers: ctypes.Array) -> int:
    """Call prctl(option, value, ...), whose other arguments must be 0 where they are not used."""
    zero = ctypes.c_ulong(0)
    return LIBC.prctl(option, ctypes.c_ulong(value), *pointers, zero, zero, zero)


def _filter(machine: str) -> list[Instruction]:
    """The system call filter for a processor. KeyError: the processor is not supported."""
    column, architecture = ARCHITECTURES[machine]
    rows = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, CALL_NUMBER_OFFSET),
    ]
    for line in ALLOWED.strip().splitlines():
        _, *numbers = line.split()
        rows += _answer(int(numbers[column]), ALLOW)
    # Programs look for files that they can do without.
    rows += _answer(OPENAT[column], NO_SUCH_FILE)
    rows += _answer(NEWFSTATAT[column], NO_SUCH_FILE)
    # clone3 hides its flags in memory. Told that it does not exist, libc calls clone instead.
    rows += _answer(CLONE3, NOT_IMPLEMENTED)
    # clone may start threads, but no processes.
    rows += _answer_by_argument(CLONE[column], JUMP_IF_ANY_BIT, CLONE_THREAD)
    # These may be called for process 0, which is the caller itself.
    rows += _answer_by_argument(PRLIMIT64[column], JUMP_IF_EQUAL, 0)
    rows += _answer_by_argument(SCHED_GETAFFINITY[column], JUMP_IF_EQUAL, 0)
    rows.append((RETURN, 0, 0, NOT_PERMITTED))
    return rows


def _answer(number: int, verdict: int) -> list[Instruction]:
    """The rows that answer a system call with a verdict, and leave others to later rows."""
    return [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, verdict)]


def _answer_by_argument(number: int, jump: int, operand: int) -> list[Instruction]:
    """The rows that allow a system call if its first argument passes the jump's test."""
    return [
        (JUMP_IF_EQUAL, 0, 4, number),
        (LOAD, 0, 0, ARGUMENT_OFFSET),
        (jump, 0, 1, operand),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, NOT_PERMITTED),
    ]


def _limit_resources(memory_mb: int) -> None:
    """Set the limits that all children inherit."""
    _limit(resource.RLIMIT_AS, (HELPER_MB + memory_mb) * 2**20)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, 16)
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    soft = 100 * 2**20 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def _limit(kind: int, limit: int) -> None:
    """Lower the soft and the hard limit of a resource; a hard limit below stays."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def _fstat(descriptor: int) -> os.stat_result:
    """The size of a held file, as `os.fstat` does.

    The C library asks for it by a system call that could ask about any file. The filter refuses it.
    """
    size = 0  # of a stream
    with contextlib.suppress(OSError):
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        size = os.lseek(descriptor, 0, os.SEEK_END)
        os.lseek(descriptor, position, os.SEEK_SET)
    return os.stat_result((0o100400, 0, 0, 1, 0, 0, size, 0, 0, 0))


def _open(file, *arguments, **options):
    """`open`, for which /dev/stdin is descriptor 0: the filter lets no file be opened."""
    return OPEN(FILES.get(str(file), file), *arguments, **options)


def _stack_size(size: int = 0) -> int:
    """`threading.stack_size`, of which programs ask for more than all their memory."""
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    return STACK_SIZE(min(size, memory // 4))


def _fork() -> int:
    """Fork without the hooks that `os.fork` runs for many modules: they double the cost."""
    while (pid := LIBC.fork()) < 0:
        time.sleep(0.05)  # no process is free until another program's threads end
    return pid


def _die_with(helper: int) -> None:
    """Let the kernel kill this child when its helper dies; end it if the helper is dead already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != helper:
        os._exit(1)


def _wait(pid: int, control: socket.socket, seconds: float) -> int:
    """The exit status of a child, -1 if a signal ended it, TIMED_OUT if its deadline did.

    The child is killed at its deadline, or when the trainer closes `control`. The time that it
    waited for a core does not count: on a busy machine the deadline is later.
    """
    start = time.monotonic()
    watched = [control.fileno()]
    interval = 0.005  # on old kernels, where no descriptor tells of the child's end
    with contextlib.suppress(AttributeError, OSError):
        watched.append(os.pidfd_open(pid))
        interval = seconds

    options = os.WNOHANG
    patience = 0.0
    has_timed_out = False
    while True:
        ended, status = os.waitpid(pid, options)
        if ended:
            break
        remaining = max(0, start + seconds + patience - time.monotonic())
        if remaining == 0:
            patience = min(_seconds_in_queue(pid), MAX_PATIENCE)
            remaining = max(0, start + seconds + patience - time.monotonic())
        readable, _, _ = select.select(watched, [], [], min(remaining, interval))
        has_timed_out = remaining == 0
        if has_timed_out or control.fileno() in readable:
            os.kill(pid, signal.SIGKILL)
            options = 0  # wait until it is dead

    for descriptor in watched[1:]:
        os.close(descriptor)
    return TIMED_OUT if has_timed_out else max(-1, os.waitstatus_to_exitcode(status))


def _seconds_in_queue(pid: int) -> float:
    """The longest time that a thread of a process has waited for a core; 0 where it is unknown."""
    longest = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="utf-8") as file:
                longest = max(longest, int(file.read().split()[1]) / 1e9)
    return longest


def _run_job(descriptors: list[int], confine: Callable[[], int] | None) -> None:
    """Read the job, give up every right, run the program. Its end is the end of the process."""
    channel = socket.socket(fileno=descriptors[0])
    parts = iter(lambda: channel.recv(2**16), b"")  # until the trainer has sent everything
    job, *inputs = b"".join(parts).decode().split("\n")
    program, entry_point = json.loads(job)
    sys.argv = ["solution.py"]
    if confine is not None and confine() != 0:
        return
    if entry_point is None:
        _run_script(program, descriptors[1:], channel.detach(), inputs[0])
    else:
        _run_function(program, entry_point, inputs, channel.detach())


def _run_function(program: str, entry_point: str, inputs: list[str], channel: int) -> None:
    """Write one line per test: '=' and the result as JSON, or '!' where there is no plain result.

    The program may patch all of this, but it changes only its own answers that way.
    """
    for number, arguments in enumerate(inputs):
        try:
            line = _result(program, entry_point, arguments)
        except MemoryError:
            if number > 0:  # earlier tests left too much behind: this one gets a child of its own
                os._exit(1)
            line = "!"
        except BaseException:  # also SystemExit and KeyboardInterrupt: the other tests still count
            line = "!"
        data = memoryview(f"{line}\n".encode())
        while data:
            written = os.write(channel, data)
            data = data[written:]
    os._exit(0)


def _result(program: str, entry_point: str, arguments: str) -> str:
    """'=' and the function's result as JSON, or '!'. It runs in a fresh module, where main guards do not run."""
    sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)
    module = _new_module("solution")
    exec(_compiled(program), module.__dict__)
    owner = module
    solution = getattr(module, "Solution", None)
    if hasattr(solution, entry_point):
        owner = solution()
    value = getattr(owner, entry_point)(*json.loads(arguments))
    if not is_plain(value):
        return "!"
    sys.set_int_max_str_digits(0)  # without a limit
    return f"={json.dumps(value)}"


def _new_module(name: str) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = "solution.py"
    return module


@functools.cache
def _compiled(program: str) -> types.CodeType:
    return compile(program, "solution.py", "exec", dont_inherit=True)


def _run_script(program: str, inputs: list[int], channel: int, mark: str) -> None:
    """Run a script once per test, and write the mark after each run that ends with status 0.

    A run that leaves builtins, threads or exit callbacks is the last of this process. The trainer
    starts another.

    Args:
        inputs: descriptors of stdin in every test.
        channel: descriptor of stdout.
    """
    usual_builtins = dict(vars(builtins))
    n_callbacks = atexit._ncallbacks()
    for stdin in inputs:
        sys.stdin = sys.stdout = None  # what the run before left there may close a descriptor
        os.dup2(stdin, 0)
        os.dup2(channel, 1)
        stdout = _start_anew()
        status = _status_of(program, _new_module("__main__"))
        has_threads = threading.active_count() > 1
        is_last = has_threads or atexit._ncallbacks() > n_callbacks
        if is_last:  # as at the end of an interpreter
            threading._shutdown()
            atexit._run_exitfuncs()
        with contextlib.suppress(ValueError, AttributeError):  # the script may have closed it
            sys.stdout.flush()  # or made a stream of its own, which needs the module
        sys.stdout = stdout
        sys.modules.pop("__main__", None)
        gc.collect()  # ends what the script made, such as files on descriptor 1
        with contextlib.suppress(ValueError):
            stdout.flush()
        if status != 0:  # the trainer runs this test again if an earlier run may be to blame
            os._exit(status)
        try:
            os.write(channel, mark.encode())
        except OSError:  # the script closed all descriptors
            os._exit(0)
        if is_last or vars(builtins) != usual_builtins:
            os._exit(0)
    os._exit(0)


def _start_anew() -> TextIO:
    """Set streams, random numbers and limits as in a new interpreter. Returns stdout."""
    sys.stdin = sys.__stdin__ = _stream(0, "r")
    sys.stdout = sys.__stdout__ = _stream(1, "w")
    sys.argv = ["solution.py"]
    sys.setrecursionlimit(RECURSION_LIMIT)
    sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)
    random.seed(0)
    return sys.stdout


def _stream(descriptor: int, mode: str) -> TextIO:
    return open(descriptor, mode, errors="surrogateescape", closefd=False)


def _status_of(program: str, module: types.ModuleType) -> int:
    """Run a script in a module. Returns the status with which an interpreter would end."""
    try:
        exec(_compiled(program), module.__dict__)
    except SystemExit as stop:
        if isinstance(stop.code, int):
            return stop.code & 255
        return 0 if stop.code is None else 1
    except BaseException:
        return 1
    return 0


if __name__ == "__main__":
    import resource  # here, because __init__.py imports this file on other systems than Linux, too

    LIBC = ctypes.PyDLL(None)  # it keeps Python's lock, which must be held while `fork` is called
    _, descriptor, seconds, memory_mb, unconfined = sys.argv
    with socket.socket(fileno=int(descriptor)) as trainer:
        serve(trainer, float(seconds), int(memory_mb), unconfined == "True")
