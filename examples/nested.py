"""Programs of two nested conditions, `A if C else B if D else E`: too many for brute force, for the searches.

    python train.py --task examples/nested.py --method grpo vpo --lr 8e-4
    python search.py runs/nested-seed0 --budget 1000

As the small programs of `--task code`, whose pieces these are: f is shown at six places and judged at twelve others.
"""

import functools
import hashlib
import random

from rewards import Problem
from tasks.code import Code
from tasks.small_programs import BRANCHES, spellings

SHOWN, HIDDEN = (-7, -4, -1, 2, 5, 8), (-9, -8, -6, -5, -3, -2, 0, 1, 3, 4, 6, 7)
CONDITIONS = tuple(f"x < {'- ' * (n < 0)}{abs(n)}" for n in range(-6, 9))
PROBLEMS, RIGHT = 12_000, 0.2  # RIGHT: how often a piece of a demonstration is the right one


@functools.cache
def nested_problems() -> dict[str, list[dict]]:
    """Distinct behaviours, as tasks/small_programs.py has its problems; split by what the prompt shows."""
    rng, known = random.Random(0), set()
    parts: dict[str, list[dict]] = {"train": [], "validation": [], "test": []}
    values = {
        text: [eval(text, {"x": x, "abs": abs}) for x in SHOWN + HIDDEN]
        for text in BRANCHES + CONDITIONS
    }
    while len(known) < PROBLEMS:
        a, b, c = rng.sample(BRANCHES, 3)
        low, high = sorted(rng.sample(range(len(CONDITIONS)), 2))
        low, high = CONDITIONS[low], CONDITIONS[high]
        ys = tuple(
            values[a][i] if values[low][i] else values[b][i] if values[high][i] else values[c][i]
            for i in range(len(SHOWN + HIDDEN))
        )
        if (
            ys in known or CONDITIONS.index(high) - CONDITIONS.index(low) < 3
        ):  # the middle one should matter
            continue
        known.add(ys)
        shown = [f"f({x})={y}" for x, y in zip(SHOWN, ys, strict=False)]
        place = hashlib.sha256(" ".join(shown).encode()).digest()[0] % 6
        parts["test" if place == 0 else "validation" if place == 1 else "train"].append(
            {
                "id": f"nested-{len(known)}",
                "small": True,
                "tiny_prompt": " ".join(shown),
                "pieces": [a, low, b, high, c],
                "text": f"f maps integers to integers and has two conditions. {', '.join(shown)}. "
                "It will be tested at other places.",
                "entry_point": "f",
                "call": "f",
                "starter": "def f(x: int) -> int:",
                "before": "",
                "after": "",
                "reference": f"{a} if {low} else {b} if {high} else {c}",
                "date": "",
                "line": "",
                "own": False,
                "tests": [[[x], y] for x, y in zip(HIDDEN, ys[len(SHOWN) :], strict=True)],
            }
        )
    return parts


class Nested(Code):
    name, flags = "nested", ("seconds", "memory_mb", "unconfined")
    warm_steps = 2000

    def __init__(self, **limits):
        super().__init__(**limits)
        self.parts, self.answer_words = nested_problems(), 26
        self.objectives = tuple(f"f({x})" for x in HIDDEN)
        prompts = [problem["tiny_prompt"] for part in self.parts.values() for problem in part]
        pieces = [text for piece in BRANCHES + CONDITIONS for text in spellings(piece)]
        self.words = tuple(dict.fromkeys(" ".join([*prompts, *pieces, "if else"]).split()))

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        every = (BRANCHES, CONDITIONS, BRANCHES, CONDITIONS, BRANCHES)
        a, low, b, high, c = (
            rng.choice(spellings(piece if rng.random() < RIGHT else rng.choice(others)))
            for piece, others in zip(problem.data["pieces"], every, strict=True)
        )
        return f"{a} if {low} else {b} if {high} else {c}"
