"""The policies of the study: rows of its tables and curves of its figures."""

from dataclasses import dataclass, replace

from report.looks import LOOKS, Look, look_of
from study.grid import CURES, LORA_RANK, LORA_RATES

LOW_RATE = "grpo_low_rate"  # GRPO at its rate for thirty candidates, in the maze and on programs
WORDS = CURES | {"mix": "t ="}  # flag -> what a table calls it
LOOKS[LOW_RATE] = Look("GRPO, low rate", "#f4a582", "s", "--")


@dataclass(frozen=True)
class Entry:
    """The start model, or what a method trained."""

    method: str  # or "start" or "start_sets"
    lr: float | None = None  # where learning rates are compared; else the method's own
    flags: tuple[tuple[str, object], ...] = ()  # of train.py, where they are not the defaults

    @property
    def title(self) -> str:
        """The method's title, with the learning rate or the setting, such as "GRPO at 5e-05"."""
        title = look_of(self.method).title
        if self.lr is not None:
            title += f" at {self.lr:g}"
        if self.flags:
            title += f", {self.setting}"
        return title

    @property
    def setting(self) -> str:
        """Its flags, or the name of the script of study/ that trained it."""
        scripts = {"answer": "reward-to-go", "shapley": "Shapley credit"}
        words = []
        for name, value in self.flags:
            if name == "credit":
                words.append(scripts[value])
            elif name == "variant":
                words.append(value.replace("_", " "))
            elif name in WORDS:
                words.append(f"{WORDS[name]} {value:g}")
            else:
                words.append(f"--{name} {value}")
        return " ".join(words)

    @property
    def is_cure(self) -> bool:
        """Whether it has another KL weight, entropy bonus or temperature of training, and no more."""
        return bool(self.flags) and {name for name, _ in self.flags} <= CURES.keys()

    @property
    def look(self) -> Look:
        """That of its method; GRPO with a KL weight, or a quarter of its rate, has one of its own."""
        look = look_of(self.method)
        if self == GRPO_QUARTER:
            look = look_of(LOW_RATE)
        if self == GRPO_KL:
            look = replace(look, color="#7f0000")
        return replace(look, title=self.title)


def mixed(policy: Entry, t: float) -> Entry:
    """A policy with the weights start + t (trained - start)."""
    return replace(policy, flags=(*policy.flags, ("mix", t))) if t < 1 else policy


START_MODEL = Entry("start")
GRPO = Entry("grpo")
GRPO_LOW = Entry(LOW_RATE)
GRPO_QUARTER = Entry("grpo", 5e-6)  # of headlines, at a quarter of its own rate
GRPO_KL = Entry("grpo", flags=(("kl", 0.1),))  # of those that keep its variety, the best compromise
MAX_AT_K = Entry("max_at_k")
MULTI_RLVR = Entry("multi_rlvr")
VPO = Entry("vpo")
VPO_LORA = Entry("vpo", flags=(("lora-rank", LORA_RANK), ("lr", LORA_RATES[0])))  # of headlines
GROUP_VPO = Entry("group_vpo")
# Of a task's figure.
CURVES = (START_MODEL, GRPO, GRPO_LOW, GRPO_QUARTER, GRPO_KL, MAX_AT_K, MULTI_RLVR, VPO, GROUP_VPO)
