"""The script that measures a card: each part runs, and a laptop's rows are planned to fit."""

import json
from pathlib import Path

import pytest
import torch

from engine.training.memory import GIB, free_memory
from study.benchmarks import one_gpu
from study.benchmarks.memory_table import LAPTOPS


def test_parts_run_on_a_cpu(monkeypatch):
    """Guards against a part that fails in the first minutes of a card."""
    argv = ["one_gpu.py", "--dry", "--only", "token", "profile", "gradient", "others"]
    monkeypatch.setattr("sys.argv", argv)
    one_gpu.run()
    record = json.loads(Path("one_gpu.json").read_text(encoding="utf-8"))
    assert "error" not in json.dumps(record)
    sides = record["token"]["tiny"]
    assert sides["all"]["operators"] < sides["plain operators"]["operators"] / 1.5
    assert sides["all"]["change_of_logits"] < 1e-5


def test_a_run_as_a_laptop_runs_it():
    """Guards against flags of a row that train.py refuses."""
    bench = one_gpu.Bench("cpu", ("tiny",))
    flags = ["--method", "vpo", *LAPTOPS[-1].flags.split()]
    with one_gpu.saved(bench, "tiny") as model:
        assert one_gpu.trained(bench, model, flags, 16)["vpo"]["seconds"] > 0


@pytest.mark.parametrize("row", LAPTOPS, ids=lambda row: f"{row.gib}-{row.model}")
def test_a_laptops_row_fits_by_plan(row):
    """Guards against a row whose card cannot sample the 48 rollouts of a step at once."""
    numbers = one_gpu.plan(one_gpu.Bench("meta", ()), row)
    assert numbers["sampling_batch"] >= 48
    assert numbers["micro_batch_tokens"] > 2000


def test_a_large_card_looks_like_a_small_one(monkeypatch):
    """Guards against a plan for the whole card, and memory beyond the small one's."""
    shares = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: GIB)
    one_gpu.pretend_small(8)
    assert shares == [pytest.approx((8 - 0.6) / 80)]
    assert free_memory() / GIB == pytest.approx(8 - 0.6 - 1)
