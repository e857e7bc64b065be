"""What is evaluated: the policies of a run, held-out problems, runs that can be compared, snapshots."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoints import checkpoints
from engine.config import Config
from engine.files import append, read_log
from engine.kinds import fill_in
from engine.run_folder import load_run, task_of
from rewards import Problem, Task, UserError, take_problems
from vpo import ADVANTAGES, answers_per_rollout


@dataclass(frozen=True)
class EvalSettings:
    """How policies are evaluated: on which problems, with how many candidates each."""

    split: str
    problems: int
    pool: int  # candidates per problem
    temperature: float

    @property
    def folder_name(self) -> str:
        size = f"{self.problems}x{self.pool}"
        return f"eval-{self.split}-{size}-T{self.temperature:g}"


@dataclass
class Evaluation:
    """The evaluation of one run."""

    run: Path
    config: Config
    task: Task
    settings: EvalSettings
    folder: Path  # for what is written

    @property
    def summary_folder(self) -> Path:
        """For the means of this run and others: beside the run."""
        folder = self.run.parent / f"{self.config.task_name}-summary"
        return folder if self.folder == self.run else folder / self.folder.name


@dataclass(frozen=True)
class StoredPolicy:
    """A policy on disk."""

    folder: Path
    m: int  # answers per rollout that it is asked for


def held_out(task: Task, split: str = "test", n: int = 4) -> list[Problem]:
    """The first n problems of a split, fewer where a finite data set wraps around."""
    problems = {problem.id: problem for problem in take_problems(task, split, n)}
    return list(problems.values())


def policies(run: Path, m: int) -> dict[str, StoredPolicy]:
    """The policies of a run by name: the start model, asked for one answer and for m, and every method's.

    Raises:
        UserError: there is no checkpoint yet.
    """
    by_name = {
        "start": StoredPolicy(run / "start", 1),
        "start_sets": StoredPolicy(run / "start", m),
    }
    for method in ADVANTAGES:
        saved = checkpoints(run / method)
        if saved:
            by_name[method] = StoredPolicy(saved[-1], answers_per_rollout(method, m))
    if len(by_name) == 2:
        raise UserError(f"{run}: holds no checkpoint yet; let train.py get further, or --resume it")
    return by_name


def check_output(runs: list[Path], out: Path) -> None:
    """Raise UserError if `out` is a file, or two runs would get the same folder in it."""
    if out.is_file():
        raise UserError(f"--out {out}: must be a folder, and is a file")
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{' '.join(map(str, runs))}: two runs are named {name}, and each gets a folder of its "
                f"name in {out}; rename one"
            )


def output_folders(runs: list[Path], out: Path) -> list[Path]:
    """The folders in `out` for what is made of each run; of a single run `out` itself.

    Raises:
        UserError: see `check_output`.
    """
    check_output(runs, out)
    return [out] if len(runs) == 1 else [out / run.name for run in runs]


def comparable(runs: list[Path], **changes) -> list[Evaluation]:
    """How to evaluate each of several runs so that their means say something.

    Args:
        changes: fields of EvalSettings. Where one is None, the run's own flags decide.

    Raises:
        UserError: the runs cannot be compared.
    """
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError(f"{' '.join(map(str, runs))}: names a run twice")
    evaluations = []
    for run in runs:
        evaluation = _evaluation_of(run, changes)
        evaluations.append(evaluation)
        _check_comparable(evaluation, evaluations[0])
    return evaluations


def _evaluation_of(run: Path, changes: dict) -> Evaluation:
    config = load_run(run).config
    task = task_of(config)
    own = EvalSettings(
        split="test",
        problems=config.eval_problems or task.eval_problems,
        pool=config.pool,
        temperature=config.eval_temperature,
    )
    changed = {name: value for name, value in changes.items() if value is not None}
    settings = dataclasses.replace(own, **changed)
    if settings.pool < config.m:
        raise UserError(
            f"--pool {settings.pool}: must hold one rollout of the run's {config.m} answers"
        )
    folder = run if settings == own else run / settings.folder_name
    return Evaluation(run, config, task, settings, folder)


def _check_comparable(evaluation: Evaluation, first: Evaluation) -> None:
    """Raise UserError if a run's numbers cannot stand beside those of the first."""
    for name in ("task", "m", *evaluation.task.flags):
        own = getattr(evaluation.config, name, None)
        others = getattr(first.config, name, None)
        if own != others:
            raise UserError(
                f"{evaluation.run}: has --{name} {own}, and {first.run} has {others}; their mean says "
                "nothing"
            )
    if evaluation.settings != first.settings:
        raise UserError(
            f"{evaluation.run}: differs from {first.run} in --problems, --pool or --temperature: give them"
        )


def start_of(name: str, task_name: str, cuda: bool) -> tuple[Config, Task, str]:
    """Configuration, task, and folder or Hub id of a run's start model, or of a model.

    Args:
        name: a run folder, or a model; then the task's defaults apply.

    Raises:
        UserError: there is neither.
    """
    run = Path(name)
    if (run / "config.json").exists() and (run / "start").is_dir():
        config = load_run(run).config
        return config, task_of(config), str(run / "start")
    if name == "tiny":
        raise UserError(
            "--reward-geometry tiny: it knows nothing before a run; python train.py --steps 1 "
            "--eval-problems 0 --out FOLDER makes the start of a run, then name its folder"
        )
    config = Config(task=task_name, model=name)
    task = task_of(config)
    fill_in(config, task, cuda)
    return config, task, name


def is_snapshot_step(config: Config, step: int) -> bool:
    """Whether a snapshot is due after this many updates: evenly spaced, the first and the last included."""
    n = min(config.snapshots, config.steps)
    gaps = max(1, n - 1)
    return step in [config.steps - round(i * (config.steps - 1) / gaps) for i in range(n)]


def write_snapshot(
    log: Path, step: int, problems: list[Problem], answers: list[list[str | None]], rewards: list
) -> None:
    """Add what a policy answers to a few held-out problems.

    Args:
        answers: (N, n) answers, None where a rollout left a slot empty.
        rewards: N tensors (n, k).
    """
    records = []
    for problem, texts, vectors in zip(problems, answers, rewards, strict=True):
        rounded = vectors.double().round(decimals=6).tolist()
        records.append({"id": problem.id, "answers": texts, "rewards": rounded})
    append(log, {"step": step, "problems": records})


@dataclass
class Frame:
    """What each method answered at one step: by method one record per problem, answers and rewards."""

    step: int
    pools: dict[str, list[dict]]


@dataclass
class Snapshots:
    """All snapshots of a run."""

    config: Config
    task: Task
    problems: list[Problem]
    frames: list[Frame]
    metrics: dict[str, list[dict]]  # by method


def read_snapshots(run: Path) -> Snapshots:
    """The snapshots of a run, up to the last step that all methods with snapshots have reached.

    A method without a snapshot at a frame's step is shown at its nearest one.

    Raises:
        UserError: there are no snapshots.
    """
    config = load_run(run).config
    task = task_of(config)
    problems = held_out(task)
    pools: dict[str, dict[int, list[dict]]] = {}  # method -> step -> records
    metrics = {}
    for method in ADVANTAGES:
        records = read_log(run / method / "snapshots.jsonl", "problems")
        by_step = {}
        for record in records:
            if len(record["problems"]) == len(problems):
                by_step[record["step"]] = record["problems"]
        if by_step:
            pools[method] = by_step
            metrics[method] = read_log(run / method / "metrics.jsonl", "diversity", "reward")
    if not pools:
        raise UserError(f"{run}: no snapshots; training with --snapshots 20 keeps them")
    last = min(max(by_step) for by_step in pools.values())
    steps = set()
    for by_step in pools.values():
        steps |= {step for step in by_step if step <= last}
    frames = []
    for step in sorted(steps):
        frame = Frame(step, {})
        for method, by_step in pools.items():
            frame.pools[method] = by_step[nearest(step, by_step)]
        frames.append(frame)
    return Snapshots(config, task, problems, frames, metrics)


def nearest(step: int, steps: Iterable[int]) -> int:
    return min(steps, key=lambda other: abs(other - step))
