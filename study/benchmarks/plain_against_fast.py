"""Plain code against fast/: seconds and memory of the gradient.

    python study/benchmarks/plain_against_fast.py                    the tiny model, in the maze and in code
    python study/benchmarks/plain_against_fast.py --model MODEL      a language model's headlines, too

One training step of GRPO and of VPO from the start model, after its SFT warm-up. The sides take turns,
and the ratio is the median of the turns' ratios. On a CPU there is one thread, and seconds are those
of the processor, so that other programs disturb less. Memory is what a call adds to the peak.
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
from contextlib import ExitStack
from pathlib import Path
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

MIB = 2**20
Function = Callable[[], object]


def start_of(flags: str, folder: Path) -> tuple[Config, Task]:
    """The configuration that these flags give, its task, and the start model in a folder."""
    config, task, _ = read_config([*flags.split(), "--out", str(folder)], "")
    resolve(config)
    policy = start_policy(config, task, train.demonstrations)
    write_start(policy, task, config, train.warm_up, train.demonstrations)
    return config, task


def gradient_of(method: str, config: Config, task: Task) -> tuple:
    """The arguments of `train.backward` in the first step of a method from the start model."""
    start = f"{config.out}/start"
    policy = load_policy(start, task, device=config.device, dtype=config.dtype)
    if config.gradient_checkpointing:
        recompute_layers(policy.model)
    reference = None
    if config.kl:
        reference = load_policy(start, task, device=config.device, dtype=config.dtype)
    usual = fast.backward
    found = []

    def keep(*arguments) -> dict:
        found.append(arguments)
        return usual(*arguments)

    optimizer = MasterWeightAdamW(policy.model)
    state = train.TrainState(policy, reference, optimizer, peak_lr=0.0, step=0)
    with patch("fast.backward", keep):
        train.train_step(method, state, task, config)
    return found[0]


def add_gradient(backward: Callable, arguments: tuple) -> None:
    backward(*arguments)
    arguments[0].model.zero_grad()  # the policy's


# Clocks.


def cost_of(function: Function, device: str) -> tuple[float, float]:
    """Seconds of one call, and the MiB that it adds to what the process takes, 0 where nobody knows."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        return seconds, (torch.cuda.max_memory_allocated() - before) / MIB
    begin_peak()
    before = resident("VmRSS")
    began = time.process_time()
    function()
    seconds = time.process_time() - began
    return seconds, (resident("VmHWM") - before) / MIB


def begin_peak() -> None:
    """Give back what was freed, and let the peak of this process begin anew. Only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def resident(name: str) -> int:
    """Bytes in memory now (VmRSS) or at the most (VmHWM), 0 where nobody knows."""
    path = Path("/proc/self/status")
    if not path.exists():
        return 0
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", path.read_text("utf-8"), re.MULTILINE)[1])


def compare(plain: Function, fast_one: Function, device: str, repeats: int) -> list[str]:
    """The cells of both sides: median seconds, their ratio, and MiB."""
    plain()  # the first calls warm up
    fast_one()
    costs = []  # (repeats, 2 sides, seconds and MiB)
    for _ in range(repeats):
        costs.append([cost_of(plain, device), cost_of(fast_one, device)])
    costs = torch.tensor(costs)
    slow, quick = costs[..., 0].quantile(0.5, dim=0).tolist()
    ratio = (costs[:, 0, 0] / costs[:, 1, 0]).quantile(0.5).item()
    memory = costs[..., 1].amax(0).tolist()
    return [f"{slow:.2f}", f"{quick:.2f}", f"{ratio:.2f}", *(f"{mib:.0f}" for mib in memory)]


# The tables.


def print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def run() -> None:
    """Print the table that the flags ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint's folder or a Hub id, for headlines")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", default=["maze", "code"], help="of the tiny model")
    parser.add_argument("--flags", default="", help="further flags of train.py, such as --kl=0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    starts = [f"--task {task}" for task in args.tasks]
    if args.model:
        starts.append(f"--task headline --model {args.model}")
    print(f"torch {torch.__version__}")
    head = ["task", "method", "part", "plain, s", "fast/, s", "times faster"]
    print_row([*head, "plain, MiB", "fast/, MiB"])
    print_row(["---"] * 8)
    with ExitStack() as folders:
        for flags in starts:
            folder = Path(folders.enter_context(tempfile.TemporaryDirectory()))
            config, task = start_of(f"{flags} {args.flags}", folder)
            for method in ("grpo", "vpo"):
                arguments = gradient_of(method, config, task)
                plain = functools.partial(add_gradient, train.backward, arguments)
                fast_one = functools.partial(add_gradient, fast.backward, arguments)
                cells = compare(plain, fast_one, config.device, args.repeats)
                print_row([task.name, method, "gradient", *cells])


if __name__ == "__main__":
    with as_command("plain_against_fast.py"):
        run()
