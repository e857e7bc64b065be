"""Speed, measured side by side in one run and printed as ratios; asserts nothing.

    python tests/benchmark.py

1. vpo_advantage against a plain loop over the prompt groups, at P, G, m, k, K = 128, 8, 3, 4, 100.
2. The sandbox against a fresh interpreter per test.
3. One update of the maze's main job against the plain one that repeats each prompt for every rollout.
4. Where the seconds of a training step go, in the maze and in code, from a start model that it warms up once (half a minute).
"""

import argparse
import functools
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rollout
import train
import vpo
from rewards import load_task
from sandbox import Job, Sandbox


def seconds_per_call(function) -> float:
    """Mean over as many calls as fit into a tenth of a second, one at least."""
    calls, began = 0, time.perf_counter()
    while not calls or time.perf_counter() - began < 0.1:
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        calls += 1
    return (time.perf_counter() - began) / calls


def compare(name: str, ours, plain, repeats: int) -> None:
    """Run the two in turn, A B A B ..., and print the medians and the median of the pairwise ratios."""
    times = [(seconds_per_call(ours), seconds_per_call(plain)) for _ in range(repeats + 1)][1:]  # the first round warms up
    fast, slow = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    print(f"{name:50}{fast * 1e3:10.2f} ms   plain {slow * 1e3:10.2f} ms   {ratio:6.1f} times faster")


def plain_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """VPO's advantage as one would first write it, one prompt group after the other: rewards (P, G, m, k) -> (P, G)."""
    advantages = []
    for group in rewards:  # (G, m, k)
        concentration = torch.ones(group.shape[-1], device=group.device)
        weights = torch.distributions.Dirichlet(concentration).sample((100,))  # (K, k)
        R = torch.einsum("gmk,jk->gmj", group, weights).amax(1).mean(-1)
        advantages.append((R - R.mean()) / (R.std(correction=0) + 1e-6))
    return torch.stack(advantages)


def repeat_prompts(rollouts: rollout.Rollouts) -> rollout.Rollouts:
    """The same batch with every prompt repeated for its rollouts: groups of one, nothing to share."""
    G = rollouts.group_size
    return rollout.Rollouts(rollouts.prompt_ids.repeat_interleave(G, 0), rollouts.prompt_mask.repeat_interleave(G, 0),
                            rollouts.tokens, rollouts.logprobs, rollouts.mask, rollouts.texts)


def fresh_interpreters(jobs: list[Job]) -> None:
    """Every test in a Python process of its own, as many at a time as there are cores; the expected outputs inside."""
    def check(program: str, test: tuple, entry_point: str | None) -> bool:
        if entry_point:
            program += f"\nassert {entry_point}(*{test[0]!r}) == {test[1]!r}"
        done = subprocess.run([sys.executable, "-c", program], input="" if entry_point else test[0], capture_output=True, text=True, check=False)
        return done.returncode == 0 and (entry_point is not None or done.stdout == test[1])

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        assert all(threads.map(lambda pair: check(*pair), [(job.program, test, job.entry_point) for job in jobs for test in job.tests]))


def sandboxed(sandbox: Sandbox, jobs: list[Job], calls: Iterator[int]) -> None:
    """The same in the sandbox; a comment makes the programs new in every call, so that none of them is remembered."""
    verdicts = sandbox.run([job._replace(program=f"{job.program}\n# {next(calls)}") for job in jobs])
    assert all(map(all, verdicts))


def programs() -> None:
    """Programs per second, at 8 tests each, every layer on."""
    functions = [Job(f"def f(x):\n    return x * {i} if x < 3 else x + {i}", [([x], x * i if x < 3 else x + i) for x in range(8)], "f")
                 for i in range(48)]
    scripts = [Job(f"x = int(input())\nprint(x + {i})", [(f"{x}\n", f"{x + i}\n") for x in range(8)]) for i in range(16)]
    with Sandbox() as sandbox:
        for kind, jobs in (("functions", functions), ("scripts", scripts)):
            compare(f"{len(jobs)} {kind} x 8 tests; plain: fresh interpreters", functools.partial(sandboxed, sandbox, jobs, itertools.count()),
                    functools.partial(fresh_interpreters, jobs), 3)


def steps(name: str, update_too: bool) -> None:
    """Where the seconds of a step go, from the task's start model; and the update against one that repeats each prompt."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = train.build_parser().parse_args(["--task", name])
    task = load_task(name)
    train.fill_in_flags(args, task)
    args.warm_steps = min(args.warm_steps, 300)  # enough for rollouts of the usual length
    model, tokenizer = rollout.load_policy("tiny", task)
    model, tokenizer = train.warm_start(args, task, model, tokenizer)
    model, reference = model.to(device), rollout.load_policy("tiny", task, device=device)[0]
    for method in ("vpo", "grpo"):
        phases: dict[str, list[float]] = {name: [] for name in ("problems", "sampling", "scoring", "advantage", "update")}
        m = vpo.answers_per_rollout(method, args.m)
        P = args.prompts_per_step * args.m // m
        for step in range(9):
            marks = [time.perf_counter()]
            problems = task.problems("train", P, start=step * P)
            prompts = [rollout.build_prompt(tokenizer, task, problem, m) for problem in problems]
            marks.append(time.perf_counter())
            rollouts = rollout.sample(model, tokenizer, prompts, args.group_size,
                                      max_new_tokens=rollout.rollout_length(task, tokenizer, m))
            marks.append(time.perf_counter())
            scored = rollout.score_texts(task, problems, rollouts.texts, m)
            marks.append(time.perf_counter())
            advantages = vpo.ADVANTAGES[method](scored.vectors, scored.scalars, scored.mask).flatten().to(device)
            marks.append(time.perf_counter())
            train.backward(args, model, reference, rollouts, advantages)
            marks.append(time.perf_counter())
            if step:
                for phase, began, ended in zip(phases, marks, marks[1:], strict=False):
                    phases[phase].append(ended - began)
        total = sum(map(statistics.median, phases.values()))
        print(f"a step of {name}, {method}: " + ", ".join(f"{phase} {statistics.median(times) / total:.1%}" for phase, times in phases.items()))
        if update_too:
            repeated = repeat_prompts(rollouts)
            compare(f"update of {name}, {method}, prompts shared",
                    lambda batch=rollouts, A=advantages: train.backward(args, model, reference, batch, A),
                    lambda batch=repeated, A=advantages: train.backward(args, model, reference, batch, A), 5)


def main() -> None:
    transformers_logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, "
          f"{torch.get_num_threads()} threads")
    rewards = torch.rand(128, 8, 3, 4, device=device)
    compare("vpo_advantage, 128 x 8 x 3 x 4, K = 100", lambda: vpo.vpo_advantage(rewards), lambda: plain_advantage(rewards), 20)
    programs()
    steps("maze", update_too=True)
    steps("code", update_too=False)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
