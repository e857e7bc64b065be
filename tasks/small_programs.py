"""The small problems of the tiny model: guess a one-line function from a few of its values.

The function is `A if C else B`. The prompt shows f at four places. They leave f open, since three
thresholds and often several A or B fit. The tests call f at eight other places.
"""

import functools
import hashlib
import itertools
from random import Random

RIGHT = 0.4  # how often a piece of a demonstration is the right one
FORMULAS = """0, 1, x, - x, x + 1, x + 2, x + 3, x - 1, x - 2, x - 3, x * 2, x * 3, x * x, 1 - x, 2 - x, 3 - x,
x // 2, x % 3, abs ( x )"""
BRANCHES = tuple(formula.strip() for formula in FORMULAS.split(","))
OPPOSITES = {"==": "!=", "<=": ">", "<": ">="}


def below(number: int) -> str:
    """The condition x < number. A minus sign is a word of its own."""
    return f"x < {number}".replace("-", "- ")


CONDITIONS = (*map(below, range(-3, 6)), "x % 2 == 0")
FORM = "{} if {} else {}"
PIECES = (BRANCHES, CONDITIONS, BRANCHES)  # what each piece of FORM may be
SHOWN = (-4, -1, 2, 5)  # where the prompt shows f
HIDDEN = (-6, -3, -2, 0, 1, 3, 4, 7)  # where the tests call f
LONGEST = 16  # words in a program
KEYWORDS = "if else != > >="  # words of programs that stand in no piece


def outputs_of(program: str) -> tuple[int, ...]:
    """The values of a program, an expression in x, at the shown and then the hidden places."""
    return tuple(eval(f"[{program} for x in places]", {"places": SHOWN + HIDDEN}))


@functools.cache
def small_problems() -> dict[str, list[dict]]:
    """Every behaviour of `A if C else B` once, without those that need no condition; by split.

    2/3 are in train, 1/6 in validation and 1/6 in test. Equal prompts are in the same split.
    """
    parts: dict[str, list[dict]] = {"train": [], "validation": [], "test": []}
    known = {outputs_of(branch) for branch in BRANCHES}
    for pieces in itertools.product(*PIECES):
        outputs = outputs_of(FORM.format(*pieces))
        if outputs not in known:
            known.add(outputs)
            problem = problem_of(f"small-{len(known)}", pieces, outputs)
            sixth = hashlib.sha256(problem["tiny_prompt"].encode()).digest()[0] % 6
            split = {0: "test", 1: "validation"}.get(sixth, "train")
            parts[split].append(problem)
    return parts


def problem_of(name: str, pieces: tuple[str, ...], outputs: tuple[int, ...]) -> dict:
    """A problem in the form that code_files.py gives to those of a file."""
    examples = [f"f({x})={y}" for x, y in zip(SHOWN, outputs, strict=False)]
    expected = outputs[len(SHOWN) :]
    return {
        "id": name,
        "small": True,
        "tiny_prompt": " ".join(examples),
        "pieces": list(pieces),
        "text": "f maps integers to integers and has one condition. "
        f"{', '.join(examples)}. It will be tested at other places.",
        "entry_point": "f",
        "call": "f",
        "starter": "def f(x: int) -> int:",
        "before": "",
        "after": "",
        "reference": FORM.format(*pieces),
        "tests": [[[x], y] for x, y in zip(HIDDEN, expected, strict=True)],
    }


def words_of(parts: dict[str, list[dict]]) -> tuple[str, ...]:
    """Every word of the prompts and of the programs, in the order of the vocabulary."""
    texts = [problem["tiny_prompt"] for part in parts.values() for problem in part]
    for piece in itertools.chain(*PIECES):
        texts += spellings(piece)
    texts.append(KEYWORDS)
    return tuple(dict.fromkeys(" ".join(texts).split()))


def demonstration(problem: dict, rng: Random) -> str:
    """A program whose pieces are often wrong, in one of its spellings."""
    guesses = []
    for piece, choices in zip(problem["pieces"], PIECES, strict=True):
        guesses.append(piece if rng.random() < RIGHT else rng.choice(choices))
    a, condition, b = [rng.choice(spellings(piece)) for piece in guesses]

    operator = next(word for word in condition.split() if word in OPPOSITES)
    if rng.random() < 0.5:
        condition = condition.replace(operator, OPPOSITES[operator])
        a, b = b, a
    return FORM.format(a, condition, b)


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
