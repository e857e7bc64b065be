"""The grid: every run of the study, as rows of tasks, methods, seeds and flags."""

from dataclasses import dataclass, field
from pathlib import Path

from engine import __version__

VERSION = int(__version__.partition(".")[0])  # of the program, kept with every result
FORMER = "_v1"  # ends the name of a task that versions 1 and 2 of the program measured

MAIN_METHODS = ("grpo", "max_at_k", "vpo", "group_vpo")
HEADLINES = {  # the ways in which the headline task is measured, and their flags of train.py
    "headline_2_prompts": "--prompts-per-step 2 --steps 150 --warm-steps 30",
    "headline_short_warm_up": "--prompts-per-step 6 --steps 60 --warm-steps 30",
    "headline": "--prompts-per-step 6 --steps 60 --warm-steps 60",
    "headline_8_words": "--prompts-per-step 6 --steps 60 --warm-steps 60 --max-words 8",
}
HEADLINE = "headline"  # the one on which the documents rest
EIGHT_WORDS = "headline_8_words"
TUNING_SEED = 100  # it and those above: validation problems, to choose a learning rate


def rates_of(text: str) -> dict[str, float]:
    """Method -> peak learning rate, from words such as "vpo=5e-4"."""
    pairs = [word.split("=") for word in text.split()]
    return {method: float(rate) for method, rate in pairs}


# The peak learning rates that validation chose. Tasks that are not named take those of the maze, or of headlines.
LR = {
    "maze": rates_of(
        "grpo=1.2e-3 dr_grpo=8e-4 maxrl=8e-4 gdpo=1.2e-3 max_at_k=1.2e-3 random_weighting=5e-4 "
        "multi_rlvr=1.2e-3 vpo=5e-4 group_vpo=1.2e-3"
    ),
    "code": rates_of(
        "grpo=5e-4 dr_grpo=8e-4 maxrl=1.2e-3 gdpo=8e-4 max_at_k=8e-4 random_weighting=8e-4 "
        "multi_rlvr=1.2e-3 vpo=8e-4 group_vpo=8e-4"
    ),
    "headline_2_prompts": rates_of(
        "grpo=2e-5 max_at_k=1e-5 multi_rlvr=2e-5 vpo=4e-5 group_vpo=2e-5"
    ),
    "headline_short_warm_up": rates_of(
        "grpo=1e-5 max_at_k=1e-5 multi_rlvr=4e-5 vpo=4e-5 group_vpo=2e-5"
    ),
    HEADLINE: rates_of("grpo=2e-5 max_at_k=2e-5 multi_rlvr=4e-5 vpo=4e-5 group_vpo=4e-5"),
}
# What validation prefers for best@30 by more than .005. LR is chosen for best@1, or for m answers.
LR_AT_30 = {
    "maze": rates_of("grpo=1.2e-4 multi_rlvr=1.8e-3 gdpo=5e-4 random_weighting=2.5e-4"),
    "code": rates_of(
        "grpo=6e-5 multi_rlvr=5e-4 group_vpo=1.2e-3 random_weighting=6e-5 dr_grpo=6e-5 "
        "maxrl=3e-5 gdpo=6e-5"
    ),
}

RATES = (1.2e-4, 2.5e-4, 5e-4, 8e-4, 1.2e-3, 1.8e-3)  # peak learning rates that are compared
LOW_RATES = (3e-5, 6e-5)
MORE_RATES = {  # compared too, where a rate at an edge was the best for best@30
    "maze": {
        **dict.fromkeys(("grpo", "gdpo"), (6e-5,)),
        "multi_rlvr": (2.5e-3,),
    },
    "code": {
        **dict.fromkeys(("grpo", "dr_grpo", "gdpo", "random_weighting"), LOW_RATES),
        "maxrl": (1.5e-5, *LOW_RATES),
        "group_vpo": (1.8e-3,),
    },
}
REAL_RATES = {  # fewer: a run takes a quarter of an hour
    "headline_2_prompts": {
        "grpo": (1e-5, 2e-5),
        "max_at_k": (5e-6, 1e-5, 2e-5),
        "multi_rlvr": (1e-5, 2e-5, 4e-5),
        "vpo": (2e-5, 4e-5, 8e-5),
        "group_vpo": (1e-5, 2e-5, 4e-5, 8e-5),
    },
    "headline_short_warm_up": {
        "grpo": (5e-6, 1e-5, 2e-5),
        "max_at_k": (1e-5, 2e-5),
        "multi_rlvr": (2e-5, 4e-5),
        "vpo": (2e-5, 4e-5, 8e-5),
        "group_vpo": (1e-5, 2e-5, 4e-5),
    },
    HEADLINE: {
        **dict.fromkeys(("multi_rlvr", "vpo", "group_vpo"), (1e-5, 2e-5, 4e-5, 8e-5)),
        "grpo": (5e-6, 1e-5, 2e-5, 4e-5),
        "max_at_k": (1e-5, 2e-5, 4e-5),
    },
}
LORA_RANK = 16
LORA_RATES = (4e-4, 2e-4)  # of VPO on headlines; the chosen one comes first

# Other cures of the collapse, compared beside the default of one setting at a time.
PAPERS_KL = 0.001
KLS = (0.003, 0.01, 0.03, 0.1, 0.3)  # weights of the KL term, for all main methods; default 1e-3
MORE_KLS = {"code": dict.fromkeys(("grpo", "group_vpo"), (1.0,))}  # where an edge was the best
ENTROPY_COEFS = (0.001, 0.003, 0.01, 0.03)  # for GRPO; default 0
TRAINING_TEMPERATURES = (0.7, 1.3)  # for GRPO; default 1
CURES = {  # flag of train.py -> what a table calls it
    "kl": "KL",
    "entropy-coef": "entropy bonus",
    "temperature": "training temperature",
}

REAL_MODEL = "--model HuggingFaceTB/SmolLM2-135M-Instruct --snapshots 0"
CREDITS = {
    "answer": "reward_to_go",
    "shapley": "shapley",
}  # as a cell says it -> in study/variants.py
MIXES = (0.0, 0.25, 0.5, 0.75, 1.0)  # t of start + t (trained - start)


@dataclass(frozen=True)
class Row:
    """Some cells: all these tasks with all these methods and with the seeds from 0."""

    tasks: str  # names, or files without ".py" for the rewards of study/rewards/
    methods: str
    seeds: int
    flags: dict[str, object] = field(default_factory=dict)


MAIN = " ".join(MAIN_METHODS)
OTHERS = "dr_grpo maxrl gdpo random_weighting"
REWARDS = "copies noisy halfway gems tradeoff"  # from collinear to conflicting
GRID = (
    Row("maze code toy", f"{MAIN} multi_rlvr", 5),
    Row("maze", "grpo", 5, {"lr": 1.2e-4}),  # its low rate
    Row("code", "grpo", 5, {"lr": 6e-5}),
    # Methods that reward single answers, also at their rates for thirty candidates.
    Row("maze_v1 code_v1 toy_v1", MAIN, 5),
    Row("maze_v1 code_v1", OTHERS, 3),
    Row("maze_v1", "gdpo", 3, {"lr": 5e-4}),
    Row("maze_v1", "random_weighting", 3, {"lr": 2.5e-4}),
    Row("code_v1", "dr_grpo gdpo random_weighting", 3, {"lr": 6e-5}),
    Row("code_v1", "maxrl", 3, {"lr": 3e-5}),
    Row("toy_v1", OTHERS, 5),
    Row(f"{REWARDS} fence", MAIN, 5),
    Row(HEADLINE, f"{MAIN} multi_rlvr", 5),
    Row(HEADLINE, "grpo", 5, {"lr": 1e-5}),  # better for thirty headlines than its own
    Row(HEADLINE, "multi_rlvr", 5, {"lr": 8e-5}),  # as good as its own on validation texts
    Row(HEADLINE, "grpo", 5, {"lr": 5e-6}),  # a quarter of its own
    Row(HEADLINE, "grpo", 5, {"kl": 0.1}),
    Row(HEADLINE, "vpo", 3, {"lora-rank": LORA_RANK, "lr": LORA_RATES[0]}),
    # Shorter warm-ups, after which VPO unlearns the list in some runs.
    Row("headline_short_warm_up", "grpo vpo", 5),
    Row("headline_2_prompts", f"{MAIN} multi_rlvr", 3),
    Row(EIGHT_WORDS, f"{MAIN} multi_rlvr", 3),
    Row(EIGHT_WORDS, "grpo", 3, {"kl": 0.1}),
    # Ablations: one setting changed at a time. Five seeds where a claim rests on it.
    # The first three sample as many answers as the default.
    Row("maze_v1", "vpo", 5, {"m": 2, "prompts-per-step": 18}),
    Row("maze_v1", "vpo", 3, {"m": 5, "prompts-per-step": 7}),
    Row("maze_v1", "vpo", 3, {"m": 1, "prompts-per-step": 36, "lr": 1.2e-3}),  # GRPO's rate
    Row("maze_v1", "vpo", 2, {"alpha": 0.3}),
    Row("maze_v1", "vpo", 2, {"alpha": 3.0}),
    Row("maze_v1", "vpo", 3, {"n-weights": 10}),
    Row("maze_v1", "vpo", 3, {"n-weights": 1000}),
    Row("maze_v1", "vpo", 2, {"subset": 2}),
    Row("maze code", "max_at_k", 5, {"subset": 2}),
    Row("maze_v1 code_v1", "group_vpo", 5, {"subset": 2}),
    Row("maze_v1", "group_vpo", 2, {"subset": 6}),
    Row("maze_v1", "group_vpo", 2, {"group-size": 4, "prompts-per-step": 24}),
    Row("maze_v1", "group_vpo", 2, {"group-size": 16, "prompts-per-step": 6}),
    Row("maze_v1", "group_vpo", 2, {"group-size": 32, "prompts-per-step": 3}),
    # More steps, in place of 200 and of 300: does GRPO at its low rate stay level with VPO?
    Row("maze", "grpo", 2, {"lr": 1.2e-4, "steps": 600}),
    Row("code", "grpo", 2, {"lr": 6e-5, "steps": 600}),
    Row("maze code", "vpo", 2, {"steps": 600}),
    Row("maze_v1", "grpo", 5, {"prompts-per-step": 4}),  # VPO's rollouts, a third of its answers
    # No flags, but scripts of study/ in place of train.py.
    Row("maze_v1", "vpo", 2, {"credit": "answer"}),
    Row("maze_v1", "vpo", 2, {"credit": "shapley"}),
    Row("code_v1", "maxrl", 3, {"variant": "passes"}),
    # Other cures, at what validation chose for few or for thirty candidates (study/validation.py).
    Row("maze", "grpo", 5, {"kl": 0.1}),
    Row("code", "grpo", 5, {"kl": 0.3}),
    Row("maze", "max_at_k", 5, {"kl": 0.03}),
    Row("maze", "group_vpo", 5, {"kl": 0.01}),
    Row("code", "max_at_k", 5, {"kl": 0.1}),
    Row("code", "group_vpo", 5, {"kl": 0.3}),
    Row("code", "vpo", 5, {"kl": 0.03}),
    Row("code", "grpo group_vpo", 5, {"kl": 0.1}),  # not chosen: between few and thirty
    Row("maze", "grpo", 5, {"kl": 0.01}),
    Row("maze", "group_vpo", 5, {"kl": 0.003}),
    Row("maze", "grpo", 5, {"entropy-coef": 0.003}),
    Row("maze", "grpo", 5, {"temperature": 0.7}),
)


@dataclass(frozen=True)
class Cell:
    """One run of train.py and what is measured of it."""

    task: str
    method: str
    seed: int
    flags: tuple[tuple[str, object], ...] = ()  # of train.py, beyond task, method and seed

    @property
    def tuning(self) -> bool:
        """Whether means over 100 validation problems are measured, at one temperature."""
        return self.seed >= TUNING_SEED

    @property
    def name(self) -> str:
        words = [Path(self.task).stem, self.method, f"seed{self.seed}"]
        for name, value in self.flags:
            words.append(name + text_of(value))
        return "-".join(words)

    @property
    def script(self) -> list[str]:
        """The script that trains it, with its first argument."""
        flags = dict(self.flags)
        variant = flags.get("variant") or CREDITS.get(flags.get("credit"))
        return ["study/variants.py", variant] if variant else ["train.py"]

    @property
    def command(self) -> list[str]:
        """Flags of train.py. A result says which learning rate it had."""
        name = self.task.removesuffix(FORMER)
        task = "headline" if name in HEADLINES else name
        words = f"--task {task} --method {self.method} --seed {self.seed}".split()
        if name in HEADLINES:
            setting = HEADLINES[name]
            if self.tuning:
                setting = setting.replace("150", "60")  # the task is learnt, or lost, by then
            words += f"{REAL_MODEL} {setting}".split()
        flags = dict(self.flags)
        flags.pop("credit", None)
        flags.pop("variant", None)
        if name not in ("toy", "fence"):  # which have one rate for all methods
            rates = LR.get(name, LR.get(task, LR["maze"]))
            flags.setdefault("lr", rates[self.method])
        for name, value in flags.items():
            words += [f"--{name}", text_of(value)]
        return words


def text_of(value: object) -> str:
    """The value of a flag as on a command line."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def cells() -> list[Cell]:
    """The whole grid: learning rates on validation problems, then all rows."""
    grid = tuning_cells()
    for row in GRID:
        grid += cells_of(row)
    return grid


def cells_of(row: Row) -> list[Cell]:
    """The cells of a row."""
    found = []
    for name in row.tasks.split():
        task = f"study/rewards/{name}.py" if name in REWARDS.split() else name
        for method in row.methods.split():
            for seed in range(row.seeds):
                found.append(Cell(task, method, seed, tuple(row.flags.items())))
    return found


def mixed_cells() -> list[Cell]:
    """The cells whose policies are mixed with their start: those of the grid, trained anew."""
    grid = []
    for task in ("maze", "code"):
        for method in MAIN_METHODS:
            flags = (("lr", LR[task][method]),)
            grid.append(Cell(task, method, TUNING_SEED, flags))
        grid.append(Cell(task, "grpo", TUNING_SEED, (("kl", 0.1),)))
    grid += cells_of(Row("maze code fence gems tradeoff", MAIN, 5))
    grid += cells_of(Row("maze code", "grpo", 5, {"kl": 0.1}))
    return grid + cells_of(Row(HEADLINE, "grpo vpo", 5))


def tuning_cells() -> list[Cell]:
    """The runs that choose the learning rates, and the settings of the other cures."""
    grid = []
    for task in LR:
        for method in LR[task]:
            for rate in tuning_rates(task, method):
                grid.append(Cell(task, method, TUNING_SEED, (("lr", rate),)))
    for rate in LORA_RATES:
        flags = (("lora-rank", LORA_RANK), ("lr", rate))
        grid.append(Cell(HEADLINE, "vpo", TUNING_SEED, flags))
    for rate in RATES:  # with one seed they came in no order
        grid.append(Cell("maze", "grpo", TUNING_SEED + 1, (("lr", rate),)))
    for task in ("maze", "code"):
        for method in MAIN_METHODS:
            for name, value in cures(task, method):
                grid.append(Cell(task, method, TUNING_SEED, ((name, value),)))
    return grid


def cures(task: str, method: str) -> list[tuple[str, float]]:
    """The flags of train.py that may keep a method's variety, one at a time: (name, value)."""
    kls = (*KLS, *MORE_KLS.get(task, {}).get(method, ()))
    found = [("kl", value) for value in kls]
    if method == "grpo":
        found += [("entropy-coef", value) for value in ENTROPY_COEFS]
        found += [("temperature", value) for value in TRAINING_TEMPERATURES]
    return found


def tuning_rates(task: str, method: str) -> tuple[float, ...]:
    """The peak learning rates that are compared: four, and more while the best is at an edge."""
    if task in HEADLINES:
        return REAL_RATES[task][method]
    best = LR[task][method]
    rates = [rate for i, rate in enumerate(RATES) if i < 4 or RATES[i - 1] <= best]
    return tuple(sorted([*rates, *MORE_RATES[task].get(method, ())]))
