"""The runs behind study/README.md: trains the cells of the grid, measures them and stores what was measured.

    python study/reproduce.py --list          all cells, and which of them are stored
    python study/reproduce.py                 trains what is not stored yet, of the tiny model
    python study/reproduce.py --block main    one block of the grid
    python study/reproduce.py --only maze-vpo-seed0 --out runs/again
                                                  one cell anew, its means beside the stored ones
    python study/reproduce.py --write         tables and figures, once all cells are stored

A cell is one task, policy and seed. It is trained and measured with one thread, in one of --jobs processes
that take cell after cell. Its record is stored at once. A stop loses the cells that are being trained. The same
command goes on.
"""

import contextlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from engine.config import Config, Parser, device_of, flag, open_device
from engine.errors import as_command
from engine.files import check_free, check_writable, read_log
from engine.mixtures import mixed
from engine.processes import run_all
from engine.runs import load_run, policies, task_of
from engine.tasks import held_out
from eval import measure, sample_pool
from examples.markdown import markdown
from rewards import Problem, Task, UserError
from study.grid import FLAGS, HEADLINE, MEANS, ONE_PROBLEM, REAL_MODEL, SETTINGS, Cell, cells
from study.store import RESULTS, Store
from study.variants import kl_term

RUNS = Path("runs/study")
TRAINING = ("diversity", "reward", "answers", "entropy")  # metrics of which a record has the curve
REAL = "--micro-batch-tokens 1024 --sampling-batch 240"  # of a real model: a dozen share a card


# One cell.


def run_cell(cell: Cell, store: Store, model: str) -> bool:
    """Train a cell, measure it and store its record. Returns whether it failed, which its log explains."""
    run = RUNS / cell.name
    log = RUNS / f"{cell.name}.log"
    began = time.perf_counter()
    outcome = f"FAILED, see {log}"
    with (
        log.open("w", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            store.add(cell, record_of(cell, run, model))
            outcome = f"{time.perf_counter() - began:.0f} s"
        except (Exception, SystemExit) as error:  # the process goes on with other cells
            if isinstance(error, SystemExit) and error.code == 130:  # train.py was stopped
                raise KeyboardInterrupt from None
            traceback.print_exc()
    print(f"{time.strftime('%H:%M')}  {cell.name}  {outcome}", flush=True)
    return "FAILED" in outcome


def record_of(cell: Cell, run: Path, model: str) -> dict:
    """Train a cell: how that went, and what its policies do on held-out problems."""
    check_free(run)  # another command may train the same cell
    shutil.rmtree(run, ignore_errors=True)  # of a stop
    cpu_began = time.process_time()
    command = [*cell.command(model), *FLAGS.split(), "--out", str(run)]
    if cell.task == HEADLINE:
        command += REAL.split()
    with kl_term(cell.kl_term):
        train.main(command)
    trained = time.perf_counter()
    stored = load_run(run)
    of_policies = measured(cell, run, stored.config)
    measuring = time.perf_counter() - trained
    steps = read_log(run / cell.method / "metrics.jsonl")
    history = stored.history[-1]
    if cell.task == HEADLINE:
        shutil.rmtree(run)  # a gigabyte
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]  # marks a changed clone
    return {
        "version": history["vpo"],
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "command": cell.shown_command,
        "date": history["date"],
        "torch": history["torch"],
        "threads": history["threads"],
        "machine": history["gpu"] or f"CPU, {platform.machine()}",
        "steps": len(steps),
        "tokens": sum(step["tokens"] for step in steps),
        "seconds": {
            "training": round(sum(step["seconds"] for step in steps), 1),
            "measuring": round(measuring, 1),
            "cpu": round(time.process_time() - cpu_began, 1),  # of both
        },
        "training": {key: means_of_ten(steps, key) for key in TRAINING},
        "policies": of_policies,
    }


def means_of_ten(steps: list[dict], key: str) -> list[float]:
    """The means of a training metric over ten steps each."""
    means = []
    for first in range(0, len(steps), 10):
        values = [step[key] for step in steps[first : first + 10]]
        means.append(round(sum(values) / len(values), 3))
    return means


def measured(cell: Cell, run: Path, config: Config) -> dict[str, dict[str, dict]]:
    """Policy -> name of a setting -> what was measured. With plain GRPO's the start model is measured."""
    task = task_of(config)
    problems = problems_of(cell, task, config)
    device = device_of("auto", config.is_tiny)
    open_device(device)
    names = [cell.method]
    if cell.policy == "grpo":
        names += ["start", "start_sets"]
    found = {}
    for name in names:
        found[name] = {}
        for title in cell.settings(name):
            setting = SETTINGS[title]
            own = replace(config, eval_temperature=setting.temperature)
            policy = mixed(run, name, setting.t, task, own, device)
            m = policies(run, config.m)[name].m
            pool = sample_pool(policy, task, problems[: setting.problems], own, m, setting.pool)
            has_means_alone = cell.is_validation or cell.task in ONE_PROBLEM
            per_problem = () if has_means_alone else setting.per_problem
            found[name][title] = condensed(measure(pool, task), per_problem)
            if cell.n_shown and title == "0.7":
                found[name][title]["candidates"] = pool.answers[: cell.n_shown]
    return found


def problems_of(cell: Cell, task: Task, config: Config) -> list[Problem]:
    """The held-out problems of a cell, one for each text, unless all have the same one."""
    problems = held_out(task, *cell.problems)
    by_text = {}
    for problem in problems:
        text = task.tiny_prompt(problem) if config.is_tiny else task.prompt(problem, 1)
        by_text.setdefault(text, problem)
    return list(by_text.values()) if len(by_text) > 1 else problems


def condensed(values: dict[str, Tensor], per_problem: tuple[str, ...]) -> dict:
    """Means of measures (N), and thousandths per problem of some."""
    record = {}
    for name in MEANS:
        if name in values:  # of a single candidate not all are
            record[name] = round(values[name].double().mean().item(), 4)
    for name in per_problem:
        record[f"{name} of each"] = (1000 * values[name]).round().long().tolist()
    return record


# The command.


@dataclass
class ReproduceFlags:
    """The flags of study/reproduce.py."""

    only: str = flag("", "a cell, or all cells whose names contain this")
    block: str = flag("", "a block of the grid; empty: all but headlines, which need a real model")
    out: str = flag("", "folder for cells that are measured anew; empty: study/results")
    model: str = flag(REAL_MODEL, "the language model of the headlines: a Hub id or a folder")
    jobs: int = flag(2, "cells side by side, one thread each", 1, 64)
    list: bool = flag(False, "say what is stored, train nothing")
    write: bool = flag(False, "write tables and figures, once all is stored; train nothing")


def chosen_cells(flags: ReproduceFlags) -> list[Cell]:
    """The cells that a command is about. Raises UserError if it names none."""
    blocks = list(dict.fromkeys(cell.block for cell in cells()))
    if flags.block not in ("", *blocks):
        raise UserError(f"--block {flags.block}: unknown; choose from {', '.join(blocks)}")
    grid = [cell for cell in cells() if flags.block in ("", cell.block)]
    named = [cell for cell in grid if flags.only in cell.name]
    if not named:
        raise UserError(f"--only {flags.only}: no chosen cell has such a name; --list shows them")
    if not (flags.only or flags.block or flags.list):
        return [cell for cell in named if cell.task != HEADLINE]
    return [cell for cell in named if cell.name == flags.only] or named


@as_command("study/reproduce.py")
def main(argv: list[str] | None = None) -> None:
    """Measure the cells that the flags name, or say or write what is stored."""
    parser = Parser(ReproduceFlags, "study/reproduce.py", __doc__)
    flags = parser.parse_args_into_dataclass(argv)[0]
    store = Store(Path(flags.out) if flags.out else RESULTS)
    grid = chosen_cells(flags)
    if (flags.list or flags.write) and not store.folder.is_dir():
        raise UserError(f"--out {flags.out}: no such folder; name one with records")
    stored = store.records()
    if flags.list:
        for cell in grid:
            status = "missing"
            if cell in stored:
                means = stored[cell]["policies"][cell.method]["0.7"]
                status = f"best@1 {means['best@1']:.3f} W@30 {means['W@30']:.3f}"
            print(f"{cell.block:12} {cell.name:40} {status}")
    elif flags.write:
        write_documents(stored)
    else:
        check_writable(store.folder, RUNS)
        run_grid([cell for cell in grid if cell not in stored], store, flags)


def run_grid(pending: list[Cell], store: Store, flags: ReproduceFlags) -> None:
    """Train and measure cells. With --out their means are printed beside the stored ones."""
    if not pending:
        print("these cells are stored; --out FOLDER measures them anew")
    theirs = Store(RESULTS).records() if flags.out else {}
    known = [cell for cell in pending if cell in theirs]
    for cell in known:
        took = theirs[cell]["seconds"]["cpu"]
        print(f"{cell.name} took {took:.0f} s of a core ({theirs[cell]['machine']})")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes
    device = device_of("auto", all(cell.task != HEADLINE for cell in pending))
    work = {cell.name: (cell, store, flags.model) for cell in pending}
    n_failed = sum(run_all(run_cell, work, flags.jobs, device).values())
    ours = store.records()
    for cell in known:
        if cell in ours:
            new = ours[cell]["policies"][cell.method]["0.7"]
            old = theirs[cell]["policies"][cell.method]["0.7"]
            rows = [[name, old[name], new[name]] for name in MEANS]
            print(markdown([cell.name, "stored", "new"], rows))
    if n_failed:
        raise UserError(f"{n_failed} cells failed; the same command tries them again")


def write_documents(stored: dict[Cell, dict]) -> None:
    """Write the documents with their tables and figures. All is read before anything is written."""
    if not importlib.util.find_spec("scipy"):
        raise UserError("--write: needs scipy; pip install -r study/requirements.txt")
    from study import figures, results, tables  # which need it

    missing = [cell.name for cell in cells() if cell not in stored]
    if missing:
        problem = f"{len(missing)} cells are not stored, such as {missing[0]}"
        raise UserError(f"--write: {problem}; train them, or restore their records")
    whole = results.Results(stored, results.solved_in_search())
    check_writable(*{path.parent for path in tables.documents()})
    tables.write(whole)
    figures.write(whole)
    print("written: README.md and study/")


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[1])  # where runs/ is
    torch.set_num_threads(1)
    main()
