"""Mistakes in a task of one's own: each is one line, before any minute is spent."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT, fails

import train
from engine.tasks import check_task, load_task
from rewards import UserError

SOURCE = (ROOT / "examples/my_task.py").read_text()
NAME = "    name = "  # a member may stand before it
PROBLEMS = '[Problem(f"{split}-{start + i}", None) for i in range(n)]'
WORST = "return [0.0, 0.0]"


def write(old: str, new: str) -> str:
    """The example's file with some text replaced."""
    assert old in SOURCE
    Path("mine.py").write_text(SOURCE.replace(old, new, 1), "utf-8")
    return "mine.py"


@pytest.mark.parametrize("name", ["maz", "sandbox", "code_files", "__init__", "", "."])
def test_an_unknown_task_is_told_the_known_ones(name):
    """Guards against a helper file taken for a task, and against a traceback for a mistyped name."""
    known = "code, eureqa, fence, headline, maze, musique, tool, toy"
    with pytest.raises(UserError, match=rf"^--task {name}: unknown; choose from {known}, or name"):
        load_task(name)
    with pytest.raises(UserError, match="^--task missing.py: there is no such file"):
        load_task("missing.py")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(Task)", "", "--task mine.py: must define one subclass of Task, and defines none"),
        ('form = "lines"', 'form = "list"', "not 'list'"),
        ("return self.request", "self.request", "the prompt None must be text"),
        (PROBLEMS, "None", "problems('train', n=200, start=0) must be a list of 200 Problem"),
        (PROBLEMS, "[{'id': i} for i in range(n)]", "must be a list of 200 Problem, not [{'id'"),
        (PROBLEMS, "[Problem('a', i) for i in range(n)]", "two with the id 'a' and different data"),
        (
            PROBLEMS,
            f"{PROBLEMS}[: 20 - start if split[0] == 'd' else n]",
            "a list of 16 Problem, not",
        ),
        # A NaN would ruin every weight, another length pair the wrong objectives.
        (WORST, "return [float('nan'), 0]", "minimum = 0.0: the reward of problem 'train-0'"),
        (WORST, "return [-0.1, 0.5]", "finite numbers of at least minimum = 0.0"),
        (WORST, "return [0.5]", ": [0.5] must be a list of 2 finite numbers"),
        ("return [ann, bob]", "return [ann, bob, 1]", "must be a list of 2 finite numbers"),
        # Text would be read digit by digit, a set has no order.
        (WORST, "return '10'", ": '10' must be a list of 2 finite numbers"),
        (WORST, "return {0.0, 0.5}", "must be a list of 2 finite numbers"),
        ('("ann", "bob")', '"ann"', "objectives must be a tuple of different names"),
        ('("ann", "bob")', "None", "objectives must be a tuple of different names"),
        ('("ann", "bob")', '("ann", "ann")', "objectives must be a tuple of different names"),
        ('["1.5e-3"]', "[2]", "--lr 2: must be a rate of 1e-12 to 1"),
        (NAME, f"    def rewards(self, pairs): pass\n{NAME}", "rewards must return 2 vectors"),
        (NAME, f"    def scalar(self, r): return r\n{NAME}", "scalar must be finite numbers (...)"),
        (NAME, f"    def scalar(self, r): return 0.5\n{NAME}", "scalar must be finite numbers"),
        ('"warm_steps": 60', '"warm_step": 60', "mine.py: its default 'warm_step' is no flag"),
        ('words = ("menu", *LIGHT)', "", "--model tiny: task menu has no words for it"),
        ("def demonstration", "def another", "task menu has no demonstrations, which --model tiny"),
        # Words that would silently become padding.
        ('words = ("menu", *LIGHT)', 'words = ("menu", "cake")', "the word 'salad' of"),
        ('return "menu"', 'return "card"', "the word 'card' of"),
    ],
)
def test_what_a_task_gets_wrong_is_one_line(old, new, message, capsys):
    fails(["--task", write(old, new), "--out", "run"], capsys, "train.py: error: ", message)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("data", "told"),
    [("i", "50 of 50 held-out"), ("i % 3", "3 of 3 held-out"), ("[split, i]", ""), ("0", "")],
)
def test_problems_that_are_not_held_out_are_told(data, told, capsys):
    """Guards against a task that is trained and tested on the same rows. One problem alone is meant so."""
    path = Path(write(PROBLEMS, PROBLEMS.replace("None", data)))
    asked = path.read_text("utf-8").replace("Write a menu", "Write menu {problem.data}")
    path.write_text(asked, "utf-8")
    check_task(load_task(str(path)), 3)
    assert told in capsys.readouterr().err if told else not capsys.readouterr().err


@pytest.mark.parametrize(
    "switch", ["grad_enabled(False)", "default_dtype(torch.float64)", "default_device('meta')"]
)
def test_what_a_task_switches_in_torch_is_as_before(switch):
    """In its file, its constructor and its rewards. Guards against a warm-up without gradients."""
    line = f"torch.set_{switch}"
    path = write(NAME, f"    {line}\n    def __init__(self): {line}\n{NAME}")
    text = Path(path).read_text("utf-8")
    text = text.replace("        dishes", f"        {line}\n        dishes", 1)
    Path(path).write_text(f"import torch\n{text}", "utf-8")
    flags = "--warm-steps 2 --steps 2 --prompts-per-step 2 --group-size 3 --eval-problems 1"
    train.main(["--task", path, *flags.split(), "--pool", "3", "--method", "vpo", "--out", "run"])


def test_a_file_is_named_with_its_ending(capsys):
    Path("mine.py").touch()
    fails(["--task", "mine"], capsys, "--task mine: unknown;", "did you mean mine.py?")


@pytest.mark.parametrize("error", ["MemoryError('mine')", "RuntimeError('quota out of memory')"])
@pytest.mark.parametrize(
    ("old", "new"),
    [(WORST, "{}"), (NAME, f"    def __init__(self): {{}}\n{NAME}"), (NAME, f"    {{}}\n{NAME}")],
)
def test_an_error_of_ones_own_is_not_taken_for_a_lack_of_memory(old, new, error):
    """In a reward, the constructor, or the file."""
    path = write(old, new.format(f"raise {error}"))
    with pytest.raises((MemoryError, RuntimeError), match="mine|quota"):
        train.main(["--task", path, "--out", "run"])


@pytest.mark.parametrize("pattern", [r".+", r"\d+", r"\S+"])
def test_answers_that_may_still_grow_are_refused(pattern):
    """Guards against rollouts of one token, all of whose slots hold an answer: `finished` is not heeded."""
    task = load_task("fence", "some model")

    def letters(text: str) -> Iterator[str]:
        return iter(text)

    for find in (functools.partial(re.findall, pattern), str, letters):  # the last two are no lists
        task.find_answers = lambda text, m, finished, find=find: find(text)
        with pytest.raises(UserError, match="find_answers with finished=False must return a list"):
            check_task(task, 2)
    task.find_answers = lambda text, m, finished: re.findall(r"(\w*)\W", text)
    check_task(task, 2)
