"""Metrics in TensorBoard or Weights & Biases, beside metrics.jsonl, which is always written."""

import importlib
from pathlib import Path
from typing import Any, Protocol

from rewards import UserError

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # what is imported


class Tracker(Protocol):
    """Where the metrics of one method go."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class NoTracker:
    """Where --log does not say."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """Event files in the method's folder. After a resume the steps beyond the checkpoint are dropped."""

    def __init__(self, module: Any, run: Path, done: int):
        self.writer = module.SummaryWriter(str(run / "tensorboard"), purge_step=done + 1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of Weights & Biases with the name of the run folder. A resume goes on with it."""

    def __init__(self, module: Any, run: Path, done: int):
        name = "-".join([*run.parent.parts[-1:], run.name])
        self.run = module.init(project="vpo", name=name, id=name, resume="allow", dir=str(run))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


def check_tracker(name: str | None) -> None:
    """Raise UserError if the package of --log is not installed."""
    if name is None:
        return
    try:
        importlib.import_module(MODULES[name])
    except ImportError as error:
        raise UserError(f"--log {name}: needs a package; pip install {name}") from error


def open_tracker(name: str | None, run: Path, done: int) -> Tracker:
    """The tracker that --log names.

    Args:
        run: the method's folder.
        done: the steps of its newest checkpoint.
    """
    if name is None:
        return NoTracker()
    module = importlib.import_module(MODULES[name])
    kind = TensorBoard if name == "tensorboard" else Wandb
    return kind(module, run, done)
