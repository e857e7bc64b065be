"""Plain code against fast/: seconds and memory of the gradient on a CPU (Linux).

    python study/benchmarks/plain_against_fast.py                    the tiny model, in the maze and in code
    python study/benchmarks/plain_against_fast.py --model MODEL      a language model's headlines, too

One training step of GRPO and of VPO from the start model, after its SFT warm-up. The sides take turns,
and the ratio is the median of the turns' ratios. There is one thread, and seconds are those of the
processor, so that other programs disturb less. Memory is what a call adds to the peak.
"""

import argparse
import ctypes
import functools
import gc
import re
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
from engine.config import Config, resolve
from engine.errors import as_command
from engine.models import recompute_layers
from engine.optimizer import MasterWeightAdamW
from engine.runs import read_config
from engine.training.start import start_policy, write_start
from rewards import Task
from rollout import load_policy

Function = Callable[[], object]


def config_and_task(flags: str, folder: str) -> tuple[Config, Task]:
    """The configuration that these flags give, its task, and the start model in a folder."""
    words = [*flags.split(), "--device", "cpu", "--out", folder]
    config, task, _ = read_config(words, "")
    resolve(config)
    policy = start_policy(config, task, train.demonstrations)
    write_start(policy, task, config, train.warm_up, train.demonstrations)
    return config, task


def gradient_arguments(method: str, config: Config, task: Task) -> tuple:
    """The arguments of `train.backward` in the first step of a method from the start model."""
    start = f"{config.out}/start"
    policy = load_policy(start, task, device=config.device, dtype=config.dtype)
    if config.gradient_checkpointing:
        recompute_layers(policy.model)
    reference = None
    if config.kl:
        reference = load_policy(start, task, device=config.device, dtype=config.dtype)
    optimizer = MasterWeightAdamW(policy.model)
    state = train.TrainState(policy, reference, optimizer, peak_lr=0.0, step=0)
    with patch("fast.backward", wraps=fast.backward) as backward:
        train.train_step(method, state, task, config)
    return backward.call_args.args


def add_gradient(backward: Callable, arguments: tuple) -> None:
    """Compute a gradient and forget it."""
    backward(*arguments)
    policy = arguments[0]
    policy.model.zero_grad()


# Clocks.


def cost_of(function: Function) -> tuple[float, float]:
    """Seconds of one call, and the MiB that it adds to what the process takes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # give back what was freed
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    before = resident_mib("VmRSS")
    began = time.process_time()
    function()
    seconds = time.process_time() - began
    return seconds, resident_mib("VmHWM") - before


def resident_mib(name: str) -> float:
    """MiB in memory now (VmRSS) or at the most (VmHWM)."""
    status = Path("/proc/self/status").read_text("utf-8")
    return int(re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)[1]) / 1024


def compare(plain: Function, fast_one: Function, repeats: int) -> list[str]:
    """The cells of both sides: median seconds, their ratio, and MiB."""
    plain()  # the first calls warm up
    fast_one()
    plain_seconds = []
    fast_seconds = []
    plain_mib = []
    fast_mib = []
    for _ in range(repeats):
        seconds, mib = cost_of(plain)
        plain_seconds.append(seconds)
        plain_mib.append(mib)
        seconds, mib = cost_of(fast_one)
        fast_seconds.append(seconds)
        fast_mib.append(mib)
    ratios = [slow / quick for slow, quick in zip(plain_seconds, fast_seconds, strict=True)]
    seconds = [f"{median(plain_seconds):.2f}", f"{median(fast_seconds):.2f}"]
    return [*seconds, f"{median(ratios):.2f}", f"{max(plain_mib):.0f}", f"{max(fast_mib):.0f}"]


# The table.


def print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def run() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint's folder or a Hub id, for headlines")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    starts = ["--task maze", "--task code"]
    if args.model:
        starts.append(f"--task headline --model {args.model}")
    head = ["task", "method", "part", "plain, s", "fast/, s", "times faster"]
    print_row([*head, "plain, MiB", "fast/, MiB"])
    print_row(["---"] * 8)
    for flags in starts:
        with tempfile.TemporaryDirectory() as folder:
            config, task = config_and_task(flags, folder)
            for method in ("grpo", "vpo"):
                arguments = gradient_arguments(method, config, task)
                plain = functools.partial(add_gradient, train.backward, arguments)
                fast_one = functools.partial(add_gradient, fast.backward, arguments)
                cells = compare(plain, fast_one, args.repeats)
                print_row([task.name, method, "gradient", *cells])


if __name__ == "__main__":
    with as_command("plain_against_fast.py"):
        run()
