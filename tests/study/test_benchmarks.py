"""The script that measures a card: each part runs, and a laptop's rows are planned to fit."""

from pathlib import Path

import pytest
import torch

from engine.config import AUTO, Config
from engine.processes import PROCESS_BYTES
from engine.tasks import load_task_class
from engine.training.memory import GIB, fill_card
from study.benchmarks import one_gpu
from study.benchmarks.memory_table import LAPTOPS


def test_parts_run_on_a_cpu(monkeypatch):
    """Guards against a part that fails in the first minutes of a card."""
    monkeypatch.setattr("sys.argv", ["one_gpu.py", "--dry", "--only", "gradient", "others"])
    one_gpu.run()
    assert "error" not in Path("one_gpu.json").read_text(encoding="utf-8")


def test_a_run_as_a_laptop_runs_it():
    """Guards against flags of a row that train.py refuses."""
    row = LAPTOPS[-1]
    numbers = one_gpu.trained(one_gpu.Bench("cpu"), row.model, f"--method vpo {row.flags}", row.gib)
    assert numbers["vpo"]["seconds"] > 0


@pytest.mark.parametrize("row", LAPTOPS, ids=lambda row: f"{row.gib}-{row.model}")
def test_a_laptops_row_fits_by_plan(row):
    """Guards against a row whose card cannot sample the 48 rollouts of a step at once."""
    is_adapter = "--lora-rank" in row.flags
    config = Config(model=row.model, method=["vpo"], max_new_tokens=16, gradient_checkpointing=True)
    config.micro_batch_tokens = config.sampling_batch = AUTO
    config.lora_rank = 16 if is_adapter else 0
    config.kl = 1e-3 if "--kl" in row.flags else 0.0
    policy = one_gpu.policy_of(one_gpu.Bench("meta"), row.model)
    policy.model.to(torch.bfloat16 if is_adapter else torch.float32)
    used = policy.model.num_parameters() * policy.model.dtype.itemsize
    free = row.gib * GIB - PROCESS_BYTES - used
    fill_card(config, policy, load_task_class("headline")(), int(free))
    assert config.sampling_batch >= 48
    assert config.micro_batch_tokens > 2000
