"""What a task is: problems, prompts, the reward vector of an answer; how it is found by its name, and checked.
`--task maze` is tasks/maze.py; `--task my_task.py` is yours, loaded the same way."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import numbers
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a wrong --task is named before torch is imported
    from torch import Tensor

TASKS = Path(__file__).resolve().parent / "tasks"


class UserError(Exception):
    """A mistake in what the user gave: reported as one line, exit code 2, no traceback."""


@dataclass
class Problem:
    """One problem of a task. `data` is whatever the task needs to score an answer; it must be plain JSON data."""

    id: str
    data: Any


class Task:
    """What a task must offer. A reward is a list of k floats, higher is better, none below `minimum`.
    The first block is all that a language model needs; `--model tiny` starts from nothing and needs the second, too."""

    name = "task"
    tag = "answer"  # answers stand between <answer_1> and </answer_1>, <answer_2> and </answer_2>, ...
    objectives: tuple[
        str, ...
    ] = ()  # names of the k components; empty: k differs from problem to problem
    minimum = 0.0  # the least that a component can be, and what an answer that does not exist gets in each
    flags: tuple[str, ...] = ()  # flags of train.py that the constructor takes
    fingerprint = ""  # of the files that the problems come from; a run goes on with no others
    m = 3  # answers per rollout, where --m does not say
    steps = 200  # of RL, where --steps does not say
    eval_problems = 200  # held out, where --eval-problems does not say

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        """Problems start .. start + n - 1 of a split; equal arguments, equal problems; a finite data set wraps around.
        Splits: "train", "validation", "test", and for a warm start "demonstrations" (those of "train" will do)."""
        raise NotImplementedError("the method is missing")

    def prompt(self, problem: Problem, m: int) -> str:
        """The text that asks a language model for m answers."""
        raise NotImplementedError("the method is missing")

    def reward(self, problem: Problem, answer: str) -> list[float]:
        """The reward vector (k) of one answer; must not raise, whatever the text."""
        raise NotImplementedError("the method is missing")

    def rewards(self, pairs: list[tuple[Problem, str]]) -> list[list[float]]:
        """The reward vectors of many answers at once, for tasks that score faster that way."""
        return [self.reward(problem, answer) for problem, answer in pairs]

    def find_answers(self, text: str, m: int) -> list[str] | None:
        """The answers in a rollout's text where they do not stand in tags; None: they do."""
        return None

    def scalar(self, rewards: Tensor) -> Tensor:
        """The task scalar, what GRPO trains on: rewards (..., k) -> (...); the plain mean unless overridden."""
        return rewards.mean(-1)

    def canonical(self, problem: Problem, answer: str) -> str:
        """Two answers of one rollout with equal canonical forms count once."""
        return " ".join(answer.split())

    def reachable(self, problem: Problem) -> list[list[float]]:
        """Reward vectors, of which one is the best that an answer can get, whatever the weighting; [] if unknown."""
        return []

    wide = False  # whether a drawing is wider than high: policies then stand side by side

    def draw(self, axes, problem: Problem, answers: list[str], color: str) -> bool:
        """Draw the answers to a problem on matplotlib axes; False if the task has no picture."""
        return False

    def summary(self, rewards: Tensor) -> str:
        """The title of a drawing, what matters in the reward vectors (n, k) of a pool, counted."""
        return f"{int((rewards > self.minimum).any(-1).sum())} of {len(rewards)} score"

    # For --model tiny only: its whole language is single words separated by blanks.
    warm_steps = 300  # of imitation, where --warm-steps does not say
    lr: float | None = (
        None  # peak learning rate of every method, where --lr does not say; None: each method's own
    )
    words: tuple[str, ...] = ()  # every word of a tiny prompt or answer, the tags excepted
    answer_words = 0  # words in the longest answer

    def tiny_prompt(self, problem: Problem) -> str:
        """The problem in words; the number of answers and the tags are added around it."""
        raise NotImplementedError("the method is missing; --model tiny needs it")

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """One answer in words, to be imitated. It need not be good: what RL discovers should not be shown here."""
        raise UserError(
            f"task {self.name}: has no demonstrations for --warm-steps or --model tiny; leave them out"
        )


def load_task(name: str, **options) -> Task:
    """The task of this name: tasks/NAME.py, or a file with one subclass of `Task`, which may import its neighbours.
    Of the options the constructor gets those that `flags` names. Raises UserError if there is no such task or it cannot
    be made; whatever its methods raise later becomes one too."""
    path = find_task(name)
    with blame(f"--task {name}: cannot be loaded"):
        kind = _task_in(path)
        task = kind(**{flag: options[flag] for flag in kind.flags if flag in options})
    valid = {
        "name": str,
        "tag": str,
        "objectives": tuple | list,
        "minimum": int | float,
        "m": int,
        "steps": int,
        "warm_steps": int,
        "eval_problems": int,
        "answer_words": int,
        "lr": int | float | None,
        "fingerprint": str,
    }
    for attribute, type_ in valid.items():
        value = getattr(task, attribute)
        positive = attribute in ("m", "steps", "eval_problems", "lr") and value is not None
        if not isinstance(value, type_) or (positive and value <= 0):
            raise UserError(
                f"--task {name}: {attribute} = {value!r:.60} is not what rewards.Task asks for"
            )
    if len(set(task.objectives)) < len(task.objectives):
        raise UserError(f"--task {name}: objectives = {task.objectives!r:.60} names one twice")
    if path.parent != TASKS:
        task.fingerprint = hashlib.sha256(path.read_bytes() + task.fingerprint.encode()).hexdigest()
    for method in (name for name, value in vars(Task).items() if callable(value)):
        setattr(task, method, _named(task, method))
    return task


def find_task(name: str) -> Path:
    """The file of a task; UserError if there is none."""
    path = Path(name) if name.endswith(".py") else TASKS / f"{name}.py"
    known = [
        file.stem
        for file in sorted(TASKS.glob("*.py"))
        if re.search(r"\((File)?Task\):", file.read_text())
    ]
    if not path.is_file() or (path.parent == TASKS and path.stem not in known):
        raise UserError(
            f"--task {name}: unknown; choose from {', '.join(known)}, or name a Python file"
        )
    return path


def _task_in(path: Path) -> type[Task]:
    if path.parent == TASKS:
        module = importlib.import_module(f"tasks.{path.stem}")
    else:
        sys.path.append(str(path.resolve().parent))  # its neighbours
        spec = importlib.util.spec_from_file_location(f"task_{path.stem}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Task)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise UserError(
            f"--task {path}: defines {len(found)} subclasses of Task; it needs exactly one"
        )
    return found[0]


def _named(task: Task, name: str) -> Callable:
    """A method of a task whose exceptions are UserErrors that name it, the problem and the answer."""
    method = getattr(task, name)

    @functools.wraps(method)
    def call(*args, **kwargs):
        about = [
            f" of problem {x.id!r}" if isinstance(x, Problem) else f", answer {x!r:.80}"
            for x in args[:2]
            if isinstance(x, Problem | str)
        ]
        with blame(f"task {task.name}: {name}{''.join(about)} failed"):
            return method(*args, **kwargs)

    return call


@contextlib.contextmanager
def blame(what: str) -> Iterator[None]:
    """Turn an exception of a user's code into a UserError that says what failed, where and why."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        place = (
            error
            if isinstance(error, SyntaxError)
            else traceback.extract_tb(error.__traceback__)[-1]
        )
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(
            f"{what} ({Path(place.filename or '').name}, line {place.lineno}: {why})"
        ) from error


def take_problems(task: Task, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
    """Exactly n problems of a split; UserError if the task gives something else."""
    problems = task.problems(split, n, seed, start)
    if not isinstance(problems, list) or not all(
        isinstance(problem, Problem) for problem in problems
    ):
        raise UserError(
            f"task {task.name}: problems({split!r}, ...) must be a list of Problem, not {problems!r:.60}"
        )
    if len(problems) != n:
        raise UserError(
            f"task {task.name}: problems({split!r}, n={n}, start={start}) gave {len(problems)}; it should "
            f"{'wrap around' if problems else 'not be empty'}"
        )
    return problems


def reward_vectors(task: Task, pairs: list[tuple[Problem, str]]) -> list[list[float]]:
    """task.rewards(pairs), checked. UserError that names problem, answer and value if one is no reward vector."""
    vectors = task.rewards(pairs)
    if not isinstance(vectors, list) or len(vectors) != len(pairs):
        raise UserError(
            f"task {task.name}: rewards must return a list of {len(pairs)} vectors, not {vectors!r:.80}"
        )
    sizes: dict[str, int] = {}
    for (problem, answer), vector in zip(pairs, vectors, strict=True):
        why = ""
        if not isinstance(vector, list | tuple) or not all(
            isinstance(value, numbers.Real) for value in vector
        ):
            why = "must be a list of numbers"
        elif len(vector) != (
            size := len(task.objectives) or sizes.setdefault(problem.id, len(vector) or 1)
        ):
            why = f"has {len(vector)} numbers for {size} objectives"
        elif wrong := [value for value in vector if not task.minimum <= value < 1e30]:
            why = (
                f"holds {wrong[0]}; each must be finite and at least Task.minimum = {task.minimum}"
            )
        if why:
            about = f"of problem {problem.id!r}, answer {answer!r:.80}"
            raise UserError(f"task {task.name}: the reward {vector!r:.80} {about} {why}")
    return vectors
