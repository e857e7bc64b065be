"""One file per task, found by its name: `--task maze` is tasks/maze.py, `--task my_task.py` is yours."""

import contextlib
import difflib
import functools
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType

from rewards import Problem, Task, UserError, did_you_mean

NAMES = ("code", "eureqa", "headline", "maze", "musique", "tool", "toy")


@dataclass(frozen=True)
class Expected:
    """What an attribute of a task may be."""

    description: str
    types: type | UnionType
    at_least: float = -math.inf
    at_most: float = math.inf

    def allows(self, value: object) -> bool:
        """Whether a value of the right type is in the range, if it is a number."""
        return not isinstance(value, int | float) or self.at_least <= value <= self.at_most


TEXT = Expected("text", str)
WHOLE = Expected("a whole number", int, 0)
POSITIVE = Expected("a whole number above 0", int, 1)
ATTRIBUTES = {  # that a task may set
    "name": TEXT,
    "tag": TEXT,
    "fingerprint": TEXT,
    "objectives": Expected('a tuple of names, such as ("speed",)', tuple | list),
    "minimum": Expected("a number", int | float),
    "lr": Expected("a number above 0", int | float, 1e-12),
    "m": Expected("a whole number from 1 to 8", int, 1, 8),
    "steps": POSITIVE,
    "warm_steps": WHOLE,
    "eval_problems": POSITIVE,
    "answer_words": WHOLE,
    "tokens_per_answer": POSITIVE,
    "language_flags": Expected("a dictionary", dict),
}


def load_task(name: str, **options) -> Task:
    """The task of this name: tasks/NAME.py, or a Python file with one subclass of `Task`.

    A file may import its neighbours. Whatever a task's methods raise later becomes a UserError that
    names the method, the problem and the answer.

    Args:
        options: the constructor gets those that `Task.flags` names.

    Raises:
        UserError: there is no such task, or it cannot be made.
    """
    path = Path(name)
    if path.suffix == ".py" and not path.is_file():
        raise UserError(f"--task {name}: there is no such file, looked for from {Path.cwd()}")
    if name not in NAMES and path.suffix != ".py":
        raise UserError(
            f"--task {name}: unknown; choose from {', '.join(NAMES)}, or name a Python file"
            f"{did_you_mean(name, NAMES)}"
        )
    with as_user_error(f"--task {name}: cannot be loaded"):
        kind = _task_class(name)
        task = kind(**{flag: options[flag] for flag in kind.flags if flag in options})
    _check_names(task, name)
    _check_attributes(task, name)
    _check_signatures(task, name)
    for method in methods():
        setattr(task, method, _with_user_errors(task, method))
    return task


def _check_attributes(task: Task, name: str) -> None:
    """Raise UserError for an attribute that is not what rewards.Task asks for."""
    for attribute, expected in ATTRIBUTES.items():
        value = getattr(task, attribute)
        is_missing = attribute == "lr" and value is None
        if is_missing:
            continue
        if not isinstance(value, expected.types) or not expected.allows(value):
            raise UserError(
                f"--task {name}: {attribute} = {value!r:.60} must be {expected.description}"
            )
    if task.form not in ("tags", "lines"):
        raise UserError(f'--task {name}: form = {task.form!r:.60} must be "tags" or "lines"')
    if len(set(task.objectives)) < len(task.objectives):
        raise UserError(f"--task {name}: objectives = {task.objectives!r:.60} names one twice")


def _check_names(task: Task, name: str) -> None:
    """Raise UserError for a misspelt name: one that is close to a name of Task that the file lacks."""
    kind = type(task)
    known = {attribute for attribute in vars(Task) if attribute[0] != "_"}
    lacking = known - vars(kind).keys()
    for attribute in vars(kind).keys() - known:
        if attribute[0] == "_":
            continue
        close = difflib.get_close_matches(attribute, lacking, n=1, cutoff=0.83)
        if close:
            raise UserError(
                f"--task {name}: {attribute} is not in rewards.Task; did you mean {close[0]}? If not, "
                f"call it _{attribute}"
            )


def _check_signatures(task: Task, name: str) -> None:
    """Raise UserError for a method that does not take the arguments of rewards.Task's."""
    for method in methods():
        expected = inspect.signature(getattr(Task, method))
        arguments = list(expected.parameters)[1:]  # without self
        try:
            inspect.signature(getattr(task, method)).bind(*arguments)
        except TypeError as error:
            raise UserError(
                f"--task {name}: {method} must take ({', '.join(['self', *arguments])}): {error}"
            ) from error


def methods() -> list[str]:
    """The names of the methods that a task may define."""
    return [name for name, value in vars(Task).items() if callable(value) and name[0] != "_"]


def _task_class(name: str) -> type[Task]:
    """The only subclass of Task that a task's file defines."""
    if name in NAMES:
        module = importlib.import_module(f"tasks.{name}")
    else:
        path = Path(name)
        sys.path.append(str(path.resolve().parent))  # its neighbours
        spec = importlib.util.spec_from_file_location(f"task_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    classes = []
    for value in vars(module).values():
        is_own = getattr(value, "__module__", "") == module.__name__
        if is_own and isinstance(value, type) and issubclass(value, Task):
            classes.append(value)
    if len(classes) != 1:
        raise UserError(
            f"--task {name}: defines {len(classes)} subclasses of Task; it needs exactly one"
        )
    return classes[0]


def _with_user_errors(task: Task, name: str) -> Callable:
    """A method of a task whose exceptions are UserErrors."""
    method = getattr(task, name)

    @functools.wraps(method)
    def call(*args, **kwargs):
        subject = ""
        for argument in args[:2]:
            if isinstance(argument, Problem):
                subject += f" of problem {argument.id!r}"
            elif isinstance(argument, str):
                subject += f", answer {argument!r:.80}"
        with as_user_error(f"task {task.name}: {name}{subject} failed"):
            return method(*args, **kwargs)

    return call


@contextlib.contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Turn an exception of a user's code into a UserError that says what failed, where and why."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        source = error if isinstance(error, SyntaxError) else frame  # both say file and line
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        place = f"{Path(source.filename or '').name}, line {source.lineno}"
        raise UserError(f"{what} ({place}: {reason})") from error
