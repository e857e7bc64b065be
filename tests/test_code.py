"""Code problems: every format from file to score, and that assertions cannot be forged."""

import ast
import base64
import builtins
import gzip
import hashlib
import json
import pickle
import random
import zlib
from pathlib import Path

import pytest
from helpers import QUICK, save_random_model

import train
from engine.config import Config
from engine.training.start import start_policy
from rewards import Problem, UserError, parse_answers
from rollout import load_policy, score
from tasks import code as code_module
from tasks import code_files, small_programs
from tasks.code import Code, canonical, find_blocks, job, pack
from tasks.code_files import read_problems
from tasks.sandbox import Sandbox
from tasks.small_programs import HIDDEN, SHOWN, small_problems

pytestmark = pytest.mark.linux


@pytest.fixture(autouse=True, scope="module")
def shared_sandbox():
    """No test needs a sandbox of its own, whose helpers take half a second to start."""
    with Sandbox() as sandbox, pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_module, "Sandbox", lambda workers, **limits: sandbox)
        yield


def pickled(cases: list) -> str:
    """How LiveCodeBench stores its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


HUMANEVAL = {
    "task_id": "Fixture/0",
    "entry_point": "halves",
    "prompt": "from typing import List, Tuple\n\ndef helper(x):\n    return x / 2\n\n"
    "def halves(xs: List[int]) -> List[float]:\n"
    '    """Half of each number.\n    >>> halves([2])\n    [1.0]\n    """\n',
    "canonical_solution": "    return [helper(x) for x in xs]\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert True, 'runs'\n"
    "    assert candidate([2, 4]) == [1.0, 2.0], 'two'\n    assert candidate([]) == []\n"
    "    assert set(candidate([2, 2])) == {1.0}\n    assert [0.5] == candidate([1])\n"
    "    assert len(candidate([1, 2, 3])) == 3\n    assert abs(sum(candidate([1, 2])) - 1.5) < 1e-6\n"
    "    for i in range(3):\n        assert candidate([i]) == [i / 2]\n"
    "    assert candidate([6]) == [helper(6)]\n",
}
MBPP = {
    "task_id": 7,
    "text": "Write a function that counts words by length.",
    "test_setup_code": "",
    "code": "def count(words):\n    out = {}\n    for w in words:\n        out[len(w)] = out.get(len(w), 0) + 1\n"
    "    return out\n",
}
COUNTS = "assert count(['a', 'bb', 'c']) == {1: 2, 2: 1}; assert count(()) == {}"
MBPP["test_list"] = f"{COUNTS}; assert not count([]); assert count(['a']) == {{1: 7}}".split("; ")
SANITIZED = {
    "task_id": 8,
    "prompt": "Write a function that finds the minimum.",
    "test_imports": ["import math"],
    "code": "import math\ndef least(xs):\n    return min(xs)\n",
    "test_list": ["assert least((3, 1)) == 1", "assert math.isclose(least([0.5]), 0.5)"],
}
DOUBLES_OF_STDIN = [{"input": f"{i} {i}\n", "output": f"{2 * i}\n"} for i in range(30)]
LCB_STDIN = {"question_title": "Sum", "question_content": "Read two numbers, print their sum."}
LCB_STDIN |= {"platform": "atcoder", "starter_code": "", "metadata": "{}"}
LCB_STDIN |= {
    "question_id": "s1",
    "contest_date": "2025-01-04T00:00:00",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "private_test_cases": pickled([*DOUBLES_OF_STDIN, {"input": "9" * 9000, "output": "9"}]),
}
FUNCTIONAL = {"testtype": "functional"}
LCB_FUNCTION = {"question_title": "Add", "question_content": "Add two numbers."}
LCB_FUNCTION |= {"question_id": "f1", "platform": "leetcode"}
LCB_FUNCTION |= {
    "contest_date": "2025-03-01T00:00:00",
    "metadata": json.dumps({"func_name": "addAll"}),
    "starter_code": "class Solution:\n    def addAll(self, xs: List[int], y: int) -> int:\n        ",
    "public_test_cases": json.dumps([FUNCTIONAL | {"input": "[1, 2]\n3", "output": "6"}]),
    "private_test_cases": pickled([FUNCTIONAL | {"input": "[]\n0", "output": "0"}]),
}
OWN = {"id": "own-1", "prompt": "Double a number.", "entry_point": "twice"}
OWN |= {"tests": [[[1], 2], [[-3], -6]], "reference": "def twice(x):\n    return 2 * x"}
OWN_SCRIPT = {"prompt": "Print the line in upper case.", "tests": [["ab\n", "AB\n"], ["", "\n"]]}
LEETCODE = {
    "task_id": "add-to-all",
    "problem_description": "Add y to each number.",
    "starter_code": "class Solution:\n    def add(self, xs: List[int], y: int) -> List[int]:\n        ",
    "prompt": "from typing import *\n\nclass ListNode:\n    pass\n",
    "completion": "class Solution:\n    def add(self, xs: List[int], y: int) -> List[int]:\n        return [x + y for x in xs]",
    "entry_point": "Solution().add",
    "test": "def check(candidate):\n"
    + "".join(f"    assert candidate(xs = [{i}, 1], y = 1) == [{i + 1}, 2]\n" for i in range(20))
    + "    assert is_same_list(candidate(head = list_node([1])), list_node([1]))\n",
}

# record, number of tests, right program, wrong program
HALVES = "def halves(xs):\n    return "
COUNT = "def count(words): return {}.fromkeys(map(len, words), 0) or {0: 0}"
ADD_ALL = "class Solution:\n    def addAll(self, xs: List[int], y: int) -> int:\n        "
BISECT = "assert bisect.bisect_left([1], 1) == 0\n        return sum(deque(xs)) + y"
UPPER = "import sys\nprint(sys.stdin.read().strip().upper())"
FORMATS = {
    "humaneval": (HUMANEVAL, 6, f"{HALVES}[helper(x) for x in xs]", f"{HALVES}[9, *xs]"),
    "mbpp": (MBPP, 3, MBPP["code"], COUNT),
    "sanitized": (SANITIZED, 2, "def least(xs): return sorted(xs)[0]", "def least(xs): return 9"),
    "lcb stdin": (LCB_STDIN, 16, "print(sum(map(int, input().split())))", "print(input())"),
    "lcb function": (LCB_FUNCTION, 2, ADD_ALL + BISECT, f"{ADD_ALL}return -1"),
    "own": (OWN, 2, "twice = lambda x: x + x", "def twice(x):\n    return x + 100"),
    "leetcode": (LEETCODE, 16, LEETCODE["completion"], LEETCODE["completion"] + " + [y]"),
    "own script": (OWN_SCRIPT, 2, UPPER, "print('ab')"),
}


def write(*records: dict | str) -> str:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    Path("problems.jsonl").write_text("".join(line + "\n" for line in lines), "utf-8")
    return "problems.jsonl"


@pytest.mark.parametrize("name", FORMATS)
def test_a_problem_of_each_format_is_read_asked_and_judged(name, capsys):
    record, n_tests, right, wrong = FORMATS[name]
    task = Code(write(record), "problems.jsonl")
    (problem,) = task.problems("test", 1)
    assert "problems.jsonl: 1 problems" in capsys.readouterr().err
    assert task.problems("train", 3)[0].data == problem.data
    assert len(problem.data["tests"]) == n_tests
    assert task.reward(problem, right) == [1.0] * n_tests
    assert task.reward(problem, wrong) == [0.0] * n_tests
    json.dumps(problem.data)

    prompt = task.prompt(problem, 3)
    for part in ("3 different solutions", "```python", problem.data["entry_point"] or "stdin"):
        assert part in prompt
    text = f"<think>```python\nno\n```</think>First:\n```python\n{right}\n```\nthen\n```\n{wrong}\n```\n"
    text += f"```python\n# same\n{right}\n```\n"
    answers = parse_answers(text, task, 3)
    assert answers == [right.strip(), wrong, f"# same\n{right.strip()}"]
    scored = score(task, [problem], [answers, []], 3)
    assert scored.scalars.tolist() == [[[1.0, 0.0, 1.0], [0.0] * 3]]
    assert scored.answer_mask.tolist() == [[[True] * 3, [False] * 3]]
    assert scored.repeat_mask.nonzero().tolist() == [[0, 0, 2]]


NO_PAIRS = """f(1) != 2; f(1) == f(2); f(1) == g(2); (f(1) == 2) == True; f(1) == 2 == 2; f(1) > 2; g(1) == 2;
f(1).issubset({2}); f(helper) == 1; f(1) == 1j; f(1) == 2 and True; f(x=1) == open('x'); abs() < 3;
f(1) == sorted([3, 1], reverse=True); f(1) == dict(a=1); torch.isclose(f(1), 3.0)"""


def test_asserts_cannot_be_forged():
    """Guards against grading HumanEval by running its asserts beside the answer, where equality can be redefined."""
    equal = "class E(list):\n    def __eq__(self, o): return 1\n    def __len__(self): return 1\n"
    program = f"{equal}def halves(xs): return E([9])"
    (problem,) = read_problems(write(HUMANEVAL))
    assert not any(*Code()._verdicts([(problem, program)]))
    source = job(problem, program).program
    assert "1e-06" not in source and "0.5]" not in source.split("def halves")[-1]


@pytest.mark.parametrize(
    ("text", "converted"),
    [
        ("assert f(1) == 2", ("f(1)", 2)),
        ("assert f(1) is None", ("f(1)", None)),
        ("assert f(1)", ("bool(f(1))", True)),
        ("assert not f(1)", ("bool(f(1))", False)),
        ("assert sorted(f([3])) == sorted([2, 1])", ("sorted(f([3]))", [1, 2])),
        ("assert f((1, 2)) == (1, [2])", ("f((1, 2))", [1, [2]])),
        ("assert set(f(1)) == set([2, 1])", ("set(f(1))", {"set": [1, 2]})),
        ("assert f(1) == {1: 2}", ("f(1)", {"dict": [[1, 2]]})),
        ("assert round(f(1), 2) == 0.33", ("round(f(1), 2)", 0.33)),
        ("assert f(1) is True", ("repr(f(1))", "True")),
        ("assert abs(f(1) - 0.3) <= 1e-3", ("f(1)", 0.3, (0.0, 1e-3))),
        ("assert math.isclose(f(1), 3.0, rel_tol=0.01)", ("f(1)", 3.0, (0.01, 0.0))),
        ("assertion(f(1), 0.5, 1e-9)", ("f(1)", 0.5, (0.0, 1e-9, 1e-7))),
        *((f"assert {text.strip()}", None) for text in NO_PAIRS.split(";")),
        ("assert abs(f(1) - 2) < 1" + "0" * 400, None),
    ],
)
def test_asserts_become_pairs_or_nothing(text, converted):
    """By hand; what compares inside the program's process must never pass as a pair."""
    assert code_files._convert("f", ast.parse(text).body[0]) == converted


DOUBLES = {"prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "    return 2 * x\n"}
INPUTS = "    inputs = [[1], [2], [1.5]]\n    results = [2, 4, 3.0000001]\n"
TRUTHS = "assert f(3) == True; assert f(3) == 1; assert f(3) is True; assert f(3) is 1; assert f(3)"
CLOSE = "assert math.isclose(f(9.0), 9.0, rel_tol=1e-5); assert math.isclose(f(0.0), 0.0, abs_tol=1e-8); assert abs(f(7) - 7) < 1"
HUNDREDS = """for inp, exp in zip([[100.0], [[1e9, 5.0]], [[[100.0]]], [100]], [100.0, [1e9, 5.0], [[100.0]], 100]):
        assertion(candidate(*inp), exp, 0)"""
ADDS = "def f(x): return [f(y) for y in x] if type(x) is list else x + "


@pytest.mark.parametrize(
    ("asserts", "program", "passed"),
    [
        (TRUTHS, "def f(x): return True", [1, 1, 1, 0, 1]),
        (TRUTHS, "def f(x): return 1", [1, 1, 0, 1, 1]),
        (TRUTHS, "def f(x): return 1.0", [1, 1, 0, 0, 1]),
        (TRUTHS, "def f(x): return [True]", [0, 0, 0, 0, 1]),
        (CLOSE, f"{ADDS}8e-9", [1, 1, 1]),
        (CLOSE, f"{ADDS}8e-5", [1, 0, 1]),
        (CLOSE, f"{ADDS}1", [0, 0, 0]),
        (CLOSE, "def f(x): return float('nan')", [0, 0, 0]),
        (HUNDREDS, f"{ADDS}0", [1, 1, 1, 1]),
        (HUNDREDS, f"{ADDS}5e-6", [1, 0, 0, 0]),
        (HUNDREDS, f"{ADDS}1.4e-6", [1, 1, 0, 0]),
        (HUNDREDS, "def f(x): return x if type(x) is not list else [1e9 + 90, 5]", [1, 1, 0, 1]),
    ],
)
def test_what_an_assert_allows(asserts, program, passed):
    """Guards against right answers that fail, and wrong ones that pass, for the way in which an assert compares."""
    check = "def check(candidate):\n    " + "\n    ".join(asserts.split("; "))
    (problem,) = read_problems(write(DOUBLES | {"test": check}))
    assert Code()._verdicts([(problem, program)]) == [[bool(verdict) for verdict in passed]]


def test_a_judge_of_livecodebench_takes_one_for_true():
    """As `==` does there; a test of one's own does not."""
    case = [{"input": "[1]\n2", "output": "true"}]
    lcb = LCB_FUNCTION | {"public_test_cases": json.dumps(case), "private_test_cases": "[]"}
    own = OWN | {"tests": [[[1], True]], "reference": ""}
    problems = read_problems(write(lcb, own))
    programs = [f"{ADD_ALL}return 1", "def twice(x): return 1"]
    assert Code()._verdicts(list(zip(problems, programs, strict=True))) == [[True], [False]]


HIDING = ("{} = [1, 2]\n", "{} = 1\ndel {}\n")


def test_a_program_may_hide_builtin_functions():
    """Guards against right answers that earn nothing for a variable `list`, where tests are made of asserts."""
    tests = ["assert f([3]) == {1: ({3}, [3])}", "assert set(f((3, 3))) == {2}", "assert f([])"]
    code = "def f(x): return {len(x): ({*x}, [*x])}"
    (problem,) = read_problems(write(MBPP | {"code": code, "test_list": tests}))
    names = [name for name in dir(builtins) if name[0].islower() and name != "len"]
    pairs = []
    for name in names:
        pairs += [(problem, hiding.format(name, name) + code) for hiding in HIDING]
    verdicts = Code()._verdicts(pairs)
    failed = [pair[1] for pair, passed in zip(pairs, verdicts, strict=True) if not all(passed)]
    assert not failed

    own_sum = "def sum(a, b): return [a, b][1:]"  # MBPP has functions of such names
    named = MBPP | {"code": own_sum, "test_list": ["assert sum(1, 2) == [2]"]}
    method = f"map = repr = sorted = 3\n{LEETCODE['completion']}"
    pairs = list(zip(read_problems(write(named, LEETCODE)), (own_sum, method), strict=True))
    assert Code()._verdicts(pairs) == [[True], [True] * 16]


LCB_STARS = """string re datetime collections heapq bisect copy math random statistics itertools functools
operator io sys json builtins typing"""


def test_what_the_grader_of_livecodebench_imports_is_there():
    """Every name with its meaning, but for classes that typing would hide; no built-in function is hidden."""
    official: dict = {}
    modules = LCB_STARS.split()
    exec("\n".join(f"from {name} import *" for name in modules), official)
    exec(f"import {', '.join(modules[:-2])}", official)
    ours = dict(vars(builtins))
    exec(code_files.IMPORTS, ours)
    others = {name for name in official if ours.get(name) is not official[name]}
    others -= {"__builtins__", "exit", "copyright"}  # the last two are those of site
    assert others == {"Counter", "ChainMap", "OrderedDict", "Match", "Pattern"}


FUTURE = "from __future__ import"
TWICE = "\ndef twice(x: Unknown) -> Other: return 2 * x\n"


@pytest.mark.parametrize(
    "head",
    [
        f"{FUTURE} (\n    annotations,  # of later names\n    division,\n)",
        f"{FUTURE} annotations; import math; e = 'é'",
        f"'''é\n{FUTURE} braces\n'''\n# é\n{FUTURE} division\r\nfrom  __future__  import\tannotations",
    ],
)
def test_future_imports_of_every_form_come_first(head):
    """Guards against a right answer that ends with a SyntaxError, below what it is put under."""
    (problem,) = read_problems(write(OWN))
    assert Code()._verdicts([(problem, head + TWICE)]) == [[True, True]]


def test_a_source_without_future_imports_stays_as_it_is():
    text = f"x = '''\r\n{FUTURE} annotations\n'''"
    for source in (text, f"{text} +", f"{text}\ud800", f"def f():\n    {FUTURE} annotations"):
        assert code_module.split_future(source) == ("", source)


EVALPLUS = f"""def assertion(out, exp, atol):
    assert out == exp
def check(candidate):
{INPUTS}    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""
EXACT = f"def check(g):\n{INPUTS}    for xs, y in zip(inputs, results): assert g(*xs) == y\n"


@pytest.mark.parametrize(
    ("test", "n_tests", "n_asserts"),
    [
        ("def check():\n    assert f(2) == 4\n    assert f(3) == 6\n", 2, 2),
        (EVALPLUS, 3, 3),
        (EXACT, 2, 3),  # an assert allows nothing: 3.0000001 is not 3
        ("def check(g):\n    for x in (1, 2): assert f(x) == 2 * x\n", 0, 2),
        (f"def check(g):\n    for x in {[[0]] * 20}: assert g(*x) == 0\n", 16, 20),
    ],
)
def test_names_and_loops_of_humaneval(test, n_tests, n_asserts, capsys):
    """Guards against a file of which no test is read, or half of them, for its way of writing them."""
    task = Code(write(DOUBLES | {"test": test}, HUMANEVAL), "problems.jsonl")
    tests = [problem["tests"] for problem in task.parts["test"] if problem["entry_point"] == "f"]
    assert sum(map(len, tests)) == n_tests
    assert f"left out: {2 + n_asserts - n_tests} asserts" in capsys.readouterr().err


def test_what_may_be_missing_or_written_otherwise():
    """An id, or the line, stands in for task_id; imports are text or null; ends of lines are Unix's."""
    without_id = {name: value for name, value in HUMANEVAL.items() if name != "task_id"}
    windows = {name: value.replace("\n", "\r\n") for name, value in without_id.items()}
    records = [
        SANITIZED | {"test_imports": "import math"},
        SANITIZED | {"task_id": 9, "test_imports": None},
        windows | {"id": 5},
        windows,
        OWN_SCRIPT | {"entry_point": None},
    ]
    path = Path(write(*records))
    path.write_text(path.read_text("utf-8"), encoding="utf-8-sig")  # with a byte order mark
    problems = read_problems("problems.jsonl")
    ids = [problem["id"] for problem in problems]
    assert ids == ["MBPP/8", "MBPP/9", "5", "problems-4", "problems-5"]
    assert problems[4]["entry_point"] is None and problems[4]["call"] is None
    assert [problem["before"] for problem in problems[:2]] == ["import math\n", ""]
    assert problems[2]["tests"] == read_problems(write(HUMANEVAL))[0]["tests"]
    for problem in problems:
        assert "\r" not in str(problem | {"tests": []})


def test_line_ends_in_a_test_are_what_is_tested():
    """Guards against a right answer that fails where a file of one's own tests "\\r\\n"."""
    own = OWN | {"tests": [[["a\r\nb\r"], 5]], "prompt": "Count\r\nletters.\r", "reference": ""}
    script = OWN_SCRIPT | {"tests": [["a\r\nb\r\n", "2\r\n"]], "reference": ""}
    problems = read_problems(write(own, script))
    assert problems[0]["text"] == "Count\nletters.\n"
    programs = ["def twice(x): return len(x)", "print(len(open(0).readlines()))"]
    assert Code()._verdicts(list(zip(problems, programs, strict=True))) == [[True], [True]]


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


BOMB = base64.b64encode(zlib.compress(pickle.dumps(Bomb()))).decode()
BAD_FILES = [
    ([OWN, OWN | {"tests": []}], "line 2, .*tests"),
    ([OWN_SCRIPT | {"tests": [[[1], "2"]]}], "line 1, .*tests"),
    ([HUMANEVAL | {"test": "assert 1"}], "line 1, .*test"),
    ([OWN | {"entry_point": "Solution.twice"}], "line 1, .*entry_point"),
    ([MBPP | {"test_list": ["assert other(1) == 2"]}], "line 1, .*test_list"),
    ([LCB_STDIN | {"public_test_cases": "[?"}], "line 1, .*public_test_cases"),
    ([LCB_STDIN | {"private_test_cases": BOMB}], "line 1, .*private_test_cases"),
    ([MBPP | {"code": "def f("}], "line 1, cannot be used .SyntaxError: .*code, line 1"),
    ([{"question": "?", "answer": 1}], "line 1, fields question, answer: no known format"),
    ([HUMANEVAL | {"entry_point": "thirds"}], "field prompt: no function 'thirds' is defined"),
    ([OWN | {"prompt": "\ud800"}], "line 1, cannot be used .*surrogates not allowed"),
    ([OWN | {"reference": "import numpy"}], "problem own-1, field reference: fails .* a package"),
    ([""], "no problem with a test is left"),
    ([MBPP | {"test_list": ["assert count([]) == 3"]}], "left out: 1 asserts that their reference"),
    ([LCB_STDIN], "1 problems to train on, 0 held out; .* --test-data FILE"),
]


@pytest.mark.parametrize(("records", "message"), BAD_FILES)
def test_a_bad_file_is_named_in_one_line(records, message):
    """Before training starts; a pickle is never executed."""
    with pytest.raises(UserError, match=f"^--data problems.jsonl.*{message}.*$"):
        Code(write(*records))
    assert not Path("executed").exists()


def several(n: int) -> list[dict]:
    return [OWN | {"id": f"p{i}", "prompt": f"Double {i}."} for i in range(n)]


def splits(task: Code, field: str = "id") -> dict[str, list]:
    return {name: [problem[field] for problem in part] for name, part in task.parts.items()}


def test_held_out_problems_are_held_out(capsys):
    """By identity where there are no dates, by date where all have one; validation is a part of the rest."""
    task = Code(write(*several(40)))
    assert "left out" not in capsys.readouterr().err
    parts = splits(task)
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [29, 3, 8]
    assert len({id for part in parts.values() for id in part}) == 40
    assert splits(Code(write(*several(40)[::-1]))) == parts
    first, second = task.problems("train", 29), task.problems("train", 29, start=29)
    assert {problem.id for problem in first} == {problem.id for problem in second}
    assert first != second
    assert task.problems("train", 9, start=25) == [*first[25:], *second[:5]]

    dated = Code(write(LCB_STDIN, LCB_FUNCTION))
    assert splits(dated) == {"train": ["s1"], "validation": [], "test": ["f1"]}
    with pytest.raises(UserError, match="no problem is left for the split validation"):
        dated.problems("validation", 1)


def test_no_text_stands_on_both_sides(capsys):
    """Guards against a text under two ids on both sides. Functions of one text are different problems."""
    records = [record | {"prompt": f"Double {i // 3}."} for i, record in enumerate(several(60))]
    parts = splits(Code(write(*records)), "text")
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [15, 1, 4]
    assert len({text for part in parts.values() for text in part}) == 20
    assert "40 problems without any test or with the text of another" in capsys.readouterr().err
    for i, record in enumerate(records):
        record |= {"prompt": "Complete it.", "entry_point": f"f{i}", "reference": ""}
    assert sum(map(len, splits(Code(write(*records))).values())) == 60

    records = []
    dates = ("2024-01-01", "2025-03-01", "2025-02-01", "2025-01-31", "2025-06-01", "2025-02-01")
    for i, date in enumerate(dates):
        own = {"question_id": f"q{i}", "contest_date": date, "question_content": f"Sum {i // 2}"}
        records.append(LCB_STDIN | own)
    parts = splits(Code(write(*records)))
    assert {*parts["train"]} == {"q0", "q3"} and parts["test"] == ["q5"], "the earliest counts"
    assert "left out: 6 tests of more than 8192 bytes" in capsys.readouterr().err


def test_small_problems_and_their_words_are_those_of_the_published_tables():
    """Guards against other problems, demonstrations or words: another order of words is another model."""
    assert not {*SHOWN} & {*HIDDEN}
    task = Code()
    shown = []
    for i, problem in enumerate(task.problems("demonstrations", 50)):
        shown.append(task.demonstration(problem, random.Random(i)))
    drawn = []
    for split in ("train", "validation", "test"):
        drawn.append([problem.data for problem in task.problems(split, 20, 1, 2900)])
    text = json.dumps([task.words, drawn, shown])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "2a7852d6b793bfcf"


ODD = """x // 0 | x % 0 if x < 3 else 1 | abs | x ( 3 ) | x + | ) , ( | 0x3 | x ** 99 | 1 if | (x := 3) |
__import__('os') | x.real | [x] | f(x) | F | i | x if x else print | lambda: 1 | * x | x <<= 3 | x if x |
x = = 3 | ) + ("""


def test_expressions_that_share_a_process_are_judged_as_if_alone():
    """Guards against a packed program that changes another's verdict; only pure arithmetic is packed."""
    rng, problems = random.Random(0), small_problems()["train"]
    pairs = [(problems[i], small_programs.demonstration(problems[i], rng)) for i in range(60)]
    odd = [text.strip() for text in ODD.split("|")]
    # A regular expression may try all ways to cut the last one in pieces.
    odd += ["def f(x):\n    return x", "x * " * 49 + "x", "1" * 999]
    pairs += [(problem, text) for text, problem in zip(odd, problems, strict=False)]
    jobs = pack(pairs)
    alone = [pairs[indices[0]][1] for indices, _ in jobs if len(indices) == 1]
    shared = [pairs[i][1] for indices, _ in jobs if len(indices) > 1 for i in indices]
    assert shared
    assert not any(word in text for text in shared for word in ("_", ".", ":", "F", "f("))
    assert "x ** 99" in alone and "__import__('os')" in alone
    task = Code()
    together = task.rewards([(Problem("", problem), text) for problem, text in pairs])
    for (problem, text), vector in zip(pairs, together, strict=True):
        expected = task.sandbox.run([job(problem, text)])[0] if canonical(text) else [False] * 8
        assert vector == [float(value) for value in expected], text


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```python\na\n```", ["a\n"]),
        ('```python title="a.py"\na\n```', ["a\n"]),
        ("```{.python}\na\n```\r\n", ["a\n"]),
        ("~~~py\na\n```\n~~~", ["a\n```\n"]),
        ("````python\na\n```\nb\n````", ["a\n```\nb\n"]),
        ("1. One:\n   ```python\n   if a:\n       b\n   ```\n2. Two", ["if a:\n    b\n"]),
        ("1、```python\na\n```\n（2） ```py\nb\n```", ["a\n", "b\n"]),
        ("   ```python\nif a:\n    b\n   ```", ["if a:\n    b\n"]),  # the fence alone is indented
        ("```python\nd = '''\n    ```\n    '''\n```", ["d = '''\n    ```\n    '''\n"]),
        ("```bash\na\n```", []),
        ("text ```python\na\n```", []),
        ("Input:\n```\n3 4\n```\n```python\na\n```\n```\n>>> f(2)\n2\n```", ["a\n"]),
        ("```python\nx = '```'\n```", ["x = '```'\n"]),
    ],
)
def test_blocks_by_hand(text, blocks):
    """Guards against right programs that earn nothing, for a fence as chat models write it."""
    assert find_blocks(text) == find_blocks(text, finished=True) == blocks


def test_a_last_block_without_fence_counts_where_the_rollout_ended_by_itself():
    """Guards against half a program that is an answer, and a whole one that is none."""
    task = Code()
    for text in ("```python\na\n```\n```python\nb", "```python\na\n```\n~~~\nb\n"):
        assert parse_answers(text, task, 2, finished=True) == ["a", "b"]
        assert parse_answers(text, task, 2, finished=False) == ["a"]
    assert {"`", "~", ">"} <= set(task.ends), "a closing fence or tag may end a rollout"


def test_a_line_ends_with_a_newline_alone():
    """Guards against lines cut at a form feed or U+2028, which Python and JSON take for a blank or a letter."""
    head = "# page\f one\u2028two\x1c\ndef help(x):\n    return x\n\n\n"
    test = "def check(candidate):\n    assert candidate(1) == 2\n"
    (problem,) = read_problems(write(DOUBLES | {"prompt": f"{head}def f(x):\n", "test": test}))
    assert problem["before"] == head
    assert Code()._verdicts([(problem, problem["reference"])]) == [[True]]
    cases = json.dumps([{"input": '"a\u2028b"', "output": '"x\x85y"'}])
    (problem,) = read_problems(write(LCB_FUNCTION | {"public_test_cases": cases}))
    assert [["a\u2028b"], "x\x85y"] in problem["tests"]


def test_answers_meet_the_source_around_them():
    """A docstring that mentions the function, a decorator, and `from __future__`, which must stay the first line."""
    future = "from __future__ import annotations\n"
    head = f"{future}import functools\n\nNOTE = 'def f('\n\n@functools.lru_cache\ndef f(x):\n"
    prompt = f"{head}    '''Like def f(y) of yore.'''\n"
    test = "def check(candidate):\n    assert candidate(1) == 2\n"
    (problem,) = read_problems(write(DOUBLES | {"prompt": prompt, "test": test}))
    right = f"{future}def f(x: int) -> Later:\n    return functools.reduce(max, [2 * x])"
    assert Code()._verdicts([(problem, right)]) == [[True]]


def test_equal_syntax_trees_are_equal_programs():
    assert canonical("x+1 # one") == canonical("x  +  (1)") != canonical("1 + x")
    cannot_parse = ["", "  ", "x +", "(" * 9000, "-" * 60000 + "1", "x\0", "\ud800", "1" * 70000]
    for text in (*cannot_parse, "if x:\n" * 300):
        assert canonical(text) == ""


@pytest.mark.draws
def test_real_formats_go_through_training_and_evaluation(capsys):
    """A small random model on a problem of each format: read, asked, sampled, judged. Nine tokens
    hold no program: guards against a run that learnt nothing and ends like a success."""
    data = write(*(record for record, *_ in FORMATS.values()))
    files = ["--data", data, "--test-data", data, "--model", save_random_model("model", "llama")]
    flags = "--task code --out run --method vpo --warm-steps 0 --steps 1 --max-new-tokens 9"
    train.main([*QUICK, *files, *flags.split(), "--eval-problems", "20"])
    report = json.loads(Path("run/eval.json").read_text("utf-8"))
    assert report["policies"]["vpo"]["pass@4"]["mean"] == 0
    told = capsys.readouterr()
    assert "8 test problems" in told.out
    assert "0% of the answers asked for are there and distinct" in told.err
    first = json.loads(Path("run/vpo/samples.jsonl").read_text("utf-8").splitlines()[0])
    assert first["problem"]["data"]["tests"]


def test_a_language_model_imitates_the_one_reference_once():
    """Guards against a warm start that shows a set of m copies: it would teach copies."""
    task = Code(data=write(*several(12)))
    policy = load_policy(save_random_model("model", "llama"), task)
    prompts, texts = train.demonstrations(policy, task, Config(m=3), step=2)
    assert len(prompts) == len(texts) == 8
    for prompt, text in zip(prompts, texts, strict=True):
        assert "in one ```python block" in prompt
        assert parse_answers(text, task, 3) == [OWN["reference"]]


def test_a_problem_that_cannot_be_trained_on_is_found_before_minutes_are_spent():
    """One without reference, and the one of 3,000 prompts with too many tokens, though not the most characters."""
    model = save_random_model("model", "llama", max_position_embeddings=2400)
    config = Config(task="code", model=model, warm_steps=3, steps=1)
    config.device, config.dtype, config.max_new_tokens = "cpu", "float32", 9

    def starts(lines: list[dict], message: str) -> None:
        with pytest.raises(UserError, match=message):
            start_policy(config, Code(data=write(*lines)), train.demonstrations)

    lines = [line | {"reference": ""} for line in several(3000)]
    for line in lines[:100]:
        line["prompt"] += " It is long." * 60
    lines[2293]["prompt"] += "🦊" * 600
    starts(lines, "^problem 'p2293': .* need a context .*shorten Task.prompt, .* another --model")
    lines = several(60)
    shown = Code(data=write(*lines)).problems("demonstrations", 24)[-1].id
    next(line for line in lines if line["id"] == shown)["reference"] = ""
    starts(lines, "has no reference that --warm-steps could show")


def test_a_file_in_gzip_is_read_and_a_damaged_one_named():
    plain = Path(write(*several(9)))
    packed = Path("packed.jsonl.gz")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert Code(str(packed)).parts == Code(str(plain)).parts
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"--data packed.jsonl.gz: cannot be read .*gzip"):
        Code(str(packed))
