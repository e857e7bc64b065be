"""Reward geometry: whether objectives conflict where a scalar chooses.

It is measured on the rollouts of a start model, before any training.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from engine.config import Config, device_of, open_device, resolve, task_defaults
from engine.runs import load_run, task_of
from engine.tasks import held_out
from engine.training.start import load_start
from report.statistics import half_width, spread_weights
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
FEW = 20  # problems, too few for a verdict
RARE = 0.05  # share of the groups or answers that is too small to tell anything
NO_CONFLICT = 0.05  # share of regret; below it no vector gained firmly (version 3)


def geometry(
    rewards: Tensor, objective_mask: Tensor, scalars: Tensor, G: int
) -> dict[str, float | None]:
    """Measures of a reward from rollouts of the start model.

    Args:
        rewards: (N, n, d).
        objective_mask: (N, d) bool, the objectives that each problem has.
        scalars: (N, n), the task's own scalar.
        G: the size of a training group.

    Returns:
        regret: what the answer y* that the scalar prefers lacks for a user of random preferences,
            E_w max_y w . r(y) - E_w w . r(y*) with w ~ Dirichlet(1), a mean over the problems.
        margin: half of its 95% interval, None where too few problems differ.
        regret_share: the regret as a share of what the best answer under each w gains over the
            average answer.
        scalar_signal: the share of groups whose scalars differ, where GRPO learns.
        vector_signal: the share of groups whose reward vectors differ, where VPO can learn.
    """
    regrets = []
    gains = []
    for vectors, mask, values in zip(rewards, objective_mask, scalars, strict=True):
        vectors = vectors[:, mask].double()
        utilities = vectors @ spread_weights(vectors.shape[1]).T  # (n, weights)
        best = utilities.amax(0).mean()
        is_preferred = values.isclose(values.max())  # several answers may be level
        regrets.append(best - utilities[is_preferred].mean())
        gains.append(best - utilities.mean())
    regret = torch.stack(regrets).mean().item()
    gain = torch.stack(gains).mean().item()

    d = rewards.shape[-1]
    grouped = rewards.shape[1] // G * G  # answers that fill whole groups
    vectors = rewards[:, :grouped].reshape(-1, G, d)
    differ = vectors != vectors[:, :1]  # (groups, G, d)
    scalars = scalars[:, :grouped].reshape(-1, G)
    return {
        "regret": regret,
        "margin": half_width(torch.stack(regrets)),
        "regret_share": regret / gain if gain > 0 else 0.0,
        "scalar_signal": (scalars.std(1) > 1e-6).float().mean().item(),
        "vector_signal": differ.any((1, 2)).float().mean().item(),
    }


def verdict(measures: dict[str, float], rare: str = "") -> str:
    """A forecast of training from the measures of `geometry`, and from the objectives that are rarely earned."""
    if measures["vector_signal"] < RARE:
        advice = "Start from a model that solves more, take easier problems, or a larger group."
        return f"Hardly any group has a signal: no method will learn. {advice}"
    unknown = f"Hardly any answer earns {rare}: this tells nothing about a conflict with these."
    if measures["regret_share"] < NO_CONFLICT:
        advice = "Keep the scalar: GRPO for one answer, Max@K for a search."
        known = f"What the scalar prefers is about the best under all preferences. {advice}"
        return unknown if rare else known
    gain = "a vector may keep what a scalar averages away, at a loss at k = 1 and a gain at large k"
    known = f"Good answers trade one objective for another: {gain}."
    return f"{known} {unknown}" if rare else known


def rare_objectives(rewards: Tensor, objective_mask: Tensor, task: Task) -> str:
    """The objectives that hardly any answer earns, such as "pro (2%), con (0%)": rewards (N, n, d)."""
    is_earning = (rewards > task.minimum) & objective_mask[:, None]  # (N, n, d)
    n_answers = objective_mask.sum(0) * rewards.shape[1]  # (d) to problems that have the objective
    shares = (is_earning.sum((0, 1)) / n_answers).tolist()
    names = task.objectives or [f"objective {i}" for i in range(1, len(shares) + 1)]
    named = zip(names, shares, strict=True)
    return ", ".join(f"{name} ({share:.0%})" for name, share in named if share < RARE)


def geometry_report(
    rewards: Tensor, objective_mask: Tensor, scalars: Tensor, G: int, task: Task
) -> str:
    """The measures and the verdict as text. Arguments are those of `geometry`."""
    measures = geometry(rewards, objective_mask, scalars, G)
    margin = "" if measures["margin"] is None else f" ± {measures['margin']:.3f}"
    share = f"{measures['regret_share']:.0%} of the best answers' gain over the average one"
    signals = "{scalar_signal:.0%} for a scalar, {vector_signal:.0%} for a vector"
    lines = [
        f"regret of the scalar: {measures['regret']:.3f}{margin}, {share}",
        f"groups of {G} with a signal: {signals.format(**measures)}",
        verdict(measures, rare_objectives(rewards, objective_mask, task)),
    ]
    if len(rewards) < FEW:
        lines.append(f"This rests on few problems ({len(rewards)}), so it may be wrong.")
    return "\n".join(lines)


def geometry_of(name: str, task_name: str, n_problems: int, device: str) -> str:
    """The reward geometry of a start model's rollouts on validation problems, as text.

    `name` is a run folder, or a model, which is asked with the defaults of the task `task_name`.
    """
    config, task, model = model_of(name, task_name, device)
    policy = load_start(model, task, device=config.device, dtype=config.dtype)
    problems = held_out(task, "validation", n_problems)
    scored = score_start(policy, task, problems, config)
    rewards = scored.vectors.flatten(1, 2)  # (N, n, d)
    scalars = scored.scalars.flatten(1, 2)  # (N, n)
    N = f"all {len(problems)}" if len(problems) < n_problems else n_problems
    heading = f"{name}: the start model on {N} validation problems, {scalars.shape[1]} answers each"
    text = geometry_report(rewards, scored.objective_mask, scalars, config.group_size, task)
    return f"{heading}\n{text}"


def model_of(name: str, task_name: str, device: str) -> tuple[Config, Task, str]:
    """Configuration, task, and folder or Hub id of a run's start model, or of a model."""
    run = Path(name)
    if (run / "config.json").exists() and (run / "start").is_dir():
        config = load_run(run).config
        config.device = device_of(device, config.is_tiny)
        open_device(config.device)
        return config, task_of(config), str(run / "start")
    if name == "tiny":
        raise UserError("geometry tiny: it knows nothing before a run; name a run folder")
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
