"""From the flags of train.py to a task, a device and a checked configuration, before time is spent."""

from dataclasses import dataclass
from pathlib import Path

from engine.checks import check_config, check_device, device_named
from engine.config import Config
from engine.kinds import fill_in
from engine.run_folder import StoredRun, find_run, is_joined, is_training, join_run, task_of
from engine.trackers import check_tracker
from rewards import Task, UserError


@dataclass
class PreparedRun:
    """What a command of train.py asks for, filled in and checked."""

    config: Config
    task: Task
    device: str
    stored: StoredRun | None  # the run that is in its folder already

    def needs_start(self) -> bool:
        """Whether its start model has to be made, as its folder says."""
        has_start = (Path(self.config.out) / "start").exists()
        return not is_joined(self.config, self.stored) or not has_start


def prepare(config: Config, flags_given: set[str]) -> PreparedRun:
    """Fill in what the flags leave open, and check all of it.

    Raises:
        UserError: a flag is wrong, does not fit another, or its folder is taken.
    """
    config.out = config.out or f"runs/{config.task_name}-seed{config.seed}"
    out = Path(config.out)
    is_plan = config.plan is not None
    stored = find_run(out) if not is_plan or config.resume else None
    if not is_plan and is_training(out):
        raise UserError(
            f"--out {out}: another train.py is writing to it; wait, or take another name"
        )
    if config.resume and stored is None:
        raise UserError(f"--resume: {out} holds no run; name the folder of one with --out")
    if is_joined(config, stored):
        config = join_run(config, flags_given, stored)
    task = task_of(config)
    device = device_named(config.device)
    fill_in(config, task, cuda=device == "cuda")
    plans_for_a_card = bool(config.plan)  # --plan GIB, which needs no card; a bare --plan is 0
    if not plans_for_a_card:
        check_device(device, config.dtype)
    check_config(config, task)
    check_tracker(config.log)
    return PreparedRun(config, task, device, stored)
