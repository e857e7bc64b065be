"""The prepared measurement of a card runs on a CPU, too."""

import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_part_of_one_gpu_runs(tmp_path, monkeypatch):
    """Guards against a part that fails on the card, where minutes are lent."""
    out = tmp_path / "one_gpu.json"
    argv = [
        "one_gpu.py",
        "--dry",
        "--out",
        str(out),
        "--parts",
        "sampling",
        "gradient",
        "estimator",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(ROOT / "study/benchmarks/one_gpu.py"), run_name="__main__")
    record = json.loads(out.read_text())
    assert "error" not in out.read_text()
    assert record["sampling"]["tiny"]["graph"]["rows_as_plain"] == 1
    assert record["machine"]["device"] == "cpu"
