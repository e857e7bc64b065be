"""Plain code against fast/: seconds and memory of the gradient.

    python study/benchmarks/plain_against_fast.py                    the tiny model, in the maze and in code
    python study/benchmarks/plain_against_fast.py --model MODEL      a language model's headlines, too
    python study/benchmarks/plain_against_fast.py --tricks           what each trick of fast/ pays

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
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fast
import fast.update
import rollout
import train
from engine.config import Config, estimator_of, resolve
from engine.doors import as_command
from engine.models import recompute_layers
from engine.runs import read_config
from engine.start import start_policy, write_start
from engine.tasks import take_problems
from rewards import Task
from rollout import Policy, Rollouts, load_policy
from vpo import ADVANTAGES, answers_per_rollout, policy_loss

MIB = 2**20
Function = Callable[[], object]


# What is measured.


@dataclass
class Step:
    """A training step of a method, from the start model."""

    method: str
    config: Config
    task: Task
    policy: Policy
    reference: Policy | None
    rollouts: Rollouts
    advantages: Tensor  # (P * G)

    def backward(self, function: Callable) -> None:
        function(self.policy, self.reference, self.rollouts, self.advantages, self.config)
        self.policy.model.zero_grad()


def start_of(flags: str, folder: Path) -> tuple[Config, Task]:
    """The configuration that these flags give, its task, and the start model in a folder."""
    config, task, _ = read_config([*flags.split(), "--out", str(folder)], "")
    resolve(config)
    policy = start_policy(config, task, train.demonstrations)
    write_start(policy, task, config, train.warm_up, train.demonstrations)
    return config, task


def step_of(method: str, config: Config, task: Task) -> Step:
    """The first step of a method up to its advantages."""
    start = f"{config.out}/start"
    policy = load_policy(start, task, device=config.device, dtype=config.dtype)
    if config.gradient_checkpointing:
        recompute_layers(policy.model)
    reference = None
    if config.kl:
        reference = load_policy(start, task, device=config.device, dtype=config.dtype)
    m = answers_per_rollout(method, config.m)
    P = config.prompts_per_step * config.m // m
    problems = take_problems(task, "train", P, config.seed)
    prompts = [rollout.build_prompt(policy, task, problem, m) for problem in problems]
    generator = rollout.random_generator(config.seed, 0, "rollouts")
    options = rollout.sampling_options(policy, task, config, m, generator)
    rollouts = rollout.sample(policy, prompts, config.group_size, options)
    scored = rollout.score(task, problems, rollout.read_answers(task, rollouts, m), m)
    estimator = estimator_of(config, rollout.random_generator(config.seed, 0, "weights"))
    advantages = ADVANTAGES[method](scored, estimator).flatten()
    advantages = advantages.to(policy.device)
    return Step(method, config, task, policy, reference, rollouts, advantages)


# fast/ without one of its tricks.


def backward_all_rows(policy, reference, rollouts, advantages, config) -> None:
    """`fast.backward`, but rollouts without an advantage are computed, too."""
    fast.backward(policy, reference, rollouts, advantages + 1e-9, config)


def backward_prompts_repeated(policy, reference, rollouts, advantages, config) -> None:
    """`train.backward` with all tricks of `fast.backward` but the shared prompts."""
    rows = list(range(len(advantages)))
    if reference is None:
        rows = advantages.nonzero()[:, 0].tolist()
    G = rollouts.group_size
    widths = [length + rollouts.prompt_lengths[i // G] for i, length in enumerate(rollouts.lengths)]
    for batch in fast.update.fill(rows, widths, config.micro_batch_tokens):
        own = rows_of(rollouts, batch)
        index = torch.arange(len(batch), device=policy.device)
        logprobs = rollout.token_logprobs(policy.model, own, index, config.temperature)[0]
        ref_logprobs = None
        if reference is not None:
            with torch.no_grad(), reference.adapter_off():
                ref_logprobs, _ = rollout.token_logprobs(
                    reference.model, own, index, config.temperature
                )
        loss, _ = policy_loss(
            logprobs,
            own.logprobs,
            advantages[batch],
            own.token_mask,
            sum(rollouts.lengths),
            ref_logprobs=ref_logprobs,
            kl_coef=config.kl,
        )
        loss.backward()


def rows_of(rollouts: Rollouts, rows: list[int]) -> Rollouts:
    """Some rollouts, each with a prompt of its own, without the padding that they do not need."""
    prompts = [row // rollouts.group_size for row in rows]
    lengths = [rollouts.lengths[row] for row in rows]
    prompt_lengths = [rollouts.prompt_lengths[p] for p in prompts]
    return replace(
        rollouts,
        prompt_ids=rollouts.prompt_ids[prompts, -max(prompt_lengths) :],
        prompt_lengths=prompt_lengths,
        tokens=rollouts.tokens[rows, : max(lengths)],
        logprobs=rollouts.logprobs[rows, : max(lengths)],
        lengths=lengths,
    )


BACKWARD_TRICKS = {
    "prompts once per group": backward_prompts_repeated,
    "no rows without gradient": backward_all_rows,
}


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


def print_plain_against_fast(step: Step, repeats: int) -> None:
    """A row for the gradient."""
    plain = functools.partial(step.backward, train.backward)
    print_comparison(step, "gradient", plain, repeats)


def print_tricks(step: Step, repeats: int) -> None:
    """A row for each trick: `fast/` without it, against `fast/`."""
    for name, function in BACKWARD_TRICKS.items():
        if name == "no rows without gradient" and step.reference is not None:
            continue  # with a KL term every rollout has one
        without = functools.partial(step.backward, function)
        print_comparison(step, f"gradient: {name}", without, repeats)


def print_comparison(step: Step, part: str, other: Function, repeats: int) -> None:
    """A row of the table: what `fast/` is compared with, and `fast/`."""
    fast_one = functools.partial(step.backward, fast.backward)
    cells = compare(other, fast_one, step.config.device, repeats)
    print_row([step.task.name, step.method, part, *cells])


def print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def run() -> None:
    """Print the table that the flags ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint's folder or a Hub id, for headlines")
    parser.add_argument("--tricks", action="store_true", help="what each trick pays")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", default=["maze", "code"], help="of the tiny model")
    parser.add_argument("--flags", default="", help="further flags of train.py, such as --kl=0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    starts = [f"--task {task}" for task in args.tasks]
    if args.model:
        starts.append(f"--task headline --model {args.model}")
    without = "without it" if args.tricks else "plain"
    print(f"torch {torch.__version__}")
    head = ["task", "method", "part", f"{without}, s", "fast/, s", "times faster"]
    print_row([*head, f"{without}, MiB", "fast/, MiB"])
    print_row(["---"] * 8)
    with ExitStack() as folders:
        for flags in starts:
            folder = Path(folders.enter_context(tempfile.TemporaryDirectory()))
            config, task = start_of(f"{flags} {args.flags}", folder)
            for method in ("grpo", "vpo"):
                step = step_of(method, config, task)
                print_it = print_tricks if args.tricks else print_plain_against_fast
                print_it(step, args.repeats)


if __name__ == "__main__":
    with as_command("plain_against_fast.py"):
        run()
