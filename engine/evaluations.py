"""Evaluations: their settings and pools, and the rows of a table of several runs."""

import dataclasses
import importlib.util
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.config import MAY_DIFFER, Config, flag_of, peak_rate
from engine.runs import StoredPolicy, load_run, policies
from rewards import Problem, UserError
from vpo import ADVANTAGES, SEVERAL_ANSWERS

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


@dataclass(frozen=True)
class Row:
    """A row of a table: a policy, and the flags by which its runs differ from the other rows'."""

    method: str  # or "start", "start_sets"
    m: int | None = None  # answers per rollout that it is asked for; None: as many as in training
    t: float = 1.0  # its weights are start + t (trained - start)
    differing: tuple[str, ...] = ()  # such as "--kl 0.0"

    @property
    def details(self) -> list[str]:
        """The words after the method in a title."""
        details = ["one answer"] if self.m == 1 else []
        if self.t != 1:
            details.append(f"--mix {self.t:g}")
        return [*details, *self.differing]

    @property
    def title(self) -> str:
        """Its name in eval.json, such as "vpo, one answer, --kl 0.0"."""
        return ", ".join([self.method, *self.details])


@dataclass
class Evaluation:
    """The evaluation of one run."""

    run: Path
    config: Config
    settings: Settings
    folder: Path  # for what is written
    policies: dict[Row, StoredPolicy]  # those that are evaluated

    @property
    def unfinished(self) -> str:
        """Which methods of the run have steps left, such as "vpo: step 37 of 300"."""
        done = dict.fromkeys(self.config.method, 0)
        for row, policy in self.policies.items():
            if row.method in done:
                done[row.method] = policy.step
        steps = self.config.steps
        return ", ".join(f"{name}: step {n} of {steps}" for name, n in done.items() if n < steps)


@dataclass
class Pool:
    """The n candidates of one policy for each of N problems."""

    problems: list[Problem]
    answers: list[list[str | None]]  # (N, n) None where a rollout left the slot empty
    rewards: Tensor  # (N, n, d) zero beyond a problem's own objectives
    scalars: Tensor  # (N, n) task scalars
    objective_mask: Tensor  # (N, d) bool, the objectives that each problem has


def evaluations_of(runs: list[Path], flags: Any) -> list[Evaluation]:
    """The evaluations that eval.py's flags ask for. Flags that are not given are the first run's."""
    names = [f"{t:g}" for t in flags.mix]  # of rows and folders
    if len(set(names)) < len(names):
        raise UserError(f"--mix {' '.join(names)}: two are equal to six digits; drop one")
    changes = {field.name: getattr(flags, field.name) for field in dataclasses.fields(Settings)}
    evaluations = load_evaluations(runs, changes | {"mix": tuple(flags.mix)})
    if flags.out:
        for evaluation, folder in zip(evaluations, output_folders(runs, flags.out), strict=True):
            evaluation.folder = folder
    return evaluations


def load_evaluations(runs: list[Path], changes: dict[str, Any]) -> list[Evaluation]:
    """The evaluations of runs by the flags of the first run, but for the changes that are not None."""
    configs = [load_run(run).config for run in runs]
    changed = {name: value for name, value in changes.items() if value is not None}
    settings = dataclasses.replace(own_settings(configs[0]), **changed)
    evaluations = []
    for run, config in zip(runs, configs, strict=True):
        if config.lora_rank and not importlib.util.find_spec("peft"):
            raise UserError(f"{run}: holds adapters, which need peft; pip install peft")
        if settings.pool < config.m:
            rule = f"must hold one rollout of the run's {config.m} answers"
            raise UserError(f"--pool {settings.pool}: {rule}")
        folder = run if settings == own_settings(config) else run / settings.folder_name
        stored = evaluated(run, config.m, settings.mix)
        evaluations.append(Evaluation(run, config, settings, folder, stored))
    return evaluations


def own_settings(config: Config) -> Settings:
    """How a run is evaluated after its training."""
    n = config.eval_problems or Config.eval_problems
    return Settings("test", n, config.pool, config.eval_temperature)


def evaluated(run: Path, m: int, mix: tuple[float, ...]) -> dict[Row, StoredPolicy]:
    """The policies of a run that are evaluated: for each t, and those of m answers asked for one, too."""
    found = {}
    for name, policy in policies(run, m).items():
        own_mix = mix if name in ADVANTAGES else (1.0,)
        for t in own_mix:
            found[Row(name, t=t)] = policy
            if name in SEVERAL_ANSWERS and m > 1:
                found[Row(name, 1, t)] = dataclasses.replace(policy, m=1)
    return found


def check_comparable(evaluations: list[Evaluation]) -> None:
    """Raise UserError if runs differ in more than the seed, so that their mean would say nothing."""
    labels = [row.title for row in rows_of(evaluations) if row.differing]
    seeds = {evaluation.config.seed for evaluation in evaluations}
    if labels or len(seeds) < len(evaluations):
        names = " ".join(str(evaluation.run) for evaluation in evaluations)
        differing = "; ".join(labels) or "one seed twice"
        raise UserError(f"{names}: must differ in the seed, and in nothing else ({differing})")


def rows_of(evaluations: list[Evaluation]) -> dict[Row, dict[int, Path]]:
    """The rows of a table of several runs, each with the runs that it is a mean of: seed -> run.

    Runs that differ in more than the seed have rows of their own, named by what differs. Raises
    UserError if they differ in their problems.
    """
    for name in PROBLEM_FLAGS:
        values = {str(getattr(evaluation.config, name)) for evaluation in evaluations}
        if len(values) > 1:
            problem = f"the runs differ in {flag_of(name)}: {', '.join(sorted(values))}"
            raise UserError(f"{problem}; one table is of the same problems")
    rows: dict[Row, dict[int, Path]] = {}
    for row in dict.fromkeys(itertools.chain(*(each.policies for each in evaluations))):
        traits = [traits_of(evaluation, row) for evaluation in evaluations]
        for evaluation, own in zip(evaluations, traits, strict=True):
            if row not in evaluation.policies:
                continue
            differing = []
            for trait, value in own.items():
                differs = any(other.get(trait, value) != value for other in traits)
                if differs and value != "":
                    differing.append(f"{trait} {value}")
            runs = rows.setdefault(dataclasses.replace(row, differing=tuple(differing)), {})
            other = runs.get(evaluation.config.seed)
            if other and row.method in evaluation.config.method:
                problem = f"differs from {other} in nothing, not even in --seed"
                raise UserError(f"{evaluation.run}: {problem}; a mean is one over seeds")
            runs[evaluation.config.seed] = other or evaluation.run
    return rows


def traits_of(evaluation: Evaluation, row: Row) -> dict[str, Any]:
    """The flags that can change a policy's numbers, but for the seed: flag -> value."""
    config = evaluation.config
    names = [name for name in vars(config) if name not in (*MAY_DIFFER, "seed")]
    if row.method.startswith("start"):
        names = START_FLAGS
    traits = {flag_of(name): getattr(config, name) for name in names}
    if row.method in config.method:
        traits["--lr"] = f"{peak_rate(config, row.method):g}"
        if row in evaluation.policies:
            done = evaluation.policies[row].step
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
