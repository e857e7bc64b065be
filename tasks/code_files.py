"""Code problems from local files, in the formats of HumanEval, MBPP, LiveCodeBench and our own, told by their fields.
A problem is a plain dictionary: id, text, entry_point (None: a script), starter, before and after (source around an
answer), call (the function that tests call), tests [[arguments, expected], ...] or [[stdin, stdout], ...], a third
element being the (relative, absolute) tolerance, date, reference (a right answer, or "") and line (where it was read).
HumanEval and MBPP test by `assert` beside an answer, which could forge a pass: `assert candidate(arguments) == literal`
becomes an expression for the program and an expected value for the grader; others are left out, and counted."""

import ast
import base64
import builtins
import inspect
import json
import pickletools
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

from rewards import UserError
from tasks.files import read_records, shuffled, tell_shared
from tasks.sandbox import check_job

MAX_TESTS, MAX_BYTES = (
    16,
    8192,
)  # LiveCodeBench: the smallest tests, input and output together (paper, set-up)
LATE = "2025-02-01"  # problems from here on are held out (paper, set-up)
MOST_TESTS, MAX_UNPACKED = (
    100,
    256,
)  # of one problem of our own format; MiB of LiveCodeBench's tests behind zlib
PICKLED = (
    "PROTO",
    "FRAME",
    "MEMOIZE",
    "BINPUT",
    "LONG_BINPUT",
    "PUT",
    "STOP",
)  # around the string of a pickled string
CONTAINERS = ("set", "tuple", "list", "sorted", "dict")  # calls that an expected value may hold
WRAPPERS = (
    *CONTAINERS,
    "abs",
    "round",
    "len",
    "sum",
    "str",
    "int",
    "float",
)  # and those around what is tested
# In front of answers to LiveCodeBench, unlike the official set-up: what competitors take for granted on the platforms.
IMPORTS = (
    "".join(
        f"from {x} import *\n" for x in ("bisect", "collections", "functools", "heapq", "itertools")
    )
    + """\
from math import ceil, comb, floor, gcd, inf, isqrt, lcm, log2, sqrt
from string import ascii_letters, ascii_lowercase, ascii_uppercase, digits
from typing import *
import bisect, collections, copy, functools, heapq, itertools, math, operator, os, random, re, string, sys
sys.setrecursionlimit(50_000)
"""
)


def load(path: str, test_path: str, judge: Callable) -> dict[str, list[dict]]:
    """The splits train, validation and test of a file, test from test_path if there is one; stderr says what they hold.
    Held out without test_path: from LATE on where every problem has a date, else a fifth, by their ids; a tenth of the
    rest is for validation; problems with one text stay together, where the earliest belongs. judge(pairs of problem and
    program) gives verdicts: tests that a reference fails are left out. UserError where too few are left."""
    problems = shuffled(_checked("--data", path, judge))
    dated = not test_path and all(problem["date"] for problem in problems)
    by_text: dict[str, list[dict]] = {}
    for problem in problems:
        by_text.setdefault(problem["text"], []).append(problem)
    early = {
        text: dated and min(problem["date"] for problem in group) < LATE
        for text, group in by_text.items()
    }
    n_test = (
        sum(not early[p["text"]] for p in problems)
        if dated
        else 0
        if test_path
        else len(problems) // 5
    )
    train, validation, test = [], [], []
    for text in sorted(by_text, key=early.get):
        n_validation = (len(problems) - len(test)) // 10
        part = (
            test if len(test) < n_test else validation if len(validation) < n_validation else train
        )
        part += by_text[text]
    if test_path:
        test = problems if test_path == path else _checked("--test-data", test_path, judge)
        tell_shared(test_path, [problem["text"] for problem in test], by_text)
    if not test or not train:
        raise UserError(
            f"--data {path}: {len(problems)} problems with {len(by_text)} texts{' and such dates' * dated} "
            "are too few to train on some and hold some out; give more, or --test-data"
        )
    if several := sum(len(group) > 1 for group in by_text.values()):
        print(
            f"{path}: {several} texts are shared by several ids; each was put on one side, whole",
            file=sys.stderr,
        )
    print(
        f"{path}: {len(train)} to train on, {len(validation)} for validation, {len(test)} held out",
        file=sys.stderr,
    )
    return {"train": train, "validation": validation, "test": test}


def _checked(flag: str, path: str, judge: Callable) -> list[dict]:
    """The problems of a file without the tests that their reference solution fails; what was left out on stderr."""
    problems = read_problems(path, flag)
    n_tests = sum(len(problem["tests"]) for problem in problems)
    judged = [problem for problem in problems if problem["reference"]]
    for problem, passed in zip(
        judged, judge([(problem, problem["reference"]) for problem in judged]), strict=True
    ):
        if problem["own"] and False in passed:
            i = passed.index(False)
            raise UserError(
                f"{flag} {problem['line']}, field reference: fails tests[{i}], {problem['tests'][i]!r:.60}"
            )
        problem["tests"] = [
            test for test, right in zip(problem["tests"], passed, strict=True) if right
        ]
    kept = [problem for problem in problems if problem["tests"]]
    n_kept = sum(len(problem["tests"]) for problem in kept)
    print(
        f"{path}: {len(kept)} problems with {n_kept} tests; left out: {sum(p['left_out'] for p in problems)} asserts "
        f"that are no pair of arguments and expected value, {n_tests - n_kept} tests that the reference solution "
        f"fails, {len(problems) - len(kept)} problems without any test; without a reference solution, so that "
        f"nothing checks their tests: {len(problems) - len(judged)}",
        file=sys.stderr,
    )
    if not kept:
        raise UserError(f"{flag} {path}: no problem with a test is left")
    return kept


def read_problems(path: str, flag: str = "--data") -> list[dict]:
    """The problems of a file, read as their fields tell, with left_out asserts; UserError names line, field, value."""

    def read(record: dict, place: str) -> dict:
        readers = [
            reader
            for reader, needed in FORMATS.values()
            if record.keys() >= {*needed} and isinstance(record.get("test", ""), str)
        ]
        if not readers:
            known = "; ".join(
                f"{name}: {', '.join(needed)}" for name, (_, needed) in FORMATS.items()
            )
            raise UserError(
                f"fields {', '.join(record) or 'none'}: no known format; expected are those of {known}"
            )
        fields = {
            name: field
            for name, field in inspect.signature(readers[0]).parameters.items()
            if name in record
        }
        for name, field in fields.items():
            if not isinstance(record[name], field.annotation):
                kind = "a list" if field.annotation is list else "text"
                raise UserError(f"field {name}: must be {kind}, not {record[name]!r:.60}")
        problem = {
            "id": f"{Path(path).stem}-{place.split()[-1]}",
            "line": place,
            "starter": "",
            "date": "",
            "before": "",
            "after": "",
            "reference": "",
            "own": False,
            "left_out": 0,
        }
        problem |= readers[0](**{name: record[name] for name in fields})
        check_job("", problem["tests"], problem.setdefault("call", problem["entry_point"]))
        return problem

    return read_records(flag, path, read)


def _own(
    prompt: str,
    tests: list,
    entry_point: str | None = None,
    reference: str = "",
    starter: str = "",
    id: object = None,
) -> dict:
    if not prompt.strip():
        raise UserError("field prompt: is empty")
    if entry_point and not entry_point.isidentifier():
        raise UserError(
            f"field entry_point: {entry_point!r} is no name of a function, so no program can define it"
        )
    if not 1 <= len(tests) <= MOST_TESTS:
        raise UserError(f"field tests: {len(tests)} tests; allowed are 1 to {MOST_TESTS}")
    form, kind, ends = (
        ("[[argument, ...], expected]", list, 1)
        if entry_point
        else ("[stdin, stdout], both text; to call a function name it in entry_point", str, 2)
    )
    for i, test in enumerate(tests):
        if (
            not isinstance(test, list)
            or len(test) != 2
            or not all(isinstance(end, kind) for end in test[:ends])
        ):
            raise UserError(f"field tests[{i}]: {test!r:.60} must be {form}")
    if reference and entry_point:
        _defined(reference, entry_point, "reference")
    return {
        "text": prompt,
        "entry_point": entry_point or None,
        "tests": tests,
        "reference": reference,
        "starter": starter,
        "own": True,
    } | ({} if id is None else {"id": str(id)})


def _humaneval(
    prompt: str, entry_point: str, test: str, canonical_solution: str = "", task_id: str = ""
) -> dict:
    source = prompt + (canonical_solution or "    pass\n")
    function = _defined(source, entry_point, "entry_point")
    check = _defined(test, "check", "test")
    (candidate,) = check.args.args
    first = min(
        x.lineno for x in (function, *function.decorator_list)
    )  # above it: imports and helper functions
    return _from_asserts(check, candidate.arg, entry_point) | {
        "id": task_id or "HumanEval",
        "text": "Complete this function:\n\n" + prompt,
        "before": "".join(source.splitlines(True)[: first - 1]),
        "reference": source if canonical_solution else "",
    }


def _mbpp(
    code: str,
    test_list: list,
    text: str = "",
    prompt: str = "",
    test_setup_code: str = "",
    test_imports: list = (),
    task_id: object = "",
) -> dict:
    if not all(isinstance(line, str) for line in test_list) or not test_list:
        raise UserError(
            f"field test_list: must be a list of asserts, at least one, not {test_list!r:.60}"
        )
    tests = ast.parse("\n".join(test_list), "field test_list")
    defined = [
        node.name
        for node in ast.parse(code, "field code").body
        if isinstance(node, ast.FunctionDef)
    ]
    called = {
        getattr(node.func, "id", "") for node in ast.walk(tests) if isinstance(node, ast.Call)
    }
    if not (names := [name for name in defined if name in called]):
        raise UserError(
            f"field test_list: calls no function that code defines ({', '.join(defined) or 'none'})"
        )
    return _from_asserts(tests, names[-1], names[-1]) | {
        "id": f"MBPP/{task_id}",
        "text": f"{text or prompt}\n\nFor example:\n{test_list[0]}",
        "reference": code,
        "before": "".join(f"{source}\n" for source in (test_setup_code, *test_imports) if source),
    }


def _livecodebench(
    question_content: str,
    public_test_cases: str,
    private_test_cases: str,
    starter_code: str = "",
    metadata: object = None,
    question_title: object = "",
    question_id: object = None,
    contest_date: object = "",
) -> dict:
    cases = _cases(public_test_cases, "public_test_cases") + _cases(
        private_test_cases, "private_test_cases"
    )
    cases = [case for case in cases if len((case["input"] + case["output"]).encode()) <= MAX_BYTES]
    cases.sort(key=lambda case: len(case["input"] + case["output"]))
    if not cases:
        raise UserError(f"field private_test_cases: no test of at most {MAX_BYTES} bytes")
    name, tests = None, [[case["input"], case["output"]] for case in cases[:MAX_TESTS]]
    if cases[0].get("testtype") == "functional":
        try:
            name = json.loads(metadata)["func_name"]
            tests = [
                [
                    [json.loads(line) for line in arguments.splitlines() if line.strip()],
                    json.loads(expected),
                ]
                for arguments, expected in tests
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"field metadata or private_test_cases: func_name or JSON missing ({error})"
            ) from error
    return {
        "id": str(question_title if question_id is None else question_id),
        "date": str(contest_date),
        "text": question_content,
        "before": IMPORTS,
        "entry_point": name,
        "starter": starter_code,
        "tests": tests,
    }


def _cases(text: str, field: str) -> list[dict]:
    """JSON, or the base64 of the zlib of a pickled JSON string: its opcodes are listed, never executed."""
    try:
        if not text.lstrip().startswith("["):
            unpack = zlib.decompressobj()
            pickled = unpack.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED * 2**20)
            if unpack.unconsumed_tail:
                raise ValueError(f"more than {MAX_UNPACKED} MiB")
            found = [
                (code.name, value)
                for code, value, _ in pickletools.genops(pickled)
                if code.name not in PICKLED
            ]
            if len(found) != 1 or "UNICODE" not in found[0][0]:
                raise ValueError(
                    "not a pickled string, but one that would run code or build objects"
                )
            text = found[0][1]
        cases = [*json.loads(text)]
    except (ValueError, TypeError, zlib.error, RecursionError, IndexError) as error:
        raise UserError(
            f"field {field}: neither a JSON list nor base64, zlib and pickle of one ({error})"
        ) from error
    for i, case in enumerate(cases):
        if not isinstance(case, dict) or not all(
            isinstance(case.get(key), str) for key in ("input", "output")
        ):
            raise UserError(f"field {field}[{i}]: {case!r:.60} needs input and output, both text")
    return cases


FORMATS = {  # name: reader, whose parameters are the fields that it takes; and the fields that tell the format
    "HumanEval": (_humaneval, ("prompt", "entry_point", "test")),
    "MBPP": (_mbpp, ("text", "code", "test_list")),
    "MBPP, sanitized": (_mbpp, ("prompt", "code", "test_list")),
    "own": (_own, ("prompt", "tests")),
    "LiveCodeBench": (
        _livecodebench,
        ("question_content", "public_test_cases", "private_test_cases"),
    ),
}


def _defined(source: str, name: str, field: str) -> ast.FunctionDef:
    tree = ast.parse(source, f"field {field}")
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    if name not in found:
        raise UserError(
            f"field {field}: no function {name!r} is defined, only {', '.join(sorted(found)) or 'none'}"
        )
    return found[name]


def plain(value):  # put in front of programs, too: untyped and self-contained
    """Plain JSON for sets, tuples and odd dictionaries, the same on both sides of a comparison."""
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((plain(item) for item in value), key=repr)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return {
            "dict": sorted(([plain(key), plain(item)] for key, item in value.items()), key=repr)
        }
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _from_asserts(tree: ast.AST, candidate: str, name: str) -> dict:
    """Tests, the source that runs them (`_answer_(i)` evaluates expression i) and how many asserts are left out, such
    as those in loops and conditions, which depend on more than a call. `assert True` is none."""
    found = [
        pair
        for node in tree.body
        if isinstance(node, ast.Assert) and (pair := _convert(candidate, node))
    ]
    n = sum(
        isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant)
        for node in ast.walk(tree)
    )
    expressions = ", ".join(f"lambda: {expression}" for expression, *_ in found)
    source = inspect.getsource(plain).replace("plain(", "_plain_(")
    known_as = "" if candidate == name else f"    {candidate} = {name}\n"
    after = f"\n\n{source}\ndef _answer_(i):\n{known_as}    return _plain_([{expressions}][i]())\n"
    tests = [[[i], *pair[1:]] for i, pair in enumerate(found)]
    return {
        "entry_point": name,
        "call": "_answer_",
        "after": after,
        "tests": tests,
        "left_out": n - len(found),
    }


def _convert(candidate: str, node: ast.Assert) -> tuple | None:
    """(expression, expected, and where there is one the tolerance) of an assert, or None if it has another form."""
    test, truth, tolerance = node.test, True, ()
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, truth = test.operand, not truth
    try:
        match test:
            case ast.Compare(left, [ast.Eq() | ast.Is()], [right]) if truth:
                pass
            case ast.Compare(
                ast.Call(ast.Name("abs"), [ast.BinOp(left, ast.Sub(), right), *_]),
                [ast.Lt() | ast.LtE()],
                [bound],
            ) if truth:
                tolerance = ((0.0, float(ast.literal_eval(bound))),)
            case ast.Call(ast.Attribute(attr="isclose"), [left, right, *_], keywords) if truth:
                given = {
                    keyword.arg: float(ast.literal_eval(keyword.value)) for keyword in keywords
                }
                tolerance = ((given.get("rel_tol", 1e-9), given.get("abs_tol", 0.0)),)
            case _:  # a truth value is all that a bare `assert candidate(x)` asks for
                return (f"bool({ast.unparse(test)})", truth) if _calls(test, candidate) else None
        if not _calls(left, candidate):
            left, right = right, left
        value = json.loads(json.dumps(plain(_literal(right))))
        usable = _calls(left, candidate) and all(
            0 <= bound < 1e300 for bounds in tolerance for bound in bounds
        )
        return (ast.unparse(left), value, *tolerance) if usable else None
    except (ValueError, TypeError, SyntaxError, LookupError, ArithmeticError, RecursionError):
        return None


def _literal(node: ast.AST) -> object:
    """A literal, also inside set(), tuple(), list(), sorted() or dict(); ValueError otherwise."""
    match node:
        case ast.Call(ast.Name(name), arguments, []) if name in CONTAINERS:
            return getattr(builtins, name)(*map(_literal, arguments))
    return ast.literal_eval(node)


def _calls(node: ast.AST, candidate: str) -> bool:
    """Whether a node is candidate(...), alone or inside built-in functions, and compares nothing on its own."""
    match node:
        case ast.Call(ast.Name(name), [inner, *_]) if name in WRAPPERS and name != candidate:
            return _calls(inner, candidate)
        case ast.Call(ast.Name(name)) if name == candidate:
            names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)} - {
                candidate
            }
            compares = any(
                isinstance(child, ast.Compare | ast.Lambda | ast.Await) for child in ast.walk(node)
            )
            return not compares and all(hasattr(builtins, name) for name in names)
    return False
