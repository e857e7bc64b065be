"""Hostile, cheating and honest programs as data; those that would do harm are harmless where they escape."""

DOUBLE = [([1], 2), ([5], 10), ([-3], -6)]  # what `f` should do
STDIO = [("2 3\n", "5\n"), ("10 -4\n", "6\n")]  # what a script should do
RIGHT = "def f(x):\n    return 2 * x\n"
ADD = "a, b = map(int, input().split())\nprint(a + b)"

# What many programs of Codeforces begin with.
FAST_STREAMS = """
import os, sys
from io import BytesIO, IOBase
class FastIO(IOBase):
    def __init__(self, file):
        self._fd = file.fileno()
        self.buffer = BytesIO()
        self.writable = "x" in file.mode or "r" not in file.mode
    def flush(self):
        if self.writable:
            os.write(self._fd, self.buffer.getvalue())
            self.buffer.truncate(0), self.buffer.seek(0)
class IOWrapper(IOBase):
    def __init__(self, file):
        self.buffer = FastIO(file)
        self.flush = self.buffer.flush
        self.write = lambda text: self.buffer.buffer.write(text.encode("ascii"))
sys.stdout = IOWrapper(sys.stdout)
"""

# Functions that do not double their argument, however they pretend to. None of their tests may pass.
CHEATS = {
    "equal to everything": "class E:\n    def __eq__(self, o): return True\n    __hash__ = None\ndef f(x): return E()",
    "forged frames": "import os\nfor fd in range(1, 20):\n    try: os.write(fd, b'=true\\n' * 3)\n    except OSError: pass\nos._exit(0)",
    "patched builtins": (
        "import builtins\nbuiltins.all = builtins.any = builtins.bool = lambda *a: True\n"
        "builtins.isinstance = lambda *a: True\nbuiltins.len = lambda *a: 1\ndef f(x): return 0"
    ),
    "patched modules": (
        "import sys\nfor m in list(sys.modules.values()):\n"
        "    try: m._same = m._passes = m.run_tests = lambda *a, **k: True\n    except Exception: pass\n"
        "def f(x): return 0"
    ),
    "emptied modules": "import sys\nsys.modules.clear()\ndef f(x): return 0",
    "frame tampering": (
        "import sys\ndef f(x):\n    frame = sys._getframe().f_back\n    while frame:\n"
        "        frame.f_locals.update(answer='=true', value=True)\n        frame.f_globals['__builtins__'] = {}\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "heap walk": (
        "import gc\ndef f(x):\n"
        "    pairs = [o for o in gc.get_objects() if isinstance(o, (list, tuple)) and len(o) == 2\n"
        "             and o[0] == [x] and type(o[1]) is int]\n    return pairs[0][1] if pairs else None"
    ),
    "returns a generator": "def f(x): yield 2 * x",
    "returns text": "def f(x): return str(2 * x)",
    "returns NaN": "def f(x): return float('nan')",
    "returns a huge integer": "def f(x): return 10 ** 90000",
    "returns a cycle": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "returns nesting that parses": "def f(x):\n    a = 2 * x\n    for _ in range(500): a = [a]\n    return a",
    "returns a lot": "def f(x): return 'a' * 30_000_000",
    "almost": "def f(x): return 2 * x + 1e-9",
    "no such function": "def g(x): return 2 * x",
    "raises an exception that raises": "class E(BaseException):\n    def __str__(self): raise self\ndef f(x): raise E()",
    "syntax error": "def f(x) return 2 * x",
    "null byte in source": "def f(x):\n    return 2 * x\0",
    "surrogate in source": "def f(x):\n    return '\ud800'",
    "deep source": "f = " + "(" * 5000 + ")" * 5000,
    "changes the arguments of the next test": "seen = []\ndef f(x):\n    seen.append(x)\n    return 2 * seen[-2]",
    "reads the trainer's memory": "import os\ndef f(x): return open(f'/proc/{os.getppid()}/mem', 'rb').read(9).hex()",
    "looks for secrets": "import os\ndef f(x): return [v for k, v in os.environ.items() if 'SECRET' in k][0]",
    "imports the trainer": "import tasks.sandbox\ndef f(x): return 2 * x",
    "writes a file": (
        "def f(x):\n    for folder in ('/tmp', '/dev/shm', '/', '.'):\n        try:\n"
        "            with open(folder + '/written_in_the_sandbox', 'w') as file: file.write('1')\n"
        "            return 2 * x\n        except OSError: pass"
    ),
    "makes a folder": "import os\ndef f(x):\n    os.mkdir('/tmp/written_in_the_sandbox')\n    return 2 * x",
    "signals everyone": "import os, signal\ndef f(x):\n    os.kill(-1, signal.SIGURG)\n    return 2 * x",
    "lists a folder": "import os\ndef f(x): return os.listdir('/')",
    "asks whether a file exists": "import os\ndef f(x): return 2 * x if os.path.exists('/etc/passwd') else 'blind'",
    "network": "import socket\ndef f(x):\n    socket.socket().connect(('127.0.0.1', 9))\n    return 2 * x",
    "subprocess": "import subprocess\ndef f(x): return int(subprocess.check_output(['echo', str(2 * x)]))",
    "daemon": "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(30)\n        os._exit(0)\n    return 2 * x",
    "kill the trainer": "import os\ndef f(x):\n    os.kill(os.getppid(), 0)\n    return 2 * x",
    "signal through fcntl": "import fcntl, os, signal\ndef f(x):\n    fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())\n    return 2 * x",
    "exec": "import os\ndef f(x): os.execv('/bin/true', ['true'])",
    "raw system call": "import ctypes\ndef f(x):\n    libc = ctypes.CDLL(None)\n    return 2 * x if libc.syscall(57) >= 0 else 'refused'",
    "raises its limits": "import resource\ndef f(x):\n    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n    return 2 * x",
    "limits of another": "import resource, os\ndef f(x):\n    resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))\n    return 2 * x",
    "slower processes": "import os\ndef f(x):\n    os.sched_setaffinity(0, {0})\n    return 2 * x",
    "memory": "def f(x): return len(bytearray(10 ** 10))",
    "recursion in C": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x):\n    class A:\n        def __repr__(self): return repr([self])\n    return repr(A())",
    "segmentation fault": "import ctypes\ndef f(x): return ctypes.string_at(0)",
    "closes every descriptor": "import os\nos.closerange(0, 99)\ndef f(x): return 2 * x",
    "thread bomb": "import threading, time\ndef f(x):\n    for _ in range(300): threading.Thread(target=time.sleep, args=(9,)).start()\n    return 3",
}

# These never end by themselves; each test of theirs costs its whole time, so they are few and get one test.
ENDLESS = {
    "loop that ignores signals": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except Exception: pass\ndef f(x):\n    while True:\n        try:\n            while True: pass\n"
        "        except BaseException: pass"
    ),
    "loop inside C": "def f(x): return sum(range(10 ** 15))",
    "sleep": "import time\ndef f(x): time.sleep(60)",
    "read forever at import": "import os\nwhile not os.read(0, 10): pass",
    "flood": "import os\ndef f(x):\n    while True:\n        for fd in range(30):\n            try: os.write(fd, b'=3\\n' * 9999)\n            except OSError: pass",
    "threads that spin": "import threading\ndef spin():\n    while True: pass\ndef f(x):\n    for _ in range(20): threading.Thread(target=spin).start()\n    spin()",
}

# Scripts that do not add two numbers.
SCRIPT_CHEATS = {
    "silent": "",
    "right answer, wrong status": "import sys\na, b = map(int, input().split())\nprint(a + b)\nsys.exit(3)",
    "right answer, then a signal": "import ctypes\na, b = map(int, input().split())\nprint(a + b, flush=True)\nctypes.string_at(0)",
    "too much": "a, b = map(int, input().split())\nprint(a + b)\nprint(a + b)",
    "on stderr": "import sys\na, b = map(int, input().split())\nprint(a + b, file=sys.stderr)",
    "flood": "while True: print('5')",
    "leading blank": "a, b = map(int, input().split())\nprint('', a + b)",
    "right answer, and a stream that fails at the end": (
        "import sys\na, b = map(int, input().split())\nprint(a + b, flush=True)\n"
        "class Out:\n    def flush(self): 1 / 0\nsys.stdout = Out()"
    ),
    "forges at the end": (
        "import os, sys\nclass Out:\n    def write(self, text): pass\n    def flush(self):\n"
        "        frame = sys._getframe()\n        while frame:\n            mark = frame.f_locals.get('mark', '')\n"
        "            frame = frame.f_back\n            os.write(1, f'True\\nPASSED{mark}'.encode())\n        os._exit(0)\n"
        "sys.stdout = Out()"
    ),
    "needs more input": "input()\ninput()\nprint(5)",
}

# Functions that double their argument.
HONEST_DOUBLES = {
    "plain": (RIGHT),
    "class Solution": "class Solution:\n    def f(self, x):\n        return self.g(x) * 2\n    def g(self, x):\n        return x",
    "main guard": (RIGHT + "if __name__ == '__main__':\n    print(f(int(input())))"),
    "prints": ("def f(x):\n    print('debug', x)\n    return 2 * x"),
    "future": ("from __future__ import annotations\ndef f(x: Unknown) -> Other: return 2 * x"),
    "looks for a file": "try:\n    data = open('input.txt')\nexcept FileNotFoundError:\n    data = None\ndef f(x): return 2 * x",
    "Solution beside an import of that name": "f = None\nclass Solution:\n    def f(self, x): return 2 * x",
}

CODECS = ("cp1252", "utf-16", "gb18030", "shift_jisx0213", "idna")
NAN = float("nan")
VALUES = [10**50, 0.25, False, None, [[[1], []]], {"b": 1, "a": {}}, "añ😀"]
VALUES += [NAN, [NAN, 1], float("inf")]

# With tests of their own, and verdicts where not all pass.
HONEST = {
    "tuple for a list": ("def f(x): return (x, (x,))", [([1], [1, [1]])]),
    "recursion": (
        "import sys\nsys.setrecursionlimit(10 ** 6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)",
        [([20000], 20000), ([0], 0)],
    ),
    "big input": ("def f(a): return sorted(a)[-1]", [([list(range(100000))], 99999)]),
    "big output": ("def f(n): return list(range(n))", [([100000], list(range(100000)))]),
    "values": (
        "def f(x): return x",
        [([x], x) for x in VALUES] + [([1], True), ([True], 1), ([None], 0), ([0], None)],
        [True] * len(VALUES) + [False] * 4,
    ),
    "integer keys": ("def f(x): return {x: 2}", [([1], {"1": 2})], [False]),
    "mutates its argument": ("def f(a):\n    a.append(1)\n    return len(a)", [([[0]], 2)] * 2),
    "global state": (
        "calls = 0\ndef f(x):\n    global calls\n    calls += 1\n    return calls",
        [([1], 1), ([1], 1)],
    ),
    "random": (
        "import random\ndef f(n): return [random.random() for _ in range(n)] == [random.Random(0).random()]",
        [([1], True)],
    ),
    "thread with a big stack": (
        (
            "import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(2 ** 27)\ndef f(n):\n"
            "    out = []\n    def g(k): return 0 if k == 0 else 1 + g(k - 1)\n"
            "    t = threading.Thread(target=lambda: out.append(g(n)))\n    t.start()\n    t.join()\n"
            "    return out[0]"
        ),
        [([50000], 50000)],
    ),
    "standard library": (
        "import asyncio, bz2, configparser, email.message, gzip, html.parser, lzma, sqlite3, unittest.mock, zipfile, zoneinfo\n"
        "import xml.dom.minidom\nfrom datetime import datetime\nfrom decimal import Decimal\ndef f(s, codec):\n"
        "    return s.encode(codec).decode(codec), str(Decimal('.1')), datetime.strptime('2026', '%Y').weekday()",
        [(["é", codec], ["é", "0.1", 3]) for codec in CODECS],
    ),
    "no arguments": ("def f(): return 7", [([], 7)]),
    "some right": ("def f(x): return 2 * x if x > 0 else 0", DOUBLE, [True, True, False]),
    "one loops": ("def f(x):\n    while x == 1: 0\n    return 2 * x", DOUBLE, [False, True, True]),
    "one crashes": (
        "import ctypes\ndef f(x):\n    if x == 5: ctypes.string_at(0)\n    return 2 * x",
        DOUBLE,
        [True, False, True],
    ),
    "one eats memory": (
        "def f(x):\n    a = 'a' * (10 ** 10 if x == -3 else 1)\n    return 2 * x",
        DOUBLE,
        [True, True, False],
    ),
    "memory": ("s = [True] * 10 ** 7\ndef f(x): return 2 * x", [([i], 2 * i) for i in range(8)]),
}

# Scripts that add two numbers.
HONEST_ADDS = {
    "input": (ADD),
    "stdin": "import sys\na, b = map(int, sys.stdin.read().split())\nsys.stdout.write(f'{a + b}  \\n\\n\\n')",
    "open(0)": ("a, b = map(int, open(0).read().split())\nprint(a + b)"),
    "os._exit": ("import os\n" + ADD + "\nimport sys\nsys.stdout.flush()\nos._exit(0)"),
    "thread": (
        "import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(2 ** 30)\ndef main():\n"
        "    a, b = map(int, input().split())\n    print(a + b)\nthreading.Thread(target=main).start()"
    ),
    "atexit": "import atexit\na, b = map(int, input().split())\natexit.register(lambda: print(a + b))",
    "fails over what it left": f"import heapq\nassert not hasattr(heapq, 'x')\nheapq.x = 1\n{ADD}",
    "random numbers": (
        f"import random\nif random.random() > 0.84 and random.random() > 0.75:\n    {ADD.replace(chr(10), chr(10) + '    ')}"
    ),
    "replaces its streams": (
        "import io, sys\nsys.stdin = io.StringIO(sys.stdin.read())\n"
        f"out, sys.stdout = sys.stdout, io.StringIO()\n{ADD}\nout.write(sys.stdout.getvalue())"
    ),
    "closes all descriptors": f"import os\n{ADD}\nimport sys\nsys.stdout.flush()\nos.closerange(0, 99)",
    "leaves a thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
        f"{ADD}"
    ),
    "fast input": (
        "import os\nfrom io import BytesIO\ninput = BytesIO(os.read(0, os.fstat(0).st_size)).readline\n"
        + ADD
    ),
    "stack limit": (
        "import resource as r\n"
        f"r.setrlimit(r.RLIMIT_STACK, r.getrlimit(r.RLIMIT_STACK)[1:] * 2)\n{ADD}"
    ),
    "open(1) left open": "out = open(1, 'w')\na, b = map(int, input().split())\nout.write(str(a + b))",
    "fast streams": FAST_STREAMS + ADD,
    "writes when it is deleted": "import os\nclass Out:\n    def __del__(self): os.write(1, self.kept)\nout = Out()\nout.kept = b'%d' % sum(map(int, input().split()))",
    "stream over the buffer": f"import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\n{ADD}",
    "devices": f"import sys\nsys.stdin, sys.stdout = open('/dev/stdin'), open('/dev/stdout', 'w')\n{ADD}",
    "waits for input": f"import select, sys\nselect.select([sys.stdin], [], [])\n{ADD}",
    "file of its own": f"import os\nos.path.dirname(__file__)\n{ADD}",
    "closes stdout": ("import sys\n" + ADD + "\nsys.stdout.close()"),
    "prints to stderr": ("import sys\nprint('note', file=sys.stderr)\n" + ADD),
}

# With tests of their own, and verdicts where not all pass.
HONEST_SCRIPTS = {
    "does not read": ("print(5)", [("1 4\n" * 200000, "5")]),
    "prints first": (
        "print('x' * 500000, flush=True)\nprint(len(input()))",
        [("y" * 500000, "x" * 500000 + "\n500000")],
    ),
    "unicode": ("print(input()[::-1])", [("é😀", "😀é")]),
    "blank lines": ("print()\nprint('a ')\nprint()\nprint('b')\nprint()", [("", "\na\n\nb")]),
    "many tests": (ADD, [(f"{i} 1\n", f"{i + 1}\n") for i in range(20)]),
    "loops in the first test": (  # a later one would loop twice: a new child begins with it
        "n = int(input())\nwhile n == 0: pass\nprint(n)",
        [(f"{n}\n", f"{n}\n") for n in range(3)],
        [False, True, True],
    ),
    "fails in the second test": (
        "n = int(input())\nprint(n)\nassert n != 1",
        [(f"{n}\n", f"{n}\n") for n in range(3)],
        [True, False, True],
    ),
    "output above the usual limit": ("print('x' * 5_000_000)", [("", "x" * 5_000_000)] * 2),
    "a million digits": ("print('1' * 1000001)", [("", "0.5"), ("", "1" * 1000001)], [False, True]),
    "one big read": ("import os\nprint(len(os.read(0, 10 ** 7)))", [("7" * 1000000, "1000000")]),
}
