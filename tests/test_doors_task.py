"""The door of a task: whatever a task of one's own gets wrong is one line that names it, before or during a run."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import train
from engine.advice import show_first_rollout
from engine.checks import check_task
from engine.config import MAX_ANSWERS, Config
from engine.fingerprints import fingerprint_of
from engine.kinds import kind_named
from rewards import Problem, UserError, parse_answers, reward_vectors, take_problems
from tasks import ATTRIBUTES, load_task

RIGHT = """
from rewards import Problem, Task

class Echo(Task):
    name = "echo"
    objectives = ("length", "capitals")

    def problems(self, split, n, seed=0, start=0):
        return [Problem(f"{split}-{start + i}", {"word": "abc"}) for i in range(n)]

    def prompt(self, problem, m):
        return f"{m} times: " + problem.data["word"]

    def reward(self, problem, answer):
        return [len(answer) / 9, 0.5]
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def write(source: str = RIGHT, *edits: tuple[str, str], name: str = "mine.py") -> str:
    """A task's file with some text replaced by other text."""
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    Path(name).write_text(source)
    return name


def method(source: str) -> tuple[str, str]:
    """The edit that puts a method of one line into the class."""
    return 'name = "echo"\n', f'name = "echo"\n    {source}\n'


def test_a_right_task_passes_through():
    task = load_task(write())
    check_task(task, 3)
    assert (
        reward_vectors(task, [(problem, "abc") for problem in take_problems(task, "test", 2)])
        == [[1 / 3, 0.5]] * 2
    )
    assert task.canonical(Problem("", {}), " a  b\n") == "a b"
    assert task.summary(torch.tensor([[0.0, 0.5], [0.0, 0.0], [1.0, 1.0]])) == "2 of 3 score"


@pytest.mark.parametrize("name", ["maze", "toy", "code"])
def test_the_projects_own_tasks_pass(name):
    task = load_task(name, size=5, data="", seconds=1.0)
    check_task(task, 3)
    assert task.name == name and task.fingerprint == ""


@pytest.mark.parametrize("name", ["maz", "sandbox", "code_files", "__init__", "", "."])
def test_an_unknown_task_is_told_the_known_ones(name):
    """Guards against a helper file taken for a task, and against a traceback for a mistyped name."""
    known = "code, eureqa, headline, maze, musique, tool, toy"
    with pytest.raises(
        UserError, match=rf"^--task {name}: unknown; choose from {known}, or name a Python"
    ):
        load_task(name)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (
            (("class Echo(Task)", "class Echo(Other)"),),
            r"cannot be loaded \(mine.py, line 4: NameError: name 'Other'",
        ),
        (
            (("class Echo(Task):", "class Echo(Task"),),
            r"cannot be loaded \(mine.py, line 4: SyntaxError",
        ),
        (
            (("\nfrom rewards", "\n1 / 0\nfrom rewards"),),
            r"cannot be loaded \(mine.py, line 2: ZeroDivisionError",
        ),
        (
            (("\nfrom rewards", "\nimport no_such_module\nfrom rewards"),),
            "ModuleNotFoundError.*'no_such_module'",
        ),
        (
            (("class Echo(Task)", "class Echo"),),
            "defines 0 subclasses of Task; it needs exactly one",
        ),
        (
            (("\nclass Echo", "\nclass Base(Task): pass\n\nclass Echo"),),
            "defines 2 subclasses of Task",
        ),
        (
            (method("def __init__(self, size): pass"),),
            "cannot be loaded .*missing 1 required positional arg.*: 'size'",
        ),
        (
            (method("def __init__(self): raise ValueError('no luck')"),),
            r"mine.py, line 6: ValueError: no luck",
        ),
        ((method("flags = ('size',)"),), "cannot be loaded .*TypeError"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line(edits, message):
    with pytest.raises(UserError, match=f"--task mine.py.*{message}"):
        load_task(write(RIGHT, *edits), size=5)


def test_the_constructor_gets_the_flags_that_it_names():
    """Guards against options that reach no task, or one that did not ask for them."""
    source = write(
        RIGHT, method("flags = ('size',)\n    def __init__(self, size=1): self.size = size")
    )
    assert load_task(source, size=5, data="x").size == 5 and load_task(source).size == 1
    assert load_task("maze", size=6, data="x").size == 6
    with pytest.raises(UserError, match="--size 99: a maze has 5 to 9 rows"):
        load_task("maze", size=99)


def test_a_task_may_import_its_neighbours_and_a_task_of_ours():
    Path("helpers_of_mine.py").write_text("WORD = 'xyz'\n")
    edits = ("from rewards", "from helpers_of_mine import WORD\nfrom rewards"), ('"abc"', "WORD")
    task = load_task(write(RIGHT, *edits))
    assert task.problems("test", 1)[0].data == {"word": "xyz"}
    task = load_task(
        write("from tasks.toy import Toy\nclass Short(Toy):\n    name = 'short'\n", name="short.py")
    )
    assert task.name == "short" and task.tiny_prompt(task.problems("test", 1)[0]) == "bits"


def test_a_fingerprint_follows_what_a_task_does():
    """Guards against a run that goes on with other rewards, and one that a comment locks out."""

    def parts(*edits, name="mine.py"):
        path = write(RIGHT, *edits, name=name)
        return json.loads(fingerprint_of(load_task(path), path))

    before = parts()
    assert parts(name="copy.py") == before
    assert parts(("return [len", "# a comment\n        return [len")) == before
    changes = {
        "rewards": ("0.5", "0.25"),
        "problems": ('"abc"', '"abd"'),
        "prompts": ("times: ", "times, please: "),
    }
    for name, edit in changes.items():
        after = parts(edit)
        differing = [part for part in before if after[part] != before[part]]
        assert name in differing and ("problems" in differing) == (name == "problems")
    varying = ("return [len(answer) / 9, 0.5]", "import random; return [random.random(), 0.5]")
    assert parts(varying)["rewards"] == "vary"


@pytest.mark.parametrize(
    ("edit", "call", "message"),
    [
        (
            ("return [len(answer) / 9, 0.5]", "return [1 / len(answer), 0]"),
            lambda task, problem: task.reward(problem, ""),
            r"reward of problem 'test-0', answer '' failed \(mine.py, line 15: ZeroDivisionError: division by zero",
        ),
        (
            ('problem.data["word"]', 'problem.data["words"]'),
            lambda task, problem: task.prompt(problem, 2),
            r"prompt of problem 'test-0' failed \(mine.py, line 12: KeyError: 'words'",
        ),
        (
            ('{"word": "abc"}) for', '{"word": gone}) for'),
            lambda task, problem: None,
            r"problems.* \(mine.py, line 9",
        ),
        (
            method("def canonical(self, problem, answer): return answer.no"),
            lambda task, problem: task.canonical(problem, "a"),
            "canonical of .*'test-0', answer 'a' .*line 6: Attribute",
        ),
        (
            method("def scalar(self, rewards): return rewards[9]"),
            lambda task, problem: task.scalar([]),
            "scalar.*IndexErr",
        ),
        (
            method("def find_answers(self, text, m, finished): return text[m]"),
            lambda task, problem: task.find_answers("", 3, True),
            "find_answers.*failed .*IndexError",
        ),
        (
            method("def summary(self, rewards): return 1 / 0"),
            lambda task, problem: task.summary(None),
            "summary failed",
        ),
        (
            method("def draw(self, *args): return 1 / 0"),
            lambda task, problem: task.draw(0, problem, [], ""),
            "draw of",
        ),
        (
            method("pass"),
            lambda task, problem: task.tiny_prompt(problem),
            "tiny_prompt.*--model tiny needs it",
        ),
        (
            method("pass"),
            lambda task, problem: task.demonstration(problem, None),
            "has no demonstrations",
        ),
    ],
)
def test_a_method_that_raises_is_named_with_problem_and_line(edit, call, message):
    """Guards against a traceback from the midst of training."""
    task = load_task(write(RIGHT, edit))
    with pytest.raises(UserError, match=f"^task echo: {message}"):
        call(task, task.problems("test", 1)[0])


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        (
            "def find_answers(self, text, m): return [text]",
            r"find_answers must take \(self, text, m, finished\): too many",
        ),
        ("def canonical(self, answer): return answer", r"canonical must take \(self, problem, a"),
    ],
)
def test_a_method_with_other_arguments_is_named(definition, message):
    """A task that was written for an older version, for instance."""
    path = write(RIGHT, method(definition))
    with pytest.raises(UserError, match=message):
        load_task(path)


@pytest.mark.parametrize("answers", ["'red'", "[1]", "3"])
def test_find_answers_that_gives_no_texts_is_named(answers):
    task = load_task(write(RIGHT, method(f"def find_answers(self, *_): return {answers}")))
    with pytest.raises(UserError, match="find_answers must return a list of texts or None, not"):
        parse_answers("text", task, 2)


@pytest.mark.parametrize(
    ("share", "told"), [(0.0, "no rollout of the first step"), (0.08, "few slots"), (0.5, "")]
)
def test_few_answers_are_no_silence(share, told, capsys):
    """Guards against a prompt that asks for no form: a few lucky answers hid it."""
    metrics = {"answers": share, "cut_off": 0.0, "best_in_rollout": 0.3}
    example = {"rollouts": [{"text": "red, blue", "rewards": [[0.0, 0.0]]}]}
    show_first_rollout("vpo", Config(model="m"), load_task(write()), example, metrics)
    advice = capsys.readouterr().err.partition("per answer)\n")[2]
    assert told in advice and bool(advice) == bool(told)
    assert ("Task.request writes such a prompt" in advice) == bool(told)
    assert ("--max-new-tokens" in advice) == bool(told)


@pytest.mark.parametrize("missing", ["problems", "prompt", "reward"])
def test_a_missing_method_is_named(missing):
    task = load_task(write(RIGHT, (f"def {missing}", "def another")))
    with pytest.raises(
        UserError,
        match=f"task echo: the method {missing} is missing",
    ):
        check_task(task, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "[float('nan'), 0.5]",
            r"the reward \[nan, 0.5\] of problem 'test-0', answer 'a' holds nan; each must be finite",
        ),
        ("[0.5, float('inf')]", "holds inf; each must be finite"),
        ("[0.5, -float('inf')]", "holds -inf"),
        ("[-0.1, 0.5]", r"holds -0.1; each must be finite and at least Task.minimum = 0.0"),
        ("[0.5]", r"the reward \[0.5\] .* has 1 numbers for 2 objectives"),
        ("[0.5, 0.5, 0.5]", r"\[0.5, 0.5, 0.5\] .* has 3 numbers for 2 objectives"),
        ("[]", "has 0 numbers for 2 object"),
        ("'high'", "the reward 'high' of .* must be a list of numbers"),
        ("None", "reward None of .* list of numbers"),
        ("['1', 0]", r"the reward \['1', 0\] of .* a list of numbers"),
        ("0.5", "the reward 0.5 of .* list of numbers"),
        ("[[0.5, 0.5]]", r"the reward \[\[0.5, 0.5\]\] of .* a list of numbers"),
    ],
)
def test_a_wrong_reward_is_shown(value, message):
    """Guards against a NaN that ruins every weight, and a vector of another length that pairs the wrong objectives."""
    task = load_task(write(RIGHT, ("[len(answer) / 9, 0.5]", value)))
    with pytest.raises(UserError, match=message):
        reward_vectors(task, [(task.problems("test", 1)[0], "a")])


def test_what_may_pass_as_a_reward():
    """Tuples, integers, truth values; below zero where `minimum` says so; each problem's own k where none is named."""
    for value in ("(1, 0.5)", "[True, 1]", "[1.5, 0]"):
        task = load_task(write(RIGHT, ("[len(answer) / 9, 0.5]", value)))
        assert len(reward_vectors(task, [(task.problems("test", 1)[0], "a")])[0]) == 2
    task = load_task(write(RIGHT, method("minimum = -1.0"), ("[len(answer) / 9, 0.5]", "[-1, 0]")))
    assert reward_vectors(task, [(task.problems("test", 1)[0], "a")]) == [[-1, 0]]
    own = write(
        RIGHT,
        ('("length", "capitals")', "()"),
        ("[len(answer) / 9, 0.5]", "(0.5,) * len(problem.id)"),
    )
    task = load_task(own)
    assert [
        len(vector)
        for vector in reward_vectors(task, [(Problem("a", 0), ""), (Problem("bcd", 0), "")])
    ] == [1, 3]
    task = load_task(
        write(
            RIGHT,
            ('("length", "capitals")', "()"),
            ("[len(answer) / 9, 0.5]", "[0.5] * len(answer)"),
        )
    )
    with pytest.raises(UserError, match="answer 'aaa' has 3 numbers for 2 objectives"):
        reward_vectors(task, [(Problem("a", 0), "aa"), (Problem("a", 0), "aaa")])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", r"rewards must return a list of 1 vectors, not None"),
        ("[]", "a list of 1 vectors, not \\[\\]"),
        ("[[0, 0], [0, 0]]", r"a list of 1 vectors, not \[\[0, 0\], \[0, 0\]\]"),
        ("{}", "a list of 1 vectors, not {}"),
    ],
)
def test_wrong_rewards_of_a_batch_are_shown(returned, message):
    task = load_task(write(RIGHT, method(f"def rewards(self, pairs): return {returned}")))
    with pytest.raises(UserError, match=message):
        reward_vectors(task, [(task.problems("test", 1)[0], "a")])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "must be a list of Problem, not None"),
        ("['a', 'b']", r"a list of Problem, not \['a', 'b'\]"),
        ("iter(())", "must be a list of Problem, not <"),
        ("[]", r"\('train', n=2, start=0\) gave 0; it should not be"),
        ("[Problem('a', {})]", "gave 1; it should wrap around"),
        ("[Problem('a', {})] * 3", "gave 3; it should wrap"),
    ],
)
def test_wrong_problems_are_shown(returned, message):
    """Guards against a data set that ends in the midst of training."""
    task = load_task(
        write(
            RIGHT.replace("def problems", "def former"),
            method(f"def problems(self, split, n, seed=0, start=0): return {returned}"),
        )
    )
    with pytest.raises(UserError, match=f"task echo: .*{message}"):
        check_task(task, 3)


def test_a_missing_file_is_told():
    with pytest.raises(UserError, match="^--task missing.py: there is no such file"):
        load_task("missing.py")


def test_a_prompt_that_is_no_text_and_a_tag_of_two_words():
    number = write(RIGHT, ('return f"{m} times: " + problem.data["word"]', "return 3"))
    with pytest.raises(UserError, match=r"prompt of .*'train-0' must be text, not 3"):
        check_task(load_task(number), 3)
    with pytest.raises(UserError, match="the tag 'my answer' must be one word"):
        check_task(load_task(write(RIGHT, method("tag = 'my answer'"))), 3)


@pytest.mark.parametrize("data", ["{1, 2}", "object()"])
def test_data_that_is_no_json_is_named(data):
    """Guards against a run whose samples cannot be written."""
    source = write(RIGHT, ('{"word": "abc"}', data), ('problem.data["word"]', '"abc"'))
    with pytest.raises(UserError, match="data of .* is not plain JSON"):
        check_task(load_task(source), 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("m = 0", "m = 0 must be a whole number from 1 to 8"),
        ("m = 9", "m = 9 must be a whole number from 1 to 8"),
        ("steps = '9'", "steps = '9' must be a whole number above 0"),
        ("warm_steps = -1", "warm_steps = -1 must be a whole number"),
        ("lr = -1.0", "lr = -1.0 must be a number above 0"),
        ("minimum = None", "minimum = None must be a number"),
        ("objectives = ('length')", "objectives = 'length' must be a tuple of names, such as"),
    ],
)
def test_an_attribute_of_another_kind_is_named(line, message):
    source = RIGHT.replace('objectives = ("length", "capitals")', "pass")
    with pytest.raises(UserError, match=f"--task mine.py: {message}"):
        load_task(write(source, method(line)))


def test_a_task_may_ask_for_as_many_answers_as_the_flag():
    assert ATTRIBUTES["m"].at_most == MAX_ANSWERS


@pytest.mark.parametrize(
    ("edit", "wrong", "right"),
    [
        (method("minimun = -1"), "minimun", "minimum"),
        (("def reward(", "def revard("), "revard", "reward"),
        (('objectives = ("', 'objective = ("'), "objective", "objectives"),
        (method("def find_answer(self, text, m, finished): pass"), "find_answer", "find_answers"),
    ],
)
def test_a_misspelt_member_is_named(edit, wrong, right):
    """Guards against one that is silently without effect."""
    message = f"{wrong} is not in rewards.Task; did you mean {right}?"
    with pytest.raises(UserError, match=re.escape(message)):
        load_task(write(RIGHT, edit))


def test_helpers_of_a_task_are_no_misspelt_members():
    """A name beside the member that it resembles, and names that resemble none."""
    source = "def problem(self): pass\n    letters = 3\n    _names = ()"
    load_task(write(RIGHT, method(source)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("        return f", "        f"), "prompt of problem 'train-0' must be text, not None"),
        (("        return [Problem", "        [Problem"), "must be a list of Problem, not None"),
        (('"abc"}', '"abc", (1, 2): 3}'), "data of 'train-0' is not plain JSON"),
        (
            method("def demonstration(self, problem, rng): return ['abc']"),
            "demonstration of problem 'train-0' must be text, not \\['abc'\\]",
        ),
        (
            method("def scalar(self, rewards): return rewards.log().sum(-1)"),
            "scalar must turn .* into finite numbers .*, not tensor\\(\\[-inf\\]\\)",
        ),
    ],
)
def test_train_names_what_a_task_gives_before_it_makes_a_folder(edit, message, capsys):
    """Guards against a look at the task that comes before its checks, and ends in a traceback."""
    with pytest.raises(SystemExit) as stopped:
        train.main(["--task", write(RIGHT, edit), "--out", "run"])
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not Path("run").exists()


def test_different_problems_of_one_id_are_named():
    """Guards against an evaluation on one problem, because equal ids stand for equal problems."""
    source = write(RIGHT, ('f"{split}-{start + i}"', "split"), ('"abc"}', '"a" * i}'))
    with pytest.raises(UserError, match="two with the id 'test' and different data"):
        take_problems(load_task(source), "test", 2)


def test_a_tiny_prompt_that_is_no_text_is_named():
    task = load_task(write(RIGHT, method("def tiny_prompt(self, problem): pass")))
    problem = task.problems("test", 1)[0]
    with pytest.raises(UserError, match="tiny_prompt of problem 'test-0' must be text, not None"):
        kind_named("tiny").prompt(None, task, problem, 1, None)
