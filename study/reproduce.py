"""The runs behind study/README.md, except the searches: trains a grid, stores it, makes the tables.

    python study/reproduce.py --quick          one seed of the main comparison in the maze, in minutes
    python study/reproduce.py                  the cells of the tiny model that are not stored yet
    python study/reproduce.py --out again      all of it anew on your machine, beside what is stored here
    python study/reproduce.py --compare again  the stored numbers against those of that folder
    python study/reproduce.py --take again     store what a newer version of the program measured there
    python study/reproduce.py --only toy       the cells whose names contain a text, here all of the toy
    python study/reproduce.py --list           what is stored by which version, and what is missing
    python study/reproduce.py --write          documents, tables and figures from what is stored

A cell is one method, task, seed and setting. It is trained and evaluated with one thread, and
--jobs cells run side by side. The same command goes on after a kill. study/results/ has one file
per task. It holds numbers per problem, from which every table is computed without training.
Cells that only the former program could train are listed, but not trained.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.config import Config, Parser, device_of, flag, open_device, task_defaults
from engine.doors import as_command
from engine.evaluations import Evaluation, Settings
from engine.files import read_log
from engine.runs import checkpoints, load_run, task_of
from engine.tasks import held_out
from eval import evaluate_policy, measure
from rewards import Problem, Task, UserError
from study import documents, result_tables
from study.grid import CURES, HEADLINES, MAIN_METHODS, REAL_TASKS, VERSION, Cell, cells
from study.store import CURVE, FORMER, QUICK, RESULTS, Store, load_stored, results_of
from study.stored import Stored

TEMPERATURES = (0.7, 1.0, 1.3)  # the first is the table's
MEASURES = ("diversity", "earned", *(f"best@{k}" for k in CURVE), *(f"W@{k}" for k in CURVE))
TRAINING = ("diversity", "reward", "answers", "entropy")
STORED_TEXTS = 6  # problems of the headline task whose answers are stored
# Of a real model on a card. A cell takes two or three minutes there, and so little memory that a dozen share it.
CARD = ["--micro-batch-tokens", "1024", "--sampling-batch", "240", "--save-every", "0"]


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
        if cell.task in REAL_TASKS and device_of("auto", is_tiny=False) == "cuda":
            command += CARD
    if subprocess.run([sys.executable, *cell.script, *command]).returncode:
        words = " ".join([*cell.script, *command])
        raise UserError(f"{cell.name}: training failed: python {words}")
    record = training_record(cell, run) | evaluation_record(cell, run)
    if cell.is_shown:
        record["during"] = answers_during(run / cell.method)
    store.add(cell, record)
    if cell.task in REAL_TASKS:
        shutil.rmtree(run)


def training_record(cell: Cell, folder: Path) -> dict:
    """The part of a cell's record that says how it was trained."""
    run = load_run(folder)
    steps = read_log(folder / cell.method / "metrics.jsonl")
    memory = folder / cell.method / "memory.json"  # on a card
    return {
        **run.history[-1],
        "version": VERSION,
        "command": cell.command,
        "size": run.config.pool,
        "steps": len(steps),
        "seconds": {"training": round(sum(step["seconds"] for step in steps), 1)},
        "rollouts": sum(step["rollouts"] for step in steps),
        "tokens": sum(step["tokens"] for step in steps),
        "peak_gib": json.loads(memory.read_text("utf-8"))["peak_gib"] if memory.exists() else None,
        "training": {key: means_of_ten(steps, key) for key in TRAINING},
    }


def answers_during(folder: Path) -> dict[int, list[list[str | None]]]:
    """What a method answered to a few held-out problems during training: step -> answers of each."""
    during = {}
    for snapshot in read_log(folder / "snapshots.jsonl", "problems"):
        during[snapshot["step"]] = [record["answers"] for record in snapshot["problems"]]
    return during


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
    is_compared = set(dict(cell.flags)) <= {"lr", *CURES}  # not an ablation
    if is_compared and cell.task != "open_cases" and not cell.tuning:
        temperatures = TEMPERATURES

    device = device_of("auto", config.is_tiny)
    open_device(device)
    problems = held_out(task, split, n_problems)
    record = {"at": {}}
    if not cell.tuning:
        record["groups"] = prompt_groups(task, problems, config.is_tiny)
    for temperature in temperatures:
        settings = Settings(split, n_problems, config.pool, temperature)
        evaluation = Evaluation(folder, config, settings, folder)
        pools = {name: evaluate_policy(name, evaluation, device) for name in names}
        at = record["at"][f"{temperature:g}"] = {}
        for name, pool in pools.items():
            at[name] = condense(measure(pool, task), cell, config.pool)
        if cell.task in HEADLINES and temperature == TEMPERATURES[0]:
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
    is_stopped = threading.Event()

    def run_cell(cell: Cell) -> bool:
        if is_stopped.is_set():
            return False
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
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
            running.append(process)
            if is_stopped.is_set():  # it began while the others were stopped
                process.send_signal(signal.SIGINT)
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
            is_stopped.set()
            workers.shutdown(wait=False, cancel_futures=True)  # first, else another cell begins
            for process in running:
                process.send_signal(signal.SIGINT)
            raise


@dataclass
class ReproduceFlags:
    """The flags of study/reproduce.py."""

    quick: bool = flag(False, f"one seed of the main comparison, anew, into {QUICK}")
    out: str = flag(
        "", "folder of the results; empty: study/results, and the documents are written too"
    )
    only: str = flag(
        "",
        "cells whose names contain this; empty: all, but those of a real language model "
        f"({', '.join(REAL_TASKS)}) are not trained: they take hours more",
    )
    jobs: int = flag(2, "cells side by side, one thread each")
    write: bool = flag(False, "write tables and figures from what is stored, train nothing")
    list: bool = flag(False, "say what is stored, train nothing")
    compare: str = flag("", "a folder whose means are printed beside the stored ones")
    take: str = flag("", "a folder from which results of a newer version are stored")
    cell: str = flag("", argparse.SUPPRESS)


def main(argv: list[str] | None = None) -> None:
    with as_command("study/reproduce.py"):
        run(argv)


def read_flags(argv: list[str] | None) -> ReproduceFlags:
    """The flags of a command. Raises UserError for those that do not fit."""
    parser = Parser(ReproduceFlags, "study/reproduce.py", __doc__)
    flags = parser.parse_args_into_dataclass(argv)[0]
    given = [name for name in ("write", "list", "compare", "take") if getattr(flags, name)]
    if len(given) > 1:
        names = " ".join(f"--{name}" for name in given)
        raise UserError(f"{names}: give one of them")
    if flags.jobs < 1:
        raise UserError(f"--jobs {flags.jobs}: must be at least 1")
    for name in ("compare", "take"):
        folder = getattr(flags, name)
        if folder and not any(Path(folder).glob("*.json.gz")):
            raise UserError(f"--{name} {folder}: holds no results; name the folder of an --out")
    return flags


def store_of(flags: ReproduceFlags) -> Store:
    """The results that a command reads and adds to. Raises UserError if --out is a file."""
    default = QUICK if flags.quick else RESULTS
    folder = Path(flags.out or default)
    if folder.is_file():
        raise UserError(f"--out {folder}: a file; name a folder")
    return Store(folder)


def grid_of(flags: ReproduceFlags) -> list[Cell]:
    """The cells that a command is about. Raises UserError if --only names none."""
    grid = [Cell("maze", method, 0) for method in MAIN_METHODS] if flags.quick else cells()
    if flags.only:
        grid = [cell for cell in grid if flags.only in cell.name]
    elif not (flags.compare or flags.take or flags.list):
        grid = [cell for cell in grid if cell.task not in REAL_TASKS]
    if not grid:
        raise UserError(f"--only {flags.only}: no cell has such a name; --list shows them")
    return grid


def run(argv: list[str] | None) -> None:
    """Do what the flags ask for: measure cells, or say, compare, take or write what is stored."""
    flags = read_flags(argv)
    store = store_of(flags)
    if flags.cell:
        cell = next(cell for cell in cells() if cell.name == flags.cell)
        measure_cell(cell, store)
        return
    grid = grid_of(flags)
    if flags.list:
        print_list(grid, store)
    elif flags.compare:
        print(compare(store, Store(Path(flags.compare)), grid))
    elif flags.take:
        taken = store.take(Store(Path(flags.take)), grid)
        print(f"{taken} records stored from {flags.take}; --write makes the documents")
    else:
        measure_and_write(flags, grid, store)


def print_list(grid: list[Cell], store: Store) -> None:
    """Say of every cell which version of the program measured it, and whether this one can."""
    current = store.current(grid)
    for cell in grid:
        status = "missing          "
        if cell in current:
            status = f"stored, version {current[cell].get('version', '?')}"
        former = "  (of the former program)" if cell.is_former else ""
        print(f"{status}  {cell.name}{former}")


def compare(old: Store, new: Store, grid: list[Cell]) -> str:
    """The table of old and new means, of the cells that two versions of the program measured."""
    before = old.current(grid) | old.current(grid, FORMER)
    after = {}
    for cell, record in new.current(grid).items():
        if cell in before and before[cell].get("version") != record.get("version"):
            after[cell] = record
    if not after:
        raise UserError(f"--compare {new.folder}: no cell was measured by another version")
    old_results = Stored(results_of(before.items()), {})
    return result_tables.old_and_new(old_results, Stored(results_of(after.items()), {}))


def measure_and_write(flags: ReproduceFlags, grid: list[Cell], store: Store) -> None:
    """Measure the cells that are not stored, unless only to write, and write what follows."""
    current = store.current(grid)
    if flags.write and not current:
        raise UserError(f"{store.folder}: holds no result of this grid, nothing to write")
    failed = 0
    if not flags.write:
        pending = [cell for cell in grid if cell not in current and not cell.is_former]
        failed = run_grid(pending, flags.jobs, store)
    stored = load_stored(store)
    print(f"\n{result_tables.main_table(stored)}")
    if not (flags.out or flags.quick):
        write(stored, store)
    if failed:
        raise UserError(f"{failed} cells failed; the same command tries them again")


def write(stored: Stored, store: Store) -> None:
    """Write all documents, tables and figures, if every cell of the tiny model is stored."""
    grid = cells()
    current = store.current(grid)
    missing = [cell for cell in grid if cell not in current]
    if any(cell.task not in REAL_TASKS for cell in missing):
        print(f"\ndocuments are written once all cells are stored; {len(missing)} are missing")
        return
    documents.write(stored, Path("."))
    documents.draw(stored, store, Path("."))
    print(f"\n{len(current)} cells stored; written: the documents, their tables and figures")
    if missing:
        print(f"of the real model {len(missing)} cells are missing; --list names them")


if __name__ == "__main__":
    os.chdir(
        Path(__file__).resolve().parent.parent
    )  # study/results/ and runs/ are named from there
    main()
