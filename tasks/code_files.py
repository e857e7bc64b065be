"""Code problems from local files: HumanEval, LeetCodeDataset, MBPP, LiveCodeBench and our own format.

The fields of a record tell its format. A problem is a plain dictionary:

    id, text      name and statement
    entry_point   the function to write, or None for a script
    starter       the beginning of the program that the prompt shows
    before, after source that stands around an answer
    call          the function that the tests call, or None for a script
    tests         [arguments, expected] or [stdin, stdout]; a third element is the (relative,
                  absolute) tolerance and maybe a share of the expected number, or "exact"
    true_is_one   whether True equals 1, as in Python
    date          when it was published, or ""
    reference     a right program, or ""
    asserts       how many asserts the tests were made of; 0 in other formats

HumanEval and MBPP test by `assert` beside an answer, which could forge a pass. Therefore
`assert candidate(arguments) == literal` becomes an expression for the program and an expected value
for the grader, also in a loop over literal lists. Other asserts are left out and counted.
"""

import ast
import base64
import builtins
import copy
import inspect
import io
import itertools
import json
import math
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator

from rewards import UserError
from tasks.files import field, optional_text, read_records, text_field, texts_field
from tasks.sandbox import check_tests

ASSERTS_CALL = "_answer_"  # the function that tests made of asserts call
Judge = Callable[[list[tuple[dict, str]]], list[list[bool]]]  # (problem, program) -> passed tests

# LiveCodeBench: the smallest tests, input and output together, as in the paper's code. LeetCodeDataset
# and HumanEval+, whose loops pass over a thousand inputs: the first ones.
MAX_TESTS = 16
MAX_BYTES = 8192

# Calls that an expected value may hold.
CONVERSIONS = ("set", "tuple", "list", "sorted", "dict", "repr")
NUMBERS = ("abs", "round", "len", "sum", "str", "int", "float", "bool")
WRAPPERS = CONVERSIONS + NUMBERS  # calls that may stand around what is tested

# Answers take these for granted, as on the platforms. LiveCodeBench's grader imports all but `os`, too,
# in this order, but typing last: its Counter would hide the class. The built-ins are those that
# the lines above them hide.
STARS = """typing string re datetime collections heapq bisect copy math random statistics itertools functools
operator io sys json"""
IMPORTS = "".join(f"from {module} import *\n" for module in STARS.split())
IMPORTS += """\
from builtins import abs, compile, open, pow
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math
import operator, os, random, re, statistics, string, sys
"""


def load_problems(flag: str, path: str, judge: Judge) -> list[dict]:
    """Read a file, and say on stderr what it holds.

    Of equal problems the earliest counts, so that none is trained on and held out. `judge` runs the
    reference solutions; the tests made of asserts that they fail are left out.
    """
    problems = read_problems(path, flag)
    _check_references(f"{flag} {path}", problems, judge)
    distinct: dict[tuple, dict] = {}
    for problem in sorted(problems, key=lambda problem: problem["date"]):
        if problem["tests"]:
            key = (problem["text"], problem["entry_point"], problem["starter"])
            distinct.setdefault(key, problem)
    n_asserts = sum(max(0, problem["asserts"] - len(problem["tests"])) for problem in problems)
    left_out = {
        "asserts that their reference solution fails, or of another form (docs/own.md)": n_asserts,
        f"tests of more than {MAX_BYTES} bytes": sum(problem["too_long"] for problem in problems),
        "problems without any test or with the text of another": len(problems) - len(distinct),
    }
    message = f"{len(distinct)} problems"
    for things, n in left_out.items():
        if n:
            message += f"; left out: {n} {things}"
    if not distinct:
        raise UserError(f"{flag} {path}: no problem with a test is left: {message}")
    print(f"{path}: {message}", file=sys.stderr)
    return list(distinct.values())


def _check_references(place: str, problems: list[dict], judge: Judge) -> None:
    """Leave out asserts that a reference solution fails; UserError if it fails another test.

    A reference that fails is judged once more, alone: the machine may have been too busy.
    """
    with_reference = [problem for problem in problems if problem["reference"]]
    verdicts = judge([(problem, problem["reference"]) for problem in with_reference])
    for problem, passed in zip(with_reference, verdicts, strict=True):
        if all(passed):
            continue
        (passed,) = judge([(problem, problem["reference"])])
        if all(passed) or problem["asserts"]:
            problem["tests"] = list(itertools.compress(problem["tests"], passed))
            continue
        test = problem["tests"][passed.index(False)]
        reason = "it may need a package, or more than --seconds or --memory-mb"
        message = f"field reference: fails {test!r:.60}; {reason} (docs/sandbox.md)"
        raise UserError(f"{place}, problem {problem['id']}, {message}")


def read_problems(path: str, flag: str = "--data") -> list[dict]:
    """The problems of a file. Raises UserError, which names the flag, the line and the field."""
    return read_records(flag, path, _read_problem)


def _read_problem(record: dict) -> dict:
    for needed, read in FORMATS.items():
        if record.keys() >= set(needed):
            texts = ("starter", "date", "before", "after", "reference")
            usual = {"asserts": 0, "too_long": 0, "true_is_one": True}
            problem = dict.fromkeys(texts, "") | usual | _id(record) | read(record)
            problem.setdefault("call", problem["entry_point"])
            check_tests(problem["tests"], problem["call"])
            return problem
    known = "; ".join(", ".join(needed) for needed in FORMATS)
    raise UserError(f"fields {', '.join(record)}: no known format; expected are {known}")


def _id(record: dict) -> dict:
    """The id in the first of these fields that is there. Without one the line stands in for it."""
    for name in ("id", "task_id", "question_id"):
        if record.get(name) is not None:
            return {"id": str(field(record, name, str | int, "text or a number"))}
    return {}


def _own(record: dict) -> dict:
    return {
        "text": text_field(record, "prompt"),
        "entry_point": optional_text(record, "entry_point") or None,
        "tests": field(record, "tests", list, "a list of tests"),
        "true_is_one": False,
        "reference": optional_text(record, "reference"),
        "starter": optional_text(record, "starter"),
    }


def _humaneval(record: dict) -> dict:
    prompt = text_field(record, "prompt")
    entry_point = text_field(record, "entry_point")
    name = entry_point.removeprefix("Solution().")
    check = _find_function(text_field(record, "test"), "check", "test")
    candidate = check.args.args[0].arg if check.args.args else entry_point
    problem = _from_asserts(check, candidate, entry_point)
    if name != entry_point:
        return problem | {  # LeetCodeDataset, whose prompt is source that stands above a class
            "text": text_field(record, "problem_description"),
            "entry_point": name,
            "starter": optional_text(record, "starter_code"),
            "before": f"{prompt}\n",
            "reference": optional_text(record, "completion"),
        }
    solution = optional_text(record, "canonical_solution")
    source = prompt + (solution or "    pass\n")
    function = _find_function(source, name, "prompt")
    # Imports and helper functions stand above the function and its decorators.
    first_line = min(node.lineno for node in (function, *function.decorator_list))
    before = source.split("\n")[: first_line - 1]
    return problem | {
        "text": "Complete this function:\n\n" + prompt,
        "before": "".join(f"{line}\n" for line in before),
        "reference": source if solution else "",
    }


def _find_function(source: str, name: str, field: str) -> ast.FunctionDef:
    for node in ast.walk(ast.parse(source, field)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise UserError(f"field {field}: no function {name!r} is defined")


def _mbpp(record: dict) -> dict:
    code = text_field(record, "code")
    text = optional_text(record, "text") or text_field(record, "prompt")
    asserts = texts_field(record, "test_list")
    setup = [optional_text(record, "test_setup_code")]
    if record.get("test_imports"):
        setup += texts_field(record, "test_imports")
    tests = ast.parse("\n".join(asserts), "test_list")
    called = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name)}
    functions = [node for node in ast.parse(code, "code").body if isinstance(node, ast.FunctionDef)]
    names = [function.name for function in functions if function.name in called]
    if not names:
        raise UserError("field test_list: calls no function that code defines")
    problem = _from_asserts(tests, names[-1], names[-1]) | {
        "text": f"{text}\n\nFor example:\n{asserts[0]}",
        "reference": code,
        "before": "".join(f"{source}\n" for source in setup if source),
    }
    if record.get("task_id") is not None:
        problem["id"] = f"MBPP/{record['task_id']}"
    return problem


def _livecodebench(record: dict) -> dict:
    cases = _cases(record, "public_test_cases") + _cases(record, "private_test_cases")
    tests = [test for test in cases if len("".join(test).encode()) <= MAX_BYTES]
    n_too_long = len(cases) - len(tests)
    tests.sort(key=lambda test: len("".join(test)))
    tests = tests[:MAX_TESTS]

    name = json.loads(text_field(record, "metadata")).get("func_name")  # None: a script
    if name:
        tests = [_function_test(*test) for test in tests]
    return {
        "date": optional_text(record, "contest_date"),
        "text": text_field(record, "question_content"),
        "entry_point": name,
        "starter": optional_text(record, "starter_code"),
        "tests": tests,
        "too_long": n_too_long,
    }


def _function_test(stdin: str, stdout: str) -> list:
    """A test of LiveCodeBench whose input holds an argument in each line."""
    arguments = [json.loads(line) for line in stdin.split("\n") if line.strip()]
    return [arguments, json.loads(stdout)]


def _cases(record: dict, name: str) -> list[list[str]]:
    """The tests [stdin, stdout] in a field of LiveCodeBench: JSON, or the base64 of the zlib of its pickle."""
    text = text_field(record, name)
    try:
        if not text.lstrip().startswith("["):
            pickled = zlib.decompress(base64.b64decode(text))
            text = _PlainUnpickler(io.BytesIO(pickled)).load()
        tests = [[case["input"], case["output"]] for case in json.loads(text)]
        "".join(itertools.chain(*tests))  # all must be text
    except Exception as error:  # whatever damaged bytes do to their readers
        form = "a list of tests with input and output as JSON, or base64 of the zlib of its pickle"
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"field {name}: must be {form}, not {text!r:.60} ({reason})") from error
    return tests


class _PlainUnpickler(pickle.Unpickler):
    """Reads text, numbers and lists, and refuses everything that could run code."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"the pickle would run code: {module}.{name}")


FORMATS = {  # the fields that tell the format
    ("prompt", "entry_point", "test"): _humaneval,
    ("code", "test_list"): _mbpp,
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
    """Make tests of asserts, and the source that runs them: `_answer_(i)` evaluates expression i.

    Asserts in other loops and in conditions depend on more than a call. They are left out and
    counted, `assert True` is not. They call the function `name` by the name `candidate`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name:
            node.id = candidate  # asserts may call the function by its own name

    expressions = []
    tests = []
    n_asserts = 0
    for node in _statements(tree.body):
        parts = [node] if isinstance(node, ast.Assert) else ast.walk(node)
        n_asserts += sum(map(_is_assert, parts))
        is_wanted = name.isidentifier() or len(tests) < MAX_TESTS  # a method has hundreds
        pair = _convert(candidate, node) if is_wanted else None
        if pair:
            tests.append([[len(tests)], *pair[1:]])
            expressions.append(pair[0])

    # It evaluates an expression where no name of the program hides a built-in function.
    after = f"""

def {ASSERTS_CALL}(i, function={name}):
    import builtins
    names = {{}}
    builtins.exec({inspect.getsource(plain)!r}, names)
    value = builtins.eval({expressions!r}[i], {{{candidate!r}: function}})
    return names["plain"](value)
"""
    return {
        "entry_point": name,
        "call": ASSERTS_CALL,
        "after": after,
        "tests": tests,
        "asserts": n_asserts,
    }


def _is_assert(node: ast.AST) -> bool:
    """Whether a node tests something: an assert, or a call of HumanEval+'s `assertion`."""
    match node:
        case ast.Assert(ast.Constant()):
            return False
        case ast.Assert() | ast.Expr(ast.Call(ast.Name("assertion"))):
            return True
    return False


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements one after the other, with those of each pass of a loop over literal lists."""
    lists: dict[str, ast.expr] = {}  # name -> literal
    for node in body:
        match node:
            case ast.Assign([ast.Name(name)], ast.List() | ast.Tuple() as literal):
                lists[name] = literal
            case ast.For():
                yield from _passes(node, lists)
            case _:
                yield node
                for part in ast.walk(node) if lists else ():  # which may change a list
                    if isinstance(part, ast.Name):
                        lists.pop(part.id, None)


def _passes(loop: ast.For, lists: dict[str, ast.expr]) -> Iterator[ast.stmt]:
    """The statements of each pass of a loop; as they are where it is over no literal list.

    Those of pass MAX_TESTS and later ones are left as they are, too, so that they are no tests.
    """
    items = _items(loop.iter, lists)
    if items is None:
        yield loop
        return
    for number, item in enumerate(items):
        values = _bind(loop.target, item) if number < MAX_TESTS else {}
        for statement in loop.body:
            yield _Substitute(values).visit(copy.deepcopy(statement))


def _items(node: ast.expr, lists: dict[str, ast.expr]) -> list[ast.expr] | None:
    """The elements of a literal list, or of zip and enumerate of such lists; None for all else."""
    match node:
        case ast.Name(name) if name in lists:
            return lists[name].elts
        case ast.List(elements) | ast.Tuple(elements):
            return elements
        case ast.Call(ast.Name("enumerate"), [inner], []):
            items = _items(inner, lists)
            if items is None:
                return None
            numbered = enumerate(items)
            return [ast.Tuple([ast.Constant(i), item], ast.Load()) for i, item in numbered]
        case ast.Call(ast.Name("zip"), parts):
            columns = [_items(part, lists) for part in parts]
            if None in columns:
                return None
            return [ast.Tuple(list(row), ast.Load()) for row in zip(*columns, strict=False)]
    return None


def _bind(target: ast.expr, item: ast.expr) -> dict[str, ast.expr]:
    """The values of the names that a loop assigns; empty where they do not fit."""
    match target, item:
        case ast.Name(name), _:
            return {name: item}
        case ast.Tuple(targets), (ast.Tuple(items) | ast.List(items)) if len(targets) == len(items):
            values: dict[str, ast.expr] = {}
            for part in map(_bind, targets, items):
                values |= part
            return values
    return {}


class _Substitute(ast.NodeTransformer):
    """Puts values in the place of names."""

    def __init__(self, values: dict[str, ast.expr]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)


def _convert(candidate: str, node: ast.stmt) -> tuple | None:
    """(expression, expected and maybe the tolerance) of an assert, None if it has another form."""
    if not _is_assert(node):
        return None
    try:
        test = node.test if isinstance(node, ast.Assert) else node.value
        left, right, *tolerance = _comparison(test)
        if not _calls(left, candidate):
            left, right = right, left
        if not _calls(left, candidate):
            return None
        expected = json.loads(json.dumps(plain(_literal(right))))
        return ast.unparse(left), expected, *tolerance
    except Exception:  # whatever the literals of an assert do to the functions around them
        return None


def _comparison(test: ast.expr) -> tuple:
    """(left, right) of an equality; if it is approximate, with its tolerance, see `Job`."""
    match test:
        case ast.Compare(
            ast.Call(ast.Name("abs"), [ast.BinOp(left, ast.Sub(), right)]),
            [ast.Lt() | ast.LtE() as operator],
            [bound],
        ):
            absolute = float(ast.literal_eval(bound))
            if isinstance(operator, ast.Lt):
                absolute = math.nextafter(absolute, 0.0)
            return left, right, (0.0, absolute)
        case ast.Call(ast.Attribute(ast.Name("math"), "isclose"), [left, right], words):
            bounds = {word.arg: float(ast.literal_eval(word.value)) for word in words}
            return left, right, (bounds.get("rel_tol", 1e-9), bounds.get("abs_tol", 0.0))
        case ast.Call(ast.Name("assertion"), [left, right, *values]):  # of HumanEval+
            absolute = float(ast.literal_eval(values[0])) if values else 0.0
            if absolute == 0 and _is_floats(_literal(right)):
                absolute = 1e-6
            return left, right, (0.0, absolute, 1e-7 if absolute else 0.0)
        case ast.Compare(left, [ast.Eq()], [right]):
            return left, right
        case ast.Compare(left, [ast.Is()], [ast.Constant(None) as right]):
            return left, right
        case ast.Compare(left, [ast.Is()], [right]):  # True is not 1
            return ast.Call(ast.Name("repr"), [left], []), ast.Call(ast.Name("repr"), [right], [])
        case ast.UnaryOp(ast.Not(), call):
            return ast.Call(ast.Name("bool"), [call], []), ast.Constant(False)
    # A truth value is all that `assert candidate(x)` asks for.
    return ast.Call(ast.Name("bool"), [test], []), ast.Constant(True)


def _is_floats(value: object) -> bool:
    """Whether HumanEval+ allows a tolerance by itself: for a float, and for a flat list of them."""
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(item, float) for item in values)


def _literal(node: ast.expr) -> object:
    """A literal, also inside a call of CONVERSIONS; ValueError otherwise."""
    match node:
        case ast.Call(ast.Name(name), arguments, []) if name in CONVERSIONS:
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
