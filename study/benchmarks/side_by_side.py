"""What the benchmarks share: clocks, the two sides of each comparison, and plans held against runs."""

import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import plain
import torch
from at_root import ROOT

import train
import vpo
from engine import decoding, memory, update
from engine.checkpoints import TrainState
from engine.config import Config, Parser, parse
from engine.kinds import fill_in
from engine.models import load_policy
from engine.optimizer import AdamW
from engine.run_folder import task_of
from rewards import Task
from rollout import score_texts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUN_AND_REPORT_PEAK = f"""
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.path.insert(0, {str(ROOT / "study/benchmarks")!r})
from side_by_side import most_bytes
print("peak", most_bytes())
"""


def config_of(flags: str) -> tuple[Config, Task]:
    """What train.py makes of these flags, and the task."""
    config, _ = parse(Parser("train.py"), Config, ["--device", DEVICE, *flags.split()])
    task = task_of(config)
    fill_in(config, task, cuda=DEVICE == "cuda")
    return config, task


def seconds_per_call(function: Callable[[], object]) -> float:
    """Mean over as many calls as fit into a tenth of a second, at least one."""
    n_calls = 0
    began = time.perf_counter()
    while True:
        function()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        n_calls += 1
        seconds = time.perf_counter() - began
        if seconds >= 0.1:
            return seconds / n_calls


def most_bytes() -> int:
    """The most that this process has taken so far.

    Not ru_maxrss: a new process inherits that of the process that started it.
    """
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    kib = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[1]
    return int(kib) * 1024


def compare(
    name: str, ours: Callable[[], object], theirs: Callable[[], object], repeats: int
) -> float:
    """Run both in turn and print the medians and the median ratio. Returns our seconds."""
    seconds_per_call(ours)  # the first round warms up
    seconds_per_call(theirs)
    our_seconds = []
    their_seconds = []
    ratios = []
    for _ in range(repeats):
        our_seconds.append(seconds_per_call(ours))
        their_seconds.append(seconds_per_call(theirs))
        ratios.append(their_seconds[-1] / our_seconds[-1])
    fast = statistics.median(our_seconds)
    slow = statistics.median(their_seconds)
    print_row(name, fast, slow, statistics.median(ratios))
    return fast


def print_row(name: str, fast: float, slow: float, ratio: float) -> None:
    """Print the seconds of both sides, and how many times faster or slower ours is."""
    outcome = f"{ratio:6.1f} times faster" if ratio >= 1 else f"{1 / ratio:6.1f} times slower"
    print(
        f"{name:60}{fast * 1e3:10.2f} ms   plain {slow * 1e3:10.2f} ms   {outcome}",
        flush=True,
    )


def compare_sampling(name: str, policy: tuple, prompts: list[str], T: int, repeats: int) -> None:
    """Eight rollouts of up to T tokens of each prompt, against transformers' own loop."""
    options = decoding.SamplingOptions(max_new_tokens=T)
    n_tokens = []

    def ours() -> None:
        rollouts = decoding.sample(*policy, prompts, 8, options)
        n_tokens.append(sum(rollouts.lengths))

    seconds = compare(name, ours, lambda: plain.generate(*policy, prompts, 8, T), repeats)
    print(f"{'':60}{statistics.mean(n_tokens) / seconds:10.0f} tokens/s")


@dataclass
class SharedUpdate:
    """The update of train_step, but for the optimizer. PlainUpdate is its counterpart."""

    kl: float = 0.0
    token_budget: int = 4096
    all_rows: bool = False  # those without a gradient, too: tensors without contents do not tell

    def backward(self, model, reference, rollouts, advantages: torch.Tensor) -> None:
        """Add the gradient of all rollouts; advantages (P * G)."""
        rows = list(range(len(advantages)))
        if not self.all_rows:
            rows = update.rows_to_compute(advantages, with_reference=reference is not None)
        for batch in update.micro_batches(
            model, reference, rollouts, rows, token_budget=self.token_budget
        ):
            loss, _ = vpo.policy_loss(
                batch.logprobs,
                batch.old_logprobs,
                advantages[batch.rows],
                batch.token_mask,
                sum(rollouts.lengths),
                ref_logprobs=batch.ref_logprobs,
                kl_coef=self.kl,
            )
            loss.backward()


def compare_grpo_step(name: str, policy: tuple, config: Config, task: Task, steps: int) -> None:
    """A whole GRPO step against GRPOTrainer of TRL: the same prompts, rewards, lengths and KL."""
    if not importlib.util.find_spec("trl"):
        print("trl is not installed: pip install trl")
        return
    model, tokenizer = policy
    problem_of = {}
    prompts = []
    for t in range(steps):
        problems, step_prompts = train.build_batch("grpo", tokenizer, task, config, t)
        problem_of |= dict(zip(step_prompts, problems, strict=True))
        prompts += step_prompts

    def reward(prompts: list[str], completions: list[str], **rest) -> list[float]:
        problems = [problem_of[prompt] for prompt in prompts]
        return score_texts(task, problems, completions, 1).scalars.flatten().tolist()

    max_new_tokens = train.step_prompts(config, task)["grpo"].max_new_tokens
    theirs = plain.trl_steps(
        policy,
        prompts,
        reward,
        per_device_train_batch_size=len(prompts) // steps * config.group_size,
        num_generations=config.group_size,
        max_steps=steps,
        beta=config.kl,
        temperature=config.temperature,
        learning_rate=config.lr,
        max_completion_length=max_new_tokens,
        use_cpu=DEVICE == "cpu",
    )

    reference = None
    if config.kl:
        reference, _ = load_policy(config.model, task, device=DEVICE)
    state = TrainState(model, tokenizer, reference, AdamW(model), step=0)
    ours = []
    for _ in range(steps):
        began = time.perf_counter()
        train.train_step("grpo", state, task, config)
        ours.append(time.perf_counter() - began)
    fast = statistics.median(ours[1:])
    slow = statistics.median(theirs[1:])
    print_row(name, fast, slow, slow / fast)


def compare_plan(flags: str) -> None:
    """Print what --plan says against the peak memory of a real run of two steps."""
    command = [str(ROOT / "train.py"), "--method", "vpo", "--steps", "2", "--eval-problems", "0"]
    command += ["--device", DEVICE, *flags.split()]
    output = run_python(*command, "--plan")
    planned = float(re.search(r"^(?:fits|does not fit) .*: ([\d.]+) GiB", output, re.M)[1])
    with tempfile.TemporaryDirectory() as folder:
        output = run_python("-c", RUN_AND_REPORT_PEAK, *command, "--out", f"{folder}/run")
        last = Path(f"{folder}/run/vpo/metrics.jsonl").read_text().splitlines()[-1]
    peak = int(re.search(r"^peak (\d+)", output, re.M)[1])
    if DEVICE == "cuda":
        peak += memory.CUDA_CONTEXT
    measured = peak / memory.GIB
    print(
        f"--plan {planned:.2f} GiB, measured {measured:.2f} GiB ({planned / measured - 1:+.0%}), "
        f"{json.loads(last)['seconds']:.0f} s a step: {flags}",
        flush=True,
    )


def run_python(*arguments: str) -> str:
    """What a Python of its own prints."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
