"""Reward geometry: how many objectives a reward has in effect, and whether they conflict.

Both are measured on the rollouts of a start model, before any training.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from engine.config import Config, device_of, open_device, resolve, task_defaults
from engine.runs import load_run, task_of
from engine.start import load_start
from engine.tasks import held_out
from rewards import Problem, Task, UserError
from rollout import (
    Policy,
    build_prompt,
    random_generator,
    read_answers,
    sample,
    sampling_options,
    score,
)
from vpo import Scored

GROUPS = 4  # of the start model's rollouts for each problem
AT_ONCE = 750  # rollouts of the tiny model


def geometry(rewards: Tensor, objective_mask: Tensor, scalars: Tensor, G: int) -> dict[str, float]:
    """Measures of a reward from rollouts of the start model.

    The first two look at the covariance C (k, k) of the quarter of a problem's answers that is
    best by the scalar, because training makes such answers frequent.

    Args:
        rewards: (N, n, k).
        objective_mask: (N, k) bool, the objectives that each problem has.
        scalars: (N, n), the task's own scalar.
        G: the size of a training group.

    Returns:
        unseen_variance_share: the share of the variance that the mean over the objectives does
            not see, 1 - 1'C1 / (k tr C).
        effective_objectives: the participation ratio (tr C)^2 / tr C^2; 1 if all objectives move
            as one.
        scalar_signal: the share of groups whose scalars differ, where GRPO learns.
        vector_signal: the share of groups whose reward vectors differ, where VPO can learn.
    """
    N, n, k = rewards.shape
    order = scalars.argsort(dim=1, descending=True, stable=True)
    best = order[:, : max(2, n // 4), None].expand(-1, -1, k)
    best = rewards.gather(1, best).double()  # (N, n / 4, k)
    centred = best - best.mean(1, keepdim=True)
    C = centred.mT @ centred  # (N, k, k)
    sizes = objective_mask.sum(1)  # (N)
    if objective_mask.all():  # else objectives of different problems have nothing in common
        C = C.sum(0, keepdim=True)
        sizes = sizes[:1]
    trace = C.diagonal(dim1=1, dim2=2).sum(1)
    unseen = 1 - C.sum((1, 2)) / (sizes * trace)
    effective = trace.square() / C.square().sum((1, 2))
    varied = trace > 1e-12

    grouped = n - n % G  # answers that fill whole groups
    vectors = rewards[:, :grouped].reshape(-1, G, k)
    differ = vectors != vectors[:, :1]  # (groups, G, k)
    scalars = scalars[:, :grouped].reshape(-1, G)
    return {
        "unseen_variance_share": unseen[varied].mean().nan_to_num(0.0).item(),
        "effective_objectives": effective[varied].mean().nan_to_num(0.0).item(),
        "scalar_signal": (scalars.std(1) > 1e-6).float().mean().item(),
        "vector_signal": differ.any((1, 2)).float().mean().item(),
    }


def correlations(rewards: Tensor) -> Tensor:
    """Correlations (k, k) of the objectives around each problem's mean; NaN for a constant one.

    Args:
        rewards: (N, n, k).
    """
    k = rewards.shape[-1]
    centred = rewards - rewards.mean(1, keepdim=True)
    return torch.corrcoef(centred.flatten(0, 1).T).reshape(k, k)


def verdict(measures: dict[str, float]) -> str:
    """What the measures of `geometry` lead one to expect of training."""
    if measures["vector_signal"] < 0.05:
        return (
            "Hardly any group has a signal: no method will learn. Start from a model that solves "
            "more, take easier problems, or a larger group."
        )
    if measures["effective_objectives"] == 0:
        return (
            "The better quarter of the answers to each problem all earn the same, so it cannot tell. Look at the "
            "correlations."
        )
    if measures["unseen_variance_share"] < 0.2:
        return (
            "The objectives rise and fall together: expect no gain of the vector. Keep the scalar: "
            "GRPO for one answer, Max@K for a search."
        )
    return (
        "Good answers trade one objective for another: a vector may keep what a scalar averages "
        "away, at a loss at k = 1 and a gain at large k."
    )


def geometry_report(
    rewards: Tensor, objective_mask: Tensor, scalars: Tensor, G: int, objectives: tuple[str, ...]
) -> str:
    """The measures and the verdict as text, with the correlations if the objectives have names.

    Args:
        rewards: (N, n, k).
        objective_mask: (N, k) bool, the objectives that each problem has.
        scalars: (N, n), the task's own scalar.
        G: the size of a training group.
        objectives: names of the k objectives; empty if problems differ in their objectives.
    """
    measures = geometry(rewards, objective_mask, scalars, G)
    lines = []
    if objectives:
        lines.append("correlations of the objectives around each problem's mean:")
        for name, row in zip(objectives, correlations(rewards).tolist(), strict=True):
            cells = "".join(f"{value:7.2f}" for value in row)
            lines.append(f"{name:16}{cells.replace('nan', '  -')}")
    lines += [
        f"unseen by the scalar: {measures['unseen_variance_share']:.0%} of the variance among the "
        "better quarter of the answers",
        f"effective number of objectives there: {measures['effective_objectives']:.2f} of "
        f"{objective_mask.sum(1).max()}",
        f"groups of {G} with a signal: {measures['scalar_signal']:.0%} for a scalar, "
        f"{measures['vector_signal']:.0%} for a vector",
        verdict(measures),
    ]
    return "\n".join(lines)


def geometry_of(name: str, task_name: str, n_problems: int, device: str) -> str:
    """What a start model's rollouts on validation problems say of the task's reward vector, as text.

    Args:
        name: a run folder, whose start model is asked; or a model, asked with the task's defaults.
        task_name: the task of a model.
        n_problems: of the validation problems.
        device: of --device.
    """
    config, task, model = start_of(name, task_name, device)
    policy = load_start(model, task, device=config.device, dtype=config.dtype)
    problems = held_out(task, "validation", n_problems)
    scored = score_start(policy, task, problems, config)
    rewards = scored.vectors.flatten(1, 2)  # (N, n, k)
    scalars = scored.scalars.flatten(1, 2)  # (N, n)
    heading = f"{name}: the start model on {len(problems)} validation problems, {scalars.shape[1]} answers each"
    text = geometry_report(
        rewards, scored.objective_mask, scalars, config.group_size, task.objectives
    )
    return f"{heading}\n{text}"


def start_of(name: str, task_name: str, device: str) -> tuple[Config, Task, str]:
    """Configuration, task, and folder or Hub id of a run's start model, or of a model."""
    run = Path(name)
    if (run / "config.json").exists() and (run / "start").is_dir():
        config = load_run(run).config
        config.device = device_of(device, config.is_tiny)
        open_device(config.device)
        return config, task_of(config), str(run / "start")
    if name == "tiny":
        raise UserError(
            "geometry tiny: it knows nothing before a run; python train.py --steps 1 "
            "--eval-problems 0 --out FOLDER makes the start of a run, then name its folder"
        )
    config = Config(task=task_name, model=name, device=device)
    task = task_of(config)
    config = dataclasses.replace(config, **task_defaults(task, name))
    resolve(config)
    return config, task, name


def score_start(policy: Policy, task: Task, problems: list[Problem], config: Config) -> Scored:
    """Sample and score a few groups of single answers for each problem."""
    generator = random_generator(config.seed, 0, "evaluation")
    options = sampling_options(policy, task, config, 1, generator)
    options.batch = config.sampling_batch or AT_ONCE
    prompts = []
    for problem in problems:
        prompts += [build_prompt(policy, task, problem, 1)] * GROUPS
    rollouts = sample(policy, prompts, config.group_size, options)
    return score(task, problems, read_answers(task, rollouts, 1), 1)
