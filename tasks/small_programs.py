"""The small problems of the tiny model: one-line functions `A if C else B`, from a few examples that leave them open:
f is shown at four places, so that three thresholds and often several A or B fit, and tested at eight others."""

import functools
import hashlib
import itertools
import random

SHOWN, HIDDEN = (-4, -1, 2, 5), (-6, -3, -2, 0, 1, 3, 4, 7)
BRANCHES = (
    "0",
    "1",
    "x",
    "- x",
    "x + 1",
    "x + 2",
    "x + 3",
    "x - 1",
    "x - 2",
    "x - 3",
    "x * 2",
    "x * 3",
    "x * x",
    "1 - x",
    "2 - x",
    "3 - x",
    "x // 2",
    "x % 3",
    "abs ( x )",
)
CONDITIONS = (*(f"x < {'- ' * (n < 0)}{abs(n)}" for n in range(-3, 6)), "x % 2 == 0")
LONGEST = 16  # words of a program


@functools.cache
def small_problems() -> dict[str, list[dict]]:
    """Every behaviour of `A if C else B` once, as code_files.py has its problems, with tiny_prompt, pieces (A, C and B)
    and small; 2/3 train, 1/6 validation, 1/6 test, split by what the prompt shows, so that no prompt is in two."""
    values = {
        text: [eval(text, {"x": x, "abs": abs}) for x in SHOWN + HIDDEN]
        for text in BRANCHES + CONDITIONS
    }
    parts: dict[str, list[dict]] = {"train": [], "validation": [], "test": []}
    known = {
        tuple(values[branch]) for branch in BRANCHES
    }  # without a condition there is nothing to guess
    for a, condition, b in itertools.product(BRANCHES, CONDITIONS, BRANCHES):
        ys = tuple(
            y if holds else z
            for y, holds, z in zip(values[a], values[condition], values[b], strict=True)
        )
        if ys in known:
            continue
        known.add(ys)
        shown = [f"f({x})={y}" for x, y in zip(SHOWN, ys, strict=False)]
        place = hashlib.sha256(" ".join(shown).encode()).digest()[0] % 6
        parts["test" if place == 0 else "validation" if place == 1 else "train"].append(
            {
                "id": f"small-{len(known)}",
                "small": True,
                "tiny_prompt": " ".join(shown),
                "pieces": [a, condition, b],
                "text": f"f maps integers to integers and has one condition. {', '.join(shown)}. "
                "It will be tested at other places.",
                "entry_point": "f",
                "call": "f",
                "starter": "def f(x: int) -> int:",
                "before": "",
                "after": "",
                "reference": f"{a} if {condition} else {b}",
                "date": "",
                "line": "",
                "own": False,
                "tests": [[[x], y] for x, y in zip(HIDDEN, ys[len(SHOWN) :], strict=True)],
            }
        )
    return parts


def demonstration(problem: dict, rng: random.Random, right: float = 0.4) -> str:
    """A program each of whose three pieces is right with probability `right`, else any, in one of its spellings."""
    pieces = [
        piece if rng.random() < right else rng.choice(every)
        for piece, every in zip(problem["pieces"], (BRANCHES, CONDITIONS, BRANCHES), strict=True)
    ]
    a, condition, b = (rng.choice(spellings(piece)) for piece in pieces)
    for operator, opposite in (("==", "!="), ("<=", ">"), ("<", ">=")):
        if f" {operator} " in condition and rng.random() < 0.5:
            return f"{b} if {condition.replace(operator, opposite)} else {a}"
    return f"{a} if {condition} else {b}"


@functools.cache
def spellings(piece: str) -> list[str]:
    """Ways to write the same: an answer has synonyms, as programs do, so that only behaviour tells two apart."""
    match piece.split():
        case ["x", "<", *number]:
            n = int("".join(number)) - 1
            return [piece, f"x <= {'- ' * (n < 0)}{abs(n)}"]
        case [left, "+" | "*" as operator, right]:
            return [piece, f"{right} {operator} {left}"] + ["x + x"] * (piece == "x * 2")
        case [left, "-", right]:
            return [piece, f"- {right} + {left}"]
    return [piece]


def words() -> tuple[str, ...]:
    """Every word of a small problem's prompt and of the programs that solve it, in the order of the vocabulary."""
    prompts = [problem["tiny_prompt"] for part in small_problems().values() for problem in part]
    pieces = [text for piece in BRANCHES + CONDITIONS for text in spellings(piece)]
    return tuple(dict.fromkeys(" ".join([*prompts, *pieces, "if else != > >="]).split()))
