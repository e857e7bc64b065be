"""The configuration of the commands: one dataclass each. Flags, checks and help are made from its fields."""

import argparse
import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rewards import UserError, did_you_mean
from vpo import ADVANTAGES, SAMPLERS

# torch keeps large tensors in huge pages, which malloc would otherwise keep after they were freed.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
MAX_ANSWERS = 8  # of one rollout; the tiny model's vocabulary has a tag for each
DEVICES = ("auto", "cpu", "cuda", "mps")


def number(kind: type, low: float, high: float) -> Callable[[str], float]:
    """A type of argparse: a number from low to high, both allowed."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if low <= value <= high:
                return value
        noun = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text}: must be a {noun}, {low} to {high}")

    return parse


def temperature(text: str) -> float:
    """A type of argparse: a sampling temperature."""
    if text.strip("0.") == "" and text:
        raise argparse.ArgumentTypeError(
            f"{text}: greedy decoding is not offered, because all candidates would be equal; take 0.001 "
            "or more"
        )
    return number(float, 1e-3, 1e3)(text)


def file_name(text: str) -> str:
    """A type of argparse: the name of a file."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; name a file, or leave the flag out")
    return text


def count(low: int, high: int = 2**31 - 1) -> Callable[[str], float]:
    return number(int, low, high)


def flag(
    default: Any, help: str, default_text: str = "", begins_group: str = "", **argparse_options
) -> Any:
    """A field of a configuration that is a flag of the command.

    Args:
        default_text: what the default is, in words, where the value does not say it.
        begins_group: title of the group of flags that begins here.
        argparse_options: of `ArgumentParser.add_argument`.
    """
    metadata = {
        "help": help,
        "default_text": default_text,
        "begins_group": begins_group,
        "argparse": argparse_options,
    }
    return dataclasses.field(default=default, metadata=metadata)


YES = {"action": "store_true"}
YES_NO = {"action": argparse.BooleanOptionalAction}
TEMPERATURE = {"type": temperature}
AS_IN_RUN = "as in the run"


@dataclass
class Config:
    """All flags of train.py. None means: it depends on task, model or device (engine/kinds.py)."""

    task: str = flag(
        "maze",
        "maze, toy, code, headline, musique, eureqa, tool, or a Python file that defines a Task",
        begins_group="task and model",
    )
    size: int = flag(7, "rows of a maze; other tasks ignore it", type=count(5, 9))
    data: str = flag(
        "",
        "file of problems for code, musique, eureqa and tool, of words for headline; its formats: "
        "docs/own.md",
        default_text="code, headline: made-up problems; the others need a file",
        type=file_name,
    )
    test_data: str = flag(
        "",
        "file of held-out problems",
        default_text="a part of the file of --data",
        type=file_name,
    )
    seconds: float = flag(
        2.0, "CPU seconds that a program may take per test", type=number(float, 0.01, 1e5)
    )
    memory_mb: int = flag(512, "MiB that a program may take", type=count(64))
    unconfined: bool = flag(False, "run programs even where the system cannot confine them", **YES)
    model: str = flag("tiny", "tiny, a local Hugging Face checkpoint, or a Hub id")
    dtype: str | None = flag(
        None,
        "type of the weights and of the computation",
        default_text="bfloat16 on cuda, except tiny and after an SFT warm-up; else float32",
        choices=("float32", "bfloat16"),
    )
    device: str = flag(
        "auto", "where to compute; auto: cuda if there is one, else cpu", choices=DEVICES
    )

    method: list[str] = flag(
        ("grpo", "vpo", "group_vpo"),
        "one or several of " + ", ".join(ADVANTAGES),
        begins_group="method",
        nargs="+",
        choices=ADVANTAGES,
        metavar="METHOD",
    )
    m: int | None = flag(
        None,
        "answers per rollout (vpo, multi_rlvr)",
        default_text="toy 5, others 3",
        type=count(1, MAX_ANSWERS),
    )
    group_size: int = flag(8, "G, rollouts per prompt", type=count(2, 4096))
    n_weights: int = flag(
        100,
        "K, preference weights drawn per prompt (vpo, group_vpo)",
        type=count(1, 100_000),
    )
    alpha: float = flag(
        1.0,
        "concentration of the Dirichlet distribution of the preference weights; 1: uniform on the "
        "simplex (vpo, group_vpo, random_weighting, goal_conditioned)",
        type=number(float, 1e-6, 1e6),
    )
    sampler: str = flag(
        "iid",
        "how preference weights are drawn; sobol has less noise and needs --alpha 1 "
        "(vpo, group_vpo)",
        choices=SAMPLERS,
    )
    subset: int | None = flag(
        None,
        "s, rollouts that form a set together, fewer than --group-size (max_at_k, vpo, group_vpo)",
        default_text="vpo 1, others half the group",
        type=count(1, 4095),
    )

    steps: int | None = flag(
        None,
        "updates, one per batch of rollouts",
        begins_group="optimisation",
        default_text="code 300, toy 60, headline 150, others 200",
        type=count(1, 999_999),
    )
    prompts_per_step: int | None = flag(
        None,
        "P of methods with m answers per rollout; the others get m times as many",
        default_text="12; headline with a language model 2",
        type=count(1, 65536),
    )
    lr: float | None = flag(
        None,
        "peak learning rate",
        default_text="the task's; else tiny and headline the best per method, others 1e-6, adapters 1e-5",
        type=number(float, 1e-12, 1.0),
    )
    lr_schedule: str = flag(
        "linear",
        "after 10 steps of rise; linear falls to a tenth",
        choices=("linear", "constant"),
    )
    kl: float | None = flag(
        None,
        "weight of KL(policy || reference policy) in the loss; 0: no reference policy is kept",
        default_text="0.001; headline with a language model 0",
        type=number(float, 0.0, 1e6),
    )
    warm_steps: int | None = flag(
        None,
        "steps of the SFT warm-up before RL; 0: none",
        default_text="tiny: maze 700, code 1500, toy 150, others 300; headline with a language model 30; "
        "other models 0",
        type=count(0),
    )

    plan: float | None = flag(
        None,
        "only print where the memory goes, and whether it fits this machine or GIB",
        begins_group="memory",
        type=number(float, 0.0, 1e6),
        nargs="?",
        const=0.0,
        metavar="GIB",
    )
    lora_rank: int = flag(
        0,
        "train a LoRA adapter of this rank, with peft; 0: train all weights",
        type=count(0, 4096),
    )
    gradient_checkpointing: bool | None = flag(
        None,
        "compute layers again in the backward pass, which takes less memory",
        default_text="yes, except tiny and headline",
        **YES_NO,
    )
    micro_batch_tokens: int | None = flag(
        None,
        "padded tokens per backward pass; 0: all at once",
        default_text="tiny 2048; others 4096 on cuda, else 512",
        type=count(0),
    )
    sampling_batch: int | None = flag(
        None,
        "rollouts sampled at a time; 0: all at once",
        default_text="tiny 0, others 96",
        type=count(0),
    )

    temperature: float | None = flag(
        None,
        "sampling temperature of the rollouts in training",
        begins_group="sampling and evaluation",
        default_text="1; headline with a language model 0.7",
        **TEMPERATURE,
    )
    max_new_tokens: int = flag(
        0,
        "tokens per answer; a rollout of m answers may take m times as many; 0: the default",
        default_text="tiny what the longest answer needs, headline 16, others 256",
        type=count(0, 2**20),
    )
    eval_problems: int | None = flag(
        None,
        "held-out problems of the evaluation; 0: no evaluation",
        default_text="code 500, musique 300, headline 40, others 200",
        type=count(0, 2**20),
    )
    eval_temperature: float = flag(
        0.7, "sampling temperature of the candidates in the evaluation", **TEMPERATURE
    )
    pool: int = flag(
        30,
        "candidates per held-out problem, the largest k of best@k",
        type=count(1, 10_000),
    )

    seed: int = flag(
        0,
        "seed of the start model, problems, rollouts and preference weights",
        begins_group="run",
        type=count(0),
    )
    out: str = flag("", "run folder", default_text="runs/TASK-seedSEED")
    resume: bool = flag(False, "go on with the run in the folder --out, with its own flags", **YES)
    changed_task: bool = flag(
        False, "with --resume: go on although the task's problems or rewards have changed", **YES
    )
    jobs: int | None = flag(
        None,
        "methods that are trained and evaluated at a time, each in a process with one thread; no "
        "number of the tiny model depends on it",
        default_text="tiny, on Linux without a GPU and with more than one core: all; a language model on "
        "2 to 4 cores: one for each core where they fit into memory; else 1",
        type=count(1, 64),
    )
    save_every: int = flag(25, "steps between checkpoints; the last two are kept", type=count(1))
    log: str | None = flag(
        None,
        "send the metrics to TensorBoard or Weights & Biases, too",
        choices=("tensorboard", "wandb"),
    )
    snapshots: int | None = flag(
        None,
        "how many times answers to four held-out problems are kept for the page and the film",
        default_text="20, at most one in 6 steps",
        type=count(0, 1000),
    )

    fingerprint: str = ""  # of the files that the problems come from; no flag

    @property
    def task_name(self) -> str:
        return Path(self.task).stem


# Flags that may change when a run is resumed: those that its result does not depend on, and those
# that make it fit its device.
MAY_CHANGE = (
    "method",
    "resume",
    "out",
    "plan",
    "changed_task",
    "device",
    "save_every",
    "jobs",
    "log",
    "snapshots",
    "eval_problems",
    "eval_temperature",
    "pool",
    "unconfined",
    "max_new_tokens",
    "sampling_batch",
    "micro_batch_tokens",
    "gradient_checkpointing",
)


@dataclass
class EvalConfig:
    """All flags of eval.py."""

    runs: list[str] = flag(
        dataclasses.MISSING, "run folders of train.py; of several also the means", nargs="+"
    )
    reward_geometry: bool = flag(
        False,
        "only say what the start model's rollouts tell about the reward; RUN may be a model",
        **YES,
    )
    task: str = flag("maze", "the task of a model, with --reward-geometry")
    page: bool = flag(
        False, "only write report.html, a page that shows the training in a browser", **YES
    )
    film: bool = flag(False, "only write film.gif, the answers drawn step by step", **YES)
    split: str = flag(
        "test",
        "which held-out problems; validation is for tuning",
        choices=("test", "validation"),
    )
    problems: int | None = flag(
        None, "number of held-out problems", default_text=AS_IN_RUN, type=count(1)
    )
    pool: int | None = flag(
        None, "candidates per problem", default_text=AS_IN_RUN, type=count(1, 10_000)
    )
    temperature: float | None = flag(
        None, "sampling temperature of the candidates", default_text=AS_IN_RUN, **TEMPERATURE
    )
    device: str = flag(
        "cpu", "where to compute; auto: cuda if there is one, else cpu", choices=DEVICES
    )
    jobs: int | None = flag(
        None,
        "policies that are evaluated at a time, at most as many as the run has methods",
        default_text="that of train.py",
        type=count(1, 64),
    )
    out: str = flag(
        "",
        "folder for what is written; several runs get a folder each in it",
        default_text="the run folder, or one in it for other settings than the run's own",
    )
    figure_format: str = flag("png", "format of all figures", choices=("png", "svg", "pdf"))


@dataclass
class SearchConfig:
    """All flags of search.py."""

    runs: list[str] = flag(
        dataclasses.MISSING,
        "run folders of train.py, all of one task; they share one list of problems",
        nargs="+",
    )
    strategy: str = flag(
        "evolve",
        "evolution, or independent samples",
        choices=("evolve", "best_of_n"),
    )
    selection: str = flag(
        "tournament",
        "how evolution chooses parents",
        choices=("tournament", "lexicase", "weighting"),
    )
    goal: str = flag(
        "scalar",
        "scalar: the task's own; all: every objective at once; an objective's name; preference "
        "weights such as gold=2,avoid_lava=1; or a Python file with score(rewards, answer)",
    )
    budget: int = flag(
        240, "candidates scored for a problem that stays unsolved", type=count(1, 10**6)
    )
    problems: int = flag(40, "number of problems that are searched", type=count(1))
    among: int | None = flag(
        None,
        "number of held-out problems that they are taken from",
        default_text=AS_IN_RUN,
        type=count(1),
    )
    screen: int = flag(
        30,
        "search only problems that no policy of any run solves with this many independent "
        "candidates; 0: the first problems",
        type=count(0, 10_000),
    )
    policies: list[str] | None = flag(
        None,
        "start, start_sets, or methods of the runs",
        default_text="all but start_sets",
        nargs="+",
    )
    temperature: float | None = flag(
        None, "sampling temperature of the candidates", default_text=AS_IN_RUN, **TEMPERATURE
    )
    seed: int = flag(0, "seed of parents and candidates", type=count(0))
    device: str = flag(
        "cpu", "where to compute; auto: cuda if there is one, else cpu", choices=DEVICES
    )
    out: str = flag(
        "",
        "folder for logs, table and figures",
        default_text="TASK-search/GOAL-STRATEGY-SELECTION-BUDGET beside the first run",
    )


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line that names the flag, the value and the fix."""

    def __init__(self, script: str, doc: str = "", usage: str = ""):
        super().__init__(
            prog=script,
            usage=f"python {script} {usage}",
            description=doc.split("\n\n")[0],
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        message = message.replace("invalid choice: ", "").replace("'", "")
        choice = re.search(r"(\S+) \(choose from (.*)\)", message)
        unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
        if choice and "," in choice[1]:
            message += "; separate them by blanks"
        elif choice:
            message += did_you_mean(choice[1], choice[2].split(", "))
        elif unknown:
            message += did_you_mean(unknown[1], self._option_string_actions)
        self.exit(2, f"{self.prog}: error: {message}; --help lists all flags\n")


def add_flags(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add the flags of a configuration to a parser, in the groups of its fields."""
    group = parser
    for field in dataclasses.fields(config_class):
        if not field.metadata:
            continue
        if field.metadata["begins_group"]:
            group = parser.add_argument_group(field.metadata["begins_group"])
        name = field.name if is_required(field) else name_of(field.name)
        text = field.metadata["help"]
        default = default_text_of(field)
        if default:
            text += f" (default: {default})"
        # Without a default, what the parser returns holds only the flags of the command line.
        group.add_argument(name, default=argparse.SUPPRESS, help=text, **field.metadata["argparse"])


def is_required(field: dataclasses.Field) -> bool:
    """Whether a field is no flag, but stands on every command line without a name."""
    return field.default is dataclasses.MISSING


def default_text_of(field: dataclasses.Field) -> str:
    """The default of a flag as text; empty where absence needs no explanation."""
    default = field.default
    if field.metadata["default_text"]:
        return field.metadata["default_text"]
    if isinstance(default, tuple):
        return " ".join(default)
    if default is None or default is False or is_required(field):
        return ""
    return str(default)


def parse(parser: Parser, config_class: type, argv: list[str] | None) -> tuple[Any, set[str]]:
    """The configuration that a command line asks for, and the names of the flags on it.

    Exits with code 2 and one line where a flag is wrong.
    """
    add_flags(parser, config_class)
    flags = vars(parser.parse_args(argv))
    return config_class(**flags), set(flags)


def check_used(config: EvalConfig, flags_given: set[str], parser: Parser) -> None:
    """Exit with an error for a flag that --page, --film or --reward-geometry would ignore."""
    if config.reward_geometry:
        mode = "--reward-geometry"
        used = {"runs", "reward_geometry", "task", "device", "problems"}
    elif config.page or config.film:
        mode = "--page and --film"
        used = {"runs", "page", "film", "out"}
    elif "task" in flags_given:
        parser.error("argument --task: only used with --reward-geometry; leave it out")
    else:
        return
    for name in sorted(flags_given - used):
        parser.error(f"argument {name_of(name)}: not used by {mode}; leave it out")


def as_command(parser: argparse.ArgumentParser, run: Callable[[], None]) -> None:
    """Run a command: a user's mistake is one line and exit code 2, Ctrl-C one line and 130."""
    from transformers.utils import logging  # here, because it takes a second to import

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it takes a sampled pad token for padding and recommends a mask
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except (UserError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt as stop:
        message = str(stop) or "stopped; give the same command again, or --resume"
        parser.exit(130, f"\n{message}\n")


def name_of(field_name: str) -> str:
    """The flag of a field."""
    return f"--{field_name.replace('_', '-')}"


def text_of(field_name: str, value: object) -> str:
    """A flag and its value as on a command line."""
    name = name_of(field_name)
    if value is False:
        return name.replace("--", "--no-", 1)
    if isinstance(value, float):
        return f"{name} {value:g}"
    return f"{name} {value}"
