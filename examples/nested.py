"""Programs of two nested conditions, `A if C else B if D else E`: too many for brute force.

    python train.py --task examples/nested.py --method grpo vpo --lr 8e-4
    python examples/search.py runs/nested-seed0 --budget 1000

They are made of the pieces of the small programs of `--task code`. The prompt shows f at six
places, the tests call it at twelve others.
"""

import functools
import itertools
from collections.abc import Iterator
from random import Random

from rewards import Problem
from tasks.code import Code
from tasks.small_programs import BRANCHES, Family, below, guess, spellings, split_by_prompt

PROBLEMS = 12_000
RIGHT = 0.2  # how often a piece of a demonstration is the right one
CONDITIONS = tuple(map(below, range(-6, 9)))
NESTED = Family(
    name="nested",
    form="{} if {} else {} if {} else {}",
    conditions="two conditions",
    choices=(BRANCHES, CONDITIONS, BRANCHES, CONDITIONS, BRANCHES),
    shown=(-7, -4, -1, 2, 5, 8),
    hidden=(-9, -8, -6, -5, -3, -2, 0, 1, 3, 4, 6, 7),
    longest=26,
    keywords="if else",
)


def candidates() -> Iterator[tuple[str, ...]]:
    """The pieces of random programs, without end."""
    rng = Random(0)
    while True:
        a, b, c = rng.sample(BRANCHES, 3)
        low, high = sorted(rng.sample(range(len(CONDITIONS)), 2))
        if high - low >= 3:  # the middle branch should matter
            yield a, CONDITIONS[low], b, CONDITIONS[high], c


@functools.cache
def nested_problems() -> dict[str, list[dict]]:
    """Problems of different behaviour, by split."""
    problems = NESTED.problems(candidates(), known=set())
    return split_by_prompt(itertools.islice(problems, PROBLEMS))


class Nested(Code):
    name = "nested"
    flags = ("seconds", "memory_mb", "unconfined")
    tiny_defaults = Code.tiny_defaults | {"warm_steps": 2000}

    def __init__(self, **limits):
        super().__init__(**limits)
        self.use_small_problems(NESTED, nested_problems())

    def demonstration(self, problem: Problem, rng: Random) -> str:
        """A program whose pieces are mostly wrong, in one of its spellings."""
        pieces = []
        for piece, choices in zip(problem.data["pieces"], NESTED.choices, strict=True):
            spelled = spellings(guess(piece, choices, RIGHT, rng))
            pieces.append(rng.choice(spelled))
        return NESTED.form.format(*pieces)
