"""Code problems: every format from file to score, what is wrong with a file, and that assertions cannot be forged."""

import base64
import json
import pickle
import random
import zlib
from pathlib import Path

import pytest
import torch
from test_rollout import save_random_model
from test_train import QUICK, fails, in_an_empty_folder  # noqa: F401 - the fixture applies by its name

import code_problems
import eval as evaluation
import train
from code_problems import BadRecord, canonical, find_blocks, job, pack, read_problems, small_problems
from rewards import Code, Problem, UserError
from rollout import parse_answers, score


def pickled(cases: list) -> str:
    """How LiveCodeBench stores its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


HUMANEVAL = {
    "task_id": "Fixture/0", "entry_point": "halves",
    "prompt": "from typing import List, Tuple\n\ndef helper(x):\n    return x / 2\n\ndef halves(xs: List[int]) -> List[float]:\n"
              '    """Half of each number.\n    >>> halves([2])\n    [1.0]\n    """\n',
    "canonical_solution": "    return [helper(x) for x in xs]\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert True, 'runs'\n    assert candidate([2, 4]) == [1.0, 2.0], 'two'\n"
            "    assert candidate([]) == []\n    assert set(candidate([2, 2])) == {1.0}\n    assert [0.5] == candidate([1])\n"
            "    assert len(candidate([1, 2, 3])) == 3\n    assert abs(sum(candidate([1, 2])) - 1.5) < 1e-6\n"
            "    for i in range(3):\n        assert candidate([i]) == [i / 2]\n    assert candidate([6]) == [helper(6)]\n"}
MBPP = {"task_id": 7, "text": "Write a function that counts words by length.", "code": "def count(words):\n    out = {}\n"
        "    for w in words:\n        out[len(w)] = out.get(len(w), 0) + 1\n    return out\n",
        "test_list": ["assert count(['a', 'bb', 'c']) == {1: 2, 2: 1}", "assert count(()) == {}", "assert not count([])",
                      "assert count(['a']) == {1: 7}"], "test_setup_code": "", "challenge_test_list": []}
SANITIZED = {"task_id": 8, "prompt": "Write a function that finds the minimum.", "code": "import math\ndef least(xs):\n    return min(xs)\n",
             "test_list": ["assert least((3, 1)) == 1", "assert math.isclose(least([0.5]), 0.5, rel_tol=0.001)"], "test_imports": ["import math"]}
LCB_STDIN = {"question_title": "Sum", "question_content": "Read two numbers, print their sum.", "question_id": "s1", "platform": "atcoder",
             "contest_date": "2025-01-04T00:00:00", "starter_code": "", "metadata": "{}",
             "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
             "private_test_cases": pickled([{"input": f"{i} {i}\n", "output": f"{2 * i}\n", "testtype": "stdin"} for i in range(30)] +
                                           [{"input": "9" * 9000, "output": "9", "testtype": "stdin"}])}
LCB_FUNCTION = {"question_title": "Add", "question_content": "Add two numbers.", "question_id": "f1", "platform": "leetcode",
                "contest_date": "2025-03-01T00:00:00", "metadata": json.dumps({"func_name": "addAll"}),
                "starter_code": "class Solution:\n    def addAll(self, xs: List[int], y: int) -> int:\n        ",
                "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]),
                "private_test_cases": pickled([{"input": "[]\n0", "output": "0", "testtype": "functional"}])}
OWN = {"id": "own-1", "prompt": "Double a number.", "entry_point": "twice", "tests": [[[1], 2], [[-3], -6]],
       "reference": "def twice(x):\n    return 2 * x"}
OWN_SCRIPT = {"prompt": "Print the line in upper case.", "tests": [["ab\n", "AB\n"], ["", "\n"]]}

# record, number of tests, right program, wrong program
FORMATS = {
    "humaneval": (HUMANEVAL, 6, "def halves(xs):\n    return [helper(x) for x in xs]", "def halves(xs):\n    return [9, *xs]"),
    "mbpp": (MBPP, 3, MBPP["code"], "def count(words):\n    return {}.fromkeys(map(len, words), 0) or {0: 0}"),
    "sanitized": (SANITIZED, 2, "def least(xs):\n    return sorted(xs)[0]", "def least(xs):\n    return 9"),
    "livecodebench stdin": (LCB_STDIN, 16, "print(sum(map(int, input().split())))", "print(input())"),
    "livecodebench function": (LCB_FUNCTION, 2, "class Solution:\n    def addAll(self, xs: List[int], y: int) -> int:\n        assert bisect.bisect_left([1], 1) == 0\n        return sum(deque(xs)) + y",
                               "class Solution:\n    def addAll(self, xs, y):\n        return -1"),
    "own": (OWN, 2, "twice = lambda x: x + x", "def twice(x):\n    return x + 100"),
    "own script": (OWN_SCRIPT, 2, "try:\n    print(input().upper())\nexcept EOFError:\n    print()", "print('ab')"),
}


def write(*records: dict | str, name: str = "problems.jsonl") -> str:
    Path(name).write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return name


@pytest.mark.parametrize("name", FORMATS)
def test_a_problem_of_each_format_is_read_asked_and_judged(name, capsys):
    record, n_tests, right, wrong = FORMATS[name]
    task = Code(write(record), "problems.jsonl")
    problem, = task.problems("test", 1)
    assert task.problems("train", 3)[0].data == problem.data and len(problem.data["tests"]) == n_tests
    assert task.reward(problem, right) == [1.0] * n_tests and task.reward(problem, wrong) == [0.0] * n_tests
    json.dumps(problem.data)
    prompt = task.prompt(problem, 3)
    assert "3 different solutions" in prompt and "```python" in prompt and "1 problems with" in capsys.readouterr().err
    assert (problem.data["entry_point"] or "stdin") in prompt
    text = f"<think>```python\nno\n```</think>First:\n```python\n{right}\n```\nthen\n```\n{wrong}\n```\n```python\n# same\n{right}\n```\n"
    assert parse_answers(text, task, 3) == [right.strip(), wrong]
    scored = score(task, [problem], [[parse_answers(text, task, 3, distinct=False), []]], 3)
    assert scored.scalars.tolist() == [[[1.0, 0.0, 1.0], [0.0] * 3]] and scored.mask.tolist() == [[[True, True, False], [False] * 3]]


def test_what_is_left_out_is_counted(capsys):
    """A loop and a helper in HumanEval, one wrong test in MBPP: none of them is silently dropped or kept."""
    problems, left_out = read_problems(write(HUMANEVAL, MBPP))
    assert left_out == 2 and [len(problem["tests"]) for problem in problems] == [6, 4]
    Code("problems.jsonl", "problems.jsonl")
    assert "2 problems with 9 tests; left out: 2 asserts" in (error := capsys.readouterr().err) and "1 tests that the reference" in error


CHEATS = [
    "class E:\n    def __eq__(self, o): return True\n    __hash__ = None\ndef halves(xs): return E()",
    "class E(list):\n    def __eq__(self, o): return True\n    def __len__(self): return 1\ndef halves(xs): return E([9])",
    "import sys\ndef halves(xs): sys.exit(0)", "import os\ndef halves(xs): os._exit(0)",
    "def halves(xs): return [7, *xs]\ndef _plain_(v): return True", "import builtins\nbuiltins.set = builtins.len = lambda v: 1\ndef halves(xs): return 0",
    "def halves(xs):\n    import inspect\n    return [v for f in inspect.stack() for v in f.frame.f_globals.values() if isinstance(v, list)]",
]


@pytest.mark.parametrize("program", CHEATS)
def test_asserts_cannot_be_forged(program):
    """Guards against grading HumanEval by running its asserts beside the answer, where equality can be redefined."""
    task = Code(write(HUMANEVAL), "problems.jsonl")
    problem, = task.problems("test", 1)
    assert not any(task.reward(problem, program))
    source = job(problem.data, program).program
    assert "1e-06" not in source and "0.5]" not in source.split("def halves")[-1]


@pytest.mark.parametrize(("text", "converted"), [
    ("assert f(1) == 2", ("f(1)", 2)), ("assert 2 == f(1)", ("f(1)", 2)), ("assert f(1) is None", ("f(1)", None)),
    ("assert f(1)", ("bool(f(1))", True)), ("assert not f(1)", ("bool(f(1))", False)),
    ("assert sorted(f([3])) == sorted([2, 1])", ("sorted(f([3]))", [1, 2])), ("assert f((1, 2)) == (1, [2])", ("f((1, 2))", [1, [2]])),
    ("assert set(f(1)) == set([2, 1])", ("set(f(1))", {"set": [1, 2]})), ("assert f(1) == {1: 2}", ("f(1)", {"dict": [[1, 2]]})),
    ("assert round(f(1), 2) == 0.33", ("round(f(1), 2)", 0.33)), ("assert abs(f(1) - 0.3) < 1e-3", ("f(1)", 0.3, (0.0, 1e-3))),
    ("assert math.isclose(f(1), 3.0, rel_tol=0.01)", ("f(1)", 3.0, (0.01, 0.0))), ("assert f(-1) == -2.5", ("f(-1)", -2.5)),
    ("assert f(1) != 2", None), ("assert f(1) == f(2)", None), ("assert f(1) == g(2)", None), ("assert (f(1) == 2) == True", None),
    ("assert f(1) == 2 == 2", None), ("assert f(1) > 2", None), ("assert f(1).issubset({2})", None), ("assert g(1) == 2", None),
    ("assert f(helper) == 1", None), ("assert f(1) == 1j", None), ("assert f(1) == 2 and True", None), ("assert f(x=1) == open('x')", None),
    ("assert f(1) == sorted([3, 1], reverse=True)", None), ("assert f(1) == dict(a=1)", None), ("assert abs() < 3", None),
    ("assert abs(f(1) - 2) < 1" + "0" * 400, None), ("assert abs(f(1) - 2) < -1", None)])
def test_asserts_become_pairs_or_nothing(text, converted):
    """By hand; what compares inside the program's process must never pass as a pair."""
    assert code_problems._convert("f", code_problems.ast.parse(text).body[0]) == converted


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


BAD = {
    "line 2": ([OWN, "{oops"], "line 2: not JSON"), "not an object": (["[1]"], "line 1, not a JSON object: each line must be one problem"),
    "no format": ([{"question": "?", "answer": 1}], "line 1, fields question, answer: no known format; expected are those of HumanEval: prompt, entry"),
    "empty": ([""], "holds no problem"), "no tests": ([OWN | {"tests": []}], "line 1, field tests: 0 tests; allowed are 1 to 100"),
    "too many": ([OWN, OWN | {"tests": [[[1], 2]] * 101}], "line 2, field tests: 101 tests"),
    "without expected": ([OWN | {"tests": [[[1], 2], [[3]]]}], "field tests[1]: has no expected output; write [[argument, ...], expected]"),
    "not a pair": ([OWN | {"tests": [[1, 2, 3]]}], "field tests[0]: must be a pair"), "arguments": ([OWN | {"tests": [[1, 2]]}], "must be a list"),
    "stdin": ([OWN_SCRIPT | {"tests": [[[1], "2"]]}], "stdin and stdout must be text; to call a function name it in entry_point"),
    "entry point": ([OWN | {"entry_point": "2x"}], "field entry_point: '2x' is no name of a function"),
    "undefined": ([OWN | {"entry_point": "thrice"}], "field reference: 'thrice' is defined by no program, only twice"),
    "reference": ([OWN | {"reference": "def twice(x): return x"}], "problems.jsonl, line 1, field reference: fails tests[0]"),
    "type": ([OWN | {"prompt": 3}], "line 1, field prompt: must be text, not int"),
    "humaneval entry": ([HUMANEVAL | {"entry_point": "thirds"}], "field entry_point: 'thirds' is defined by no program"),
    "humaneval test": ([HUMANEVAL | {"test": "assert 1"}], "field test: has no function check(candidate)"),
    "humaneval syntax": ([HUMANEVAL | {"test": "def check("}], "field test: not Python"),
    "mbpp": ([MBPP | {"test_list": ["assert other(1) == 2"]}], "field test_list: calls no function that code defines (count)"),
    "mbpp none": ([MBPP | {"test_list": []}], "field test_list: must be a list of asserts"),
    "lcb json": ([LCB_STDIN | {"public_test_cases": "?"}], "field public_test_cases: neither a JSON list nor base64"),
    "lcb output": ([LCB_STDIN | {"public_test_cases": '[{"input": "1"}]'}], "field public_test_cases[0]: needs input and output"),
    "lcb large": ([LCB_STDIN | {"public_test_cases": "[]", "private_test_cases": pickled([{"input": "9" * 9000, "output": ""}])}], "no test of at most"),
    "lcb name": ([LCB_FUNCTION | {"metadata": "{}"}], "field metadata or private_test_cases: func_name"),
    "test for tests": ([{"prompt": "?", "entry_point": "f", "test": [[[1], 2]]}], "no known format"),
    "lcb name type": ([LCB_FUNCTION | {"metadata": '{"func_name": 3}'}], "line 1: cannot be used"),
    "long integer": (['{"id": "a", "prompt": "?", "entry_point": "f", "tests": [[[1], ' + "9" * 5000 + "]]}"], "line 1: cannot be used"),
    "deep": ([OWN | {"tests": [[[1], eval("[" * 90 + "]" * 90)]]}, json.dumps(OWN).replace("-6", "[" * 900 + "]" * 900)], "line 2"),
    "imports": ([SANITIZED | {"test_imports": None}], "field test_imports: must be a list"),
    "twice": ([OWN, OWN], "line 2, field id: 'own-1' stands there twice"),
    "lcb pickle": ([LCB_STDIN | {"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Bomb()))).decode()}], "would run code"),
    "lcb bomb": ([LCB_STDIN | {"private_test_cases": base64.b64encode(zlib.compress(bytes(2**28 + 9))).decode()}], "more than 256 MiB"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_by_line_and_field(name, capsys):
    """Before training starts, in one line, with exit code 2; a pickle is never executed."""
    records, message = BAD[name]
    fails(["--task", "code", "--data", write(*records), "--test-data", "problems.jsonl", "--model", "x/y"], capsys, "--data problems.jsonl", message)
    assert not Path("executed").exists() and not Path("runs").exists()


def test_bad_flags(capsys):
    fails(["--task", "code", "--data", "no.jsonl"], capsys, "--data no.jsonl: cannot be read")
    fails(["--task", "code", "--test-data", "no.jsonl"], capsys, "--test-data no.jsonl: needs --data")
    fails(["--task", "maze", "--data", "no.jsonl"], capsys, "--data no.jsonl: the task maze takes no file")
    fails(["--task", "code", "--seconds", "0"], capsys, "--seconds", "seconds > 0")
    fails(["--task", "code", "--memory-mb", "5"], capsys, "memory_mb=5")
    fails(["--task", "code", "--data", write(OWN)], capsys, "1 problems are too few to train on some and hold some out")
    fails(["--task", "code", "--data", write(OWN), "--test-data", "problems.jsonl"], capsys, "--model tiny: task code has no words for it here; take a language model")


def test_a_file_that_changes_under_a_run_is_noticed(capsys):
    """Guards against a table whose problems are not those that were trained on, in the evaluation and in --resume."""
    data, model = write(*(OWN | {"id": f"p{i}"} for i in range(12))), save_random_model(Path("model"), "llama")
    train.main(["--task", "code", "--data", data, "--model", model, "--out", "run", *QUICK, "--steps", "1", "--max-new-tokens", "9", "--method", "vpo"])
    assert "9 problems to train on, 1 for validation, 2 held out" in capsys.readouterr().err
    evaluation.main(["run", "--pool", "4"])
    write(*(OWN | {"id": f"p{i}"} for i in range(11)))
    fails(["run"], capsys, "--data problems.jsonl: has changed since the run began", command=evaluation.main)
    fails(["--resume", "--out", "run"], capsys, "--data problems.jsonl: has changed since the run began")
    write(OWN, name="other.jsonl")
    Code("problems.jsonl", "other.jsonl")
    assert "1 of 1 held-out problems stand in problems.jsonl too" in capsys.readouterr().err


def test_held_out_problems_are_held_out():
    """By identity where there are no dates, by date where all have one; validation is a part of the rest."""
    records = [OWN | {"id": f"p{i}"} for i in range(40)]
    task = Code(write(*records))
    parts = {name: {problem["id"] for problem in part} for name, part in task.parts.items()}
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [29, 3, 8] and len(set.union(*parts.values())) == 40
    assert {problem.id for problem in task.problems("train", 29)} == {problem.id for problem in task.problems("train", 29, start=29)}
    assert Code(write(*records[::-1])).parts.keys() == parts.keys()
    dated = Code(write(LCB_STDIN, LCB_FUNCTION))
    assert [problem["id"] for problem in dated.parts["test"]] == ["f1"] and [problem["id"] for problem in dated.parts["train"]] == ["s1"]
    with pytest.raises(UserError, match="no problem is left for the split validation"):
        dated.problems("validation", 1)


def test_small_problems_hide_what_they_test():
    """The prompt shows none of the tested places, no prompt of a held-out problem occurs in training, and there are 500."""
    parts = small_problems()
    assert len(parts["test"]) >= 500 and not set(code_problems.SHOWN) & set(code_problems.HIDDEN)
    shown = {name: {problem["tiny_prompt"] for problem in part} for name, part in parts.items()}
    assert not shown["train"] & shown["test"] and not shown["train"] & shown["validation"] and not shown["test"] & shown["validation"]
    assert len(shown["test"]) < 0.6 * len(parts["test"]), "examples should leave the program open"
    behaviours = [json.dumps([problem["tiny_prompt"], problem["tests"]]) for part in parts.values() for problem in part]
    assert len(set(behaviours)) == len(behaviours)
    task = Code()
    pairs = [(Problem(problem["id"], problem), problem["reference"]) for problem in parts["test"][::10]]
    assert all(all(vector) for vector in task.rewards(pairs))


def test_expressions_that_share_a_process_are_judged_as_if_alone():
    """Guards against a packed program that changes another's verdict; only pure arithmetic is packed."""
    rng, problems = random.Random(0), small_problems()["train"]
    pairs = [(problems[i], code_problems.demonstration(problems[i], rng)) for i in range(60)]
    odd = ["x // 0", "x % 0 if x < 3 else 1", "abs", "x ( 3 )", "x +", ") , (", "0x3", "x ** 99", "def f(x):\n    return x", "1 if", "x * " * 49 + "x",
           "(x := 3)", "__import__('os')", "x.real", "[x]", "f(x)", "F", "i", "x if x else print", "lambda: 1", "* x", "x <<= 3", "x if x", "x = = 3", ") + ("]
    pairs += [(problem, text) for text, problem in zip(odd, problems, strict=False)]
    jobs = pack(pairs)
    alone = [text for indices, _ in jobs for text in [pairs[i][1] for i in indices] if len(indices) == 1]
    assert not any(word in text for indices, _ in jobs if len(indices) > 1 for i in indices for text in [pairs[i][1]] for word in ("_", ".", ":", "F", "f("))
    assert "x ** 99" in alone and "__import__('os')" in alone
    task = Code()
    together = task.rewards([(Problem("", problem), text) for problem, text in pairs])
    for (problem, text), vector in zip(pairs, together, strict=True):
        expected = task.sandbox.run([job(problem, text)])[0] if canonical(text) else [False] * 8
        assert vector == [float(value) for value in expected], text


@pytest.mark.parametrize(("text", "blocks"), [
    ("```python\na\n```", ["a\n"]), ("```py\na\n```\n```Python3\nb\n```", ["a\n", "b\n"]), ("```\na\n```", ["a\n"]), ("```bash\na\n```", []),
    ("```python\na\n", []), ("text ```python\na\n```", []), ("```python\nx = '```'\n```", ["x = '```'\n"]), ("", []), ("```", []), ("```python\n```", [""]),
    ("<think>\n```python\ndraft\n```\n</think>\n```python\na\n```", ["a\n"])])
def test_blocks_by_hand(text, blocks):
    assert find_blocks(text) == blocks


def test_answers_meet_the_source_around_them(capsys):
    """A docstring that mentions the function, a decorator, and `from __future__`, which must stay the first statement."""
    prompt = "import functools\n\nNOTE = 'def th('\n\n@functools.lru_cache\ndef th(x):\n    '''Like def th(y) of yore.'''\n"
    record = {"task_id": "x", "prompt": prompt, "entry_point": "th", "canonical_solution": "    return x + 1\n",
              "test": "def check(candidate):\n    assert candidate(1) == 2\n    assert abs(candidate(300) - 301) < 1\n"}
    task = Code(write(record), "problems.jsonl")
    problem, = task.problems("test", 1)
    assert task.reward(problem, "from __future__ import annotations\ndef th(x: int) -> Later:\n    return functools.reduce(max, [x]) + 1") == [1.0, 1.0]
    assert task.reward(problem, "def th(x): return x + 1.5") == [0.0, 1.0], "a tolerance is that of one test alone, and absolute"
    assert task.reward(problem, "def th(x): return 10 ** 9") == [0.0, 0.0]


def test_equal_syntax_trees_are_equal_programs():
    assert canonical("x+1 # one") == canonical("x  +  (1)") != canonical("1 + x")
    for text in ("", "  ", "x +", "(" * 9000, "-" * 60000 + "1", "x\0", "\ud800", "1" * 70000, "if x:\n" * 300):
        assert canonical(text) == ""


def test_pools_of_problems_with_different_numbers_of_tests():
    """Zero columns that pad a problem's vector are no failed tests: passing, weightings and coverage ignore them."""
    task = Code(write(OWN | {"id": "a"}, OWN | {"id": "b", "tests": [[[i], 2 * i] for i in range(5)]}), "problems.jsonl")
    problems = task.problems("test", 2)
    right = "def twice(x): return 2 * x"
    scored = score(task, problems, [[[right]], [[right]]], 1)
    pool = evaluation.Pool(problems, [[right]] * 2, scored.vectors.flatten(1, 2), scored.scalars.flatten(1, 2), scored.objective_mask)
    values = evaluation.measure(pool, task, 1)
    assert all(values[name].tolist() == [1.0, 1.0] for name in ("pass@1", "best@1", "coverage"))
    assert torch.allclose(values["W@1"], torch.ones(2, dtype=torch.float64)) and sorted(scored.objective_mask.sum(1).tolist()) == [2, 5]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_real_formats_go_through_training_and_evaluation(architecture, capsys):
    """A small random model of a real architecture on one problem of each format: read, asked, sampled, judged, evaluated."""
    data = write(*(record for record, *_ in FORMATS.values()))
    train.main(["--task", "code", "--data", data, "--test-data", data, "--model", save_random_model(Path("model"), architecture), "--out", "run",
                *QUICK, "--steps", "2", "--max-new-tokens", "20", "--eval-problems", "20"])
    report = json.loads(Path("run/eval.json").read_text())
    assert report["policies"]["vpo"]["pass@6"]["mean"] == 0 and "7 test problems" in capsys.readouterr().out
    assert json.loads(Path("run/vpo/samples.jsonl").read_text().splitlines()[0])["problem"]["data"]["tests"]
    assert Path("run/answers.png").stat().st_size > 5000


def test_rollouts_without_any_program_are_said_to_be_useless(capsys):
    """Guards against a run that learnt nothing and ends like a success: nine tokens hold no program."""
    train.main(["--task", "code", "--data", write(OWN), "--test-data", "problems.jsonl", "--model", save_random_model(Path("model"), "llama"),
                "--out", "run", *QUICK, "--steps", "1", "--max-new-tokens", "9", "--method", "vpo", "--eval-problems", "0"])
    assert "vpo: no rollout held an answer" in (error := capsys.readouterr().err) and "--max-new-tokens 9" in error


def test_the_small_problems_train(capsys):
    """The main job in small, with resume: verdicts come from real programs in the sandbox."""
    arguments = ["--task", "code", *QUICK, "--warm-steps", "25", "--steps", "3", "--eval-problems", "0"]
    train.main([*arguments, "--out", "whole", "--method", "vpo"])
    rows = [json.loads(line) for line in Path("whole/vpo/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all("reward_f(-6)" in row and 0 <= row["reward"] <= 1 for row in rows)
    with pytest.raises(BadRecord):
        read_problems("whole/config.json")
