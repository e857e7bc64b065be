"""Checkpoints: all that a method needs to go on training, bit for bit on a CPU."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import Config
from engine.files import checksum, read_log, write_folder, write_text
from engine.forward import recompute_layers
from engine.models import Model, Tokenizer, add_adapter, load_policy, save_policy
from engine.optimizer import AdamW
from rewards import Task, UserError

LOGS = ("metrics", "samples", "snapshots")


@dataclass
class TrainState:
    """What a training step reads and changes."""

    model: Model  # the policy
    tokenizer: Tokenizer
    reference: Model | None  # the reference policy: the frozen start; None without KL
    optimizer: AdamW
    step: int  # updates done


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of one method, oldest first."""
    return sorted(run.glob("checkpoint-" + 6 * "[0-9]"))


def load_state(config: Config, task: Task, run: Path, device: str) -> TrainState:
    """The state in a method's newest checkpoint, else in the start model. Its logs are cut there.

    With an adapter the reference policy is the model itself, with the adapter switched off.

    Raises:
        UserError: a file is missing or damaged.
    """
    for leftover in run.glob("checkpoint-*.tmp*"):  # of a process that was killed while saving
        shutil.rmtree(leftover)
    start = start_folder(run)
    check_folder(start)
    saved = checkpoints(run)
    policy = saved[-1] if saved else start
    check_folder(policy)

    placement = {"device": device, "dtype": config.dtype}
    model, tokenizer = load_policy(str(policy), task, seed=config.seed, **placement)
    if config.lora_rank and not saved:
        add_adapter(model, config.lora_rank)
    if config.gradient_checkpointing:
        recompute_layers(model)
    reference = None
    if config.kl and config.lora_rank:
        reference = model
    elif config.kl:
        reference, _ = load_policy(str(start), task, **placement)

    state = TrainState(model, tokenizer, reference, AdamW(model), step=0)
    if saved:
        trainer = torch.load(
            policy / "trainer.pt", map_location="cpu", mmap=True, weights_only=True
        )
        state.optimizer.load_state_dict(trainer["optimizer"])
        state.step = trainer["step"]
    for name in LOGS:  # so that no step is logged twice
        log = run / f"{name}.jsonl"
        kept = [json.dumps(row) + "\n" for row in read_log(log) if row["step"] <= state.step]
        write_text(log, "".join(kept))
    return state


def start_folder(run: Path) -> Path:
    """Where a method starts: from a start model of its own, else from that of all methods."""
    own = run / "start"
    return own if own.exists() else run.parent / "start"


def save_state(state: TrainState, run: Path) -> None:
    """Write a checkpoint and keep the last two. Raises UserError if the weights are not finite."""
    if not all(parameter.isfinite().all() for parameter in state.model.parameters()):
        raise UserError("the weights are not finite: try a lower --lr")

    def write(folder: Path) -> None:
        save_policy(state.model, state.tokenizer, folder)
        trainer = {"optimizer": state.optimizer.state_dict(), "step": state.step}
        torch.save(trainer, folder / "trainer.pt")

    write_folder(run / f"checkpoint-{state.step:06d}", write)
    for old in checkpoints(run)[:-2]:
        shutil.rmtree(old)


def check_folder(folder: Path) -> None:
    """Raise UserError if a file of a checkpoint or start model is missing or altered."""
    path = folder / "checksums.json"
    try:
        for name, expected in json.loads(path.read_text()).items():
            path = folder / name
            if checksum(path) != expected:
                raise ValueError
    except (OSError, ValueError, AttributeError) as error:
        fix = f"delete the folder {folder}, and --resume does without it"
        if folder.name == "start":
            fix = "restore it from a copy, or train with another --out"
        raise UserError(f"{path}: missing or damaged; {fix}") from error
