"""The scripts lie one folder up and import one another by name, wherever pytest is started; no network."""

import contextlib
import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("helpers")

# The models are so small that threads wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no card: what the tests compare are numbers of the CPU
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


SLOW_FILES = "lesson bridges jobs sandbox train fast mistakes device search code models playground"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "draws: figures are rendered, not left empty")
    config.addinivalue_line("markers", "linux: runs programs; skipped on other systems")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long begin first: at the end no process waits for another's last file."""

    slow = SLOW_FILES.split()  # the slowest first

    def place(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return slow.index(name) if name in slow else len(slow)

    items.sort(key=place)
    for item in items:
        if item.get_closest_marker("linux") and sys.platform != "linux":
            item.add_marker(pytest.mark.skip(reason="programs need Linux or WSL"))


def pytest_collection_finish() -> None:
    """The libraries stay: a training frees its memory twice, and a look at all of theirs took half a second."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins in an empty folder, and the modules of one's own in it are its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(autouse=True)
def _usual_signals() -> None:
    """A command sets its handler of SIGTERM for good, which would keep a test's forks alive."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _usual_types() -> Iterator[None]:
    import torch

    yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made up to their rendering, which would take a third of the tests' time."""
    if not request.node.get_closest_marker("draws"):
        leave_undrawn(monkeypatch)


def leave_undrawn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, path, **options: Path(path).touch()
    )


@pytest.fixture(autouse=True, scope="session")
def _one_job() -> Iterator[None]:
    """Methods go one by one where --jobs does not say: other tests run on the other cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.training.jobs.cores", lambda: 1)
        yield


@pytest.fixture
def policy(request: pytest.FixtureRequest):
    """The small model that a test names."""
    from helpers import load_random_model

    return load_random_model(request.param)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the toy, GRPO and VPO, which has learnt something. `toy_run` is a copy."""
    import train

    flags = "--task toy --method grpo vpo --m 2 --warm-steps 40 --steps 4 --lr 0.001 --save-every 3"
    flags += " --prompts-per-step 2 --group-size 4 --eval-problems 2 --pool 4 --keep-optimizer "
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        leave_undrawn(patch)
        train.main([*flags.split(), "--device", "cpu", "--out", "run"])
    return folder / "run"


@pytest.fixture
def toy_run(trained: Path) -> Path:
    """A copy of the trained run as ./run, which a test may change."""
    shutil.copytree(trained, "run")
    return Path("run")
