"""The grid: every run of the study, as rows of tasks, methods, seeds and flags of train.py.

Rows, the rule that chooses a KL weight, what is compared, by which measures and with which words: all was
written down before the first run of version 4.0. The weight at which KL terms are compared followed validation.
"""

from collections.abc import Iterable
from dataclasses import dataclass

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
HEADLINE_FLAGS = "--prompts-per-step 6 --steps 60 --warm-steps 60"
FLAGS = "--eval-problems 0 --snapshots 0 --save-every 0 --jobs 1"  # of all
REWARDS = ("gems", "tradeoff", "copies")  # files of study/rewards/

# The KL weight of "grpo-kl" in a task. The rule, fixed before the first run: of 0.03, 0.1 and 0.3 the weight
# with the highest sum of best@1 and W@30, means over three seeds and 100 validation problems. The sums were
# 1.3815, 1.3792 and 1.2923 in the maze, 1.7177, 1.7327 and 1.5877 on programs. Headlines have the latter's.
KL = {"maze": 0.03, "code": 0.1, HEADLINE: 0.1}
KL_WEIGHTS = (0.03, 0.1, 0.3)
TERMS_AT = 0.1  # the weight at which the KL terms of variants.py are compared, in both tasks
VALIDATION_SEED = 100  # it and those above are measured on validation problems

# What is measured.
KS = (1, 2, 3, 5, 10, 30)  # of best@k and W@k; 30 is the pool
MEANS = [*(f"best@{k}" for k in KS), *(f"W@{k}" for k in KS), "pass@30", "diversity"]
ALL_PROBLEMS = 500  # held out, of which each text counts once
FEWER_PROBLEMS = {HEADLINE: 40, "fence": 200, "toy": 200}
ONE_PROBLEM = ("fence", "toy")  # all of theirs are the same one
SHOWN = ("headline-grpo-seed0", "headline-vpo-seed0")  # cells whose candidates headlines.png shows


@dataclass(frozen=True)
class Setting:
    """How a policy is sampled, and of which measures the values per problem are stored beside all means.

    In a maze all settings take half of the seconds that training takes, and a record has 4 kB.
    """

    t: float = 1.0  # of the weights start + t (trained - start)
    temperature: float = 0.7
    problems: int = ALL_PROBLEMS  # the first ones
    pool: int = KS[-1]  # candidates per problem
    per_problem: tuple[str, ...] = ("W@30",)


SETTINGS = {
    "0.7": Setting(per_problem=("best@1", "best@30", "W@30", "pass@30")),
    "half": Setting(t=0.5, per_problem=("best@1", "W@30")),
    "1": Setting(temperature=1.0, problems=200),
    "1.3": Setting(temperature=1.3, problems=200),
    "greedy": Setting(temperature=0.001, pool=1, per_problem=()),  # of a set the first answer
}

# What is compared: ours minus theirs.
CONTRASTS = (
    ("vpo", "grpo"),
    ("vpo", "grpo-kl"),
    ("vpo", "max_at_k"),
    ("group_vpo", "max_at_k"),
    ("max_at_k", "grpo-kl"),
)
# Measures whose differences get a word, best@30 and pass@30 stand beside them without one. A 95% interval is
# the wider of a bootstrap over seeds and problems and Student's t over seeds. The word is "equal"
# where the interval lies inside 0.02, "ahead" or "behind" where it excludes 0 and the t-test does too after Holm's
# correction over the contrasts and measures of a task, else "open".
JUDGED = ("best@1", "W@30")
ALIKE = 0.02


@dataclass(frozen=True)
class Cell:
    """One run of train.py and what is measured of it."""

    task: str
    policy: str  # the method, after a hyphen what makes it another policy, such as "grpo-kl"
    seed: int
    flags: tuple[tuple[str, object], ...] = ()  # of train.py, where they are not those of the task
    block: str = ""

    @property
    def name(self) -> str:
        return f"{self.task}-{self.policy}-seed{self.seed}"

    @property
    def method(self) -> str:
        return self.policy.partition("-")[0]

    @property
    def kl_term(self) -> str:
        """The KL term of variants.py; empty: that of the program."""
        return self.policy.partition("-kl-")[2]

    @property
    def is_validation(self) -> bool:
        return self.seed >= VALIDATION_SEED

    @property
    def problems(self) -> tuple[str, int]:
        """The split and the number of its problems."""
        if self.is_validation:
            return "validation", 100
        return "test", FEWER_PROBLEMS.get(self.task, ALL_PROBLEMS)

    @property
    def n_shown(self) -> int:
        """The number of problems whose candidates are stored, at temperature 0.7."""
        return 3 if self.name in SHOWN else 0

    def settings(self, name: str) -> list[str]:
        """The settings in which its policy is sampled, and with plain GRPO's the start model."""
        if self.is_validation or self.block == "settings" or name == "start_sets":
            return ["0.7"]
        if name == "start" or self.task == HEADLINE:  # without weights half-way
            return [setting for setting in SETTINGS if setting != "half"]
        return list(SETTINGS)

    def command(self, model: str = REAL_MODEL) -> list[str]:
        """The flags of train.py."""
        task = f"study/rewards/{self.task}.py" if self.task in REWARDS else self.task
        words = ["--task", task, "--method", self.method, "--seed", str(self.seed)]
        if self.task == HEADLINE:
            words += ["--model", model, *HEADLINE_FLAGS.split()]
        rates = LR.get("maze" if self.task in REWARDS else self.task, {})
        flags = dict(self.flags)
        if self.method in rates:
            flags.setdefault("lr", rates[self.method])
        for name, value in flags.items():
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
        return words

    @property
    def shown_command(self) -> str:
        """What a record says of how its run was trained."""
        return f"python train.py {' '.join(self.command())} {FLAGS}"


def row(block: str, task: str, policies: str, seeds: Iterable[int], **flags: object) -> list[Cell]:
    """The cells of a task with all these policies and seeds, policy by policy."""
    settings = tuple((name.replace("_", "-"), value) for name, value in flags.items())
    found = []
    for policy in policies.split():
        found += [Cell(task, policy, seed, settings, block) for seed in seeds]
    return found


FIVE = range(5)
THREE = range(3)


def main_row(block: str, task: str, seeds: Iterable[int]) -> list[Cell]:
    """The five policies that README compares."""
    weight = KL.get(task, KL["maze"])
    others = row(block, task, "grpo max_at_k vpo group_vpo", seeds)
    return others + row(block, task, "grpo-kl", seeds, kl=weight)


def cells() -> list[Cell]:
    """All cells, block by block. Blocks are trained as a whole; the fence and ablation came before rates."""
    grid = []
    for task in ("maze", "code"):
        for weight in KL_WEIGHTS:
            grid += row("kl-weight", task, f"grpo-kl{weight:g}", range(100, 103), kl=weight)
    grid += main_row("main", "maze", range(6))
    grid += main_row("main", "code", range(6))
    # Our own term at that weight, which on programs is "grpo-kl".
    grid += row("kl-term", "maze", f"grpo-kl{TERMS_AT:g}", FIVE, kl=TERMS_AT)
    for task in ("maze", "code"):
        grid += row("kl-term", task, "grpo-kl-clamped grpo-kl-k2", FIVE, kl=TERMS_AT)
    toy = "grpo max_at_k vpo group_vpo multi_rlvr random_weighting"
    grid += row("toy", "toy", toy, FIVE)
    for task in ("maze", "code"):
        rate = LR[task]["grpo"]
        grid += row("rates", task, "grpo-quarter-rate", FIVE, lr=rate / 4)
        grid += row("rates", task, "grpo-tenth-rate", FIVE, lr=rate / 10)
        grid += row("rates", task, "vpo-rate-of-grpo", FIVE, lr=rate)
    for task in ("fence", *REWARDS):
        grid += main_row("conflict", task, FIVE)
    grid += row("ablation", "maze", "gdpo random_weighting multi_rlvr", FIVE)
    # One answer per rollout, as many answers in all; at GRPO's rate, as other methods with single answers.
    one_answer = {"m": 1, "prompts_per_step": 36, "lr": LR["maze"]["grpo"]}
    grid += row("ablation", "maze", "vpo-1-answer", FIVE, **one_answer)
    # VPO's 12 prompts, and of each as many answers as VPO has.
    grid += row("ablation", "maze", "grpo-24-rollouts", FIVE, group_size=24, prompts_per_step=4)
    # Settings, one at a time. With two and with five answers a step samples as many as the default.
    grid += row("settings", "maze", "vpo-2-answers", THREE, m=2, prompts_per_step=18)
    grid += row("settings", "maze", "vpo-5-answers", THREE, m=5, prompts_per_step=7)
    grid += row("settings", "maze", "vpo-alpha-0.3", THREE, alpha=0.3)
    grid += row("settings", "maze", "vpo-alpha-3", THREE, alpha=3.0)
    grid += row("settings", "maze", "vpo-10-weights", THREE, n_weights=10)
    grid += row("settings", "maze", "vpo-1000-weights", THREE, n_weights=1000)
    grid += row("settings", "maze", "group_vpo-sets-of-2 max_at_k-sets-of-2", THREE, subset=2)
    grid += main_row("more-seeds", "maze", range(6, 12))
    grid += main_row("more-seeds", "code", range(6, 8))
    grid += main_row("headlines", HEADLINE, FIVE)
    # Max@K at the rate of Group VPO, which came last.
    rate = LR[HEADLINE]["group_vpo"]
    return grid + row("headlines", HEADLINE, "max_at_k-rate-of-vpo", FIVE, lr=rate)
