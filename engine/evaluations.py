"""Evaluations: their settings and pools, and which runs may share a mean."""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.config import MAY_DIFFER, Config, flag_of, peak_rate
from engine.runs import load_run, steps_done
from rewards import Problem, UserError


@dataclass(frozen=True)
class Settings:
    """How policies are evaluated: on which problems, with how many candidates each."""

    split: str
    problems: int
    pool: int  # candidates per problem
    temperature: float

    @property
    def folder_name(self) -> str:
        return f"eval-{self.split}-{self.problems}x{self.pool}-T{self.temperature:g}"


@dataclass
class Evaluation:
    """The evaluation of one run."""

    run: Path
    config: Config
    settings: Settings
    folder: Path  # for what is written


@dataclass
class Pool:
    """The n candidates of one policy for each of N problems."""

    problems: list[Problem]
    answers: list[list[str | None]]  # (N, n) None where a rollout left the slot empty
    rewards: Tensor  # (N, n, k) zero beyond a problem's own objectives
    scalars: Tensor  # (N, n) task scalars
    objective_mask: Tensor  # (N, k) bool, the objectives that each problem has


def evaluations_of(runs: list[Path], flags: Any) -> list[Evaluation]:
    """How eval.py's flags evaluate runs: a flag that is 0 or empty is as in the run."""
    changes = {}
    for field in dataclasses.fields(Settings):
        changes[field.name] = getattr(flags, field.name) or None
    evaluations = [evaluation_of(run, changes) for run in runs]
    check_comparable(evaluations)
    out = Path(flags.out) if flags.out else None
    for evaluation, folder in zip(evaluations, output_folders(runs, out), strict=True):
        evaluation.folder = folder or evaluation.folder
    return evaluations


def evaluation_of(run: Path, changes: dict) -> Evaluation:
    """How to evaluate a run: by its own flags, but for the changes that are not None."""
    config = load_run(run).config
    own = Settings(
        "test", config.eval_problems or Config.eval_problems, config.pool, config.eval_temperature
    )
    changed = {name: value for name, value in changes.items() if value is not None}
    settings = dataclasses.replace(own, **changed)
    if settings.pool < config.m:
        raise UserError(
            f"--pool {settings.pool}: must hold one rollout of the run's {config.m} answers"
        )
    return Evaluation(run, config, settings, run if settings == own else run / settings.folder_name)


def check_comparable(evaluations: list[Evaluation]) -> None:
    """Raise UserError if the means of several runs would say nothing."""
    runs = [evaluation.run for evaluation in evaluations]
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError(f"{' '.join(map(str, runs))}: names a run twice")
    for first, other in itertools.combinations(evaluations, 2):
        check_pair(first, other)


def check_pair(first: Evaluation, other: Evaluation) -> None:
    """Raise UserError if two runs differ in more than the seed, or do not differ in it."""
    for field in dataclasses.fields(Config):
        own = getattr(other.config, field.name)
        others = getattr(first.config, field.name)
        if own != others and field.name not in (*MAY_DIFFER, "seed"):
            raise UserError(
                f"{other.run}: has {flag_of(field.name)} {own}, and {first.run} has {others}; their mean "
                "says nothing"
            )
    for method in other.config.method:
        if method in first.config.method:
            check_trained_alike(method, first, other)
    if other.settings != first.settings:
        raise UserError(
            f"{other.run}: differs from {first.run} in --problems, --pool or --temperature: give them"
        )
    if other.config.seed == first.config.seed:
        raise UserError(
            f"{other.run}: has --seed {other.config.seed}, as {first.run} has; a mean is one over seeds: "
            "train with another --seed, or evaluate them one by one"
        )


def check_trained_alike(method: str, first: Evaluation, other: Evaluation) -> None:
    """Raise UserError if a method had other learning rates in two runs, or other steps."""
    rate = peak_rate(first.config, method)
    other_rate = peak_rate(other.config, method)
    if other_rate != rate:
        raise UserError(
            f"{other.run}: has --lr {method}={other_rate:g}, and {first.run} has {rate:g}; their mean "
            "says nothing"
        )
    steps = steps_done(first.run / method)
    other_steps = steps_done(other.run / method)
    if other_steps != steps:
        raise UserError(
            f"{other.run}: {method} has done {other_steps} steps, and in {first.run} {steps}; finish "
            "both with --resume"
        )


def output_folders(runs: list[Path], out: Path | None) -> list[Path | None]:
    """The folders in `out` for what is made of each run; of a single run `out` itself."""
    if out is None:
        return [None] * len(runs)
    if out.is_file():
        raise UserError(f"--out {out}: must be a folder, and is a file")
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{' '.join(map(str, runs))}: two runs are named {name}, and each gets a folder of its "
                f"name in {out}; rename one"
            )
    return [out] if len(runs) == 1 else [out / name for name in names]


def summary_folder(evaluations: list[Evaluation], out: str) -> Path:
    """The folder for the means of several runs: `out`, or one beside the first of them."""
    if out:
        return Path(out)
    first = evaluations[0]
    folder = first.run.parent / f"{first.config.task_name}-summary"
    return folder if first.folder == first.run else folder / first.folder.name
