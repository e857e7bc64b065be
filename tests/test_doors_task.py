"""The door of a task: whatever one gets wrong is one line that names it, before or during a run."""

import sys
from pathlib import Path

import pytest
from engine.messages import show_first_step, why_unread
from test_train import fails

from engine.config import Config
from engine.tasks import check_task, load_task, reward_vectors, take_problems, task_names
from rewards import Problem, UserError, parse_answers

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
REWARD = "[len(answer) / 9, 0.5]"
PROBLEMS = '[Problem(f"{split}-{start + i}", {"word": "abc"}) for i in range(n)]'
UNNAMED = ('("length", "capitals")', "()")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def write(*edits: tuple[str, str], source: str = RIGHT, name: str = "mine.py") -> str:
    """A task's file with some text replaced by other text."""
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    Path(name).write_text(source)
    return name


def member(source: str) -> tuple[str, str]:
    """The edit that puts a member of one line into the class."""
    return 'name = "echo"\n', f'name = "echo"\n    {source}\n'


def test_a_right_task_passes_through():
    task = load_task(write())
    check_task(task, 3)
    pairs = [(problem, "abc") for problem in take_problems(task, "test", 2)]
    assert reward_vectors(task, pairs) == [[1 / 3, 0.5]] * 2
    assert task.canonical(Problem("", {}), " a  b\n") == "a b"


@pytest.mark.parametrize("name", ["maze", "fence", "toy", "code", "headline"])
def test_the_projects_own_tasks_pass(name):
    task = load_task(name, size=5, data="", seconds=1.0)
    check_task(task, 3)
    assert task.name == name and name in task_names()


@pytest.mark.parametrize("name", ["maz", "sandbox", "code_files", "__init__", "", "."])
def test_an_unknown_task_is_told_the_known_ones(name):
    """Guards against a helper file taken for a task, and against a traceback for a mistyped name."""
    known = "code, eureqa, fence, headline, maze, musique, tool, toy"
    message = rf"^--task {name}: unknown; choose from {known}, or name a Python"
    with pytest.raises(UserError, match=message):
        load_task(name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        # its file
        (("(Task)", "(Other)"), "cannot be loaded (mine.py, line 4: NameError: name 'Other'"),
        (("(Task):", "(Task"), "cannot be loaded (mine.py, line 4: SyntaxError"),
        (("\nfrom", "\n1 / 0\nfrom"), "cannot be loaded (mine.py, line 2: ZeroDivisionError"),
        (("\nfrom", "\nexit(3)\nfrom"), "cannot be loaded (mine.py, line 2: SystemExit: 3)"),
        (("\nfrom", "\nimport no_such\nfrom"), "ModuleNotFoundError: No module named 'no_such'"),
        (("(Task)", ""), "--task mine.py: defines 0 subclasses of Task; it needs exactly one"),
        (("\nclass", "\nclass A(Task): pass\n\nclass"), "defines 2 subclasses of Task"),
        (
            member("def __init__(self, size): pass"),
            "missing 1 required positional argument: 'size'",
        ),
        (member("def __init__(self): {}['a']"), "cannot be loaded (mine.py, line 6: KeyError: 'a'"),
        (member("flags = ('size',)"), "cannot be loaded (tasks.py, line"),
        # its attributes
        (member("flags = 'size'"), "flags = 'size' must be a tuple of names of flags"),
        (member("flags = ('sizes',)"), "'sizes', which is no flag of train.py; did you mean size?"),
        (member("words = (1, 2)"), "words = (1, 2) must be a tuple of words"),
        (member("minimum = None"), "minimum = None must be a number"),
        (member("minimum = -float('inf')"), "minimum = -inf must be finite"),
        (member("def __init__(self): self.minimum = 'a'"), "minimum = 'a' must be a number"),
        (('("length", "capitals")', "'length'"), "objectives = 'length' must be a tuple of names"),
        (('"capitals"', '"length"'), "objectives = ('length', 'length') names one twice"),
        (member("words = 'red'"), "words = 'red' must be a tuple of words"),
        (member("answer_words = '6'"), "answer_words = '6' must be a whole number"),
        (member("form = 'list'"), "form = 'list' must be"),
        (member("tag = 'my answer'"), "the tag 'my answer' must be one word"),
        (member("steps = 60"), "steps is a flag; give its default in defaults = {'steps': ...}"),
        (member("lr = 1e-3"), "lr is a flag; give its default"),
        (member("defaults = ('m', 3)"), "defaults = ('m', 3) must be a dictionary of flags"),
        (member("defaults = {'step': 3}"), "task echo: 'step' is no flag; did you mean steps?"),
        (member("defaults = {'steps': '3'}"), "task echo: steps = '3' must be a whole number"),
        (member("tiny_defaults = {'lr': 1e-3}"), "lr = 0.001 must be a list of texts, such as"),
        (member("defaults = {'m': 0}"), "--m 0: must be 1 to 8"),
        (member("defaults = {'seed': 7}"), "its defaults name seed, which only a command can give"),
        (member("defaults = {'dtype': 'half'}"), "must be one of auto, float32, bfloat16"),
        # its methods
        (member("minimun = -1"), "minimun is not in rewards.Task; did you mean minimum?"),
        (('objectives = ("', 'objective = ("'), "objective is not in rewards.Task; did you mean"),
        (("def reward(", "def revard("), "did you mean reward? If not, call it _revard"),
        (member("def find_answer(self): pass"), "did you mean find_answers?"),
        (
            member("def find_answers(self, text, m): return [text]"),
            "find_answers must take (self, text, m, finished): too many positional arguments",
        ),
        (member("def canonical(self, a): pass"), "canonical must take (self, problem, answer)"),
        (("def problems", "def another"), "task echo: the method problems is missing"),
        (("def prompt", "def another"), "task echo: the method prompt is missing"),
        (("def reward", "def another"), "task echo: the method reward is missing"),
        # problems and prompts
        (
            ("start + i}", "start + j}"),
            "problems 'train' failed (mine.py, line 9: NameError: name 'j'",
        ),
        ((PROBLEMS, "None"), "problems('train', ...) must be a list of Problem, not None"),
        ((PROBLEMS, "['a', 'b']"), "must be a list of Problem, not ['a', 'b']"),
        ((PROBLEMS, "iter(())"), "must be a list of Problem, not <"),
        ((PROBLEMS, "[]"), "problems('train', n=2, start=0) gave 0; it should not be empty"),
        ((PROBLEMS, "[Problem('a', {})]"), "gave 1; it should wrap around"),
        ((PROBLEMS, "[Problem('a', {})] * 3"), "gave 3; it should wrap around"),
        (
            (PROBLEMS, "[Problem('a', {i: 0}) for i in range(n)]"),
            "two with the id 'a' and different",
        ),
        (('f"{split}-{start + i}"', "i"), "task echo: the id 0 of a problem must be text"),
        (('{"word": "abc"}', "{(1, 2): 3}"), "data of 'train-0' is not plain JSON"),
        (('{"word": "abc"}', "object()"), "data of 'train-0' is not plain JSON"),
        (
            ('["word"]', '["words"]'),
            "prompt of problem 'train-0' failed (mine.py, line 12: KeyError",
        ),
        (("        return f", "        f"), "prompt of problem 'train-0' must be text, not None"),
        # rewards: a NaN would ruin every weight, another length pair the wrong objectives
        (
            (REWARD, "[1 / len(answer), 0]"),
            "reward of problem 'train-0', answer '' failed (mine.py",
        ),
        (
            (REWARD, "[float('nan'), 0]"),
            "the reward [nan, 0] of problem 'train-0', answer '' holds nan",
        ),
        ((REWARD, "[0.5, float('inf')]"), "holds inf; each must be finite"),
        (
            (REWARD, "[-0.1, 0.5]"),
            "holds -0.1; each must be finite and at least Task.minimum = 0.0",
        ),
        ((REWARD, "[0.5]"), "the reward [0.5] of problem 'train-0', answer '' has 1 numbers for 2"),
        ((REWARD, "[]"), "has 0 numbers for 2 objectives"),
        ((REWARD, "'high'"), "answer '' must be a list of numbers; of a tensor or array return"),
        ((REWARD, "None"), "the reward None of problem 'train-0', answer '' must be a list of"),
        ((REWARD, "['1', 0]"), "must be a list of numbers"),
        ((REWARD, "0.5"), "must be a list of numbers"),
        ((REWARD, "[[0.5, 0.5]]"), "must be a list of numbers"),
        (member("def rewards(self, pairs): pass"), "must return a list of 1 vectors, not None"),
        (member("def rewards(self, pairs): return []"), "a list of 1 vectors, not []"),
        (member("def rewards(self, pairs): return {}"), "a list of 1 vectors, not {}"),
        (
            member("def scalar(self, rewards): return (rewards - 1).log().sum(-1)"),
            "scalar must turn (..., k) into finite numbers (...), not tensor([nan])",
        ),
        (member("def scalar(self, rewards): return rewards"), "scalar must turn (..., k) into"),
        (member("def scalar(self, rewards): return rewards[9]"), "scalar failed (mine.py, line 6"),
        # what the tiny model needs
        (member("pass"), "--model tiny: task echo has no words for it here"),
        (member("words = ('abc',)"), "tiny_prompt is missing; --model tiny needs it"),
        (
            member("words = ('abc',)\n    def tiny_prompt(self, problem): pass"),
            "tiny_prompt of problem 'train-0' must be text, not None",
        ),
        (
            member("words = ('abc',)\n    def tiny_prompt(self, problem): return 'abc'"),
            "has no demonstrations, which --model tiny and --warm-steps need",
        ),
    ],
)
def test_what_a_task_gets_wrong_is_named_before_any_minute_is_spent(edit, message, capsys):
    """Guards against a traceback, and against a member or a default that is silently without effect."""
    fails(["--task", write(edit), "--out", "run"], capsys, "train.py: error: ", message)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("definition", "arguments", "message"),
    [
        ("canonical(self, problem, answer): return answer.no", "pa", "line 6: AttributeError"),
        ("find_answers(self, text, m, finished): return text[m]", "amm", "line 6: IndexError"),
        ("reachable(self, problem): return 1 / 0", "p", "line 6: ZeroDivisionError"),
        ("reward(self, problem, answer): compile(answer, '', 'exec')", "pa", "line 6: SyntaxError"),
    ],
)
def test_a_method_that_raises_later_is_named_with_its_line(definition, arguments, message):
    """Of the task's own file, though the error may come from a library that it calls."""
    name = definition.partition("(")[0]
    former = ("def reward(", "def _reward(") if name == "reward" else ("", "")
    task = load_task(write(former, member(f"def {definition}")), model="some model")
    values = {"p": Problem("test-0", {}), "a": "(", "m": 2}
    with pytest.raises(UserError, match=rf"^task echo: {name}.* failed \(mine.py, {message}"):
        getattr(task, name)(*[values[argument] for argument in arguments])


def test_a_reward_that_nobody_would_call_is_told():
    """Guards against a subclass whose reward is ignored, because its parent scores many answers at once."""
    head = "from tasks.code import Code\n\n\nclass Short(Code):\n    name = 'short'\n"
    source = head + "    def reward(self, problem, answer): return [0.25] * 8\n"
    with pytest.raises(UserError, match="short.py: defines reward, but its parent scores answers"):
        load_task(write(source=source, name="short.py"))
    source = source.replace("reward(self, problem, answer)", "rewards(self, pairs)")
    task = load_task(write(source=source, name="short.py"))
    assert task.reachable(task.problems("test", 1)[0]) == []


def test_the_tiny_model_writes_tags_whatever_the_form():
    """Guards against a form for language models that turns every answer of the tiny one into none."""
    source = write(member("def find_answers(self, text, m, finished): return [text]"))
    text = "<answer_1> a </answer_1> <answer_2> b </answer_2>"
    assert parse_answers(text, load_task(source), 2) == ["a", "b"]
    assert parse_answers(text, load_task(source, model="some model"), 2) == [text]


def test_a_missing_file_is_told():
    with pytest.raises(UserError, match="^--task missing.py: there is no such file"):
        load_task("missing.py")


def test_the_constructor_gets_the_flags_that_it_names():
    """Guards against options that reach no task, or one that did not ask for them."""
    init = "flags = ('size',)\n    def __init__(self, size=1): self.size = size"
    source = write(member(init))
    assert load_task(source, size=5, data="x").size == 5 and load_task(source).size == 1
    assert load_task("maze", size=6, data="x").size == 6
    with pytest.raises(UserError, match="--size 99: a maze has 5 to 9 rows"):
        load_task("maze", size=99)


def test_a_task_may_import_its_neighbours_and_a_task_of_ours():
    Path("helpers_of_mine.py").write_text("WORD = 'xyz'\n")
    imported = ("from rewards", "from helpers_of_mine import WORD\nfrom rewards")
    task = load_task(write(imported, ('"abc"', "WORD")))
    assert task.problems("test", 1)[0].data == {"word": "xyz"}
    short = "from rewards import Toy\nclass Short(Toy):\n    name = 'short'\n"
    task = load_task(write(source=short, name="short.py"))
    assert task.name == "short" and task.tiny_prompt(task.problems("test", 1)[0]) == "bits"


def test_a_file_that_was_changed_is_read_again():
    """Guards against a notebook that goes on with the rewards of before."""
    assert load_task(write()).prompt(Problem("", {"word": "abc"}), 2) == "2 times: abc"
    again = load_task(write(("times", "tames")))
    assert again.prompt(Problem("", {"word": "abc"}), 2) == "2 tames: abc"


def test_helpers_of_a_task_are_no_misspelt_members():
    """A name beside the member that it resembles, and names that resemble none."""
    load_task(write(member("def problem(self): pass\n    letters = 3\n    _names = ()")))


@pytest.mark.parametrize("value", ["(1, 0.5)", "[True, 1]", "[1.5, 0]", "[-1, 0]"])
def test_what_may_pass_as_a_reward(value):
    """Tuples, integers, truth values; below zero where `minimum` says so."""
    task = load_task(write(member("minimum = -1"), (REWARD, value)))
    check_task(task, 3)


def test_without_names_each_problem_has_its_own_objectives():
    """Their number may differ between problems, but not between the answers to one."""
    task = load_task(write(UNNAMED, (REWARD, "(0.5,) * len(problem.id)")))
    vectors = reward_vectors(task, [(Problem("a", 0), ""), (Problem("bcd", 0), "")])
    assert [len(vector) for vector in vectors] == [1, 3]
    task = load_task(write(UNNAMED, (REWARD, "[0.5] * len(answer)")))
    with pytest.raises(UserError, match="answer 'aaa' has 3 numbers for 2 objectives"):
        reward_vectors(task, [(Problem("a", 0), "aa"), (Problem("a", 0), "aaa")])


# What a user is told about rollouts.


@pytest.mark.parametrize(
    ("share", "told"), [(0.0, "no rollout of the first step"), (0.08, "few slots"), (0.5, "")]
)
def test_few_answers_are_no_silence(share, told, capsys):
    """Guards against a prompt that asks for no form: a few lucky answers hid it."""
    metrics = {"answers": share, "cut_off": 0.0, "earned": 0.3, "rollouts": 16}
    example = {"best": {"id": "p", "text": "red, blue", "rewards": [[0.0, 0.0]]}}
    show_first_step("vpo", Config(model="m"), load_task(write()), example, metrics)
    advice = capsys.readouterr().err.partition("per answer)\n")[2]
    assert told in advice and bool(advice) == bool(told)
    assert ("Task.request writes such a prompt" in advice) == bool(told)
    assert ("--max-new-tokens" in advice) == bool(told)


@pytest.mark.parametrize(
    ("form", "text", "first"),
    [
        ("tags", "1. red", "- the tag <answer_1> is missing"),
        ("tags", "<answer_1> red", "- <answer_1> is there, but no </answer_1> after it"),
        ("lines", "<think> red", "- the first line is empty, a <think> is not closed"),
    ],
)
def test_the_likeliest_reason_comes_first(form, text, first):
    task = load_task(write(member(f"form = {form!r}")), model="m")
    assert why_unread(Config(model="m", max_new_tokens=9), task, text).startswith(first)
