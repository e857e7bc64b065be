"""The runs behind study/README.md, except the searches: trains a grid, stores it, makes the tables.

    python study/reproduce.py --quick       one seed of the main comparison in the maze, in minutes
    python study/reproduce.py               the cells of the tiny model that are not stored yet
    python study/reproduce.py --out again   all of it anew on your machine, beside what is stored here
    python study/reproduce.py --only toy    the cells whose names contain a text, here all of the toy
    python study/reproduce.py --list        what is stored, and what is missing
    python study/reproduce.py --write       documents, tables and figures from what is stored

A cell is one method, task, seed and setting. It is trained and evaluated with one thread, and
--jobs cells run side by side. The same command goes on after a kill. study/results/ has one file
per task. It holds numbers per problem, from which every table is computed without training.
Cells that only the former program could train are listed, but not trained.
"""

import argparse
import fcntl
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.config import Config, Parser, flag, task_defaults
from engine.doors import as_command
from engine.files import read_log
from engine.runs import checkpoints, load_run, task_of
from engine.tasks import held_out, load_task, take_problems
from eval import Evaluation, Settings, evaluate_policy, measure, pass_at_k
from report import plots
from report.geometry import geometry
from rewards import Problem, Task, UserError
from study import documents
from study.entries import Entry
from study.stored import SINGLE, Result, Stored

VERSION = 3  # of the program, kept with every result; 1 and 2 are the former one
RESULTS = Path("study/results")
RUNS = Path("runs/reproduce")
QUICK = RUNS / "quick"
FORMER_TASKS = {"examples/fence.py": "fence"}  # former names in the commands of stored results

MAIN_METHODS = ("grpo", "max_at_k", "vpo", "group_vpo")
OTHERS = ("multi_rlvr", "dr_grpo", "maxrl", "gdpo", "random_weighting", "goal_conditioned")
TEMPERATURES = (0.7, 1.0, 1.3)  # the first is the table's
CURVE = (1, 2, 3, 5, 10, 30)  # the k of best@k, W@k and pass@k
MEASURES = ("diversity", "earned", *(f"best@{k}" for k in CURVE), *(f"W@{k}" for k in CURVE))
TRAINING = ("diversity", "reward", "answers", "entropy")
REWARDS = ("copies", "noisy", "halfway", "gems", "tradeoff")  # from collinear to conflicting

FIVE_SEEDS = (*MAIN_METHODS, "multi_rlvr", "goal_conditioned")  # of each task; the others three

RATES = (1.2e-4, 2.5e-4, 5e-4, 8e-4, 1.2e-3, 1.8e-3)  # peak learning rates that are compared
MORE_RATES = {  # compared too, where a rate at an edge was the best for best@30
    "maze": {
        **dict.fromkeys(("grpo", "gdpo", "goal_conditioned"), (6e-5,)),
        "multi_rlvr": (2.5e-3,),
    },
    "code": {
        **dict.fromkeys(set(SINGLE) - {"max_at_k"}, (3e-5, 6e-5)),
        "maxrl": (1.5e-5, 3e-5, 6e-5),
        "group_vpo": (1.8e-3,),
    },
}
REAL_RATES = {  # fewer: a run takes a quarter of an hour
    "open_cases": dict.fromkeys(MAIN_METHODS, (2e-5, 5e-5)),
    "headline": {
        "grpo": (1e-5, 2e-5),
        "max_at_k": (5e-6, 1e-5, 2e-5),
        "multi_rlvr": (1e-5, 2e-5, 4e-5),
        "vpo": (2e-5, 4e-5, 8e-5),
        "group_vpo": (1e-5, 2e-5, 4e-5, 8e-5),
    },
}
# The peak learning rates that validation chose. Tasks that are not named take those of the maze.
LR = {
    "maze": {
        "grpo": 1.2e-3,
        "dr_grpo": 8e-4,
        "maxrl": 8e-4,
        "gdpo": 1.2e-3,
        "max_at_k": 1.2e-3,
        "random_weighting": 5e-4,
        "goal_conditioned": 8e-4,
        "multi_rlvr": 1.2e-3,
        "vpo": 5e-4,
        "group_vpo": 1.2e-3,
    },
    "code": {
        "grpo": 5e-4,
        "dr_grpo": 8e-4,
        "maxrl": 1.2e-3,
        "gdpo": 8e-4,
        "max_at_k": 8e-4,
        "random_weighting": 8e-4,
        "goal_conditioned": 8e-4,
        "multi_rlvr": 1.2e-3,
        "vpo": 8e-4,
        "group_vpo": 8e-4,
    },
    "headline": {
        "grpo": 2e-5,
        "max_at_k": 1e-5,
        "multi_rlvr": 2e-5,
        "vpo": 4e-5,
        "group_vpo": 2e-5,
    },
    "open_cases": {"grpo": 5e-5, "max_at_k": 2e-5, "vpo": 5e-5, "group_vpo": 2e-5},
}
# What validation prefers for best@30 by more than .005. LR is chosen for best@1, or for m answers.
LR_AT_30 = {
    "maze": {
        "grpo": 1.2e-4,
        "multi_rlvr": 1.8e-3,
        "goal_conditioned": 5e-4,
        "gdpo": 5e-4,
        "random_weighting": 2.5e-4,
    },
    "code": {
        "grpo": 6e-5,
        "multi_rlvr": 5e-4,
        "group_vpo": 1.2e-3,
        "goal_conditioned": 6e-5,
        "random_weighting": 6e-5,
        "dr_grpo": 6e-5,
        "maxrl": 3e-5,
        "gdpo": 6e-5,
    },
}
OTHER_REAL_RATES = {  # compared on held-out problems
    "open_cases": {"grpo": (2e-5,), "max_at_k": (5e-5,), "vpo": (2e-5,)},
    "headline": {"grpo": (5e-6, 1e-5), "max_at_k": (5e-6, 2e-5), "group_vpo": (4e-5,)},
}
TUNING_SEED = 100  # it and those above: validation problems, to choose a learning rate

# A real language model, half an hour to an hour and a half for a run on one core.
REAL_TASKS = tuple(REAL_RATES)
REAL_MODEL = "--model HuggingFaceTB/SmolLM2-135M-Instruct --snapshots 0"
OPEN_CASES = (
    "--data tasks/open_cases.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct --warm-steps 36 "
    "--prompts-per-step 2 --max-new-tokens 96 --temperature 0.7 --kl 0 --save-every 10 "
    "--no-gradient-checkpointing --snapshots 0 --steps"
)
TUNING_STEPS = 60  # of 150: the headline task is learnt, or lost, by then
STORED_TEXTS = 6  # problems of the headline task whose answers are stored, of which
DRAWN_TEXTS = 2  # are in the figure

# One setting changed at a time: method, seeds, flags. Five seeds where a claim rests on it.
ABLATIONS = (
    # These three sample as many answers as the default.
    ("vpo", 5, {"m": 2, "prompts-per-step": 18}),
    ("vpo", 3, {"m": 5, "prompts-per-step": 7}),
    ("vpo", 3, {"m": 1, "prompts-per-step": 36, "lr": 1.2e-3}),  # C8: GRPO's data and learning rate
    ("vpo", 2, {"alpha": 0.3}),
    ("vpo", 2, {"alpha": 3.0}),
    ("vpo", 3, {"n-weights": 10}),
    ("vpo", 3, {"n-weights": 1000}),
    ("vpo", 3, {"sampler": "sobol"}),
    ("vpo", 2, {"subset": 2}),
    # No flags, but scripts of study/ in place of train.py.
    ("vpo", 2, {"credit": "answer"}),
    ("vpo", 2, {"credit": "shapley"}),
    ("vpo", 5, {"variant": "shared_mean"}),
    ("vpo", 2, {"variant": "half_mean"}),
    ("group_vpo", 2, {"variant": "tchebycheff"}),
    ("group_vpo", 2, {"variant": "annealed"}),
    ("multi_rlvr", 1, {"variant": "literal_sum"}),
    ("group_vpo", 5, {"subset": 2}),
    ("group_vpo", 2, {"subset": 6}),
    ("group_vpo", 2, {"group-size": 4, "prompts-per-step": 24}),
    ("group_vpo", 2, {"group-size": 16, "prompts-per-step": 6}),
    ("group_vpo", 2, {"group-size": 32, "prompts-per-step": 3}),
    ("grpo", 5, {"prompts-per-step": 4}),  # as many rollouts as VPO, a third of its answers
)


@dataclass(frozen=True)
class Cell:
    """One run of train.py and what is measured of it."""

    task: str
    method: str
    seed: int
    flags: tuple[tuple[str, object], ...] = ()  # of train.py, beyond task, method and seed

    @property
    def tuning(self) -> bool:
        """Whether means over 100 validation problems are measured, at one temperature."""
        return self.seed >= TUNING_SEED

    @property
    def name(self) -> str:
        words = [Path(self.task).stem, self.method, f"seed{self.seed}"]
        for name, value in self.flags:
            words.append(name + text_of(value))
        return "-".join(words)

    @property
    def is_former(self) -> bool:
        """Whether it is a result of the former program, which the present one cannot train."""
        return self.method == "goal_conditioned" or "sampler" in dict(self.flags)

    @property
    def folder(self) -> str:
        """The name of its run: what was trained by another version or setting has another."""
        digest = hashlib.sha256(f"{VERSION} {self.command}".encode()).hexdigest()
        return f"{self.name}-{digest[:8]}"

    @property
    def script(self) -> list[str]:
        """The script that trains it, with its first argument."""
        flags = dict(self.flags)
        if "variant" in flags:
            return ["study/variants.py", flags["variant"]]
        scripts = {"answer": "study/reward_to_go.py", "shapley": "study/shapley.py"}
        return [scripts.get(flags.get("credit"), "train.py")]

    @property
    def command(self) -> list[str]:
        """Flags of train.py. The learning rate is written out: a result says which one it had."""
        text = f"--task {self.task} --method {self.method} --seed {self.seed}"
        if self.task == "open_cases":
            steps = 20 if self.tuning else 60
            text = f"{text} {OPEN_CASES} {steps}".replace("open_cases", "code", 1)
        if self.task == "headline":
            text = f"{text} {REAL_MODEL}"
            if self.tuning:
                text = f"{text} --steps {TUNING_STEPS}"
        flags = dict(self.flags)
        flags.pop("credit", None)
        flags.pop("variant", None)
        if self.task not in ("toy", "fence"):  # which have one rate for all methods
            rates = LR.get(self.task, LR["maze"])
            flags.setdefault("lr", rates[self.method])
        words = [f"--{name} {text_of(value)}" for name, value in flags.items()]
        return " ".join([text, *words]).split()


def text_of(value: object) -> str:
    """The value of a flag as on a command line."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def cells() -> list[Cell]:
    """The whole grid: learning rates, main comparison, ablations, reward geometry, real model."""
    grid = tuning_cells()
    for task in ("maze", "code", "toy"):
        for method in MAIN_METHODS + OTHERS:
            n_seeds = 5 if method in FIVE_SEEDS or task == "toy" else 3
            grid += [Cell(task, method, seed) for seed in range(n_seeds)]

    for method, n_seeds, flags in ABLATIONS:
        setting = tuple(flags.items())
        grid += [Cell("maze", method, seed, setting) for seed in range(n_seeds)]
    grid += [Cell("code", "group_vpo", seed, (("subset", 2),)) for seed in range(5)]
    grid += [Cell("code", "vpo", seed, (("variant", "shared_mean"),)) for seed in range(5)]
    grid += [Cell("code", "maxrl", seed, (("variant", "passes"),)) for seed in range(3)]
    for task, rates in LR_AT_30.items():
        for method, rate in rates.items():
            n_seeds = 5 if method in FIVE_SEEDS else 3
            grid += [Cell(task, method, seed, (("lr", rate),)) for seed in range(n_seeds)]
    for task in (*(f"study/rewards/{reward}.py" for reward in REWARDS), "fence"):
        for method in MAIN_METHODS:
            grid += [Cell(task, method, seed) for seed in range(5)]

    return grid + real_cells()


def real_cells() -> list[Cell]:
    """The runs of the real model that are measured on held-out problems."""
    grid = [Cell("open_cases", method, 0) for method in MAIN_METHODS]
    for method in LR["headline"]:
        grid += [Cell("headline", method, seed) for seed in range(3)]
    for task, rates_of in OTHER_REAL_RATES.items():
        for method, rates in rates_of.items():
            grid += [Cell(task, method, 0, (("lr", rate),)) for rate in rates]
    return grid


def tuning_cells() -> list[Cell]:
    """The runs that choose the learning rates."""
    grid = []
    for task in ("maze", "code", *REAL_TASKS):
        for method in LR[task]:
            for rate in tuning_rates(task, method):
                grid.append(Cell(task, method, TUNING_SEED, (("lr", rate),)))
    for rate in RATES:  # with one seed they came in no order
        grid.append(Cell("maze", "grpo", TUNING_SEED + 1, (("lr", rate),)))
    return grid


def tuning_rates(task: str, method: str) -> tuple[float, ...]:
    """The peak learning rates that are compared: four, and more while the best is at an edge."""
    if task in REAL_TASKS:
        return REAL_RATES[task][method]
    best = LR[task][method]
    rates = [rate for i, rate in enumerate(RATES) if i < 4 or RATES[i - 1] <= best]
    return tuple(sorted([*rates, *MORE_RATES[task].get(method, ())]))


@dataclass(frozen=True)
class Store:
    """Results in a folder, one file per task: cell name -> record."""

    folder: Path

    def run(self, cell: Cell) -> Path:
        """Where a cell is trained. Other results than the project's own have runs of their own."""
        runs = RUNS if self.folder in (RESULTS, QUICK) else self.folder / "runs"
        return runs / cell.folder

    def path(self, cell: Cell) -> Path:
        """The file that holds a cell; the rewards that are compared share one."""
        name = cell.task
        if name == "fence" or name.endswith(".py"):
            name = "rewards"
        return self.folder / f"{name}.json.gz"

    def read(self, path: Path) -> dict[str, dict]:
        """All records of a file, none if there is no file. Raises UserError if it is damaged."""
        if not path.exists():
            return {}
        try:
            records = dict(json.loads(gzip.decompress(path.read_bytes())))
            if not all(isinstance(record, dict) for record in records.values()):
                raise ValueError("a record is no object")
        except (OSError, EOFError, ValueError, TypeError, zlib.error) as error:
            raise UserError(f"{path}: damaged ({error}); restore or delete it") from error
        return records

    def current(self, grid: list[Cell]) -> dict[Cell, dict]:
        """The records that were measured with the cell's own command, by either program."""
        records = {}
        for path in {self.path(cell) for cell in grid}:
            records |= self.read(path)
        current = {}
        for cell in grid:
            record = records.get(cell.name, {})
            command = [FORMER_TASKS.get(word, word) for word in record.get("command", [])]
            if command == cell.command:
                current[cell] = record
        return current

    def add(self, cell: Cell, record: dict) -> None:
        """Store a record. The file is replaced as a whole; equal numbers give equal bytes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(cell)
        temporary = path.with_suffix(".tmp")
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may store at the same time
            records = self.read(path) | {cell.name: record}
            text = json.dumps(dict(sorted(records.items())), separators=(",", ":"))
            temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
            temporary.replace(path)


def measure_cell(cell: Cell, store: Store) -> None:
    """Train a cell, or go on with it, evaluate it, and store what was measured.

    The run of a real model is deleted then, because its checkpoints take several gigabytes.

    Raises UserError if the training failed.
    """
    run = store.run(cell)
    if checkpoints(run / cell.method):
        command = ["--resume", "--out", str(run)]
    else:
        command = [*cell.command, "--eval-problems", "0", "--out", str(run)]
    if subprocess.run([sys.executable, *cell.script, *command]).returncode:
        words = " ".join([*cell.script, *command])
        raise UserError(f"{cell.name}: training failed: python {words}")
    store.add(cell, training_record(cell, run) | evaluation_record(cell, run))
    if cell.task in REAL_TASKS:
        shutil.rmtree(run)


def training_record(cell: Cell, folder: Path) -> dict:
    """The part of a cell's record that says how it was trained."""
    run = load_run(folder)
    steps = read_log(folder / cell.method / "metrics.jsonl")
    return {
        **run.history[-1],
        "version": VERSION,
        "command": cell.command,
        "size": run.config.pool,
        "steps": len(steps),
        "seconds": {"training": round(sum(step["seconds"] for step in steps), 1)},
        "rollouts": sum(step["rollouts"] for step in steps),
        "tokens": sum(step["tokens"] for step in steps),
        "training": {key: means_of_ten(steps, key) for key in TRAINING},
    }


def means_of_ten(steps: list[dict], key: str) -> list[float]:
    """The means of a training metric over ten steps each."""
    means = []
    for first in range(0, len(steps), 10):
        values = [step[key] for step in steps[first : first + 10]]
        means.append(round(sum(values) / len(values), 3))
    return means


def evaluation_record(cell: Cell, folder: Path) -> dict:
    """The part of a cell's record that says what its policies did on held-out problems.

    Of GRPO it holds the start model too. "at" maps temperature -> policy -> measure -> thousandths
    per problem. "groups" says which problems share a prompt.
    """
    config = load_run(folder).config
    task = task_of(config)
    split = "test"
    n_problems = task_defaults(task, config.model).get("eval_problems", Config.eval_problems)
    if cell.tuning:
        split = "validation"
        n_problems = 100
    names = [cell.method]
    if not cell.flags and cell.method == "grpo":
        names = ["start", "start_sets", "grpo"]
    temperatures = TEMPERATURES[:1]
    if set(dict(cell.flags)) <= {"lr"} and cell.task != "open_cases" and not cell.tuning:
        temperatures = TEMPERATURES

    problems = held_out(task, split, n_problems)
    record = {"at": {}}
    if not cell.tuning:
        record["groups"] = prompt_groups(task, problems, config.is_tiny)
    for temperature in temperatures:
        settings = Settings(split, n_problems, config.pool, temperature)
        evaluation = Evaluation(folder, config, settings, folder)
        pools = {name: evaluate_policy(name, evaluation, "cpu") for name in names}
        at = record["at"][f"{temperature:g}"] = {}
        for name, pool in pools.items():
            at[name] = condense(measure(pool, task, config.m), cell, config.pool)
        if "start" in pools and temperature == 1:  # as in training
            start = pools["start"]
            record["geometry"] = geometry(
                start.rewards, start.objective_mask, start.scalars, config.group_size
            )
        if cell.task == "headline" and temperature == TEMPERATURES[0]:
            record["answers"] = {name: pool.answers[:STORED_TEXTS] for name, pool in pools.items()}
    return record


def prompt_groups(task: Task, problems: list[Problem], is_tiny: bool) -> list[int] | None:
    """The number of each problem's prompt, equal where two problems share one. None: all do."""
    prompts = []
    for problem in problems:
        prompts.append(task.tiny_prompt(problem) if is_tiny else task.prompt(problem, 1))
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) == 1:
        return None
    return [distinct.index(prompt) for prompt in prompts]


def condense(values: dict[str, Tensor], cell: Cell, size: int) -> dict[str, list]:
    """Measures in thousandths, and how many of `size` candidates passed: per problem, or means."""
    condensed = {name: (1000 * values[name]).round().long() for name in MEASURES}
    condensed["passed"] = (values["pass@1"] * size).round().long()
    for name, value in condensed.items():
        numbers = value.tolist()
        if cell.tuning:
            numbers = [round(value.double().mean().item(), 2)]
        condensed[name] = numbers
    return condensed


def run_grid(pending: list[Cell], jobs: int, store: Store) -> int:
    """Measure cells, `jobs` at a time, each in a process of its own.

    Those that fail are named. They do not stop the others. Returns how many failed.
    """
    for cell in pending:  # here, so that a bad --out costs no training
        store.run(cell).parent.mkdir(parents=True, exist_ok=True)
    store.folder.mkdir(parents=True, exist_ok=True)

    running: list[subprocess.Popen] = []  # all that were started; a signal to an ended one is lost

    def run_cell(cell: Cell) -> bool:
        log = Path(f"{store.run(cell)}.log")
        command = [
            sys.executable,
            "study/reproduce.py",
            "--out",
            str(store.folder),
            "--cell",
            cell.name,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
            running.append(process)
            has_failed = process.wait() != 0
        outcome = f"FAILED, see {log}" if has_failed else "stored"
        print(f"{time.strftime('%H:%M')}  {cell.name}  {outcome}", flush=True)
        return has_failed

    def stop(number: int, frame) -> None:
        raise KeyboardInterrupt("stopped; the same command goes on")

    signal.signal(signal.SIGTERM, stop)
    with ThreadPoolExecutor(jobs) as workers:
        try:
            return sum(workers.map(run_cell, pending))
        except KeyboardInterrupt:
            workers.shutdown(wait=False, cancel_futures=True)  # first, else another cell begins
            for process in running:
                process.send_signal(signal.SIGINT)
            raise


def load_stored(store: Store) -> Stored:
    """All results of the grid, and the stored searches, as plain data for the tables."""
    results = [result_of(cell, record) for cell, record in store.current(cells()).items()]
    return Stored(results, store.read(store.folder / "search.json.gz"))


def result_of(cell: Cell, record: dict) -> Result:
    """A record in the measures' own units, with pass@k. Raises UserError if a part of it is missing."""
    try:
        return _result_of(cell, record)
    except KeyError as error:
        raise UserError(
            f"results, cell {cell.name}: the record lacks {error}; restore the file, or delete the "
            "record and measure the cell again"
        ) from error


def _result_of(cell: Cell, record: dict) -> Result:
    measures = {}
    for temperature, policies in record["at"].items():
        measures[temperature] = {}
        for name, values in policies.items():
            measures[temperature][name] = measures_of(values, record["size"], cell.tuning)
    prompt_ids = record.get("groups")
    return Result(
        task=Path(cell.task).stem,
        policy=policy_of(cell),
        seed=cell.seed,
        tuning=cell.tuning,
        measures=measures,
        prompt_ids=None if prompt_ids is None else torch.tensor(prompt_ids),
        geometry=record.get("geometry"),
        training=record["training"],
        rollouts=record["rollouts"],
        tokens=record["tokens"],
        steps=record["steps"],
        training_seconds=record["seconds"]["training"],
    )


def policy_of(cell: Cell) -> Entry:
    """What the tables call a cell's policy: with the learning rate where several are compared."""
    flags = dict(cell.flags)
    if cell.task == "open_cases" or set(flags) == {"lr"}:
        return Entry(cell.method, float(cell.command[-1]))
    return Entry(cell.method, flags=cell.flags)


def measures_of(values: dict[str, list], size: int, tuning: bool) -> dict[str, Tensor]:
    """Stored thousandths as measures, and pass@k from how many of `size` candidates passed."""
    measures = {}
    for name, thousandths in values.items():
        if name != "passed":
            measures[name] = torch.tensor(thousandths, dtype=torch.float64) / 1000
    if not tuning:  # else means
        for k in CURVE:
            chances = [pass_at_k(size, passed, k) for passed in values["passed"]]
            measures[f"pass@{k}"] = torch.tensor(chances, dtype=torch.float64)
    return measures


@dataclass
class ReproduceFlags:
    """The flags of study/reproduce.py."""

    quick: bool = flag(False, f"one seed of the main comparison, anew, into {QUICK}")
    out: str = flag(
        "", "folder of the results; empty: study/results, and the documents are written too"
    )
    only: str = flag(
        "",
        "cells whose names contain this; empty: all but those of a real language model "
        f"({', '.join(REAL_TASKS)}), which take hours more",
    )
    jobs: int = flag(2, "cells side by side, one thread each")
    write: bool = flag(False, "write tables and figures from what is stored, train nothing")
    list: bool = flag(False, "say what is stored, train nothing")
    cell: str = flag("", argparse.SUPPRESS)


def main(argv: list[str] | None = None) -> None:
    as_command("study/reproduce.py", lambda: run(argv))


def read_flags(argv: list[str] | None) -> ReproduceFlags:
    """The flags of a command. Raises UserError for those that do not fit."""
    parser = Parser(ReproduceFlags, "study/reproduce.py", __doc__.split("\n\n")[0])
    flags = parser.parse_args_into_dataclasses(argv)[0]
    if flags.write and flags.list:
        raise UserError("--write --list: give one of them")
    if flags.jobs < 1:
        raise UserError(f"--jobs {flags.jobs}: must be at least 1")
    return flags


def store_of(flags: ReproduceFlags) -> Store:
    """The results that a command reads and adds to. Raises UserError if --out is a file."""
    default = QUICK if flags.quick else RESULTS
    folder = Path(flags.out or default)
    if folder.is_file():
        raise UserError(f"--out {folder}: a file; name a folder")
    return Store(folder)


def run(argv: list[str] | None) -> None:
    """List the chosen cells, or measure those that are not stored, and write what follows."""
    flags = read_flags(argv)
    store = store_of(flags)
    grid = [Cell("maze", method, 0) for method in MAIN_METHODS] if flags.quick else cells()
    if flags.cell:
        cell = next(cell for cell in grid if cell.name == flags.cell)
        measure_cell(cell, store)
        return

    if flags.only:
        grid = [cell for cell in grid if flags.only in cell.name]
    else:
        grid = [cell for cell in grid if cell.task not in REAL_TASKS]
    if not grid:
        raise UserError(f"--only {flags.only}: no cell has such a name; --list shows them")
    current = store.current(grid)
    if flags.list:
        for cell in grid:
            former = "  (of the former program)" if cell.is_former else ""
            print(f"{'stored ' if cell in current else 'missing'}  {cell.name}{former}")
        return

    if flags.write and not current:
        raise UserError(f"{store.folder}: holds no result of this grid, nothing to write")
    failed = 0
    if not flags.write:
        pending = [cell for cell in grid if cell not in current and not cell.is_former]
        failed = run_grid(pending, flags.jobs, store)
    stored = load_stored(store)
    print(f"\n{documents.block(stored, 'all', 'main')}")
    if not (flags.out or flags.quick):
        write(stored, store)
    if failed:
        raise UserError(f"{failed} cells failed; the same command tries them again")


def write(stored: Stored, store: Store) -> None:
    """Write all documents, tables and figures, if every cell is stored."""
    missing = len(cells()) - len(stored.results)
    if missing:
        print(f"\ndocuments are written once all cells are stored; {missing} are missing")
        return
    documents.write(stored, Path("."))
    draw_headlines(store, Path("docs/figures/headlines.png"))
    print(f"\n{len(stored.results)} cells stored; written: the documents, their tables and figures")


def draw_headlines(store: Store, path: Path) -> None:
    """Draw what the policies of seed 0 wrote for the first held-out texts."""
    task = load_task("headline")
    problems = take_problems(task, "test", DRAWN_TEXTS)
    pools = {}
    drawn = [Cell("headline", method, 0) for method in LR["headline"]]
    for record in store.current(drawn).values():
        for name, texts in record["answers"].items():  # GRPO's record holds the start model too
            if name != "start_sets":
                texts = texts[:DRAWN_TEXTS]
                pools[name] = (texts, rewards_of(task, problems, texts))
    headings = [problem.data["text"] for problem in problems]
    plots.answers(pools, problems, task, path, columns=headings)


def rewards_of(task: Task, problems: list[Problem], texts: list[list]) -> list[Tensor]:
    """The rewards (n, k) of the answers to each problem; an empty slot earns what "" does."""
    rewards = []
    for problem, candidates in zip(problems, texts, strict=True):
        vectors = [task.reward(problem, text or "") for text in candidates]
        rewards.append(torch.tensor(vectors))
    return rewards


if __name__ == "__main__":
    os.chdir(
        Path(__file__).resolve().parent.parent
    )  # study/results/ and runs/ are named from there
    main()
