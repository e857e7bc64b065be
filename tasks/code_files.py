"""
Code problems from local files, in the formats of HumanEval, MBPP, LiveCodeBench and our own.

The fields of a record tell its format. A problem is a plain dictionary:

    id, text      name and statement
    entry_point   the function to write, or None for a script
    starter       the beginning of the program that the prompt shows
    before, after source that stands around an answer
    call          the function that the tests call, or None for a script
    tests         [arguments, expected] or [stdin, stdout]; a third element is the (relative,
                  absolute) tolerance
    date          when it was published, or ""
    reference     a right program, or ""
    asserts       how many asserts the tests were made of; 0 in other formats

HumanEval and MBPP test by `assert` beside an answer, which could forge a pass. Therefore
`assert candidate(arguments) == literal` becomes an expression for the program and an expected value
for the grader. Other asserts are left out and counted.
"""

import ast
import base64
import builtins
import inspect
import io
import itertools
import json
import pickle
import sys
import zlib
from collections.abc import Callable

from rewards import UserError
from tasks.files import field, optional_text, read_records, text_field
from tasks.sandbox import check_job

Judge = Callable[[list[tuple[dict, str]]], list[list[bool]]]  # (problem, program) -> passed tests

# LiveCodeBench: the smallest tests, input and output together (paper, set-up).
MAX_TESTS = 16
MAX_BYTES = 8192

CONTAINERS = ("set", "tuple", "list", "sorted", "dict")  # calls that an expected value may hold
NUMBERS = ("abs", "round", "len", "sum", "str", "int", "float", "bool")
WRAPPERS = CONTAINERS + NUMBERS  # calls that may stand around what is tested

# LiveCodeBench answers take these for granted, as on the platforms. Its official set-up lacks them.
IMPORTS = """\
from bisect import *
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


def load_problems(flag: str, path: str, judge: Judge) -> list[dict]:
    """
    Read a file, and say on stderr what it holds.

    Of problems with one text the earliest counts, so that no text is trained on and held out.

    Args:
        judge: runs the reference solutions. The tests made of asserts that they fail are left out.

    Raises:
        UserError: a record is not as it should be, or no problem with a test is left.
    """
    problems = read_problems(path, flag)
    _check_references(f"{flag} {path}", problems, judge)
    n_left_out = sum(max(0, problem["asserts"] - len(problem["tests"])) for problem in problems)

    by_text: dict[str, dict] = {}
    for problem in sorted(problems, key=lambda problem: problem["date"]):
        if problem["tests"]:
            by_text.setdefault(problem["text"], problem)
    if not by_text:
        raise UserError(f"{flag} {path}: no problem with a test is left")

    print(
        f"{path}: {len(by_text)} problems; left out: {n_left_out} asserts that their reference "
        "solution fails or that are no pair of arguments and expected value, "
        f"{len(problems) - len(by_text)} problems without any test or with the text of another",
        file=sys.stderr,
    )
    return list(by_text.values())


def _check_references(place: str, problems: list[dict], judge: Judge) -> None:
    """Leave out asserts that a reference solution fails; UserError if it fails another test."""
    with_reference = [problem for problem in problems if problem["reference"]]
    verdicts = judge([(problem, problem["reference"]) for problem in with_reference])
    for problem, passed in zip(with_reference, verdicts, strict=True):
        if not problem["asserts"] and not all(passed):
            test = problem["tests"][passed.index(False)]
            raise UserError(f"{place}, problem {problem['id']}, reference: fails {test!r:.60}")
        problem["tests"] = list(itertools.compress(problem["tests"], passed))


def read_problems(path: str, flag: str = "--data") -> list[dict]:
    """The problems of a file. Raises UserError, which names the flag, the line and the field."""
    return read_records(flag, path, _read_problem)


def _read_problem(record: dict) -> dict:
    for needed, read in FORMATS.items():
        if record.keys() >= set(needed):
            problem = {
                "starter": "",
                "date": "",
                "before": "",
                "after": "",
                "reference": "",
                "asserts": 0,
            }
            problem |= read(record)
            problem.setdefault("call", problem["entry_point"])
            check_job("", problem["tests"], problem["call"])
            return problem
    known = "; ".join(", ".join(needed) for needed in FORMATS)
    raise UserError(f"fields {', '.join(record)}: no known format; expected are {known}")


def _own(record: dict) -> dict:
    problem = {
        "text": text_field(record, "prompt"),
        "entry_point": optional_text(record, "entry_point") or None,
        "tests": field(record, "tests", list, "a list of tests"),
        "reference": optional_text(record, "reference"),
        "starter": optional_text(record, "starter"),
    }
    if "id" in record:
        problem["id"] = str(record["id"])
    return problem


def _humaneval(record: dict) -> dict:
    prompt = text_field(record, "prompt")
    entry_point = text_field(record, "entry_point")
    solution = optional_text(record, "canonical_solution")
    source = prompt + (solution or "    pass\n")
    function = _find_function(source, entry_point, "prompt")
    check = _find_function(text_field(record, "test"), "check", "test")
    (candidate,) = check.args.args

    # Imports and helper functions stand above the function and its decorators.
    first_line = min(node.lineno for node in (function, *function.decorator_list))
    before = source.splitlines(keepends=True)[: first_line - 1]
    return _from_asserts(check, candidate.arg, entry_point) | {
        "id": record["task_id"],
        "text": "Complete this function:\n\n" + prompt,
        "before": "".join(before),
        "reference": source if solution else "",
    }


def _find_function(source: str, name: str, field: str) -> ast.FunctionDef:
    for node in ast.walk(ast.parse(source, f"field {field}")):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise UserError(f"field {field}: no function {name!r} is defined")


def _mbpp(record: dict) -> dict:
    code = text_field(record, "code")
    text = optional_text(record, "text") or text_field(record, "prompt")
    asserts = field(record, "test_list", list, "a list of asserts")
    imports = record.get("test_imports", [])
    setup = [optional_text(record, "test_setup_code"), *imports]

    tests = ast.parse("\n".join(asserts), "field test_list")
    called = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name)}
    names = []
    for node in ast.parse(code, "field code").body:
        if isinstance(node, ast.FunctionDef) and node.name in called:
            names.append(node.name)
    if not names:
        raise UserError("field test_list: calls no function that code defines")
    return _from_asserts(tests, names[-1], names[-1]) | {
        "id": f"MBPP/{record['task_id']}",
        "text": f"{text}\n\nFor example:\n{asserts[0]}",
        "reference": code,
        "before": "".join(f"{source}\n" for source in setup if source),
    }


def _livecodebench(record: dict) -> dict:
    cases = _cases(record, "public_test_cases") + _cases(record, "private_test_cases")
    tests = [[case["input"], case["output"]] for case in cases]
    tests = [test for test in tests if len("".join(test).encode()) <= MAX_BYTES]
    tests.sort(key=lambda test: len("".join(test)))
    tests = tests[:MAX_TESTS]

    name = json.loads(record["metadata"]).get("func_name")
    if name:
        tests = [[_json_lines(stdin), json.loads(stdout)] for stdin, stdout in tests]
    return {
        "id": str(record["question_id"]),
        "date": optional_text(record, "contest_date"),
        "text": text_field(record, "question_content"),
        "before": IMPORTS,
        "entry_point": name,
        "starter": optional_text(record, "starter_code"),
        "tests": tests,
    }


def _json_lines(text: str) -> list:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _cases(record: dict, name: str) -> list[dict]:
    """The tests in a field of LiveCodeBench: JSON, or the base64 of the zlib of a pickled JSON."""
    text = text_field(record, name)
    if not text.lstrip().startswith("["):
        pickled = zlib.decompress(base64.b64decode(text))
        text = _PlainUnpickler(io.BytesIO(pickled)).load()
    return json.loads(text)


class _PlainUnpickler(pickle.Unpickler):
    """Reads text, numbers and lists, and refuses everything that could run code."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"the pickle would run code: {module}.{name}")


FORMATS = {  # the fields that tell the format
    ("prompt", "entry_point", "test"): _humaneval,
    ("text", "code", "test_list"): _mbpp,
    ("prompt", "code", "test_list"): _mbpp,
    ("prompt", "tests"): _own,
    ("question_content", "public_test_cases", "private_test_cases"): _livecodebench,
}


def plain(value):
    """Plain JSON for sets, tuples and dictionaries. Programs get this source: no type hints."""
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(map(plain, value), key=repr)}
    if isinstance(value, dict):
        return {"dict": sorted(map(plain, value.items()), key=repr)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _from_asserts(tree: ast.Module | ast.FunctionDef, candidate: str, name: str) -> dict:
    """
    Make tests of asserts, and the source that runs them: `_answer_(i)` evaluates expression i.

    Asserts in loops and conditions depend on more than a call. They are left out and counted,
    `assert True` is not.

    Args:
        tree: the body holds the asserts.
        candidate: the name by which they call the function.
        name: the name of the function.
    """
    expressions = []
    tests = []
    for node in tree.body:
        pair = _convert(candidate, node)
        if pair:
            tests.append([[len(tests)], *pair[1:]])
            expressions.append(f"lambda: {pair[0]}")

    n_asserts = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            n_asserts += 1

    source = inspect.getsource(plain).replace("plain", "_plain_")
    head = f"def _answer_(i, {candidate}={name}):"
    body = f"    return _plain_([{', '.join(expressions)}][i]())\n"
    return {
        "entry_point": name,
        "call": "_answer_",
        "after": f"\n\n{source}\n{head}\n{body}",
        "tests": tests,
        "asserts": n_asserts,
    }


def _convert(candidate: str, node: ast.stmt) -> tuple | None:
    """(expression, expected and maybe the tolerance) of an assert, None if it has another form."""
    if not isinstance(node, ast.Assert):
        return None
    try:
        left, right, *tolerance = _comparison(node.test)
        if not _calls(left, candidate):
            left, right = right, left
        if not _calls(left, candidate):
            return None
        expected = json.loads(json.dumps(plain(_literal(right))))
        return ast.unparse(left), expected, *tolerance
    except Exception:  # whatever the literals of an assert do to the functions around them
        return None


def _comparison(test: ast.expr) -> tuple:
    """(left, right) of an equality; if it is approximate, with (relative, absolute) bounds."""
    match test:
        case ast.Compare(left, [ast.Eq() | ast.Is()], [right]):
            return left, right
        case ast.Compare(
            ast.Call(ast.Name("abs"), [ast.BinOp(left, ast.Sub(), right)]),
            [ast.Lt() | ast.LtE()],
            [bound],
        ):
            return left, right, (0.0, float(ast.literal_eval(bound)))
        case ast.Call(ast.Attribute(attr="isclose"), [left, right], keywords):
            bounds = {word.arg: float(ast.literal_eval(word.value)) for word in keywords}
            return left, right, (bounds.get("rel_tol", 1e-9), bounds.get("abs_tol", 0.0))
        case ast.UnaryOp(ast.Not(), call):
            return ast.Call(ast.Name("bool"), [call], []), ast.Constant(False)
    # A truth value is all that `assert candidate(x)` asks for.
    return ast.Call(ast.Name("bool"), [test], []), ast.Constant(True)


def _literal(node: ast.expr) -> object:
    """A literal, also inside set(), tuple(), list(), sorted() or dict(); ValueError otherwise."""
    match node:
        case ast.Call(ast.Name(name), arguments, []) if name in CONTAINERS:
            return getattr(builtins, name)(*map(_literal, arguments))
    return ast.literal_eval(node)


def _calls(node: ast.expr, candidate: str) -> bool:
    """Whether a node is candidate(...), maybe inside built-in functions."""
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    if not names <= {candidate, *dir(builtins)}:
        return False
    match node:
        case ast.Call(ast.Name(name)) if name == candidate:
            return True
        case ast.Call(ast.Name(name), [inner, *_]) if name in WRAPPERS:
            return _calls(inner, candidate)
    return False
