"""Evaluations: their settings and pools, and the rows of a table of several runs."""

import dataclasses
import importlib.util
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.config import MAY_DIFFER, Config, flag_of, peak_rate
from engine.models import load_config_and_tokenizer
from engine.runs import StoredPolicy, load_run, policies, steps_done
from rewards import Problem, UserError
from vpo import ADVANTAGES, SEVERAL_ANSWERS

ONE_ANSWER = "one answer"
PROBLEM_FLAGS = ("task", "size", "max_words", "data", "test_data")
START_FLAGS = (  # on which the start model's numbers depend
    "model", "dtype", "m", "warm_steps", "temperature", "max_new_tokens", "seconds", "memory_mb",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How policies are evaluated: on which problems, with how many candidates each."""

    split: str
    problems: int
    pool: int  # candidates per problem
    temperature: float
    mix: tuple[float, ...] = (1.0,)  # t of the weights start + t (trained - start)

    @property
    def folder_name(self) -> str:
        name = f"eval-{self.split}-{self.problems}x{self.pool}-T{self.temperature:g}"
        mix = "-".join(f"{t:g}" for t in self.mix)
        return name if self.mix == (1.0,) else f"{name}-mix{mix}"


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
    rewards: Tensor  # (N, n, d) zero beyond a problem's own objectives
    scalars: Tensor  # (N, n) task scalars
    objective_mask: Tensor  # (N, d) bool, the objectives that each problem has


@dataclass
class Row:
    """A row of a table: a policy, by the seeds of the runs that it is a mean of."""

    name: str  # the policy, and what differs, such as "vpo, --kl 0.0"
    policy: str
    runs: dict[int, Path]


def evaluations_of(runs: list[Path], flags: Any) -> list[Evaluation]:
    """How eval.py's flags evaluate runs: a flag that is not given is as in the first run."""
    changes = {field.name: getattr(flags, field.name) for field in dataclasses.fields(Settings)}
    names = [f"{t:g}" for t in flags.mix]  # of rows and folders
    if len(set(names)) < len(names):
        given = " ".join(map(str, flags.mix))
        raise UserError(f"--mix {given}: two are equal to six digits; drop one")
    changes["mix"] = tuple(flags.mix)
    settings = vars(evaluation_of(runs[0], changes).settings)
    evaluations = [evaluation_of(run, settings) for run in runs]
    rows_of(evaluations)  # raises if they do not fit into one table
    if flags.out:
        folders = output_folders(runs, flags.out)
        for evaluation, folder in zip(evaluations, folders, strict=True):
            evaluation.folder = folder
    return evaluations


def evaluation_of(run: Path, changes: dict) -> Evaluation:
    """How to evaluate a run: by its own flags, but for the changes that are not None."""
    config = load_run(run).config
    load_config_and_tokenizer(str(run / "start"))  # raises if it is damaged
    if config.lora_rank and not importlib.util.find_spec("peft"):
        raise UserError(f"{run}: holds adapters, which need peft; pip install peft")
    n = config.eval_problems or Config.eval_problems
    own = Settings("test", n, config.pool, config.eval_temperature)
    changed = {name: value for name, value in changes.items() if value is not None}
    settings = dataclasses.replace(own, **changed)
    if settings.pool < config.m:
        message = f"must hold one rollout of the run's {config.m} answers"
        raise UserError(f"--pool {settings.pool}: {message}")
    return Evaluation(run, config, settings, run if settings == own else run / settings.folder_name)


def check_comparable(evaluations: list[Evaluation]) -> None:
    """Raise UserError if runs differ in more than the seed, so that their mean would say nothing."""
    labels = [row.name for row in rows_of(evaluations) if row.name != row.policy]
    seeds = {evaluation.config.seed for evaluation in evaluations}
    if labels or len(seeds) < len(evaluations):
        names = " ".join(str(evaluation.run) for evaluation in evaluations)
        differing = "; ".join(labels) or "one seed twice"
        raise UserError(f"{names}: must differ in the seed, and in nothing else ({differing})")


def evaluated(evaluation: Evaluation) -> dict[str, StoredPolicy]:
    """What is evaluated of a run, by row: its policies, those of several answers asked for one, too.

    Of a trained policy there is a row for each t of --mix.
    """
    found = {}
    for name, policy in policies(evaluation.run, evaluation.config.m).items():
        mix = evaluation.settings.mix if name in ADVANTAGES else (1.0,)
        for t in mix:
            mixed = dataclasses.replace(policy, t=t)
            end = "" if t == 1 else f", --mix {t:g}"
            found[f"{name}{end}"] = mixed
            if name in SEVERAL_ANSWERS and policy.m > 1:
                found[f"{name}, {ONE_ANSWER}{end}"] = dataclasses.replace(mixed, m=1)
    return found


def method_of(row: str) -> str:
    """The start model or the method of a row such as "vpo, --kl 0.0"."""
    return row.partition(",")[0]


def rows_of(evaluations: list[Evaluation]) -> list[Row]:
    """The rows of a table of several runs: a policy of runs that differ in their seeds alone.

    Runs that differ in more have rows of their own, named by what differs. Raises UserError if they
    differ in their problems.
    """
    for name in PROBLEM_FLAGS:
        values = {str(getattr(evaluation.config, name)) for evaluation in evaluations}
        if len(values) > 1:
            problem = f"the runs differ in {flag_of(name)}: {', '.join(sorted(values))}"
            raise UserError(f"{problem}; one table is of the same problems")
    rows: dict[str, Row] = {}
    for policy in dict.fromkeys(itertools.chain(*map(evaluated, evaluations))):
        traits = [traits_of(evaluation, policy) for evaluation in evaluations]
        for evaluation, own in zip(evaluations, traits, strict=True):
            if policy not in evaluated(evaluation):
                continue
            name = policy
            for trait, value in own.items():
                differs = any(other.get(trait, value) != value for other in traits)
                if differs and value != "":
                    name += f", {trait} {value}"
            row = rows.setdefault(name, Row(name, policy, {}))
            other = row.runs.get(evaluation.config.seed)
            if other and method_of(policy) in evaluation.config.method:
                problem = f"differs from {other} in nothing, not even in --seed"
                raise UserError(f"{evaluation.run}: {problem}; a mean is one over seeds")
            row.runs[evaluation.config.seed] = other or evaluation.run
    return list(rows.values())


def traits_of(evaluation: Evaluation, policy: str) -> dict[str, Any]:
    """The flags that can change a policy's numbers, but for the seed: flag -> value."""
    config = evaluation.config
    method = method_of(policy)
    names = [name for name in vars(config) if name not in (*MAY_DIFFER, "seed")]
    if method.startswith("start"):
        names = START_FLAGS
    traits = {flag_of(name): getattr(config, name) for name in names}
    if method in config.method:
        traits["--lr"] = f"{peak_rate(config, method):g}"
        done = steps_done(evaluation.run / method)
        traits["at step"] = done if done < config.steps else ""
    return traits


def output_folders(runs: list[Path], out: str) -> list[Path]:
    """The folders for what is made of each run: the run, or `out`, which holds one for each of several."""
    if not out:
        return runs
    if len(runs) == 1:
        return [Path(out)]
    folders = [Path(out) / run.name for run in runs]
    if len(set(folders)) < len(runs):
        problem = f"each gets a folder of its name in {out}, and two have one name"
        raise UserError(f"{' '.join(map(str, runs))}: {problem}; rename one")
    return folders


def summary_folder(evaluations: list[Evaluation], out: str) -> Path:
    """The folder for the means of several runs: `out`, or one beside the first of them."""
    if out:
        return Path(out)
    first = evaluations[0]
    folder = first.run.parent / f"{first.config.task_name}-summary"
    return folder if first.folder == first.run else folder / first.folder.name
