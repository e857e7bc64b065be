"""Tasks: how they are found and loaded, and checks of what their methods return."""

import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import math
import numbers
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rewards
from engine.config import Config
from engine.doors import as_user_error, did_you_mean
from rewards import Problem, Task, UserError

ROOT = Path(__file__).resolve().parent.parent
BUILT_IN = {"fence": rewards.Fence, "toy": rewards.Toy}
# Flags whose default a task may want to set, where an attribute would have no effect.
DEFAULTS = (
    "m",
    "steps",
    "lr",
    "warm_steps",
    "eval_problems",
    "max_new_tokens",
    "temperature",
    "kl",
)
ATTRIBUTES: dict[str, tuple[type, str]] = {  # that a task may set: type, and what it is called
    "name": (str, "text"),
    "tag": (str, "text"),
    "ends": (str, "text"),
    "objectives": (tuple, 'a tuple of names, such as ("speed",)'),
    "words": (tuple, 'a tuple of words, such as ("red",)'),
    "flags": (tuple, 'a tuple of names of flags, such as ("size",)'),
    "minimum": (numbers.Real, "a number"),
    "answer_words": (int, "a whole number"),
    "defaults": (dict, "a dictionary of flags"),
    "tiny_defaults": (dict, "a dictionary of flags"),
    "language_defaults": (dict, "a dictionary of flags"),
}


def task_names() -> list[str]:
    """The tasks that --task knows by name."""
    names = list(BUILT_IN)
    for path in (ROOT / "tasks").glob("*.py"):
        if f'    name = "{path.stem}"' in path.read_text():  # the others are helpers
            names.append(path.stem)
    return sorted(names)


def load_task_class(name: str) -> type[Task]:
    """The class of a task: built in, of tasks/NAME.py, or the only subclass of Task in a Python file.

    Raises:
        UserError: there is no such task, it cannot be loaded, or it has an unfit member.
    """
    path = Path(name)
    if name in BUILT_IN:
        return BUILT_IN[name]
    if path.suffix == ".py" and not path.is_file():
        fix = f"; the built-in one is --task {path.stem}" if path.stem in task_names() else ""
        raise UserError(f"--task {name}: there is no such file, looked for from {Path.cwd()}{fix}")
    if path.suffix != ".py" and name not in task_names():
        names = task_names()
        raise UserError(
            f"--task {name}: unknown; choose from {', '.join(names)}, or name a Python file"
            f"{did_you_mean(name, names)}"
        )
    with as_user_error(f"--task {name}: cannot be loaded"):
        if path.suffix == ".py":
            module = module_of(path)
        else:
            module = importlib.import_module(f"tasks.{name}")
    classes = []
    for value in vars(module).values():
        is_own = getattr(value, "__module__", "") == module.__name__
        if is_own and isinstance(value, type) and issubclass(value, Task):
            classes.append(value)
    if len(classes) != 1:
        raise UserError(
            f"--task {name}: defines {len(classes)} subclasses of Task; it needs exactly one"
        )
    _check_names(classes[0], name)
    _check_reward(classes[0], name)
    _check_attributes(classes[0], name)
    _check_flags(classes[0], name)
    return classes[0]


def module_of(path: Path) -> Any:
    """The module of a user's file, which may import its neighbours. It is run once."""
    return _run_module(path.resolve(), path.read_bytes())


@functools.lru_cache(maxsize=1)
def _run_module(path: Path, source: bytes) -> Any:
    sys.path.append(str(path.parent))
    module = types.ModuleType(f"task_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(source, path, "exec"), vars(module))
    return module


def load_task(name: str, model: str = "tiny", **flags: Any) -> Task:
    """The task of this name. Whatever its methods raise later names the method, problem and answer.

    Args:
        model: of --model; the tiny model writes its answers in tags, as it has imitated them.
        flags: the constructor gets those that `Task.flags` names.

    Raises:
        UserError: there is no such task, or it cannot be made.
    """
    task_class = load_task_class(name)
    with as_user_error(f"--task {name}: cannot be loaded"):
        flags["model"] = model
        own = {flag: flags[flag] for flag in task_class.flags if flag in flags}
        task = task_class(**own)
    _check_attributes(task, name)  # those that the constructor has set
    _check_signatures(task, name)
    for method in methods_of():
        setattr(task, method, _with_user_errors(task, method))
    if model == "tiny":
        task.form = "tags"
        task.reads_untagged = False
        task.find_answers = no_answers_of_its_own
    return task


def no_answers_of_its_own(text: str, m: int, finished: bool) -> None:
    """In place of `Task.find_answers`: the answers stand in tags."""


def methods_of() -> dict[str, Callable]:
    """The methods of rewards.Task by name."""
    members = vars(Task)
    return {name: value for name, value in members.items() if callable(value) and name[0] != "_"}


def _check_attributes(task: Task | type[Task], name: str) -> None:
    """Raise UserError for an attribute that is not what rewards.Task asks for."""
    for attribute in ("objectives", "words", "flags"):
        value = getattr(task, attribute)
        if isinstance(value, list):
            setattr(task, attribute, tuple(value))
    for attribute, (expected, description) in ATTRIBUTES.items():
        value = getattr(task, attribute)
        is_right = isinstance(value, expected)
        if is_right and expected is tuple:
            is_right = all(isinstance(part, str) for part in value)
        if not is_right:
            raise UserError(f"--task {name}: {attribute} = {value!r:.60} must be {description}")
    if not math.isfinite(task.minimum):
        raise UserError(f"--task {name}: minimum = {task.minimum} must be finite")
    if task.form not in ("tags", "lines"):
        raise UserError(f'--task {name}: form = {task.form!r:.60} must be "tags" or "lines"')
    if len(task.tag.split()) != 1:
        raise UserError(f"--task {name}: the tag {task.tag!r} must be one word")
    if len(set(task.objectives)) < len(task.objectives):
        raise UserError(f"--task {name}: objectives = {task.objectives!r:.60} names one twice")


def _check_flags(task_class: type[Task], name: str) -> None:
    """Raise UserError for a name in `flags` that train.py does not know."""
    known = [field.name for field in dataclasses.fields(Config)]
    for flag in task_class.flags:
        if flag not in known:
            raise UserError(
                f"--task {name}: flags names {flag!r}, which is no flag of train.py"
                f"{did_you_mean(flag, known)}"
            )


def _check_names(task_class: type[Task], name: str) -> None:
    """Raise UserError for a misspelt name: one that is close to a name of Task that the file lacks."""
    known = {attribute for attribute in vars(Task) if attribute[0] != "_"}
    lacking = known - vars(task_class).keys()
    for attribute in vars(task_class).keys() - known:
        if attribute[0] == "_":
            continue
        if attribute in DEFAULTS:
            raise UserError(
                f"--task {name}: {attribute} is a flag; give its default in "
                f"defaults = {{{attribute!r}: ...}}, tiny_defaults or language_defaults"
            )
        close = difflib.get_close_matches(attribute, lacking, n=1, cutoff=0.83)
        if close:
            raise UserError(
                f"--task {name}: {attribute} is not in rewards.Task; did you mean {close[0]}? If not, "
                f"call it _{attribute}"
            )


def _check_reward(task_class: type[Task], name: str) -> None:
    """Raise UserError if a class defines `reward` while `rewards` of a parent is what is called."""
    for parent in task_class.__mro__[:-1]:
        if parent is Task or "rewards" in vars(parent):
            return
        if "reward" in vars(parent) and task_class.rewards is not Task.rewards:
            raise UserError(
                f"--task {name}: defines reward, but its parent scores answers with rewards(pairs); "
                "define rewards"
            )


def _check_signatures(task: Task, name: str) -> None:
    """Raise UserError for a method that does not take the arguments of rewards.Task's."""
    for method, original in methods_of().items():
        arguments = list(inspect.signature(original).parameters)
        try:
            inspect.signature(getattr(task, method)).bind(*arguments[1:])  # without self
        except TypeError as error:
            raise UserError(
                f"--task {name}: {method} must take ({', '.join(arguments)}): {error}"
            ) from error


def _with_user_errors(task: Task, name: str) -> Callable:
    """A method of a task whose exceptions are UserErrors."""
    method = getattr(task, name)

    @functools.wraps(method)
    def call(*args, **kwargs):
        subject = ""
        for argument in args[:2]:
            if isinstance(argument, Problem):
                subject += f" of problem {argument.id!r}"
            elif isinstance(argument, str) and subject:
                subject += f", answer {argument!r:.80}"
            elif isinstance(argument, str):
                subject = f" {argument!r:.80}"
        with as_user_error(f"task {task.name}: {name}{subject} failed"):
            return method(*args, **kwargs)

    return call


# What a task's methods return.


def take_problems(task: Task, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
    """Exactly n problems of a split. Raises UserError if the task gives something else."""
    problems = task.problems(split, n, seed, start)
    is_list = isinstance(problems, list)
    if not is_list or not all(isinstance(problem, Problem) for problem in problems):
        raise UserError(
            f"task {task.name}: problems({split!r}, ...) must be a list of Problem, not {problems!r:.60}"
        )
    if len(problems) != n:
        fix = "it should wrap around" if problems else "it should not be empty"
        raise UserError(
            f"task {task.name}: problems({split!r}, n={n}, start={start}) gave {len(problems)}; {fix}"
        )
    for problem in problems:
        if not isinstance(problem.id, str):
            raise UserError(
                f"task {task.name}: the id {problem.id!r:.60} of a problem must be text"
            )
    by_id = {problem.id: problem for problem in problems}
    for problem in problems:
        if problem.data != by_id[problem.id].data:
            raise UserError(
                f"task {task.name}: problems({split!r}, ...) gave two with the id {problem.id!r} and "
                "different data; give each an id of its own"
            )
    return problems


def held_out(task: Task, split: str = "test", n: int = 4) -> list[Problem]:
    """The first n problems of a split, fewer where a finite data set wraps around."""
    problems = {problem.id: problem for problem in take_problems(task, split, n)}
    return list(problems.values())


def reward_vectors(task: Task, pairs: list[tuple[Problem, str]]) -> list[list[float]]:
    """task.rewards(pairs), checked.

    Raises:
        UserError: names problem, answer and value of what is no reward vector.
    """
    vectors = task.rewards(pairs)
    if not isinstance(vectors, list) or len(vectors) != len(pairs):
        raise UserError(
            f"task {task.name}: rewards must return a list of {len(pairs)} vectors, not {vectors!r:.80}"
        )
    sizes: dict[str, int] = {}  # of the vectors of each problem, where the objectives have no names
    for (problem, answer), vector in zip(pairs, vectors, strict=True):
        mistake = _mistake_in(vector, task, problem, sizes)
        if mistake:
            raise UserError(
                f"task {task.name}: the reward {vector!r:.80} of problem {problem.id!r}, "
                f"answer {answer!r:.80} {mistake}"
            )
    return vectors


def reachable_vectors(task: Task, problem: Problem) -> list[list[float]]:
    """task.reachable(problem), checked. Raises UserError for what is no reward vector."""
    vectors = task.reachable(problem)
    if not isinstance(vectors, list):
        raise UserError(
            f"task {task.name}: reachable of problem {problem.id!r} must be a list of reward vectors, "
            f"not {vectors!r:.80}"
        )
    sizes: dict[str, int] = {}
    for vector in vectors:
        mistake = _mistake_in(vector, task, problem, sizes)
        if mistake:
            raise UserError(
                f"task {task.name}: reachable of problem {problem.id!r} holds {vector!r:.80}, which "
                f"{mistake}"
            )
    return vectors


def _mistake_in(vector: Any, task: Task, problem: Problem, sizes: dict[str, int]) -> str:
    """What is wrong with a reward vector, empty if nothing is."""
    is_list = isinstance(vector, list | tuple)
    if not is_list or not all(isinstance(value, numbers.Real) for value in vector):
        return "must be a list of numbers; of a tensor or array return .tolist()"
    size = len(task.objectives) or sizes.setdefault(problem.id, len(vector) or 1)
    if len(vector) != size:
        return f"has {len(vector)} numbers for {size} objectives"
    for value in vector:
        if not task.minimum <= value < 1e30:  # false for NaN, too
            return (
                f"holds {value}; each must be finite and at least Task.minimum = {task.minimum}, which "
                "the task may set"
            )
    return ""


def task_scalars(task: Task, rewards: Tensor) -> Tensor:
    """task.scalar of rewards (..., k), checked: (...).

    Raises:
        UserError: it is no tensor of this shape, or a number in it is not finite.
    """
    scalars = task.scalar(rewards)
    is_tensor = isinstance(scalars, Tensor)
    if not is_tensor or scalars.shape != rewards.shape[:-1] or not scalars.isfinite().all():
        given = " ".join(f"{scalars!r:.80}".split())
        raise UserError(
            f"task {task.name}: scalar must turn (..., k) into finite numbers (...), not {given}"
        )
    return scalars


def check_text(task: Task, method: str, problem: Problem, value: object) -> None:
    """Raise UserError unless a method of a task returned text."""
    if not isinstance(value, str):
        raise UserError(
            f"task {task.name}: {method} of problem {problem.id!r} must be text, not {value!r:.80}"
        )


def check_task(task: Task, m: int) -> None:
    """Ask a task for all that a run will need."""
    for split in ("train", "test"):
        for problem in take_problems(task, split, 2):
            try:
                json.dumps(problem.data)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"task {task.name}: data of {problem.id!r} is not plain JSON ({error})"
                ) from error
            check_text(task, "prompt", problem, task.prompt(problem, m))
            vectors = reward_vectors(task, [(problem, "")])
            task_scalars(task, torch.tensor(vectors, dtype=torch.float32))
