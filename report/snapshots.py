"""Snapshots: the answers of each method to a few held-out problems during training."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import Config
from engine.files import read_log
from engine.runs import task_of
from engine.tasks import held_out
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


def read_snapshots(run: Path, config: Config) -> Snapshots:
    """The snapshots of a run, at the steps at which all methods with snapshots have one."""
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
    steps = set.intersection(*map(set, pools.values())) if pools else set()
    if not steps:
        raise UserError(f"{run}: no snapshots; training with --snapshots 20 keeps them")
    frames = []
    for step in sorted(steps):
        frames.append(Frame(step, {method: by_step[step] for method, by_step in pools.items()}))
    return Snapshots(config, task, problems, frames, metrics)


def utility(record: dict) -> float:
    """W@n of the n answers of one method to one problem."""
    rewards = torch.tensor(record["rewards"], dtype=torch.float64)  # (n, d)
    utilities = rewards @ spread_weights(rewards.shape[1]).T  # (n, weights)
    return utilities.amax(0).mean().item()
