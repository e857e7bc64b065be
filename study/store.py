"""study/results/: one file per task, in it a record for every cell; and records as results."""

import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from eval import pass_at_k
from study.entries import GRPO_LOW, Entry, mixed
from study.grid import LR_AT_30, Cell, cells, mixed_cells
from study.stored import TEMPERATURES, Result, Stored

RESULTS = Path("study/results")
MIXED = RESULTS / "mixed"  # half-way weights
RUNS = Path("runs/reproduce")
CURVE = (1, 2, 3, 5, 10, 30)  # the k of best@k, W@k and pass@k


@dataclass(frozen=True)
class Store:
    """Results in a folder, one file per task: cell name -> record."""

    folder: Path

    @property
    def runs(self) -> Path:
        """Where cells are trained. Other results than the project's own have runs of their own."""
        return RUNS if self.folder in (RESULTS, MIXED) else self.folder / "runs"

    def path(self, cell: Cell) -> Path:
        """The file that holds a cell; the rewards that are compared share one."""
        name = cell.task
        if name == "fence" or name.endswith(".py"):
            name = "rewards"
        return self.folder / f"{name}.json.gz"

    def read(self, path: Path) -> dict[str, dict]:
        """All records of a file, none if there is no file."""
        return json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}

    def current(self, grid: list[Cell]) -> dict[Cell, dict]:
        """The records of the cells that are stored."""
        records = {}
        for path in {self.path(cell) for cell in grid}:
            records |= self.read(path)
        return {cell: records[cell.name] for cell in grid if cell.name in records}

    def add(self, cell: Cell, record: dict) -> None:
        """Store a record. The file is replaced as a whole; equal numbers give equal bytes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(cell)
        temporary = path.with_suffix(".tmp")
        with FileLock(self.folder / "lock"):  # another process may store at the same time
            records = self.read(path) | {cell.name: record}
            text = json.dumps(dict(sorted(records.items())), separators=(",", ":"))
            temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
            temporary.replace(path)


def load_stored(store: Store) -> Stored:
    """All results of the grid, and the stored searches, as plain data for the tables."""
    results = [result_of(cell, record) for cell, record in store.current(cells()).items()]
    return Stored(results, store.read(store.folder / "search.json.gz"), load_mixed(Store(MIXED)))


def load_mixed(store: Store) -> Stored:
    """The stored results of half-way weights: a cell's policy at every t is a policy of its own."""
    results = []
    for cell, record in store.current(mixed_cells()).items():
        for t, values in record["at"][TEMPERATURES[0]].items():
            result = result_of(cell, record | {"at": {TEMPERATURES[0]: {cell.method: values}}})
            results.append(replace(result, policy=mixed(result.policy, float(t))))
    return Stored(results, {})


def result_of(cell: Cell, record: dict) -> Result:
    """A record in the measures' own units, with pass@k."""
    policy = policy_of(cell)
    measures = {}
    for temperature, policies in record["at"].items():
        measures[temperature] = {}
        for name, values in policies.items():
            name = policy.method if name == cell.method else name
            measures[temperature][name] = measures_of(values, record["size"], cell.tuning)
    prompt_ids = record.get("groups")
    return Result(
        task=Path(cell.task).stem,
        policy=policy,
        seed=cell.seed,
        version=record["version"],
        tuning=cell.tuning,
        measures=measures,
        prompt_ids=None if prompt_ids is None else torch.tensor(prompt_ids),
        training=record["training"],
        tokens=record["tokens"],
        step_seconds=record["seconds"]["training"] / record["steps"],
        answers=record.get("answers", {}),
        gpu=record.get("gpu") or "",
    )


def policy_of(cell: Cell) -> Entry:
    """What the tables call a cell's policy: with the learning rate where several are compared."""
    flags = dict(cell.flags)
    low_rate = LR_AT_30.get(cell.task, {}).get("grpo")
    if cell.method == "grpo" and flags == {"lr": low_rate} and not cell.tuning:
        return GRPO_LOW
    if set(flags) == {"lr"}:
        return Entry(cell.method, flags["lr"])
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
