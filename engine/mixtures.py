"""Mixtures: policies whose weights lie between those of the start model and the trained ones."""

import functools
from pathlib import Path

import torch
from transformers import PreTrainedModel

from engine.config import Config
from engine.evaluations import ONE_ANSWER, Evaluation, evaluated, method_of, output_folders
from engine.files import write_folder
from engine.models import load_hugging_face, save_model
from engine.runs import policies, task_of
from rewards import Task, UserError
from rollout import Policy, load_policy
from vpo import ADVANTAGES


def mixed(
    run: Path, method: str, t: float, task: Task, config: Config, device: str = "cpu"
) -> Policy:
    """The policy of a method of a run, its weights moved to start + t (trained - start).

    Between the two it is float32: the steps of bfloat16 are as large as what a training changes.

    Args:
        method: or "start".
        config: of the run.
    """
    folder = policies(run, config.m)[method].folder
    dtype = "float32" if 0 < t < 1 else config.dtype
    policy = load_policy(str(folder), task, device=device, dtype=dtype)
    if t < 1:
        start, _ = load_hugging_face(str(run / "start"), dtype)
        mix_weights(policy.model, start, t)
    return policy


@torch.no_grad()
def mix_weights(trained: PreTrainedModel, start: PreTrainedModel, t: float) -> None:
    """Move the weights of a trained model to start + t (trained - start), exact at 0 and at 1.

    Args:
        trained: changed in place. An adapter, which holds trained - start, is scaled by t.
    """
    adapter = [weight for name, weight in trained.named_parameters() if "lora_B" in name]
    if adapter:
        for weight in adapter:
            weight.mul_(t)
        return
    for weight, trained_weight in zip(start.parameters(), trained.parameters(), strict=True):
        trained_weight.copy_(weight.to(trained_weight.device).lerp(trained_weight, t))


def save_mixed(evaluations: list[Evaluation], out: str) -> None:
    """Write the trained policies of runs, mixed as they are evaluated, as ordinary checkpoints."""
    folders = output_folders([evaluation.run for evaluation in evaluations], out)
    for evaluation, folder in zip(evaluations, folders, strict=True):
        save_mixed_run(evaluation, folder)


def save_mixed_run(evaluation: Evaluation, folder: Path) -> None:
    """Write those of one run."""
    run = evaluation.run
    config = evaluation.config
    for row, stored in evaluated(evaluation).items():
        method = method_of(row)
        if method not in ADVANTAGES or ONE_ANSWER in row:
            continue
        target = folder / f"{method}-{stored.t:g}"
        if target.exists():
            raise UserError(f"--save-mixed {folder}: holds {target.name}; name another folder")
        policy = mixed(run, method, stored.t, task_of(config), config)
        model = policy.model
        if config.lora_rank:
            from peft import PeftModel  # optional

            start, _ = load_hugging_face(str(run / "start"), "float32")  # it takes up small changes
            adapted = PeftModel.from_pretrained(start, stored.folder)
            mix_weights(adapted, start, stored.t)
            model = adapted.merge_and_unload()
        save = functools.partial(
            save_model, model, policy.tokenizer, temperature=config.temperature
        )
        write_folder(target, save)
        print(f"saved: {target}")
