"""Checkpoints of a method: ordinary Hugging Face checkpoints, with what training needs to go on."""

import shutil
from pathlib import Path

import torch

from engine.config import Config
from engine.errors import is_out_of_memory
from engine.files import listed, whole_folder
from engine.models import add_adapter, name_start, recompute_layers, save_model
from engine.optimizer import MasterWeightAdamW
from engine.runs import checkpoints, steps_done
from rewards import Task, UserError
from rollout import Policy, load_policy


def is_due(config: Config, step: int) -> bool:
    """Whether a checkpoint is due after this many steps."""
    if step == config.steps:
        return True
    return config.save_every > 0 and step % config.save_every == 0


def load(
    config: Config, task: Task, folder: Path
) -> tuple[Policy, Policy | None, MasterWeightAdamW, int]:
    """Policy, reference, optimizer and steps done: of the newest checkpoint, else of the start.

    The reference is None without a KL term. With an adapter it is the policy, whose adapter is
    switched off for it.
    """
    folder.mkdir(exist_ok=True)
    for leftover in listed(folder, "checkpoint-*.tmp*"):  # a process was killed while saving
        shutil.rmtree(leftover, ignore_errors=True)
    start = folder.parent / "start"
    saved = checkpoints(folder)
    newest = saved[-1] if saved else start

    policy = load_policy(str(newest), task, device=config.device, dtype=config.dtype)
    if config.lora_rank and not saved:
        torch.manual_seed(config.seed)  # from which peft draws the adapter
        add_adapter(policy.model, config.lora_rank)
    if config.gradient_checkpointing:
        recompute_layers(policy.model)
    reference = None
    if config.kl and config.lora_rank:
        reference = policy
    elif config.kl:
        reference = load_policy(str(start), task, device=config.device, dtype=config.dtype)
    optimizer = MasterWeightAdamW(policy.model)
    if saved:
        load_optimizer(optimizer, newest)
    return policy, reference, optimizer, steps_done(folder)


def load_optimizer(optimizer: MasterWeightAdamW, folder: Path) -> None:
    """Read the optimizer's state in a checkpoint."""
    path = folder / "trainer.pt"
    try:
        optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # of a damaged file there are many kinds
        if is_out_of_memory(error):
            raise
        advice = f"delete the folder {folder}, and --resume does without it"
        raise UserError(f"{path}: missing or damaged ({error!s:.100}); {advice}") from error


def save(
    policy: Policy, optimizer: MasterWeightAdamW, step: int, config: Config, folder: Path
) -> None:
    """Write a checkpoint, and delete older ones.

    The last two are kept. With --save-every 0 it is the last one, and so it is when all steps are
    done; then the optimizer's state is left out, unless --keep-optimizer.
    """
    if not all(weight.isfinite().all() for weight in policy.model.parameters()):
        raise UserError("diverged: the weights are not finite; try a lower --lr")
    is_finished = step == config.steps and not config.keep_optimizer
    is_from_hub = not config.warm_steps and not Path(config.model).exists()
    with whole_folder(folder / f"checkpoint-{step:06d}") as path:
        save_model(policy.model, policy.tokenizer, path, config.temperature)
        if config.lora_rank:
            start = str((folder.parent / "start").resolve())
            name_start(path, config.model if is_from_hub else start)
        if not is_finished:
            torch.save(optimizer.state_dict(), path / "trainer.pt")
    n_kept = 1 if is_finished or not config.save_every else 2
    for old in checkpoints(folder)[:-n_kept]:
        shutil.rmtree(old, ignore_errors=True)  # NFS and Windows keep files that are open
