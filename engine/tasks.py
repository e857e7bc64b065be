"""Tasks: how they are found and loaded, and checks of what their methods return."""

import contextlib
import functools
import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import TASKS
from engine.errors import did_you_mean, task_code
from engine.files import listed
from rewards import Fence, Problem, Task, Toy, UserError

BUILT_IN = {"fence": Fence, "toy": Toy}


def load_task_class(name: str) -> type[Task]:
    """The class of a task: built in, of tasks/NAME.py, or the only subclass of Task in a Python file."""
    path = Path(name)
    if name in BUILT_IN:
        return BUILT_IN[name]
    if path.suffix == ".py" and path.is_file():
        module = _run_module(path.resolve(), path.read_bytes())
    elif name in TASKS:
        module = importlib.import_module(f"tasks.{name}")
    else:
        problem = "there is no such file" if path.suffix == ".py" else "unknown"
        known = sorted(TASKS)
        hint = did_you_mean(name, [*known, *map(str, listed(Path(), "*.py"))])
        advice = f"choose from {', '.join(known)}, or name a Python file"
        raise UserError(f"--task {name}: {problem}; {advice}{hint}")
    classes = []
    for value in vars(module).values():
        is_task = isinstance(value, type) and issubclass(value, Task)
        if is_task and value.__module__ == module.__name__:  # it was not imported
            classes.append(value)
    if len(classes) != 1:
        names = ", ".join(own.__name__ for own in classes) or "none"
        raise UserError(f"--task {name}: must define one subclass of Task, and defines {names}")
    return classes[0]


@contextlib.contextmanager
def usual_torch() -> Iterator[None]:
    """What a user's own code switches in torch is as before after it: gradients, default type and device."""
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)  # None costs less


@functools.lru_cache(maxsize=1)
@usual_torch()
def _run_module(path: Path, source: bytes) -> Any:
    """The module of a user's file, which may import its neighbours. It is run once."""
    sys.path.append(str(path.parent))
    module = types.ModuleType(f"task_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    with task_code(f"the file of --task {path.name}"):
        exec(compile(source, path, "exec"), vars(module))
    return module


def load_task(name: str, model: str = "tiny", **flags: Any) -> Task:
    """The task of this name. Its constructor gets the flags that `Task.flags` names.

    The tiny model writes its answers in tags, as it has imitated them.
    """
    task_class = load_task_class(name)
    flags["model"] = model
    with usual_torch(), task_code(f"the constructor of --task {name}"):
        task = task_class(**{key: flags[key] for key in task_class.flags if key in flags})
    if task.form not in ("tags", "lines"):
        raise UserError(f'--task {name}: form must be "tags" or "lines", not {task.form!r:.60}')
    is_sequence = isinstance(task.objectives, tuple | list)
    if not is_sequence or len({*map(str, task.objectives)}) < len(task.objectives):
        rule = 'must be a tuple of different names, such as ("a",)'
        raise UserError(f"--task {name}: objectives {rule}, not {task.objectives!r:.60}")
    if model == "tiny":
        task.form = "tags"
        task.reads_untagged = False
        task.find_answers = types.MethodType(Task.find_answers, task)
    return task


def take_problems(task: Task, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
    """Exactly n problems of a split, checked."""
    with task_code(f"Task.problems({split!r}, n={n}, seed={seed}, start={start})"):
        problems = task.problems(split, n, seed, start)
    call = f"task {task.name}: problems({split!r}, n={n}, start={start})"
    is_list = isinstance(problems, list) and len(problems) == n
    if not is_list or not all(isinstance(problem, Problem) for problem in problems):
        raise UserError(f"{call} must be a list of {n} Problem, not {problems!r:.80}")
    by_id = {problem.id: problem for problem in problems}
    for problem in problems:
        with task_code(f"Task.problems: data of problem {problem.id!r} must be plain JSON"):
            json.dumps(problem.data)
        if problem.data != by_id[problem.id].data:
            raise UserError(f"{call} gave two with the id {problem.id!r} and different data")
    return problems


def held_out(task: Task, split: str = "test", n: int = 4) -> list[Problem]:
    """The first n problems of a split, fewer where a finite data set wraps around."""
    by_id = {problem.id: problem for problem in take_problems(task, split, n)}
    return list(by_id.values())


@usual_torch()
def call_rewards(task: Task, pairs: list[tuple[Problem, str]]) -> Any:
    """What task.rewards(pairs) returns, or task.reward of each."""
    if type(task).rewards is not Task.rewards:
        first = pairs[0][0].id
        with task_code(f"Task.rewards of {len(pairs)} answers, to problem {first!r} and others"):
            return task.rewards(pairs)
    vectors = []
    for problem, answer in pairs:
        with task_code(f"Task.reward of problem {problem.id!r}, answer {answer!r:.80}"):
            vectors.append(task.reward(problem, answer))
    return vectors


def reward_vectors(task: Task, pairs: list[tuple[Problem, str]]) -> list[list[float]]:
    """task.rewards(pairs), checked."""
    vectors = call_rewards(task, pairs)
    if not isinstance(vectors, list) or len(vectors) != len(pairs):
        raise UserError(f"task {task.name}: rewards must return {len(pairs)} vectors in a list")
    sizes: dict[str, int] = {}  # of each problem's vectors
    checked = []
    for (problem, answer), vector in zip(pairs, vectors, strict=True):
        place = f"the reward of problem {problem.id!r}, answer {answer!r:.80}"
        checked.append(numbers_of(task, vector, sizes.get(problem.id, 0), place))
        sizes[problem.id] = len(checked[-1])
    return checked


def reachable_vectors(task: Task, problem: Problem) -> list[list[float]]:
    """task.reachable(problem), checked."""
    place = f"reachable of problem {problem.id!r}"
    return [numbers_of(task, vector, 0, place) for vector in task.reachable(problem)]


def numbers_of(task: Task, vector: Any, d: int, place: str) -> list[float]:
    """A vector of d numbers, of any d if it is 0 and no objective has a name. Raises UserError for another."""
    d = len(task.objectives) or d
    try:
        values = torch.as_tensor(vector, dtype=torch.float64)  # which takes no text and no set
    except (TypeError, ValueError, OverflowError, RuntimeError):
        values = torch.zeros(0)
    has_size = values.ndim == 1 and len(values) > 0 and d in (0, len(values))
    if has_size and ((values >= task.minimum) & (values < 1e30)).all():  # no NaN either
        return values.tolist()
    rule = f"must be a list of {d or 'some'} finite numbers of at least minimum = {task.minimum}"
    raise UserError(f"task {task.name}: {vector!r:.80} {rule}: {place}")


def prompt_of(task: Task, problem: Problem, m: int) -> str:
    """task.prompt(problem, m), checked."""
    with task_code(f"Task.prompt of problem {problem.id!r}, m={m}"):
        prompt = task.prompt(problem, m)
    check_text(prompt, f"task {task.name}, problem {problem.id!r}: the prompt")
    return prompt


def check_text(text: Any, name: str) -> None:
    """Raise UserError for what is no text, or holds half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise UserError(f"{name} {text!r:.80} must be text ({error!s:.200})") from error


def task_scalars(task: Task, rewards: Tensor) -> Tensor:
    """task.scalar of rewards (..., d), checked: (...)."""
    scalars = torch.as_tensor(task.scalar(rewards))
    if scalars.shape != rewards.shape[:-1] or not scalars.isfinite().all():
        raise UserError(f"task {task.name}: scalar must be finite numbers (...), not {scalars}")
    return scalars


def check_task(task: Task, m: int) -> None:
    """Ask a task for all that a run will need, before minutes are spent."""
    prompts: dict[str, set[str]] = {}  # of each split
    for split, n in (("train", 200), ("test", 50)):
        in_files = getattr(task, "parts", {}).get(split, ())  # all are looked at
        problems = take_problems(task, split, max(n, len(in_files)))
        prompts[split] = {prompt_of(task, problem, m) for problem in problems}
        for problem in problems[:2]:
            prompt = prompt_of(task, problem, m)
            vectors = reward_vectors(task, [(problem, ""), (problem, "Two: 10 red.")])
            task_scalars(task, torch.tensor(vectors, dtype=torch.float32))
            check_find_answers(task, f"Two: 10 red.\n{prompt[-500:]}")
    n_test = len(prompts["test"])
    n_shared = len(prompts["test"] & prompts["train"])
    if n_test > 1 and n_shared:
        message = f"{n_shared} of {n_test} held-out problems stand in training too: not held out"
        print(f"task {task.name}: {message}; give each split problems of its own", file=sys.stderr)


def check_find_answers(task: Task, text: str) -> None:
    """Raise UserError if an answer changes as a text grows: the rollout would be cut off in it."""
    given: list[str] = []
    for end in range(len(text)):
        answers = task.find_answers(text[:end], 1, finished=False) or []
        if not isinstance(answers, list) or answers[: len(given)] != given:
            rule = "find_answers with finished=False must return a list of texts that have ended"
            change = f"{given!r:.80}, and {answers!r:.80} a letter later"
            raise UserError(f"task {task.name}: {rule}, or None, not {change}")
        given = answers[:1]
