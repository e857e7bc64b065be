"""Plain code against fast/: seconds of the gradient on a CPU.

    python study/benchmarks/plain_against_fast.py                    the tiny model, in the maze and in code
    python study/benchmarks/plain_against_fast.py --model MODEL      a language model's headlines, too

The first training step of GRPO and of VPO, after the SFT warm-up. The sides take turns, and the ratio is
the median of the turns' ratios. There is one thread, and seconds are those of the processor, so that
other programs disturb less.
"""

import argparse
import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fast
import train

TURNS = 5
METHODS = ("grpo", "vpo")
FIRST_STEP = f"--method {' '.join(METHODS)} --jobs 1 --steps 1 --eval-problems 0 --snapshots 0"


def seconds_of(backward: Callable, arguments: tuple) -> float:
    """Seconds of a gradient, which is forgotten."""
    began = time.process_time()
    backward(*arguments)
    seconds = time.process_time() - began
    policy = arguments[0]
    policy.model.zero_grad()
    return seconds


def compare(fast_backward: Callable, rows: list[str], *arguments) -> dict:
    """Compare train.backward with that of fast/, whose result it returns. Rows of the table get cells."""
    seconds_of(train.backward, arguments)  # the first calls warm up
    seconds_of(fast_backward, arguments)
    plain = []
    ours = []
    for _ in range(TURNS):
        plain.append(seconds_of(train.backward, arguments))
        ours.append(seconds_of(fast_backward, arguments))
    ratio = median(slow / quick for slow, quick in zip(plain, ours, strict=True))
    rows.append(f"{median(plain):.2f} | {median(ours):.2f} | {ratio:.2f}")
    return fast_backward(*arguments)


def first_step(task: str, model: str) -> None:
    """Print a row for each method of a task, in whose training the gradients are compared."""
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--task", task, "--model", model, "--device", "cpu", "--out", folder]
        comparing = patch("fast.backward", functools.partial(compare, fast.backward, rows))
        with comparing, contextlib.redirect_stdout(sys.stderr):  # the table stands alone
            train.main([*FIRST_STEP.split(), *flags])
    for method, cells in zip(METHODS, rows, strict=True):
        print(f"| {task} | {method} | {cells} |", flush=True)


def run() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint's folder or a Hub id, for headlines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| task | method | plain, s | fast/, s | times faster |\n|---|---|---|---|---|")
    first_step("maze", "tiny")
    first_step("code", "tiny")
    if args.model:
        first_step("headline", args.model)


if __name__ == "__main__":
    run()
