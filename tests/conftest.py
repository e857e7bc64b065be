"""The scripts lie one folder up and import one another by name, wherever pytest is started; no network."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # the models are so small that threads wait for one another
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "draws: figures are rendered; elsewhere an empty file stands for each"
    )


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made up to their rendering, which would take a third of the tests' time."""
    if not request.node.get_closest_marker("draws"):
        monkeypatch.setattr("report.style.write", lambda figure, path: path.touch())


@pytest.fixture(autouse=True)
def _one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods go one by one where --jobs does not say: other tests run on the other cores."""
    monkeypatch.setattr("engine.processes.cores", lambda: 1)
