"""The grid: every run of the study, as rows of tasks, methods, seeds and flags of train.py.

All of it was written down before the first run: rows, their order, the rule that chooses a KL weight, what
is compared, by which measures and with which words.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine import __version__

VERSION = __version__.partition(".")[0]  # of the program; a record of another one does not count

# Peak learning rates, chosen on validation problems with earlier versions of the program. The rewards of
# study/rewards/ take those of the maze, and tasks that are not named the default of train.py.
LR = {
    "maze": {
        "grpo": 1.2e-3, "gdpo": 1.2e-3, "max_at_k": 1.2e-3, "random_weighting": 5e-4,
        "multi_rlvr": 1.2e-3, "vpo": 5e-4, "group_vpo": 1.2e-3,
    },
    "code": {"grpo": 5e-4, "max_at_k": 8e-4, "vpo": 8e-4, "group_vpo": 8e-4},
    "headline": {"grpo": 2e-5, "max_at_k": 2e-5, "vpo": 4e-5, "group_vpo": 4e-5},
}  # fmt: skip
HEADLINE = "headline"
REAL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
HEADLINE_FLAGS = "--snapshots 0 --prompts-per-step 6 --steps 60 --warm-steps 60"
REWARDS = ("gems", "tradeoff", "copies")  # files of study/rewards/

# The KL weight of "GRPO, KL" in a task. The rule: of 0.03, 0.1 and 0.3 the weight with the highest sum of
# best@1 and W@30, means over three seeds and 100 validation problems. It is set once the first block is done.
KL = {"maze": 0.1, "code": 0.1, HEADLINE: 0.1}
KL_WEIGHTS = (0.03, 0.1, 0.3)
VALIDATION_SEED = 100  # it and those above are measured on validation problems
KL_TERM = "kl-term"  # a flag that train.py does not have: the KL terms of variants.py

# What is compared: ours minus theirs. GRPO_KL stands for GRPO with the KL weight of the task.
GRPO_KL = "grpo-kl"
CONTRASTS = (
    ("vpo", "grpo"),
    ("vpo", GRPO_KL),
    ("vpo", "max_at_k"),
    ("group_vpo", "max_at_k"),
    ("max_at_k", GRPO_KL),
)
# Measures whose differences get a word, best@30 and pass@30 stand beside them without one. A 95% interval is
# the wider of a bootstrap over seeds and problems and Student's t over seeds. The word is "equal within 0.02"
# where the interval lies inside it, "ahead" or "behind" where it excludes 0 and the t-test does too after Holm's
# correction over the contrasts and measures of a task, else "open".
JUDGED = ("best@1", "W@30")
ALIKE = 0.02


@dataclass(frozen=True)
class Cell:
    """One run of train.py and what is measured of it."""

    task: str
    method: str
    seed: int
    flags: tuple[tuple[str, object], ...] = ()  # of train.py, beyond task, method and seed
    block: str = field(default="", compare=False)

    @property
    def policy(self) -> str:
        """The method and its flags, such as "grpo-kl0.1": cells that differ in the seed alone share it."""
        return "-".join([self.method, *(name + text_of(value) for name, value in self.flags)])

    @property
    def name(self) -> str:
        return f"{self.task}-{self.policy}-seed{self.seed}"

    @property
    def kl_term(self) -> str:
        """The KL term of variants.py; empty: that of the program."""
        return str(dict(self.flags).get(KL_TERM, ""))

    @property
    def is_validation(self) -> bool:
        return self.seed >= VALIDATION_SEED

    def command(self, model: str = REAL_MODEL) -> list[str]:
        """The flags of train.py."""
        task = f"study/rewards/{self.task}.py" if self.task in REWARDS else self.task
        words = ["--task", task, "--method", self.method, "--seed", str(self.seed)]
        if self.task == HEADLINE:
            words += ["--model", model, *HEADLINE_FLAGS.split()]
        flags = dict(self.flags)
        flags.pop(KL_TERM, None)
        if self.rate:
            flags.setdefault("lr", self.rate)
        for name, value in flags.items():
            words += [f"--{name}", text_of(value)]
        return words

    @property
    def rate(self) -> float | None:
        """The peak learning rate of its method; None: the one that train.py has for the task."""
        task = "maze" if self.task in REWARDS else self.task
        return LR.get(task, {}).get(self.method)


def text_of(value: object) -> str:
    """The value of a flag as on a command line."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def row(block: str, tasks: str, methods: str, seeds: Iterable[int], **flags: object) -> list[Cell]:
    """The cells of all these tasks with all these methods and seeds."""
    settings = tuple((name.replace("_", "-"), value) for name, value in flags.items())
    found = []
    for task in tasks.split():
        for method in methods.split():
            found += [Cell(task, method, seed, settings, block) for seed in seeds]
    return found


MAIN = "grpo max_at_k vpo group_vpo"
FIVE = range(5)


def main_row(block: str, task: str, seeds: Iterable[int]) -> list[Cell]:
    """The five policies that README compares."""
    weight = KL.get(task, KL["maze"])
    return row(block, task, MAIN, seeds) + row(block, task, "grpo", seeds, kl=weight)


def cells() -> list[Cell]:
    """All cells in the order in which they are trained. If time ends, it ends after a whole block."""
    grid = []
    for weight in KL_WEIGHTS:
        grid += row("kl-weight", "maze code", "grpo", range(100, 103), kl=weight)
    for task in ("maze", "code"):
        grid += main_row("main", task, range(6))
    for task in ("maze", "code"):
        for term in ("clamped", "k2"):
            grid += row("kl-term", task, "grpo", FIVE, kl=KL[task], kl_term=term)
    grid += row("toy", "toy", f"{MAIN} multi_rlvr random_weighting", FIVE)
    for task in ("maze", "code"):
        rate = LR[task]["grpo"]
        grid += row("rates", task, "grpo", FIVE, lr=rate / 4)
        grid += row("rates", task, "grpo", FIVE, lr=rate / 10)
        grid += row("rates", task, "vpo", FIVE, lr=rate)
    for task in ("fence", *REWARDS):
        grid += main_row("conflict", task, FIVE)
    grid += row("ablation", "maze", "gdpo random_weighting multi_rlvr", FIVE)
    # One answer per rollout, as many answers in all; at GRPO's rate, as other methods with single answers.
    grid += row("ablation", "maze", "vpo", FIVE, m=1, prompts_per_step=36, lr=LR["maze"]["grpo"])
    # VPO's prompts and answers per prompt: P is 4 m = 12, G is 24.
    grid += row("ablation", "maze", "grpo", FIVE, group_size=24, prompts_per_step=4)
    # Settings, one at a time. The first two sample as many answers as the default.
    three = range(3)
    grid += row("settings", "maze", "vpo", three, m=2, prompts_per_step=18)
    grid += row("settings", "maze", "vpo", three, m=5, prompts_per_step=7)
    grid += row("settings", "maze", "vpo", three, alpha=0.3)
    grid += row("settings", "maze", "vpo", three, alpha=3.0)
    grid += row("settings", "maze", "vpo", three, n_weights=10)
    grid += row("settings", "maze", "vpo", three, n_weights=1000)
    grid += row("settings", "maze", "group_vpo max_at_k", three, subset=2)
    grid += main_row("more-seeds", "maze", range(6, 12))
    grid += main_row("more-seeds", "code", range(6, 8))
    return grid + main_row("headlines", HEADLINE, FIVE)
