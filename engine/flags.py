"""The flags of the commands: defaults, ranges, help; a wrong one is named before torch is imported."""

import argparse
import contextlib
import functools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rewards import UserError, find_task

os.environ.setdefault(
    "THP_MEM_ALLOC_ENABLE", "1"
)  # torch's large tensors in huge pages: malloc keeps those it freed
# Flags that may change when a run goes on: what it does not depend on, and what makes it fit its device.
FREE = (
    "method",
    "resume",
    "out",
    "plan",
    "device",
    "save_every",
    "snapshots",
    "eval_problems",
    "eval_temperature",
    "pool",
    "unconfined",
    "max_new_tokens",
    "cuda_graph",
    "sampling_batch",
    "micro_batch_tokens",
    "gradient_checkpointing",
)
# Peak learning rates of the tiny model, best of a common grid in validation (docs/results.md); other tasks: the maze's.
TINY_LR = {
    "maze": {
        "grpo": 1.2e-3,
        "dr_grpo": 8e-4,
        "maxrl": 8e-4,
        "gdpo": 1.2e-3,
        "max_at_k": 1.2e-3,
        "vpo": 5e-4,
        "random_weighting": 5e-4,
        "goal_conditioned": 8e-4,
        "multi_rlvr": 1.2e-3,
        "group_vpo": 1.2e-3,
    },
    "code": {
        "grpo": 5e-4,
        "dr_grpo": 8e-4,
        "maxrl": 1.2e-3,
        "gdpo": 8e-4,
        "max_at_k": 8e-4,
        "vpo": 8e-4,
        "random_weighting": 8e-4,
        "goal_conditioned": 8e-4,
        "multi_rlvr": 8e-4,
        "group_vpo": 8e-4,
    },
}
TINY_LR["nested"] = TINY_LR["code"]
MAX_ANSWERS = 8  # that one rollout may hold; the tiny model's vocabulary has a tag for each


class Parser(argparse.ArgumentParser):
    """Mistakes in one line that names flag, value and fix; defaults in the help, unless it says what absent means."""

    class Help(argparse.ArgumentDefaultsHelpFormatter):
        def _get_help_string(self, action: argparse.Action) -> str | None:
            return (
                action.help
                if action.default in (None, "", False)
                else super()._get_help_string(action)
            )

    def __init__(self, script: str, doc: str, usage: str):
        super().__init__(
            prog=script,
            usage=f"python {script} {usage}",
            description=doc.split("\n\n")[0],
            formatter_class=self.Help,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        message = re.sub(
            r"invalid choice: (.*) \(choose from (.*)\)$", r"\1: choose from \2", message
        ).replace("'", "")
        message = re.sub(r"^argument (\S+): (?!expected|not allowed)", r"\1 ", message)
        self.exit(2, f"{self.prog}: error: {message}; --help lists all flags\n")


def number(kind: type, low: float, high: float = 2**31 - 1) -> Callable[[str], float]:
    """A type of argparse: a number from low to high, both allowed."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) <= high:
                return value
        bounds = f"{low:g} to {high:g}" if high < 2**31 - 1 else f"{low:g} or more, below 2^31"
        raise argparse.ArgumentTypeError(
            f"{text}: must be a {'whole ' * (kind is int)}number, {bounds}"
        )

    return parse


count = functools.partial(number, int)
TEMPERATURE = number(float, 1e-3, 1e3)
DEVICES = ("auto", "cpu", "cuda", "mps")


def as_command(parser: Parser, run: Callable[[], None]) -> None:
    """Run a command: a user's mistake is one line and exit code 2, Ctrl-C one line and 130."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from transformers.utils import logging  # here, because it takes a second to import

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it takes a sampled pad token for padding and recommends a mask
    try:
        run()
    except (UserError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt as stop:
        parser.exit(
            130,
            f"\n{str(stop) or 'stopped; give the same command again, with --resume if training began'}\n",
        )


def train_parser(doc: str = "") -> Parser:
    parser = Parser(
        "train.py",
        doc,
        "[--task TASK] [--method METHOD ...] [--out FOLDER] [--resume] [--FLAG VALUE ...]",
    )

    def group(title: str) -> Callable[..., None]:
        flags = parser.add_argument_group(title)
        return lambda name, kind, default, help, **rest: flags.add_argument(
            f"--{name}", default=default, help=help, **({"type": kind} if kind else {}), **rest
        )

    yes, yes_no = {"action": "store_true"}, {"action": argparse.BooleanOptionalAction}
    add = group("task and model")
    add(
        "task",
        str,
        "maze",
        "maze, toy, code, musique, eureqa, tool, or a Python file that defines a Task",
    )
    add("size", count(5, 9), 7, "rows of a maze; other tasks ignore it")
    add(
        "data",
        str,
        "",
        "JSON Lines file of problems; sources, licences for code, musique, eureqa, tool: docs/own.md",
    )
    add("test-data", str, "", "held-out problems; empty: a part of --data")
    add("seconds", number(float, 0.01, 1e5), 2.0, "CPU seconds that a program may take for a test")
    add("memory-mb", count(64), 512, "MiB that a program may take")
    add(
        "unconfined",
        None,
        False,
        "run programs without confinement, for systems that have none",
        **yes,
    )
    add("model", str, "tiny", "tiny, a local Hugging Face checkpoint, or a Hub id")
    add(
        "dtype",
        str,
        None,
        "of the weights; not given: float32, but bfloat16 for all models but tiny on cuda",
        choices=("float32", "bfloat16"),
    )
    add("device", str, "auto", "auto: cuda if there is one, else cpu", choices=DEVICES)
    add = group("method")
    add(
        "method",
        str,
        ["grpo", "vpo", "group_vpo"],
        "one or several of grpo, dr_grpo, maxrl, gdpo, max_at_k, "
        "random_weighting, goal_conditioned, multi_rlvr, vpo, group_vpo",
        nargs="+",
    )
    add(
        "m",
        count(1, MAX_ANSWERS),
        None,
        "answers per rollout of vpo and multi_rlvr; not given: toy 5, others 3",
    )
    add(
        "group-size",
        count(2, 4096),
        8,
        "G, rollouts per prompt; a group of one cannot be normalised",
    )
    add("n-weights", count(1, 100_000), 100, "K, weightings drawn per prompt (vpo, group_vpo)")
    add(
        "alpha",
        number(float, 1e-6, 1e6),
        1.0,
        "of the Dirichlet of random weightings; 1 is uniform on the simplex",
    )
    add("sampler", str, "iid", "of the weightings (vpo, group_vpo)", choices=("iid", "sobol"))
    add(
        "subset",
        count(1, 4095),
        None,
        "s, rollouts that form a set together; not given: 1 for vpo, half the group "
        "for group_vpo and max_at_k",
    )
    add = group("optimisation")
    add(
        "steps",
        count(1, 999_999),
        None,
        "updates, one per batch of rollouts; not given: maze 200, code 300, toy 60",
    )
    add("prompts-per-step", count(1, 65536), 12, "P; a single-answer method gets m times as many")
    add(
        "lr",
        number(float, 1e-12, 1.0),
        None,
        "peak; not given: the task's, tiny's best, others 1e-6, adapters 1e-5",
    )
    add("lr-schedule", str, "linear", "linear: down to a tenth", choices=("linear", "constant"))
    add(
        "kl",
        number(float, 0.0, 1e6),
        1e-3,
        "weight of KL(policy || start); 0: no reference policy is kept",
    )
    add(
        "warm-steps",
        count(0),
        None,
        "imitation steps before RL; not given: tiny the task's, others 0: none",
    )
    add = group("memory")
    add(
        "plan",
        number(float, 0.0, 1e6),
        None,
        "only print where the memory goes and whether it fits, here or on so many GiB",
        nargs="?",
        const=0.0,
        metavar="GIB",
    )
    add(
        "lora-rank",
        count(0, 4096),
        0,
        "train a LoRA adapter of this rank instead of the weights, with peft; 0: no",
    )
    add(
        "gradient-checkpointing",
        None,
        None,
        "compute layers twice, keep less; not given: for all but tiny",
        **yes_no,
    )
    add(
        "micro-batch-tokens",
        count(0),
        None,
        "per backward pass; 0: all; not given: tiny 2048, cuda 4096, else 512",
    )
    add("cuda-graph", None, True, "replay a decode step as a graph, on cuda", **yes_no)
    add(
        "sampling-batch",
        count(0),
        None,
        "rollouts sampled at a time; 0: all; not given: tiny 0, others 96",
    )
    add = group("sampling and evaluation")
    add("temperature", TEMPERATURE, 1.0, "of the rollouts in training")
    add(
        "max-new-tokens",
        count(0, 2**20),
        0,
        "of an answer, m times as many of a rollout; 0: 256, tiny what it needs",
    )
    add(
        "eval-problems",
        count(0, 2**20),
        None,
        "held out, at most all; 0: none; not given: code 500, others 200",
    )
    add("eval-temperature", TEMPERATURE, 0.7, "of the candidates in the evaluation")
    add("pool", count(1, 10_000), 30, "candidates per held-out problem, the largest k of best@k")
    add = group("run")
    add("seed", count(0), 0, "of the start model, problems, rollouts and weightings")
    add("out", str, "", "output folder; empty: runs/TASK-seedSEED")
    add("resume", None, False, "go on with the run in the output folder, with its own flags", **yes)
    add("save-every", count(1), 25, "steps between checkpoints; the last two are kept")
    add(
        "snapshots",
        count(0, 1000),
        None,
        "pools kept for eval.py --page; 0: none; not given: 20, or one in 6 steps",
    )
    return parser


def eval_parser(doc: str = "") -> Parser:
    parser = Parser(
        "eval.py", doc, "RUN [RUN ...] [--split SPLIT] [--out FOLDER] [--FLAG VALUE ...]"
    )
    parser.add_argument(
        "runs", nargs="+", help="run folders of train.py; several: also their means"
    )
    parser.add_argument(
        "--reward-geometry",
        action="store_true",
        help="only say what the start model's rollouts tell "
        "of the reward, before any training: RUN may then be a model too",
    )
    parser.add_argument("--task", default="maze", help="of a model, with --reward-geometry")
    parser.add_argument(
        "--page",
        action="store_true",
        help="only write report.html, training as a film, to be opened",
    )
    parser.add_argument(
        "--film", action="store_true", help="only write film.gif, the answers drawn step by step"
    )
    parser.add_argument(
        "--split", choices=("test", "validation"), default="test", help="validation: to tune on"
    )
    parser.add_argument("--problems", type=count(1), help="how many; as trained if not given")
    parser.add_argument(
        "--pool", type=count(1, 10_000), help="candidates per problem; as trained if not given"
    )
    parser.add_argument(
        "--temperature", type=TEMPERATURE, help="of the candidates; as trained if not given"
    )
    parser.add_argument(
        "--device", choices=DEVICES, default="cpu", help="auto: cuda if there is one"
    )
    parser.add_argument(
        "--out",
        default="",
        help="folder for what is written; not given: the run's own, or one in it "
        "for other settings; means of several: TASK-summary beside the first",
    )
    parser.add_argument(
        "--figure-format", choices=("png", "svg", "pdf"), default="png", help="of all figures"
    )
    return parser


def check_eval(parser: Parser, args: argparse.Namespace) -> None:
    """What --page, --film and --reward-geometry would ignore is an error of the parser."""
    only, used = (
        ("--reward-geometry", "runs reward_geometry task device problems")
        if args.reward_geometry
        else ("--page and --film", "runs page film out")
    )
    for flag, value in vars(args).items() if args.reward_geometry or args.page or args.film else ():
        if flag not in used.split() and value != parser.get_default(flag):
            parser.error(f"argument --{flag.replace('_', '-')}: not used by {only}; leave it out")


def search_parser(doc: str = "") -> Parser:
    parser = Parser(
        "search.py",
        doc,
        "RUN [RUN ...] [--goal GOAL] [--budget N] [--strategy NAME] [--FLAG VALUE ...]",
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        help="run folders of train.py, of one task; several: one list of problems, and their means",
    )
    add(
        "--strategy",
        choices=("evolve", "best_of_n"),
        default="evolve",
        help="best_of_n: independent samples",
    )
    add(
        "--selection",
        choices=("tournament", "lexicase", "weighting"),
        default="tournament",
        help="of parents",
    )
    add(
        "--goal",
        default="scalar",
        help="scalar: the task's own; all: every objective at once; an objective's name; "
        "a weighting, gold=2,avoid_lava=1; or a Python file with score(rewards, answer)",
    )
    add(
        "--budget",
        type=count(1, 10**6),
        default=240,
        help="candidates scored for a problem that stays unsolved",
    )
    add("--problems", type=count(1), default=40, help="how many are searched")
    add(
        "--among",
        type=count(1),
        default=None,
        help="held-out problems they are taken from; not given: as in eval.py",
    )
    add(
        "--screen",
        type=count(0, 10_000),
        default=30,
        help="only problems that no policy of any run solves with so "
        "many independent candidates; 0: the first ones",
    )
    add(
        "--policies",
        nargs="+",
        default=None,
        help="start, start_sets, methods of the runs; not given: all",
    )
    add(
        "--temperature",
        type=TEMPERATURE,
        default=None,
        help="of the candidates; not given: the run's for evaluation",
    )
    add("--seed", type=count(0), default=0, help="of parents and candidates")
    add("--device", choices=DEVICES, default="cpu", help="auto: cuda if there is one")
    add(
        "--out",
        default="",
        help="folder for logs, table and figures; not given: in TASK-search, beside the runs",
    )
    return parser


def parse(argv: list[str], doc: str = "") -> tuple[argparse.Namespace, dict[str, object]]:
    """All flags, and those that were given. Exits with 2 and one line where one is wrong."""
    parser = train_parser(doc)
    args = parser.parse_args(argv)
    try:
        find_task(args.task)
    except UserError as error:
        parser.error(str(error))
    if args.method != parser.get_default("method"):
        from vpo import ADVANTAGES  # here, because it imports torch

        for method in args.method:
            if method not in ADVANTAGES:
                parser.error(f"--method {method}: unknown; choose from {', '.join(ADVANTAGES)}")
            if args.method.count(method) > 1:
                parser.error(f"--method {' '.join(args.method)}: names {method} twice")
    args.out = args.out or f"runs/{Path(args.task).stem}-seed{args.seed}"
    parser.set_defaults(**dict.fromkeys(vars(args)))
    return args, {
        flag: value for flag, value in vars(parser.parse_args(argv)).items() if value is not None
    }


def fill_in(args: argparse.Namespace, task, cuda: bool) -> None:
    """Give the flags that depend on task, model and device, where they were not given, their values."""
    tiny = args.model == "tiny"
    values = {
        "m": task.m,
        "steps": task.steps,
        "eval_problems": task.eval_problems,
        "lr": task.lr if tiny else None,
        "dtype": "bfloat16" if not tiny and cuda else "float32",
        "warm_steps": task.warm_steps if tiny else 0,
        "gradient_checkpointing": not tiny,
        "snapshots": min(20, max(2, (args.steps or task.steps) // 6)),
        "micro_batch_tokens": 2048 if tiny else 4096 if cuda else 512,
        "sampling_batch": 0 if tiny else 96,
    }
    vars(args).update(
        {flag: value for flag, value in values.items() if getattr(args, flag) is None}
    )


def learning_rate(args: argparse.Namespace, method: str, step: int) -> float:
    """Of update `step` (0-based): 10 warm-up steps, then constant or linear decay to a tenth of the peak."""
    peak = args.lr or (
        TINY_LR.get(Path(args.task).stem, TINY_LR["maze"]).get(method, 5e-4)
        if args.model == "tiny"
        else 1e-5
        if args.lora_rank
        else 1e-6
    )
    decay = 1.0 if args.lr_schedule == "constant" else 1.0 - 0.9 * step / args.steps
    return peak * min(1.0, (step + 1) / 10) * decay


def text_of(flag: str, value: object) -> str:
    name = f"--{flag.replace('_', '-')}"
    if value is None or value == "":
        return f"no {name}"
    if isinstance(value, bool):
        return name if value else name.replace("--", "--no-", 1)
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
