"""Every claim of the paper in miniature: trains a grid of runs, stores each result, writes docs/results.md from them.

    python reproduce.py --quick       one seed of the headline: GRPO, Max@K, VPO and Group VPO in the maze, in minutes
    python reproduce.py               the tiny model's cells that are not stored yet; killed, it goes on where it was
    python reproduce.py --out again   all of it anew on your machine, beside what is stored here
    python reproduce.py --only toy    the cells whose names match, here all of the toy
    python reproduce.py --list        what is stored, what is missing, what was measured by another version
    python reproduce.py --write       docs/results.md, README's table and the figures from what is stored

A cell is one method, task, seed and setting, trained and evaluated with one thread, --jobs of them side by side. Its
result, results/NAME.json.gz, holds per-problem numbers, from which every table is computed without training."""

import argparse
import gzip
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from engine.flags import TINY_LR, Parser, as_command, count, text_of
from rewards import UserError

VERSION = 1  # of the results: raised when a change of the code changes what a run learns, be it by rounding
RESULTS, RUNS, QUICK = Path("results"), Path("runs/reproduce"), Path("runs/reproduce/quick")
HEADLINE = ("grpo", "max_at_k", "vpo", "group_vpo")
OTHERS = ("dr_grpo", "maxrl", "gdpo", "random_weighting", "goal_conditioned", "multi_rlvr")
RATES = (
    2.5e-4,
    5e-4,
    8e-4,
)  # the common grid of peak learning rates; MORE where a method was best at its edge
MORE = {
    **{
        ("maze", method): (1.2e-3, 1.8e-3)
        for method in ("grpo", "gdpo", "max_at_k", "group_vpo", "multi_rlvr")
    },
    **{("maze", method): (1.2e-3,) for method in ("dr_grpo", "maxrl", "goal_conditioned")},
    **{("code", method): (1.2e-3,) for method in (*HEADLINE[1:], *OTHERS)},
    ("code", "maxrl"): (1.2e-3, 1.8e-3),
}
TEMPERATURES = (0.7, 1.0, 1.3)  # the first is the table's
CURVE = (1, 2, 3, 5, 10, 30)  # the k of best@k and W@k
REWARDS = (
    "copies",
    "noisy",
    "halfway",
    "gems",
    "tradeoff",
)  # from collinear to conflicting; the maze lies between
REAL = {
    "task": "code",
    "data": "tasks/open_cases.jsonl",
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "warm-steps": 36,
    "prompts-per-step": 2,
    "max-new-tokens": 96,
    "temperature": 0.7,
    "kl": 0.0,
    "save-every": 10,
    "gradient-checkpointing": False,
    "snapshots": 0,
}  # task open_cases: an hour, VPO more, on one core for 60 steps
REAL_LR = (2e-5, 5e-5)
LR = TINY_LR | {"open_cases": {"grpo": 5e-5, "max_at_k": 2e-5, "vpo": 5e-5, "group_vpo": 2e-5}}
CREDIT = ("credit", "answer")  # no flag: examples/reward_to_go.py in the place of train.py
TUNING_SEED = 100  # never evaluated on held-out problems
TUNED_TWICE = {("maze", "grpo")}  # with the next seed, too: with one its rates came in no order


@dataclass(frozen=True)
class Cell:
    """One run of train.py and what is measured of it."""

    task: str
    method: str
    seed: int
    flags: tuple[tuple[str, object], ...] = ()  # of train.py, beyond task, method and seed
    tuning: bool = field(
        default=False, kw_only=True
    )  # on 100 validation problems, at one temperature

    @property
    def name(self) -> str:
        settings = [text_of(*flag).removeprefix("--").replace(" ", "") for flag in self.flags]
        return "-".join([Path(self.task).stem, self.method, f"seed{self.seed}", *settings])

    @property
    def run(self) -> Path:
        """Where it is trained: what was trained by another version or with another setting lies elsewhere."""
        return (
            RUNS
            / f"{self.name}-{hashlib.sha256(f'{VERSION} {self.command}'.encode()).hexdigest()[:8]}"
        )

    @property
    def script(self) -> str:
        return "examples/reward_to_go.py" if CREDIT in self.flags else "train.py"

    @property
    def command(self) -> list[str]:
        """Flags of train.py; the learning rate is written out, so that a result says which one it had."""
        real = REAL | {"steps": 20 if self.tuning else 60} if self.task == "open_cases" else {}
        flags = (
            {"task": self.task, "method": self.method, "seed": self.seed} | real | dict(self.flags)
        )
        flags.pop(CREDIT[0], None)
        if self.task != "toy":
            flags.setdefault("lr", LR.get(self.task, LR["maze"]).get(self.method, 5e-4))
        return [word for flag in flags.items() for word in text_of(*flag).split()]


def cells() -> list[Cell]:
    grid = [
        Cell(task, method, TUNING_SEED + again, (("lr", rate),), tuning=True)
        for methods in (HEADLINE, OTHERS)
        for task in ("maze", "code")
        for method in methods
        for again in range(1 + ((task, method) in TUNED_TWICE))
        for rate in RATES + MORE.get((task, method), ())
    ]
    for methods, seeds in ((HEADLINE, range(3)), (HEADLINE, range(3, 5)), (OTHERS, range(3))):
        grid += [
            Cell(task, method, seed)
            for task in ("maze", "code")
            for seed in seeds
            for method in methods
        ]
    grid += [Cell("toy", method, seed) for seed in range(5) for method in HEADLINE + OTHERS]
    ablations: dict[str, list[dict]] = {
        "vpo": [
            {"m": 2, "prompts-per-step": 18},
            {"m": 5, "prompts-per-step": 7},  # equal answers
            {"m": 1, "prompts-per-step": 36, "lr": 1.2e-3},  # C8: GRPO's data and rate
            {"alpha": 0.3},
            {"alpha": 3.0},
            {"n-weights": 10},
            {"n-weights": 1000},
            {"sampler": "sobol"},
            {"subset": 2},
            dict([CREDIT]),
        ],
        "group_vpo": [
            {"subset": 2},
            {"subset": 6},
            *({"group-size": G, "prompts-per-step": 96 // G} for G in (4, 16, 32)),
        ],
        "grpo": [{"prompts-per-step": 4}],
    }  # as many rollouts as VPO, a third of its answers
    grid += [
        Cell("maze", method, seed, tuple(flags.items()))
        for seed in range(3)
        for method, varied in ablations.items()
        for flags in varied
        if seed < 2 or flags.keys() <= {"m", "prompts-per-step", "lr", "n-weights", "sampler"}
    ]  # claims: three
    grid += [
        Cell(f"examples/rewards/{reward}.py", method, seed)
        for seed in range(2)
        for method in ("grpo", "vpo")
        for reward in REWARDS
    ]
    grid += [
        Cell("open_cases", method, TUNING_SEED, (("lr", rate),), tuning=True)
        for method in HEADLINE
        for rate in REAL_LR
    ]
    return grid + [
        Cell("open_cases", method, 0, flags)
        for method in HEADLINE
        for flags in (  # method or rate?
            (),
            *(
                (("lr", rate),)
                for rate in REAL_LR
                if method != "group_vpo" and rate != LR["open_cases"][method]
            ),
        )
    ]


def path_of(cell: Cell) -> Path:
    return RESULTS / f"{cell.name}.json.gz"


def load(cell: Cell) -> dict | None:
    """The stored result of a cell; None if there is none, or one of another version or setting."""
    if not path_of(cell).exists():
        return None
    try:
        result = json.loads(gzip.decompress(path_of(cell).read_bytes()))
        return (
            result
            if (result.get("version"), result.get("command")) == (VERSION, cell.command)
            else None
        )
    except (OSError, EOFError, ValueError, AttributeError, zlib.error) as error:
        raise UserError(f"{path_of(cell)}: damaged ({error}); restore or delete it") from error


def store(cell: Cell, result: dict) -> None:
    """Write a result whole or not at all, and the same bytes for the same numbers."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    temporary = path_of(cell).with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(
        gzip.compress(json.dumps(result, separators=(",", ":")).encode(), 9, mtime=0)
    )
    temporary.replace(path_of(cell))


def measure_cell(cell: Cell) -> None:
    """Train a cell, or go on with it, evaluate it, and store what was measured. UserError if the training failed."""
    from engine.runs import checkpoints, load_config, read_log, task_of
    from eval import evaluate_run, measure
    from report.geometry import geometry

    out, began = cell.run, time.monotonic()
    command = (
        ["--resume", "--out", str(out)]
        if checkpoints(out / cell.method)
        else [*cell.command, "--eval-problems", "0", "--out", str(out)]
    )
    if subprocess.run([sys.executable, cell.script, *command]).returncode:
        raise UserError(f"{cell.name}: training failed: python train.py {' '.join(command)}")
    trained, config = time.monotonic(), load_config(out)
    flags, task = config["flags"], task_of(config["flags"])
    names = (
        [cell.method]
        if cell.tuning or cell.method != "grpo" or cell.flags
        else ["start", "start_sets", "grpo"]
    )
    at, before, real = {}, None, cell.task == "open_cases"
    for temperature in TEMPERATURES[:1] if cell.tuning or cell.flags or real else TEMPERATURES:
        settings = {
            "split": "validation" if cell.tuning else "test",
            "size": flags["pool"],
            "temperature": temperature,
            "problems": 100 if cell.tuning else task.eval_problems,
        }
        pools, groups = evaluate_run(out, flags, task, settings, "cpu", names)
        if temperature == 1 and (start := pools.get("start")):  # as in training
            before = geometry(
                start.rewards, start.objective_mask, start.scalars, flags["group_size"]
            )
        at[f"{temperature:g}"] = {
            name: condensed(measure(pool, task, flags["m"]), pool, cell.tuning, bool(at))
            for name, pool in pools.items()
        }
    rows = read_log(out / cell.method / "metrics.jsonl")
    training = {
        key: [
            round(sum(row[key] for row in part) / len(part), 3)
            for part in (rows[i : i + 10] for i in range(0, len(rows), 10))
        ]
        for key in ("diversity", "reward", "answers")
    }
    store(
        cell,
        {
            "version": VERSION,
            "command": cell.command,
            "machine": platform.machine(),
            **{
                key: config["history"][-1].get(key)
                for key in ("date", "python", "torch", "threads", "gpu")
            },
            "seconds": {
                "training": round(sum(row["seconds"] for row in rows), 1),
                "all": round(time.monotonic() - began, 1),
                "evaluation": round(time.monotonic() - trained, 1),
            },
            "steps": len(rows),
            **{key: sum(row[key] for row in rows) for key in ("rollouts", "tokens")},
            "training": training,
            "size": flags["pool"],
            "geometry": before,
            "groups": None if groups is None or cell.tuning else groups.tolist(),
            "at": at,
            "programs": {
                name: [
                    Counter(zip(found, rewards.mean(1).tolist(), strict=True)).most_common(3)
                    for found, rewards in zip(pool.answers, pool.vectors(), strict=True)
                ]
                for name, pool in pools.items()
            }
            if real and not cell.tuning
            else None,
        },
    )


def condensed(values: dict, pool, means: bool, few: bool) -> dict[str, list]:
    """Per-problem values in thousandths, and how many candidates passed; only means, or few measures, where asked."""
    kept = (
        ["best@1", "best@30", "W@30"]
        if few
        else [f"{kind}@{k}" for kind in ("best", "W") for k in CURVE]
    )
    whole = {key: (1000 * values[key]).round().long() for key in (*kept, "diversity")} | {
        "passed": (values["pass@1"] * pool.scalars.shape[1]).round().long()
    }
    return {
        key: [round(value.double().mean().item(), 2)] if means else value.tolist()
        for key, value in whole.items()
    }


def run_grid(pending: list[Cell], jobs: int) -> list[Cell]:
    """Measure cells, `jobs` at a time, each in a process of its own; those that failed are named and do not stop it."""
    failed, began = [], time.monotonic()
    for folder in (RUNS, RESULTS):  # here, so that a bad --out costs no training
        folder.mkdir(parents=True, exist_ok=True)

    def measured(cell: Cell) -> None:
        if load(cell):  # another reproduce.py was faster
            return
        log = cell.run.with_name(f"{cell.run.name}.log")
        with log.open("w") as file:
            code = subprocess.run(
                [sys.executable, "reproduce.py", "--out", str(RESULTS), "--cell", cell.name],
                stdout=file,
                stderr=file,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            ).returncode
        minutes = (time.monotonic() - began) / 60
        print(
            f"{minutes:6.1f} min  {cell.name}{f'  FAILED, see {log}' if code else ''}", flush=True
        )
        if code:
            failed.append(cell)

    with ThreadPoolExecutor(jobs) as workers:
        list(workers.map(measured, pending))
    return failed


def all_stored() -> dict[tuple, dict]:
    """Results of this version by (task, method, seed, flags), as Stored takes them; a real model's: "grpo 2e-05"."""
    return {
        (
            Path(cell.task).stem,
            " ".join([cell.method, *rate]),
            cell.seed,
            () if rate else cell.flags,
        ): result
        for cell in cells()
        if (result := load(cell))
        for rate in [cell.command[-1:] if cell.task == "open_cases" and not cell.tuning else []]
    }


def write(document: bool) -> None:
    """Print the headline; docs/results.md, README.md and their figures too, from the stored results alone."""
    from engine.runs import write_text
    from report import results

    stored = results.Stored(all_stored())
    if not stored.results:
        raise UserError(f"{RESULTS}: holds no result of this version, so there is nothing to write")
    print(f"\n{results.headline(stored)}")
    if document:
        for path in (Path("docs/results.md"), Path("README.md")):
            write_text(path, results.fill(stored, path))
        print(
            f"\n{len(stored.results)} of {len(cells())} cells stored; written: docs/results.md, README.md, "
            f"{', '.join(map(str, results.figures(stored, Path('figures'))))}"
        )


def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "reproduce.py",
        __doc__,
        "[--quick] [--only PATTERN] [--jobs N] [--list] [--write] [--out FOLDER]",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"one seed of the headline, anew, into {QUICK}"
    )
    parser.add_argument(
        "--out",
        default="",
        help="folder of the results; not given: results, and the document follows",
    )
    parser.add_argument(
        "--only",
        default="^(?!open_cases)",
        help="cells whose names match a regular expression; not "
        "given: all but those of a real language model (open_cases), which take hours more",
    )
    parser.add_argument(
        "--jobs", type=count(1, 256), default=2, help="cells side by side, one thread each"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--write", action="store_true", help="write the document from what is stored, train nothing"
    )
    instead.add_argument("--list", action="store_true", help="say what is stored, train nothing")
    parser.add_argument("--cell", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    as_command(parser, lambda: run(args))


def run(args: argparse.Namespace) -> None:
    global RESULTS
    grid = [Cell("maze", method, 0) for method in HEADLINE] if args.quick else cells()
    RESULTS = Path(args.out) if args.out else QUICK if args.quick else RESULTS
    if RESULTS.is_file():
        raise UserError(f"--out {RESULTS}: a file; name a folder")
    if args.cell:
        return measure_cell(next(cell for cell in grid if cell.name == args.cell))
    try:
        grid = [cell for cell in grid if re.search(args.only, cell.name)]
    except re.error as error:
        raise UserError(f"--only {args.only}: no regular expression ({error})") from error
    if not grid:
        raise UserError(f"--only {args.only}: no cell has such a name; --list shows them")
    pending = [cell for cell in grid if load(cell) is None]
    for path in filter(Path.exists, map(path_of, pending)):
        print(f"{path}: of another version or setting, left out, to be measured again")
    if args.list:
        return print(
            "\n".join(
                f"{'missing' if cell in pending else 'stored '}  {cell.name}" for cell in grid
            )
        )
    failed = [] if args.write else run_grid(pending, args.jobs)
    for cell in failed:
        print(f"failed: python {cell.script} {' '.join(cell.command)}", file=sys.stderr)
    write(document=not (args.out or args.quick))
    if failed:
        raise UserError(
            f"{len(failed)} of {len(pending)} cells failed; the same command tries them again"
        )


if __name__ == "__main__":
    main()
