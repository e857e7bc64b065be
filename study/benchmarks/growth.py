"""How the seconds and the memory of a step grow with group size, answers, their length, and the model.

    python study/benchmarks/growth.py                 the tiny model in the maze
    python study/benchmarks/growth.py MODEL           a checkpoint's folder, or a Hub id, on headlines

One setting is doubled at a time. A step samples two groups of rollouts, none of which ends early,
computes VPO's advantage, and updates all weights. Each row is a process of its own. The last rows
give the exponents e of seconds ~ n^e and memory ~ n^e between the smallest and the largest n. The
memory is what a step adds to the peak of the process beyond weights, gradients and moments.
"""

import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace

import torch
from side_by_side import SharedUpdate, most_bytes, run_python
from transformers.utils import logging as transformers_logging

from engine import memory
from engine.decoding import SamplingOptions, sample
from engine.models import load_policy
from engine.optimizer import AdamW
from rollout import build_prompt
from tasks import load_task
from vpo import vpo_advantage

P = 2
STEPS = 3  # of which the fastest counts
FACTORS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    model: str = "tiny"
    group_size: int = 8
    m: int = 1
    tokens: int = 8  # of each answer


def measure(setting: Setting) -> tuple[float, int]:
    """Seconds of a step, and the bytes that it adds to the peak."""
    task = load_task("maze" if setting.model == "tiny" else "headline")
    model, tokenizer = load_policy(setting.model, task)
    # No token ends a rollout.
    model.generation_config.eos_token_id = model.config.vocab_size
    tokenizer.eos_token = None
    optimizer = AdamW(model)
    update = SharedUpdate(token_budget=512)
    prompts = []
    for problem in task.problems("train", P):
        prompts.append(build_prompt(tokenizer, task, problem, setting.m))

    def step(group_size: int, m: int, tokens: int) -> float:
        began = time.perf_counter()
        options = SamplingOptions(max_new_tokens=m * tokens)
        rollouts = sample(model, tokenizer, prompts, group_size, options)
        advantages = vpo_advantage(torch.rand(P, group_size, m, 4))
        update.backward(model, None, rollouts, advantages.flatten())
        optimizer.step(1e-6)
        model.zero_grad()
        return time.perf_counter() - began

    step(2, 1, 2)  # gradients and moments take their memory
    before = most_bytes()
    seconds = [step(setting.group_size, setting.m, setting.tokens) for _ in range(STEPS)]
    return min(seconds), most_bytes() - before


def print_growth(base: Setting, name: str) -> None:
    """Print a row for each multiple of one setting, and the exponents."""
    smallest = getattr(base, name)
    all_seconds = []
    all_gib = []
    for factor in FACTORS:
        n = factor * smallest
        setting = replace(base, **{name: n})
        output = run_python(__file__, "row", json.dumps(asdict(setting)))
        seconds, added = json.loads(output)
        gib = added / memory.GIB
        print(f"| {name} | {n} | {seconds:.3f} | {gib:.3f} |", flush=True)
        all_seconds.append(seconds)
        all_gib.append(gib)
    print(f"| {name} | exponent | {exponent(all_seconds):.2f} | {exponent(all_gib):.2f} |")


def exponent(costs: list[float]) -> float:
    """The e of cost ~ n^e between the smallest and the largest n."""
    return math.log(costs[-1] / costs[0]) / math.log(FACTORS[-1])


def main(words: list[str]) -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if words[:1] == ["row"]:
        setting = Setting(**json.loads(words[1]))
        print(json.dumps(measure(setting)))
        return
    base = Setting(words[0] if words else "tiny")
    print(f"{base}; torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| setting | n | seconds a step | GiB |\n| --- | --- | --- | --- |")
    for name in ("group_size", "m", "tokens"):
        print_growth(base, name)


if __name__ == "__main__":
    main(sys.argv[1:])
