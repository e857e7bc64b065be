"""Code problems: read from local files in four formats, or made here for the tiny model; and what is a program in a text.

    read_problems("problems.jsonl")      HumanEval, MBPP, LiveCodeBench (code_generation_lite) or our own, told by their fields
    small_problems()                     one-line functions with a condition, from a few examples that leave it open

A problem is a plain dictionary: id, text, entry_point (None: a script), starter, before and after (source around an answer),
call (the function that tests call), tests [[arguments, expected], ...] or [[stdin, stdout], ...], a third element being the
(relative, absolute) tolerance, date, reference (a right answer, or "") and line (where it was read).

HumanEval and MBPP test by `assert`, inside the program's own process, where an answer could forge a pass. So every assert
of the form `candidate(arguments) == literal` (also inside set(), sorted(), abs() and the like, or with a tolerance) becomes
an expression for the program and an expected value for the grader; all other asserts are left out, and counted.

Where this departs from the official LiveCodeBench set-up: names that competitors take for granted (List, deque, inf, ...)
are imported in front of an answer and the recursion limit is raised, as on the platforms themselves.
"""

import ast
import base64
import builtins
import functools
import hashlib
import inspect
import itertools
import json
import pickletools
import random
import re
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox import Job, check_job

MAX_TESTS, MAX_BYTES = 16, 8192  # LiveCodeBench: the smallest tests, and their input and output together (paper, set-up)
MOST_TESTS = 100  # of one problem of our own format
IMPORTS = """from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, floor, gcd, inf, isqrt, lcm, log2, sqrt
from string import ascii_letters, ascii_lowercase, ascii_uppercase, digits
from typing import *
import bisect, collections, copy, functools, heapq, itertools, math, operator, os, random, re, string, sys
sys.setrecursionlimit(50_000)
"""


# The small problems: `A if C else B`. A prompt shows f at four places, so that three thresholds fit between two of them and
# often several A or B; the hidden tests are eight other places, where they differ.
SHOWN, HIDDEN = (-4, -1, 2, 5), (-6, -3, -2, 0, 1, 3, 4, 7)
BRANCHES = ("0", "1", "x", "- x", "x + 1", "x + 2", "x + 3", "x - 1", "x - 2", "x - 3", "x * 2", "x * 3", "x * x", "1 - x", "2 - x",
            "3 - x", "x // 2", "x % 3", "abs ( x )")
CONDITIONS = (*(f"x < {'- ' * (n < 0)}{abs(n)}" for n in range(-3, 6)), "x % 2 == 0")
LONGEST = 16  # words
ARITHMETIC = re.compile(r"(?!.*\*\*)(?:abs|if|else|x|\d{1,3}|//|[<>=!]=|[-+*%()<> ]){1,200}")

PACKED = """
FUNCTIONS = [{}]
def f(i, xs):
    ys = []
    for x in xs:
        try:
            y = FUNCTIONS[i](x)
        except Exception:
            y = None
        ys.append(y if isinstance(y, int) else "no number")
    return ys
"""


class BadRecord(Exception):
    """A record that cannot be used: FILE, line N, field F: what is wrong and what it should be."""


def load(path: str, test_path: str, run: Callable) -> dict[str, list[dict]]:
    """The splits train, validation and test of a file (test from test_path if there is one), what was left out on stderr.

    Held out without test_path: from 2025-02-01 on where every problem has a date (paper, set-up), else a fifth, chosen by
    their ids. A tenth of the rest is for validation. `run` is Sandbox.run: tests that a reference solution fails are left
    out. Raises BadRecord, also where too few problems are left.
    """
    problems = _checked(path, run)
    problems.sort(key=lambda problem: hashlib.sha256(repr(problem["id"]).encode()).digest())
    if test_path:
        train, test = problems, problems if test_path == path else _checked(test_path, run)
        texts = {problem["text"] for problem in train}
        if shared := sum(problem["text"] in texts for problem in test):
            print(f"{test_path}: {shared} of {len(test)} held-out problems stand in {path} too, so they are not held out",
                  file=sys.stderr)
    elif all(problem["date"] for problem in problems):
        train, test = ([problem for problem in problems if (problem["date"] >= "2025-02-01") is late] for late in (False, True))
    else:
        train, test = problems[len(problems) // 5:], problems[:len(problems) // 5]
    if not test or not train:
        raise BadRecord(f"{path}: {len(problems)} problems{' of such dates' * all(problem['date'] for problem in problems)} are too "
                        "few to train on some and hold some out; give more, or --test-data")
    n = len(train) // 10
    print(f"{path}: {len(train) - n} problems to train on, {n} for validation, {len(test)} held out", file=sys.stderr)
    return {"train": train[n:], "validation": train[:n], "test": test}


def _checked(path: str, run: Callable) -> list[dict]:
    problems, left_out = read_problems(path)
    n_tests, judged = sum(len(problem["tests"]) for problem in problems), [p for p in problems if p["reference"]]
    for problem, passed in zip(judged, run([job(problem, problem["reference"]) for problem in judged]), strict=True):
        if problem["own"] and not all(passed):
            raise BadRecord(f"{problem['line']}, field reference: fails tests[{passed.index(False)}]")
        problem["tests"] = [test for test, ok in zip(problem["tests"], passed, strict=True) if ok]
    kept = [problem for problem in problems if problem["tests"]]
    n_kept = sum(len(problem["tests"]) for problem in kept)
    print(f"{path}: {len(kept)} problems with {n_kept} tests; left out: {left_out} asserts that are no pair of arguments and "
          f"expected value, {n_tests - n_kept} tests that the reference solution fails, {len(problems) - len(kept)} problems "
          "without any test; without a reference solution, so that nothing checks their tests: "
          f"{len(problems) - len(judged)}", file=sys.stderr)
    if not kept:
        raise BadRecord(f"{path}: no problem with a test is left")
    return kept


def read_problems(path: str) -> tuple[list[dict], int]:
    """The problems of a JSON Lines file and the number of asserts left out; BadRecord names file, line and field."""
    problems, ids, left_out = [], set(), 0
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecord(f"{path}: cannot be read ({error}); it must be a JSON Lines file") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise BadRecord("not a JSON object: each line must be one problem")
            name = next((name for name, (_, fields) in FORMATS.items() if all(field in record for field in fields)
                         and (name != "HumanEval" or isinstance(record["test"], str))), None)
            if name is None:
                known = "; ".join(f"{name}: {', '.join(fields)}" for name, (_, fields) in FORMATS.items())
                raise BadRecord(f"fields {', '.join(record) or 'none'}: no known format; expected are those of {known}")
            problem, missing = FORMATS[name][0](record)
            defaults = {"id": f"{Path(path).stem}-{number}", "line": f"{path}, line {number}", "own": name == "own", "starter": "",
                        "before": "", "after": "", "reference": "", "date": "", "call": problem["entry_point"]}
            problems.append(defaults | problem)
            check_job(*job(problems[-1], "")[:3])
        except json.JSONDecodeError as error:
            raise BadRecord(f"{path}, line {number}: not JSON ({error})") from error
        except BadRecord as error:
            raise BadRecord(f"{path}, line {number}, {error}") from error
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise BadRecord(f"{path}, line {number}: cannot be used ({error})") from error
        left_out += missing
        if problems[-1]["id"] in ids:
            raise BadRecord(f"{path}, line {number}, field id: {problems[-1]['id']!r} stands there twice")
        ids.add(problems[-1]["id"])
    if not problems:
        raise BadRecord(f"{path}: holds no problem")
    return problems, left_out


def _field(record: dict, name: str, kind: type, default: Any = None) -> Any:
    value = record.get(name, default)
    if not isinstance(value, kind):
        wanted = {str: "text", list: "a list"}[kind]
        raise BadRecord(f"field {name}: must be {wanted}, not {'missing' if value is None else type(value).__name__}")
    return value


def _own(record: dict) -> tuple[dict, int]:
    entry_point = _field(record, "entry_point", str, "") or None
    if entry_point and not entry_point.isidentifier():
        raise BadRecord(f"field entry_point: {entry_point!r} is no name of a function, so no program can define it")
    tests = _field(record, "tests", list)
    if not 1 <= len(tests) <= MOST_TESTS:
        raise BadRecord(f"field tests: {len(tests)} tests; allowed are 1 to {MOST_TESTS}")
    for i, test in enumerate(tests):
        if not isinstance(test, list) or len(test) != 2:
            without = isinstance(test, list) and len(test) == 1
            raise BadRecord(f"field tests[{i}]: {'has no expected output' if without else 'must be a pair'}; write "
                            + ("[[argument, ...], expected]" if entry_point else "[stdin, stdout]"))
        if not (isinstance(test[0], list) if entry_point else all(isinstance(text, str) for text in test)):
            raise BadRecord(f"field tests[{i}]: " + ("the arguments must be a list" if entry_point else
                            "stdin and stdout must be text; to call a function name it in entry_point"))
    reference = _field(record, "reference", str, "")
    if reference and entry_point:
        _defines(reference, entry_point, "reference")
    return {"text": _field(record, "prompt", str), "entry_point": entry_point, "tests": tests, "reference": reference,
            "starter": _field(record, "starter", str, "")} | ({"id": str(record["id"])} if "id" in record else {}), 0


def _humaneval(record: dict) -> tuple[dict, int]:
    prompt, name = _field(record, "prompt", str), _field(record, "entry_point", str)
    reference = prompt + _field(record, "canonical_solution", str, "    pass\n")
    function = _defines(reference, name, "entry_point")
    module = _parse(_field(record, "test", str), "test")
    check = next((node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None or len(check.args.args) != 1:
        raise BadRecord("field test: has no function check(candidate)")
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    before = "".join(reference.splitlines(keepends=True)[:first - 1])  # imports and helper functions
    problem, left_out = _from_asserts(check, check.args.args[0].arg, name)
    return problem | {
        "id": _field(record, "task_id", str, "HumanEval"), "text": "Complete this function:\n\n" + prompt, "before": before,
        "reference": reference if "canonical_solution" in record else ""}, left_out


def _mbpp(record: dict) -> tuple[dict, int]:
    code, asserts = _field(record, "code", str), _field(record, "test_list", list)
    if not all(isinstance(text, str) for text in asserts) or not asserts:
        raise BadRecord("field test_list: must be a list of asserts, at least one")
    tests = _parse("\n".join(asserts), "test_list")
    defined = [node.name for node in _parse(code, "code").body if isinstance(node, ast.FunctionDef)]
    called = {node.func.id for node in ast.walk(tests) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    name = next((name for name in defined[::-1] if name in called), None)
    if name is None:
        raise BadRecord(f"field test_list: calls no function that code defines ({', '.join(defined) or 'none'})")
    before = "\n".join(filter(None, [_field(record, "test_setup_code", str, ""), *_field(record, "test_imports", list, [])]))
    text = _field(record, "text" if "text" in record else "prompt", str)
    problem, left_out = _from_asserts(tests, name, name)
    return problem | {
        "id": f"MBPP/{record.get('task_id', '')}", "text": f"{text}\n\nFor example:\n{asserts[0]}", "reference": code,
        "before": before + "\n" if before else ""}, left_out


def _livecodebench(record: dict) -> tuple[dict, int]:
    cases = []
    for field in ("public_test_cases", "private_test_cases"):
        for i, case in enumerate(_cases(_field(record, field, str), field)):
            if not isinstance(case, dict) or not all(isinstance(case.get(key), str) for key in ("input", "output")):
                raise BadRecord(f"field {field}[{i}]: needs input and output, both text")
            cases.append((case.get("testtype", "stdin"), case["input"], case["output"]))
    cases = sorted((case for case in cases if len((case[1] + case[2]).encode()) <= MAX_BYTES), key=lambda c: len(c[1] + c[2]))
    if not cases:
        raise BadRecord(f"field private_test_cases: no test of at most {MAX_BYTES} bytes")
    entry_point, starter = None, _field(record, "starter_code", str, "")
    tests = [[stdin, stdout] for _, stdin, stdout in cases[:MAX_TESTS]]
    if cases[0][0] == "functional":
        try:
            entry_point = json.loads(_field(record, "metadata", str))["func_name"]
            tests = [[[json.loads(line) for line in arguments.splitlines() if line.strip()], json.loads(expected)]
                     for arguments, expected in tests]
        except (ValueError, KeyError, TypeError) as error:
            raise BadRecord(f"field metadata or private_test_cases: func_name or JSON arguments missing ({error})") from error
    return {"id": str(record.get("question_id", record.get("question_title", ""))), "text": record["question_content"],
            "entry_point": entry_point, "starter": starter, "tests": tests, "before": IMPORTS,
            "date": str(record.get("contest_date", ""))}, 0


def _cases(text: str, field: str) -> list:
    """JSON, or the base64 of the zlib of a pickled JSON string: its opcodes are listed, never executed."""
    try:
        if not text.lstrip().startswith("["):
            unpack = zlib.decompressobj()
            pickled = unpack.decompress(base64.b64decode(text, validate=True), 2**28)
            if unpack.unconsumed_tail:
                raise ValueError("more than 256 MiB")
            operations = [(code.name, value) for code, value, _ in pickletools.genops(pickled)]
            strings = [value for name, value in operations if "UNICODE" in name]
            others = {name for name, _ in operations if "UNICODE" not in name}
            if len(strings) != 1 or not others <= {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}:
                raise ValueError("not a pickled string, but one that would run code or build objects")
            text = strings[0]
        cases = json.loads(text)
    except (ValueError, zlib.error, RecursionError, IndexError) as error:
        raise BadRecord(f"field {field}: neither a JSON list nor base64, zlib and pickle of one ({error})") from error
    if not isinstance(cases, list):
        raise BadRecord(f"field {field}: must hold a list of tests")
    return cases


FORMATS = {  # name: reader, and the fields that tell the format
    "HumanEval": (_humaneval, ("prompt", "entry_point", "test")), "MBPP": (_mbpp, ("text", "code", "test_list")),
    "MBPP, sanitized": (_mbpp, ("prompt", "code", "test_list")), "own": (_own, ("prompt", "tests")),
    "LiveCodeBench": (_livecodebench, ("question_content", "public_test_cases", "private_test_cases"))}


def _parse(source: str, field: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadRecord(f"field {field}: not Python ({error})") from error


def _defines(source: str, name: str, field: str) -> ast.FunctionDef:
    """The function of that name; BadRecord if the source defines none."""
    found = {node.name: node for node in ast.walk(_parse(source, field)) if isinstance(node, ast.FunctionDef)}
    if name not in found:
        raise BadRecord(f"field {field}: {name!r} is defined by no program, only {', '.join(sorted(found)) or 'nothing'}")
    return found[name]


# From asserts to (expression, expected value).

def plain(value):  # put in front of programs, too: untyped and self-contained
    """Plain JSON for sets, tuples and odd dictionaries, the same on both sides of a comparison."""
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((plain(item) for item in value), key=repr)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return {"dict": sorted(([plain(key), plain(item)] for key, item in value.items()), key=repr)}
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _from_asserts(tree: ast.AST, candidate: str, name: str) -> tuple[dict, int]:
    """Tests and the source that runs them, `_answer_(i)` evaluates expression i; and how many asserts are left out.

    Those in loops and conditions are: they depend on more than a call. `assert True` is none.
    """
    found = [pair for node in tree.body if isinstance(node, ast.Assert) and (pair := _convert(candidate, node))]
    every = [node for node in ast.walk(tree) if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant)]
    expressions = ", ".join(f"lambda: {expression}" for expression, *_ in found)
    source = inspect.getsource(plain).replace("plain(", "_plain_(")
    known_as = "" if candidate == name else f"    {candidate} = {name}\n"
    after = f"\n\n{source}\ndef _answer_(i):\n{known_as}    return _plain_([{expressions}][i]())\n"
    tests = [[[i], *pair[1:]] for i, pair in enumerate(found)]
    return {"entry_point": name, "call": "_answer_", "after": after, "tests": tests}, len(every) - len(found)


def _convert(candidate: str, node: ast.Assert) -> tuple | None:
    """(expression, expected, and where there is one the tolerance) of an assert, or None if it has another form."""
    test, negated = node.test, False
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, negated = test.operand, not negated
    tolerance, left, right = (), test, None
    try:
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and not negated:
            left, operator, right = test.left, test.ops[0], test.comparators[0]
            if isinstance(operator, ast.Lt | ast.LtE) and isinstance(left, ast.Call) and getattr(left.func, "id", "") == "abs" \
                    and isinstance(left.args[0], ast.BinOp) and isinstance(left.args[0].op, ast.Sub):
                tolerance = ((0.0, float(ast.literal_eval(right))),)
                left, right = left.args[0].left, left.args[0].right
            elif not isinstance(operator, ast.Eq | ast.Is):
                return None
        elif isinstance(test, ast.Call) and getattr(test.func, "attr", "") == "isclose" and not negated:
            left, right, *_ = test.args
            given = {keyword.arg: float(ast.literal_eval(keyword.value)) for keyword in test.keywords}
            tolerance = ((given.get("rel_tol", 1e-9), given.get("abs_tol", 0.0)),)
        if right is not None and not _calls(left, candidate):
            left, right = right, left
        if not _calls(left, candidate):
            return None
        # A truth value is all that a bare `assert candidate(x)` asks for.
        expected = not negated if right is None else _literal(right)
        expression = ast.unparse(left)
        value = plain(expected)
        json.dumps(value)
        if any(not 0 <= bound < 1e300 for bounds in tolerance for bound in bounds):
            return None
    except (ValueError, TypeError, SyntaxError, LookupError, ArithmeticError, RecursionError):
        return None
    return (f"bool({expression})" if right is None else expression), value, *tolerance


def _literal(node: ast.AST) -> Any:
    """A literal, also inside set(), tuple(), list(), sorted() or dict(); ValueError otherwise."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("set", "tuple", "list", "sorted", "dict") and not node.keywords:
        return getattr(builtins, node.func.id)(*map(_literal, node.args))
    return ast.literal_eval(node)


def _calls(node: ast.AST, candidate: str) -> bool:
    """Whether a node is candidate(...), alone or inside built-in functions, and compares nothing on its own."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id != candidate:
        if node.func.id not in ("set", "tuple", "list", "sorted", "dict", "abs", "round", "len", "sum", "str", "int", "float") \
                or not node.args:
            return False
        node = node.args[0]
    if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == candidate):
        return False
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)} - {candidate}
    compares = any(isinstance(child, ast.Compare | ast.Lambda | ast.Await) for child in ast.walk(node))
    return not compares and all(hasattr(builtins, name) for name in names)


# Programs in texts.

def find_blocks(text: str) -> list[str]:
    """The closed ```python blocks of a text, in order, those of a model's thoughts aside; unlabelled ones count as Python."""
    blocks, begun = [], None
    for line in text.rpartition("</think>")[2].splitlines(keepends=True):
        if begun is None:
            if opened := re.fullmatch(r"```(\w*)\s*", line):
                begun, language = [], opened[1].lower()
        elif line.rstrip() != "```":
            begun.append(line)
        else:
            blocks += ["".join(begun)] if language in ("", "py", "python", "python3") else []
            begun = None
    return blocks


@functools.lru_cache(maxsize=4096)
def canonical(source: str) -> str:
    """The abstract syntax tree as text: programs that differ in layout and comments alone are equal. "" if it is none."""
    if not source.strip() or len(source) > 2**16:
        return ""
    with warnings.catch_warnings(action="ignore"):
        try:
            return ast.dump(ast.parse(source))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return ""


def job(problem: dict, answer: str) -> Job:
    """What runs: the answer between the problem's own source; to a small problem an expression in x is the function f."""
    if problem.get("small") and canonical(f"({answer}\n)").startswith("Module(body=[Expr("):
        answer = f"def f(x):\n    return {answer.strip()}"
    future = "".join(line for line in answer.splitlines(keepends=True) if line.startswith("from __future__ "))  # must come first
    return Job(future + problem["before"] + answer.replace(future, "") + problem["after"], problem["tests"], problem["call"])


def pack(pairs: list[tuple[dict, str]]) -> list[tuple[list[int], Job]]:
    """The jobs that judge answers (problem, answer), each with the indices of its answers; what is no Python gets none.

    One job, hence one process, for each answer. Only expressions of pure arithmetic, which can touch nothing, not even each
    other, share one by the dozen: a tiny model writes thousands of them a minute.
    """
    runnable = [i for i, (_, answer) in enumerate(pairs) if canonical(answer)]
    pure = [i for i in runnable if pairs[i][0].get("small") and _is_arithmetic(pairs[i][1])]
    jobs = [([i], job(*pairs[i])) for i in sorted({*runnable} - {*pure})]
    for group in (pure[i:i + 48] for i in range(0, len(pure), 48)):
        functions = ", ".join(f"lambda x: ({pairs[i][1]})" for i in group)
        columns = [zip(*pairs[i][0]["tests"], strict=True) for i in group]  # arguments [x], expected y
        tests = [[[place, [x for x, in xs]], list(ys)] for place, (xs, ys) in enumerate(columns)]
        jobs.append((group, Job(PACKED.format(functions), tests, "f", each=True)))
    return jobs


def _is_arithmetic(answer: str) -> bool:
    """Whether it is one expression of numbers, x, operators, conditions and abs alone, no statement such as x <<= 3."""
    tree = canonical(answer)
    return bool(ARITHMETIC.fullmatch(answer)) and tree.startswith("Module(body=[Expr(") and "Starred" not in tree


# The small problems.

@functools.cache
def small_problems() -> dict[str, list[dict]]:
    """Every behaviour of `A if C else B` once, in the splits train, validation and test (2/3, 1/6, 1/6).

    Split by what the prompt shows, so that no prompt of a held-out problem is seen in training.
    """
    places = SHOWN + HIDDEN
    values = {text: [eval(text, {"x": x, "abs": abs}) for x in places] for text in BRANCHES + CONDITIONS}  # our own
    parts: dict[str, list[dict]] = {"train": [], "validation": [], "test": []}
    known = {tuple(values[branch]) for branch in BRANCHES}  # without a condition there is nothing to guess
    for a, condition, b in itertools.product(BRANCHES, CONDITIONS, BRANCHES):
        ys = tuple(y if holds else z for y, holds, z in zip(values[a], values[condition], values[b], strict=True))
        if ys in known:
            continue
        known.add(ys)
        shown = [f"f({x})={y}" for x, y in zip(SHOWN, ys, strict=False)]
        place = hashlib.sha256(" ".join(shown).encode()).digest()[0] % 6
        parts["test" if place == 0 else "validation" if place == 1 else "train"].append({
            "id": f"small-{len(known)}", "small": True, "tiny_prompt": " ".join(shown), "pieces": [a, condition, b],
            "text": f"f maps integers to integers and has one condition. {', '.join(shown)}. It will be tested at other places.",
            "entry_point": "f", "call": "f", "starter": "def f(x: int) -> int:", "before": "", "after": "",
            "reference": f"{a} if {condition} else {b}", "date": "", "line": "", "own": False,
            "tests": [[[x], y] for x, y in zip(HIDDEN, ys[len(SHOWN):], strict=True)]})
    return parts


def demonstration(problem: dict, rng: random.Random, right: float = 0.4) -> str:
    """A program each of whose three pieces is the right one with probability `right`, else any, in one of many spellings.

    It shows how programs are written and, weakly, what examples have to do with them; putting it together is left to RL.
    """
    pieces = [piece if rng.random() < right else rng.choice(every)
              for piece, every in zip(problem["pieces"], (BRANCHES, CONDITIONS, BRANCHES), strict=True)]
    a, condition, b = (rng.choice(_spellings(piece)) for piece in pieces)
    for operator, opposite in (("==", "!="), ("<=", ">"), ("<", ">=")):
        if f" {operator} " in condition and rng.random() < 0.5:
            return f"{b} if {condition.replace(operator, opposite)} else {a}"
    return f"{a} if {condition} else {b}"


@functools.cache
def _spellings(piece: str) -> list[str]:
    """Ways to write the same: an answer has synonyms, as programs do, so that only behaviour tells two apart."""
    words = piece.split()
    if piece.startswith("x < "):
        n = int("".join(words[2:])) - 1
        return [piece, f"x <= {'- ' * (n < 0)}{abs(n)}"]
    if len(words) == 3 and words[1] in "+*":
        return [piece, f"{words[2]} {words[1]} {words[0]}", *(["x + x"] if piece == "x * 2" else [])]
    if len(words) == 3 and words[1] == "-":
        return [piece, f"- {words[2]} + {words[0]}"]
    return [piece]


def small_words() -> tuple[str, ...]:
    """Every word of a small problem's prompt and of the programs that solve it."""
    prompts = [problem["tiny_prompt"] for part in small_problems().values() for problem in part]
    pieces = [text for piece in BRANCHES + CONDITIONS for text in _spellings(piece)]
    return tuple(dict.fromkeys(" ".join([*prompts, *pieces, "if else != > >="]).split()))
