"""Snapshots: the answers of each method to a few held-out problems during training."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import Config
from engine.files import read_log
from engine.runs import load_run, task_of
from engine.tasks import held_out
from report.looks import look_of
from report.statistics import spread_weights
from rewards import Problem, Task, UserError


@dataclass
class Frame:
    """The answers at one step: by method one record per problem, with answers and rewards."""

    step: int
    pools: dict[str, list[dict]]


@dataclass
class Snapshots:
    """All snapshots of a run."""

    config: Config
    task: Task
    problems: list[Problem]
    frames: list[Frame]
    metrics: dict[str, list[dict]]  # by method


def read_snapshots(run: Path) -> Snapshots:
    """The snapshots of a run, up to the last step that all methods with snapshots have reached.

    A method without a snapshot at a frame's step is shown at its nearest one.
    """
    config = load_run(run).config
    task = task_of(config)
    problems = held_out(task)
    pools: dict[str, dict[int, list[dict]]] = {}  # method -> step -> records
    metrics = {}
    for method in config.method:
        records = read_log(run / method / "snapshots.jsonl", "problems")
        by_step = {}
        for record in records:
            if len(record["problems"]) == len(problems):
                by_step[record["step"]] = record["problems"]
        if by_step:
            pools[method] = by_step
            metrics[method] = read_log(run / method / "metrics.jsonl", "diversity", "reward")
    if not pools:
        raise UserError(f"{run}: no snapshots; training with --snapshots 20 keeps them")
    last = min(max(by_step) for by_step in pools.values())
    steps = set()
    for by_step in pools.values():
        steps |= {step for step in by_step if step <= last}
    frames = []
    for step in sorted(steps):
        frame = Frame(step, {})
        for method, by_step in pools.items():
            frame.pools[method] = by_step[nearest(step, by_step)]
        frames.append(frame)
    return Snapshots(config, task, problems, frames, metrics)


def utilities(frame: Frame) -> str:
    """W@n of the n answers of each method, a mean over the problems, as text."""
    parts = []
    for name, records in frame.pools.items():
        total = 0.0
        for record in records:
            rewards = torch.tensor(record["rewards"], dtype=torch.float64)  # (n, k)
            total += (rewards @ spread_weights(rewards.shape[1]).T).amax(0).mean().item()
        parts.append(f"{look_of(name).title} {total / len(records):.2f}")
    # A few problems may order the methods otherwise than the evaluation.
    few = f" of these {len(records)} problems" if len(records) > 1 else ""
    return f"W@{len(rewards)}{few}: {', '.join(parts)}"


def nearest(step: int, steps: Iterable[int]) -> int:
    return min(steps, key=lambda other: abs(other - step))
