"""The flags of train.py: one dataclass, the defaults that are laid over it, and their checks."""

import argparse
import dataclasses
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import torch

from engine.errors import did_you_mean
from rewards import MAX_ANSWERS, Task, UserError
from vpo import ADVANTAGES, ALPHAS, Options, Scored, answers_per_rollout

TASKS = ("maze", "fence", "toy", "code", "headline", "musique", "eureqa", "tool")
AUTO = -1  # the default of some numbers on cuda: what the card's memory holds
IGNORE_SUBSET = {"grpo", "dr_grpo", "maxrl", "gdpo", "random_weighting", "multi_rlvr"}
# Peak learning rates of the tiny model: the best of a grid on validation mazes (version 3).
TINY_RATES = (
    "5e-4 grpo=1.2e-3 dr_grpo=8e-4 maxrl=8e-4 gdpo=1.2e-3 max_at_k=1.2e-3 multi_rlvr=1.2e-3 "
    "group_vpo=1.2e-3"
)


def flag(default: Any, help: str, low: float = -math.inf, high: float = math.inf) -> Any:
    """A field that is a flag of the command, with the least and the most that it may be."""
    metadata = {"help": help, "range": (low, high)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Config:
    """All flags of train.py, with the defaults of the tiny model.

    LANGUAGE_DEFAULTS are laid over them for a language model, then the defaults of the task.
    """

    # task and model
    task: str = flag("maze", f"{', '.join(TASKS)}, or a Python file with a Task")
    size: int = flag(7, "rows of a maze", 5, 9)
    max_words: int = flag(6, "words that a headline may have, 5 to 9", 5, 9)
    data: str = flag("", "file of problems (docs/own.md); empty: the task's made-up problems")
    test_data: str = flag("", "file of held-out problems; empty: a part of --data")
    seconds: float = flag(2.0, "CPU seconds that a program may take per test", 0.01, 1e5)
    memory_mb: int = flag(512, "MiB that a program may take", 64, 2**31)
    unconfined: bool = flag(False, "run programs even where the system cannot confine them")
    model: str = flag("tiny", "tiny, a local Hugging Face checkpoint, or a Hub id")
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto",
        "auto: bfloat16 on cuda for a language model without --warm-steps or with LoRA, else float32",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = flag(
        "auto", "auto: cuda for a language model if there is one, else cpu"
    )
    # method
    method: list[str] = flag(["grpo", "vpo", "group_vpo"], f"some of {', '.join(ADVANTAGES)}")
    m: int = flag(3, "answers per rollout (vpo, multi_rlvr)", 1, MAX_ANSWERS)
    group_size: int = flag(8, "G, rollouts per prompt", 2, 4096)
    n_weights: int = flag(100, "K, preference weights per prompt (vpo, group_vpo)", 1, 100_000)
    alpha: float = flag(1.0, "Dirichlet concentration of preference weights; 1: uniform", *ALPHAS)
    subset: int = flag(0, "s < G, rollouts that form a set; 0: vpo 1, others G / 2", 0, 4095)
    # optimisation
    steps: int = flag(200, "training steps, a batch of rollouts each", 1, 999_999)
    prompts_per_step: int = flag(
        12, "P of methods with m answers per rollout; the others get m times as many", 1, 65536
    )
    lr: list[str] = flag(TINY_RATES.split(), "peak learning rates: of all, or of one as vpo=2e-5")
    updates: int = flag(
        1, "optimizer steps per batch, each on a part of it; the paper: 2", 1, 65536
    )
    lr_schedule: Literal["linear", "constant"] = flag(
        "linear", "linear: a rise over 10 steps, a sixth of short runs, then a fall to a tenth"
    )
    kl: float = flag(1e-3, "weight of KL(policy || start model) in the loss; 0: none", 0, 1e6)
    entropy_coef: float = flag(0.0, "weight of a bonus for the entropy of tokens; 0: none", 0, 1e6)
    warm_steps: int = flag(300, "steps of the SFT warm-up before RL; 0: none", 0, 2**31)
    # memory and speed
    lora_rank: int = flag(
        0, "train a LoRA adapter of this rank, at about ten times the rate; 0: all weights", 0, 4096
    )
    gradient_checkpointing: bool = flag(
        False, "compute layers twice, to save memory; on cuda by default only if it must be"
    )
    micro_batch_tokens: int = flag(
        2048, "padded tokens per backward pass; 0: all; default on cuda: what fits", AUTO, 2**31
    )
    sampling_batch: int = flag(0, "rollouts at a time; 0: all; on cuda: what fits", AUTO, 2**31)
    plain: bool = flag(False, "train with the plain code, without fast/")
    jobs: int = flag(0, "methods trained at a time; 0: all if they are small, else one", 0, 64)
    # sampling and evaluation
    temperature: float = flag(1.0, "sampling temperature of the rollouts in training", 1e-3, 1e3)
    max_new_tokens: int = flag(0, "tokens per answer; 0: enough for the tiny model", 0, 2**20)
    eval_problems: int = flag(200, "held-out problems of the evaluation; 0: none", 0, 2**20)
    eval_temperature: float = flag(0.7, "sampling temperature in the evaluation", 1e-3, 1e3)
    pool: int = flag(30, "candidates per held-out problem, the largest k of best@k", 1, 10_000)
    eval_every: int = flag(0, "steps between checks on 20 validation problems; 0: none", 0, 2**31)
    # run
    seed: int = flag(0, "seed of everything random", 0, 2**31)
    out: str = flag("", "run folder; empty: runs/TASK-seedSEED")
    resume: bool = flag(False, "go on with the run in the folder --out, with its own flags")
    save_every: int = flag(25, "steps between checkpoints; 0: only the last state", 0, 2**31)
    keep_optimizer: bool = flag(False, "keep its state at the end, for a larger --steps later")
    log: Literal["", "tensorboard", "wandb"] = flag("", "where metrics are sent, too")
    snapshots: int = flag(20, "how many times answers are kept for the page and the film", 0, 1000)

    @property
    def task_name(self) -> str:
        return Path(self.task).stem

    @property
    def is_tiny(self) -> bool:
        return self.model == "tiny"

    @property
    def warms_up_all(self) -> bool:
        """Whether an SFT warm-up trains all weights of a language model, for which bfloat16 is too coarse."""
        return not self.is_tiny and self.warm_steps > 0 and not self.lora_rank

    def groups_per_step(self, method: str) -> int:
        """P of a method, so that all methods sample equally many answers: 12 of VPO, 36 of GRPO."""
        return self.prompts_per_step * self.m // answers_per_rollout(method, self.m)


LANGUAGE_DEFAULTS: dict[str, Any] = {
    "warm_steps": 0,
    "lr": ["1e-6"],
    "micro_batch_tokens": 4096,
    "sampling_batch": 96,
    "max_new_tokens": 256,
    "gradient_checkpointing": True,
}
CUDA_DEFAULTS: dict[str, Any] = {
    "micro_batch_tokens": AUTO,
    "sampling_batch": AUTO,
    "gradient_checkpointing": True,
}
# What may differ when a run goes on or one more method joins it: no trained weights depend on it.
MAY_DIFFER = (
    "method", "lr", "resume", "out", "device", "plain", "jobs", "save_every", "log", "snapshots",
    "keep_optimizer", "eval_problems", "eval_every", "eval_temperature", "pool", "unconfined", "sampling_batch",
    "micro_batch_tokens", "gradient_checkpointing",
)  # fmt: skip


# Flags that a task takes if its Task.flags names them.
TASK_FLAGS = ("size", "max_words", "data", "test_data", "seconds", "memory_mb", "unconfined")


class Parser(argparse.ArgumentParser):
    """The flags of a dataclass whose fields are made by `flag`. A mistake is one line and exit code 2."""

    def __init__(self, flags: type, script: str, doc: str, **options: Any):
        super().__init__(
            prog=script,
            usage=f"python {script} [--flag value ...]",
            description=doc.split("\n\n")[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
            **options,
        )
        self.flags = flags
        for field in dataclasses.fields(flags):
            types = get_args(field.type) or (field.type,)  # int first of list[int], of `int | None`
            kind: dict[str, Any] = {"type": types[0]}
            if get_origin(field.type) is list:
                kind["nargs"] = "+"
            elif get_origin(field.type) is Literal:
                kind = {"choices": types}
            elif field.type is bool:
                kind = {"action": argparse.BooleanOptionalAction}
            default = getattr(flags(), field.name)
            help = field.metadata["help"]
            self.add_argument(flag_of(field.name), default=default, help=help, **kind)

    def parse_args_into_dataclass(
        self, argv: list[str] | None = None
    ) -> tuple[Any, argparse.Namespace]:
        """The flags as their dataclass, and all arguments. Raises UserError for a value out of its range."""
        arguments = self.parse_args(argv)
        names = [field.name for field in dataclasses.fields(self.flags)]
        flags = self.flags(**{name: getattr(arguments, name) for name in names})
        check_ranges(flags)
        return flags, arguments

    def error(self, message: str) -> NoReturn:
        _, _, unknown = message.partition("unrecognized arguments: ")
        first = unknown.partition(" ")[0]
        hint = did_you_mean(first, map(flag_of, vars(self.flags())))
        self.exit(2, f"{self.prog}: error: {message}; --help lists all flags{hint}\n")


def check_ranges(flags: Any) -> None:
    """Raise UserError for a flag that has the wrong type or is out of its range."""
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        kind = type(getattr(type(flags)(), field.name))
        is_whole = kind is float and type(value) is int
        if type(value) is not kind and not is_whole and field.default is not None:
            raise UserError(f"{flag_of(field.name)} {value!r}: must be of type {kind.__name__}")
        low, high = field.metadata["range"]
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not low <= number <= high:
                limits = f"{low:.10g} to {high:.10g}"
                raise UserError(f"{flag_of(field.name)} {number}: must be {limits}")


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


def peak_rate(config: Config, method: str) -> float:
    """The peak learning rate of a method: its own entry of --lr, else the one for all methods."""
    rates: dict[str, float] = {}  # by method; "": of all
    for entry in config.lr:
        name, _, text = str(entry).rpartition("=")
        try:
            rate = float(text)
        except ValueError:
            rate = math.nan  # which is in no range
        if name not in ("", *ADVANTAGES) or not 1e-12 <= rate <= 1:
            rule = "must be a rate of 1e-12 to 1, or METHOD=RATE of a known method"
            hint = "" if name in ADVANTAGES else did_you_mean(name, ADVANTAGES)
            raise UserError(f"--lr {entry}: {rule}{hint}")
        rates[name] = rate
    if method not in rates and "" not in rates:
        given = " ".join(map(str, config.lr))
        raise UserError(f"--lr {given}: names no rate for {method}; add {method}=RATE")
    return rates.get(method) or rates[""]


def task_defaults(task: Task | type[Task], model: str, device: str = "cpu") -> dict[str, Any]:
    """The defaults of flags for this task, model and device."""
    defaults = LANGUAGE_DEFAULTS | task.defaults | task.language_defaults
    if model == "tiny":
        defaults = task.defaults | task.tiny_defaults
    return defaults | CUDA_DEFAULTS if device == "cuda" else defaults


def resolve(config: Config) -> None:
    """Give `auto` its meaning on this machine. Raises UserError if the device cannot compute."""
    config.device = device_of(config.device, config.is_tiny)
    open_device(config.device)  # before torch is asked what its card can do
    is_cuda = config.device == "cuda"
    has_bfloat16 = is_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    if config.dtype == "auto":
        is_half = has_bfloat16 and not config.is_tiny and not config.warms_up_all
        config.dtype = "bfloat16" if is_half else "float32"
    open_device(config.device, config.dtype)
    if is_cuda and config.dtype == "bfloat16" and not has_bfloat16:
        raise UserError("--dtype bfloat16: this card only emulates it; take --dtype float32")
    defaults = vars(Config()) if config.is_tiny else LANGUAGE_DEFAULTS
    for name in ("micro_batch_tokens", "sampling_batch"):
        if not is_cuda and getattr(config, name) == AUTO:  # there is no card to fill
            setattr(config, name, defaults[name])


def device_of(device: str, is_tiny: bool) -> str:
    """The device that --device means: for auto cuda for a language model if there is one, else cpu."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() and not is_tiny else "cpu"


def open_device(device: str, dtype: str = "float32") -> None:
    """Prepare a device. Raises UserError, with the reason, if it cannot compute in this dtype."""
    try:
        torch.ones(1, device=device, dtype=getattr(torch, dtype)).square()
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        problem = f"--device {device}: cannot compute in {dtype} here ({error!s:.200})"
        raise UserError(f"{problem}; take --device cpu") from error
    if device == "cuda":
        # It plans for every new shape, and each decoded token has one.
        torch.backends.cuda.enable_cudnn_sdp(False)


def check(config: Config, task: Task) -> None:
    """Raise UserError for flags that do not fit one another, the task or the machine."""
    if config.lora_rank and not importlib.util.find_spec("peft"):
        raise UserError(f"--lora-rank {config.lora_rank}: needs peft; pip install peft")
    if (Path(config.model) / "adapter_config.json").is_file():
        advice = "merge it first (merge_and_unload of peft)"
        raise UserError(f"--model {config.model}: an adapter; {advice}")
    if config.pool < config.m:
        rule = f"must hold at least one rollout of --m {config.m} answers"
        raise UserError(f"--pool {config.pool}: {rule}")
    for name in TASK_FLAGS:
        value = getattr(config, name)
        if value != getattr(Config(), name) and name not in task.flags:
            problem = f"{flag_of(name)} {value}: task {config.task} has no such flag"
            raise UserError(f"{problem}; drop it, or name it in Task.flags of your own task")
    if config.warms_up_all and config.dtype == "bfloat16":
        problem = "too coarse for the SFT warm-up of all weights"
        raise UserError(f"--dtype bfloat16: {problem}; take --dtype float32, or --warm-steps 0")
    if not config.is_tiny and not config.max_new_tokens:
        raise UserError("--max-new-tokens 0: a language model needs a number of tokens per answer")
    check_methods(config)
    check_tracker(config.log)


def check_tracker(name: str) -> None:
    """Raise UserError for a tracker of --log that cannot be used."""
    if name and not importlib.util.find_spec(name):
        raise UserError(f"--log {name}: not installed; pip install {name}")
    if name == "wandb":
        import wandb  # optional

        try:
            wandb.login()
        except Exception as error:  # it has no key, or a wrong one
            advice = "run `wandb login`, or set WANDB_MODE=offline"
            raise UserError(f"--log wandb: {error!s:.200}; {advice}") from error


def check_methods(config: Config) -> None:
    """Raise UserError for a method that is unknown, or that cannot use the flags."""
    for name in config.method:
        if name not in ADVANTAGES:
            known = f"one of {', '.join(ADVANTAGES)}, or several with blanks between them"
            hint = did_you_mean(name, [] if "," in name else ADVANTAGES)
            raise UserError(f"--method {name}: unknown; {known}{hint}")
        peak_rate(config, name)
        try_method(name, config)
    fewest = min(config.method, key=config.groups_per_step)  # the others have m times as many
    P = config.groups_per_step(fewest)
    if P % config.updates:
        raise UserError(
            f"--updates {config.updates}: must divide the {P} prompts of a step of {fewest}"
        )


def try_method(name: str, config: Config) -> None:
    """Raise UserError for a method that cannot be used, tried on three made-up groups."""
    G = config.group_size
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(3, G, answers_per_rollout(name, config.m), 2, generator=generator)
    rewards[1:] = rewards[1:, :1]  # two groups whose rollouts earn the same,
    rewards[2, 0] *= 1 + 2**-23  # in the last one but for rounding, as of sums in another order
    present = torch.ones(rewards.shape[:3], dtype=torch.bool)
    objectives = torch.ones(3, 2, dtype=torch.bool)
    scored = Scored(rewards, rewards.mean(-1), present, ~present, objectives, torch.zeros(3, 1))
    try:
        advantages = ADVANTAGES[name](scored, options_of(config, generator))
    except ValueError as error:  # a flag does not fit, or a user's own code has a fault
        is_own = ADVANTAGES[name].__module__ != "vpo"
        flags = f"--group-size {G} --subset {config.subset}"
        raise error if is_own else UserError(f"--method {name} {flags}: {error}") from None
    check_advantages(name, advantages, scored)
    if advantages[1:].any():
        rule = "must return exactly 0 for rewards that are equal, or differ by rounding"
        raise UserError(f"--method {name}: {rule} (see vpo.center), not {advantages[1:]!r:.80}")


def check_advantages(name: str, advantages: Any, scored: Scored) -> None:
    """Raise UserError unless a method has given each rollout a finite number."""
    is_real = isinstance(advantages, torch.Tensor) and advantages.is_floating_point()
    P, G = scored.scalars.shape[:2]
    if not is_real or advantages.shape != (P, G) or not advantages.isfinite().all():
        rule = f"must return {P} x {G} finite advantages (P, G)"
        raise UserError(f"--method {name}: {rule}, not {advantages!r:.80}")


def options_of(config: Any, generator: torch.Generator | None = None) -> Options:
    """The options of the methods in vpo.py that flags of the same names ask for."""
    return Options(config.n_weights, config.alpha, config.subset, generator)
