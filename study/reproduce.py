"""The runs behind study/README.md, except the searches: trains a grid, stores it, makes the tables.

    python study/reproduce.py --write      documents, tables and figures from what is stored
    python study/reproduce.py --list       what is stored, and what is missing
    python study/reproduce.py              trains the cells of the tiny model that are not stored yet
    python study/reproduce.py --out runs/again  trains all of them anew on your machine, into a folder
    python study/reproduce.py --mixed      half-way weights, into study/results/mixed or --out
    python study/reproduce.py --only toy   the cells whose names contain a text, here all of the toy

A cell is one method, task, seed and setting. It is trained and evaluated with one thread, and
--jobs cells run side by side. The same command goes on after a kill. study/results/ has one file
per task. It holds numbers per problem, from which every table is computed without training.
Tasks that end in _v1 were measured by versions 1 and 2 of the program.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.config import Config, Parser, device_of, flag, open_device, task_defaults
from engine.errors import as_command
from engine.evaluations import Evaluation, Row, Settings, evaluated
from engine.files import read_log
from engine.runs import checkpoints, load_run, task_of
from eval import evaluate_policy, measure
from rewards import Problem, Task, UserError
from study import documents, tables
from study.grid import CURES, HEADLINES, MIXES, VERSION, Cell, cells, mixed_cells
from study.store import CURVE, MIXED, RESULTS, Store, load_mixed, load_stored
from study.stored import TEMPERATURES, Stored

MEASURES = ("diversity", "earned", *(f"best@{k}" for k in CURVE), *(f"W@{k}" for k in CURVE))
TRAINING = ("diversity", "reward", "answers", "entropy")
STORED_TEXTS = 6  # problems of the headline task whose answers are stored
# Of a real model on a card. A cell takes two or three minutes there, and so little memory that a dozen share it.
CARD = ["--micro-batch-tokens", "1024", "--sampling-batch", "240", "--save-every", "0"]


def measure_cell(cell: Cell, store: Store, is_mixed: bool = False) -> None:
    """Train a cell, or go on with it, evaluate it, and store what was measured.

    The run of a real model is deleted then, because its checkpoints take several gigabytes.

    Raises UserError if the training failed.
    """
    run = store.runs / cell.name
    if checkpoints(run / cell.method):
        command = ["--resume", "--out", str(run)]
    else:
        command = [*cell.command, "--eval-problems", "0", "--out", str(run)]
        if cell.task in HEADLINES and device_of("auto", is_tiny=False) == "cuda":
            command += CARD
    if subprocess.run([sys.executable, *cell.script, *command]).returncode:
        words = " ".join([*cell.script, *command])
        raise UserError(f"{cell.name}: training failed: python {words}")
    record = training_record(cell, run) | evaluation_record(cell, run, is_mixed)
    store.add(cell, record)
    if cell.task in HEADLINES:
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


def evaluation_record(cell: Cell, folder: Path, is_mixed: bool) -> dict:
    """The part of a cell's record that says what its policies did on held-out problems.

    "at" maps temperature -> policy -> measure -> thousandths per problem. Of GRPO it holds the start
    model too. In place of policies it has t of --mix, if is_mixed. "groups" says which problems share
    a prompt.
    """
    config = load_run(folder).config
    task = task_of(config)
    # 1. which policies, as the record and as eval.py call them, and at which temperatures
    rows = {cell.method: Row(cell.method)}
    mixes = (1.0,)
    temperatures = TEMPERATURES[:1]
    if is_mixed:
        mixes = MIXES
        rows = {f"{t:g}": Row(cell.method, t=t) for t in MIXES}
    else:
        if cell.method == "grpo" and not cell.flags:
            rows = {name: Row(name) for name in ("start", "start_sets", "grpo")}
        is_ablation = not set(dict(cell.flags)) <= {"lr", *CURES}
        if not (is_ablation or cell.tuning):
            temperatures = TEMPERATURES

    # 2. on which problems
    split = "test"
    n_problems = task_defaults(task, config.model).get("eval_problems", Config.eval_problems)
    if cell.tuning:
        split = "validation"
        n_problems = 100

    # 3. their measures
    device = device_of("auto", config.is_tiny)
    open_device(device)
    stored = evaluated(folder, config.m, mixes)
    record = {"at": {}}
    for temperature in temperatures:
        settings = Settings(split, n_problems, config.pool, float(temperature), mixes)
        evaluation = Evaluation(folder, config, settings, folder, stored)
        measures = {}
        answers = {}
        for key, row in rows.items():
            pool = evaluate_policy(row, evaluation, device)
            measures[key] = condense(measure(pool, task), cell, config.pool)
            answers[key] = pool.answers[:STORED_TEXTS]
        record["at"][temperature] = measures
        if cell.task in HEADLINES and temperature == TEMPERATURES[0] and not is_mixed:
            record["answers"] = answers
    if not cell.tuning:
        record["groups"] = prompt_groups(task, pool.problems, config.is_tiny)
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


def run_grid(pending: list[Cell], jobs: int, store: Store, is_mixed: bool) -> int:
    """Measure cells, `jobs` at a time, each in a process of its own.

    Those that fail are named. They do not stop the others. Returns how many failed.
    """
    store.runs.mkdir(parents=True, exist_ok=True)  # so that a bad --out costs no training

    def run_cell(cell: Cell) -> bool:
        log = store.runs / f"{cell.name}.log"
        command = [sys.executable, "study/reproduce.py", "--out", str(store.folder)]
        if is_mixed:
            command.append("--mixed")
        command += ["--cell", cell.name]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.run(command, stdout=file, stderr=file, env=environment)
        has_failed = process.returncode != 0
        outcome = f"FAILED, see {log}" if has_failed else "stored"
        print(f"{time.strftime('%H:%M')}  {cell.name}  {outcome}", flush=True)
        return has_failed

    with ThreadPoolExecutor(jobs) as workers:
        try:
            return sum(workers.map(run_cell, pending))
        except KeyboardInterrupt:  # which the cells that are running get, too
            workers.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass
class ReproduceFlags:
    """The flags of study/reproduce.py."""

    mixed: bool = flag(False, f"half-way weights; without --out they are in {MIXED}")
    out: str = flag(
        "", "folder of the results; empty: study/results, and the documents are written too"
    )
    only: str = flag(
        "",
        "cells whose names contain this; empty: all, but those of a real language model "
        f"({', '.join(HEADLINES)}) are not trained: they take hours more",
    )
    jobs: int = flag(2, "cells side by side, one thread each", 1, 1000)
    write: bool = flag(False, "write tables and figures from what is stored, train nothing")
    list: bool = flag(False, "say what is stored, train nothing")
    cell: str = flag("", argparse.SUPPRESS)


def grid_of(flags: ReproduceFlags) -> list[Cell]:
    """The cells that a command is about. Raises UserError if --only names none."""
    grid = mixed_cells() if flags.mixed else cells()
    if flags.only:
        grid = [cell for cell in grid if flags.only in cell.name]
    elif not flags.list:
        grid = [cell for cell in grid if cell.task not in HEADLINES]
    if not grid:
        raise UserError(f"--only {flags.only}: no cell has such a name; --list shows them")
    return grid


@as_command("study/reproduce.py")
def main(argv: list[str] | None = None) -> None:
    """Do what the flags ask for: measure cells, or say or write what is stored."""
    parser = Parser(ReproduceFlags, "study/reproduce.py", __doc__)
    flags = parser.parse_args_into_dataclass(argv)[0]
    own = MIXED if flags.mixed else RESULTS
    store = Store(Path(flags.out or own))
    if store.folder.is_file():
        raise UserError(f"--out {store.folder}: a file; name a folder")
    if flags.mixed and flags.out and not flags.cell:  # cells have the same names as without --mixed
        store = Store(store.folder / MIXED.name)
    if flags.cell:
        cell = next(cell for cell in cells() + mixed_cells() if cell.name == flags.cell)
        measure_cell(cell, store, flags.mixed)
        return
    grid = grid_of(flags)
    current = store.current(grid)
    if flags.list:
        for cell in grid:
            status = "stored " if cell in current else "missing"
            print(f"{status}  {cell.name}")
        return
    if flags.write and not current:
        raise UserError(f"{store.folder}: holds no result of this grid, nothing to write")
    if not flags.write:
        pending = [cell for cell in grid if cell not in current]
        failed = run_grid(pending, flags.jobs, store, flags.mixed)
        if failed:
            raise UserError(f"{failed} cells failed; the same command tries them again")
    if flags.out:
        print_tables(store, flags.mixed)
    else:
        write_documents()


def print_tables(store: Store, is_mixed: bool) -> None:
    """Print the means of what was trained anew."""
    if is_mixed:
        print(f"\n{tables.half_way(Stored([], {}, load_mixed(store)), '')}")
        return
    stored = load_stored(store)
    for name in stored.names:
        print(f"\n{name}\n{tables.means(stored, name)}")


def write_documents() -> None:
    """Write all documents, their tables and figures."""
    store = Store(RESULTS)
    stored = load_stored(store)
    documents.write(stored, Path("."))
    documents.draw(stored, store, Path("."))
    print(f"\n{len(stored.results)} cells stored; written: the documents, their tables and figures")


if __name__ == "__main__":
    # study/results/ and runs/ are named from there
    os.chdir(Path(__file__).resolve().parent.parent)
    main()
