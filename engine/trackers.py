"""Metrics in TensorBoard or Weights & Biases, beside metrics.jsonl, which is always written."""

import importlib
import secrets
from collections.abc import Callable
from pathlib import Path

from engine.doors import as_user_error
from rewards import UserError

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # what is imported


def check_tracker(name: str) -> None:
    """Raise UserError if the package of --log is not installed."""
    try:
        if name:
            importlib.import_module(MODULES[name])
    except ImportError as error:
        raise UserError(f"--log {name}: needs a package; pip install {name}") from error


def open_tracker(name: str, folder: Path, done: int) -> Callable[[dict[str, float], int], None]:
    """A function (metrics, step) that sends a method's metrics to the tracker that --log names.

    Args:
        folder: of the method.
        done: the steps of its newest checkpoint; later ones are dropped.
    """
    if name == "tensorboard":
        module = importlib.import_module(MODULES[name])
        writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

        def log(metrics: dict[str, float], step: int) -> None:
            for metric, value in metrics.items():
                writer.add_scalar(metric, value, step)
            writer.flush()

        return log
    if name == "wandb":
        id_file = folder / "wandb-id"
        if done == 0 or not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        module = importlib.import_module(MODULES[name])
        with as_user_error("--log wandb: cannot begin, is there a login or WANDB_MODE=offline?"):
            run = module.init(
                project="vpo",
                name=f"{folder.parent.name}-{folder.name}",
                id=id_file.read_text(),
                resume="allow",
                dir=str(folder),
                reinit=True,
            )
        return lambda metrics, step: run.log(metrics, step=step)
    return lambda metrics, step: None
