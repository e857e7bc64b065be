"""Mixtures: policies whose weights lie between those of the start model and the trained ones."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from engine.config import Config
from engine.evaluations import Evaluation, Row, output_folders
from engine.files import whole_folder
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
    `config` is the run's; the method may be "start".
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

    An adapter, which holds trained - start, is scaled by t.
    """
    adapter = [weight for name, weight in trained.named_parameters() if "lora_B" in name]
    for weight in adapter:
        weight.mul_(t)
    if adapter:
        return
    for weight, trained_weight in zip(start.parameters(), trained.parameters(), strict=True):
        trained_weight.copy_(weight.to(trained_weight.device).lerp(trained_weight, t))


def save_mixed(evaluations: list[Evaluation], out: str) -> None:
    """Write the trained policies of runs, mixed as they are evaluated, as ordinary checkpoints."""
    folders = output_folders([evaluation.run for evaluation in evaluations], out)
    for evaluation, folder in zip(evaluations, folders, strict=True):
        for row in evaluation.policies:
            if row.method in ADVANTAGES and row.m is None:
                save_policy(evaluation, row, folder / f"{row.method}-{row.t:g}")


def save_policy(evaluation: Evaluation, row: Row, target: Path) -> None:
    """Write the policy of one row. An adapter becomes part of the weights."""
    if target.exists():
        raise UserError(f"--save-mixed {target.parent}: holds {target.name}; name another folder")
    config = evaluation.config
    policy = mixed(evaluation.run, row.method, row.t, task_of(config), config)
    model = policy.model
    if config.lora_rank:
        from peft import PeftModel  # optional

        # float32 takes up small changes
        model, _ = load_hugging_face(str(evaluation.run / "start"), "float32")
        adapted = PeftModel.from_pretrained(model, evaluation.policies[row].folder)
        mix_weights(adapted, model, row.t)
        model = adapted.merge_and_unload()
    with whole_folder(target) as folder:
        save_model(model, policy.tokenizer, folder, config.temperature)
    print(f"saved: {target}")
