"""The small problems of the tiny model: guess a one-line function from a few of its values.

The function is `A if C else B`. The prompt shows f at four places. They leave f open, since three
thresholds and often several A or B fit. The tests call f at eight other places.
"""

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

RIGHT = 0.4  # how often a piece of a demonstration is the right one
FORMULAS = """0, 1, x, - x, x + 1, x + 2, x + 3, x - 1, x - 2, x - 3, x * 2, x * 3, x * x, 1 - x, 2 - x, 3 - x,
x // 2, x % 3, abs ( x )"""
BRANCHES = tuple(formula.strip() for formula in FORMULAS.split(","))
OPPOSITES = {"==": "!=", "<=": ">", "<": ">="}


@dataclass(frozen=True)
class Family:
    """Programs of one form, whose pieces are words separated by blanks, and problems about them."""

    name: str  # ids begin with it
    form: str  # the program, with {} for each piece
    conditions: str  # how many conditions the prompt for a language model names
    choices: tuple[tuple[str, ...], ...]  # what each piece may be
    shown: tuple[int, ...]  # where the prompt shows f
    hidden: tuple[int, ...]  # where the tests call f
    longest: int  # words in a program
    keywords: str  # words of programs that stand in no piece

    def outputs(self, program: str) -> tuple[int, ...]:
        """The values of a program, an expression in x, at the shown and then the hidden places."""
        places = self.shown + self.hidden
        return tuple(eval(f"[{program} for x in places]", {"places": places}))

    def problems(
        self, candidates: Iterable[tuple[str, ...]], known: set[tuple[int, ...]]
    ) -> Iterator[dict]:
        """A problem of every candidate, the pieces of a program, whose behaviour is not known; it is added."""
        for pieces in candidates:
            outputs = self.outputs(self.form.format(*pieces))
            if outputs not in known:
                known.add(outputs)
                yield self._problem(f"{self.name}-{len(known)}", pieces, outputs)

    def words(self, parts: dict[str, list[dict]]) -> tuple[str, ...]:
        """Every word of the prompts and of the programs, in the order of the vocabulary."""
        texts = [problem["tiny_prompt"] for part in parts.values() for problem in part]
        for piece in itertools.chain(*self.choices):
            texts += spellings(piece)
        texts.append(self.keywords)
        return tuple(dict.fromkeys(" ".join(texts).split()))

    def _problem(self, name: str, pieces: tuple[str, ...], outputs: tuple[int, ...]) -> dict:
        """A problem in the form that code_files.py gives to those of a file."""
        examples = [f"f({x})={y}" for x, y in zip(self.shown, outputs, strict=False)]
        expected = outputs[len(self.shown) :]
        return {
            "id": name,
            "small": True,
            "tiny_prompt": " ".join(examples),
            "pieces": list(pieces),
            "text": f"f maps integers to integers and has {self.conditions}. "
            f"{', '.join(examples)}. It will be tested at other places.",
            "entry_point": "f",
            "call": "f",
            "starter": "def f(x: int) -> int:",
            "before": "",
            "after": "",
            "reference": self.form.format(*pieces),
            "tests": [[[x], y] for x, y in zip(self.hidden, expected, strict=True)],
        }


def below(number: int) -> str:
    """The condition x < number. A minus sign is a word of its own."""
    return f"x < {number}".replace("-", "- ")


CONDITIONS = (*map(below, range(-3, 6)), "x % 2 == 0")
SMALL = Family(
    name="small",
    form="{} if {} else {}",
    conditions="one condition",
    choices=(BRANCHES, CONDITIONS, BRANCHES),
    shown=(-4, -1, 2, 5),
    hidden=(-6, -3, -2, 0, 1, 3, 4, 7),
    longest=16,
    keywords="if else != > >=",
)


@functools.cache
def small_problems() -> dict[str, list[dict]]:
    """Every behaviour of `A if C else B` once, without those that need no condition; by split."""
    trivial = {SMALL.outputs(branch) for branch in BRANCHES}
    return split_by_prompt(SMALL.problems(itertools.product(*SMALL.choices), trivial))


def split_by_prompt(problems: Iterable[dict]) -> dict[str, list[dict]]:
    """Put 2/3 in train, 1/6 in validation and 1/6 in test, equal prompts in the same split."""
    parts: dict[str, list[dict]] = {"train": [], "validation": [], "test": []}
    for problem in problems:
        sixth = hashlib.sha256(problem["tiny_prompt"].encode()).digest()[0] % 6
        split = {0: "test", 1: "validation"}.get(sixth, "train")
        parts[split].append(problem)
    return parts


def demonstration(problem: dict, rng: Random) -> str:
    """A program whose pieces are often wrong, in one of its spellings."""
    guesses = []
    for piece, choices in zip(problem["pieces"], SMALL.choices, strict=True):
        guesses.append(guess(piece, choices, RIGHT, rng))
    a, condition, b = [rng.choice(spellings(piece)) for piece in guesses]

    operator = next(word for word in condition.split() if word in OPPOSITES)
    if rng.random() < 0.5:
        condition = condition.replace(operator, OPPOSITES[operator])
        a, b = b, a
    return SMALL.form.format(a, condition, b)


def guess(piece: str, choices: tuple[str, ...], right: float, rng: Random) -> str:
    """The right piece with probability `right`, else any."""
    return piece if rng.random() < right else rng.choice(choices)


@functools.cache
def spellings(piece: str) -> list[str]:
    """Ways to write a piece: programs have synonyms, so that only behaviour tells two apart."""
    match piece.split():
        case ["x", "<", *number]:
            n = int("".join(number))
            return [piece, below(n - 1).replace("<", "<=")]
        case ["x", "*", "2"]:
            return [piece, "2 * x", "x + x"]
        case [left, "+" | "*" as operator, right]:
            return [piece, f"{right} {operator} {left}"]
        case [left, "-", right]:
            return [piece, f"- {right} + {left}"]
    return [piece]
