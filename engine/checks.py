"""Checks of flags, device and task before minutes are spent. Each raises UserError."""

import inspect
import json

import torch
from torch import Tensor

from engine.config import Config
from engine.models import check_peft, is_adapter
from rewards import Problem, Task, UserError, reward_vectors, take_problems
from vpo import ADVANTAGES, vpo_advantage

FORM_SETS = {"max_at_k", "group_vpo"}  # across the rollouts of a group
TAKE_SUBSET = FORM_SETS | {"vpo"}  # which forms such sets with --subset alone
RESERVED = ("start", "start_sets")  # policies of every run that are no methods


def device_named(name: str) -> str:
    """The device of --device; `auto` is cuda if there is one, else cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def check_device(name: str, dtype: str = "float32") -> str:
    """The device of this name.

    Raises:
        UserError: the machine does not have it, or it does not compute in this dtype.
    """
    device = device_named(name)
    try:
        torch.ones(1, device=device, dtype=getattr(torch, dtype)).square()
    except (RuntimeError, TypeError, AssertionError) as error:
        if dtype == "float32":
            message = f"--device {device}: this machine has none; take --device cpu"
        else:
            message = (
                f"--device {device}: this machine has none that computes in {dtype}; "
                "take --device cpu or --dtype float32"
            )
        raise UserError(message) from error
    return device


def check_config(config: Config, task: Task) -> None:
    """Raise UserError for flags that do not fit one another, the task or the model."""
    if config.pool < config.m:
        raise UserError(
            f"--pool {config.pool}: must hold at least one rollout of --m {config.m} answers"
        )
    if config.sampler == "sobol" and config.alpha != 1:
        raise UserError(f"--alpha {config.alpha:g}: --sampler sobol needs --alpha 1; take iid")
    check_warm_up(config)
    check_sets(config)
    check_methods(config.method)
    if len(set(config.method)) < len(config.method):
        raise UserError(f"--method {' '.join(config.method)}: names a method twice")
    if "goal_conditioned" in config.method and not task.objectives:
        raise UserError(
            f"--method goal_conditioned: task {config.task} names no objectives to be weighed"
        )
    for name, file in (("--data", config.data), ("--test-data", config.test_data)):
        if file and "data" not in task.flags:
            raise UserError(f"{name} {file}: task {config.task} takes no file, unlike code")
    if config.lora_rank:
        check_peft(f"--lora-rank {config.lora_rank}")
    if is_adapter(config.model):
        raise UserError(
            f"--model {config.model}: an adapter, not a model; merge it first (merge_and_unload of peft)"
        )


def check_warm_up(config: Config) -> None:
    """A language model's warm-up takes steps that are too small for weights in bfloat16.

    It is done in float32. Rounded to bfloat16, most weights are what they were before.
    """
    if config.model != "tiny" and config.warm_steps and config.dtype == "bfloat16":
        raise UserError(
            f"--dtype bfloat16 --warm-steps {config.warm_steps}: rounding to bfloat16 would take back "
            "most of what the warm-up teaches; take --dtype float32, or --warm-steps 0"
        )


def check_methods(names: list[str]) -> None:
    """Every method must take what all methods get, and its name is that of a folder and a column."""
    options = inspect.signature(vpo_advantage).parameters.keys() - {"rewards", "answer_mask"}
    for name in names:
        if not name.isidentifier() or name in RESERVED:
            raise UserError(
                f"--method {name}: must be a name such as my_method, and no other policy's"
            )
        try:
            inspect.signature(ADVANTAGES[name]).bind(
                "rewards", "scalars", "answer_mask", **dict.fromkeys(options)
            )
        except TypeError as error:
            raise UserError(
                f"--method {name}: must take (rewards, scalars, answer_mask, **options): {error}"
            ) from error


def check_sets(config: Config) -> None:
    """Sets of rollouts: smaller than the group, and formed by a method that is trained."""
    if (config.subset or 1) >= config.group_size:
        raise UserError(
            f"--subset {config.subset}: must be below --group-size {config.group_size}, or no signal is left"
        )
    forming = FORM_SETS & set(config.method)
    if forming and not config.subset and config.group_size < 3:
        raise UserError(
            f"--group-size {config.group_size}: {min(forming)} forms sets of two or more, smaller "
            "than the group; take 3 or more"
        )
    if config.subset and not TAKE_SUBSET & set(config.method):
        raise UserError(
            f"--subset {config.subset}: not used by {', '.join(config.method)}, only by "
            f"{', '.join(sorted(TAKE_SUBSET))}; leave it out"
        )


def check_task(task: Task, m: int) -> None:
    """Ask a task for all that a run will need."""
    if len(task.tag.split()) != 1:
        raise UserError(f"task {task.name}: the tag {task.tag!r} must be one word")
    for split in ("train", "test"):
        for problem in take_problems(task, split, 2):
            check_problem(task, problem, m)


def check_problem(task: Task, problem: Problem, m: int) -> None:
    try:
        json.dumps(problem.data)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"task {task.name}: data of {problem.id!r} is not plain JSON ({error})"
        ) from error
    check_text(task, "prompt", problem, task.prompt(problem, m))
    vectors = reward_vectors(task, [(problem, "")])
    task_scalars(task, torch.tensor(vectors, dtype=torch.float32))


def check_text(task: Task, method: str, problem: Problem, value: object) -> None:
    """Raise UserError unless a method of a task returned text."""
    if not isinstance(value, str):
        raise UserError(
            f"task {task.name}: {method} of problem {problem.id!r} must be text, not {value!r:.80}"
        )


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


def check_advantages(method: str, advantages: Tensor, shape: tuple[int, int]) -> None:
    """Raise UserError unless a method's advantages are finite numbers of this shape (P, G)."""
    if not isinstance(advantages, Tensor) or not advantages.is_floating_point():
        raise UserError(f"method {method}: must return a tensor of floats, not {advantages!r:.60}")
    if advantages.shape != shape:
        raise UserError(
            f"method {method}: its advantages have the shape {tuple(advantages.shape)}, not "
            f"(P, G) = {tuple(shape)}"
        )
    if not advantages.isfinite().all():
        raise UserError(f"method {method}: an advantage is not finite; look for a division by 0")
