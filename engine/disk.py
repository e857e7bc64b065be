"""How much disk a run takes."""

import math
import shutil
from pathlib import Path

from safetensors import safe_open

from engine.config import Config

OPTIMIZER_BYTES = {"float32": 8, "bfloat16": 12}  # per weight: two moments, and a float32 copy
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}


def disk_line(config: Config, jobs: int) -> str:
    """What a run takes on disk when it is finished and at most until then, and what is free.

    Args:
        jobs: methods that are trained at a time.
    """
    out = Path(config.out)
    starts = (1 + bool(config.warm_steps)) * _size(out / "start")  # runs/start keeps a copy
    finished, during = _checkpoint_bytes(config)
    n = len(config.method)
    at_end = starts + n * finished
    at_most = starts + (n - jobs) * finished + jobs * during
    free = shutil.disk_usage(out).free
    line = f"{text_of(at_end)} of disk"
    if at_most > 1.05 * at_end:
        line += f", up to {text_of(at_most)} until it has finished"
    return f"{line} ({text_of(free)} are free)"


def _checkpoint_bytes(config: Config) -> tuple[int, int]:
    """The bytes of a method's checkpoints when it has finished, and at most until then."""
    trained = 0
    for path in (Path(config.out) / "start").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - a file of safetensors is no dictionary
                shape = file.get_slice(name).get_shape()
                if not config.lora_rank:
                    trained += math.prod(shape)
                elif len(shape) == 2:
                    trained += config.lora_rank * sum(shape)
    weights = trained * WEIGHT_BYTES[config.dtype]
    complete = weights + trained * OPTIMIZER_BYTES[config.dtype]
    n = 0  # checkpoints before the last step
    if config.save_every:
        n = (config.steps - 1) // config.save_every
    # Two are kept while a third is written.
    if config.keep_optimizer:
        return min(2, n + 1) * complete, min(3, n + 1) * complete
    before_the_last = min(3, n) * complete
    at_the_last = min(2, n) * complete + weights  # it is written without its optimizer
    return weights, max(before_the_last, at_the_last)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def text_of(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{math.ceil(size / 1e6)} MB"
