"""ToolRL (arXiv 2504.13958): function calls, judged by format, the functions' names, their arguments and the values."""

import contextlib
import decimal
import hashlib
import json
import re

from rewards import Problem, UserError
from tasks.files import FileTask, f1, field, normalized, tagged

NUMBER = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d{1,3})?", re.ASCII)


class Tool(FileTask):
    """format: thoughts, and calls if the true answer has some; tool_name: F1 of the names; arg_key, arg_value: means
    over calls; one without a partner of the same name counts 0. All three are 1 if neither side has a call."""

    name, tag, share = "tool", "attempt", 50  # of 4,000 problems 80 are held out, as in the paper
    objectives = ("format", "tool_name", "arg_key", "arg_value")
    source = "rlla_rl.json of github.com/qiancheng0/ToolRL, dataset/rlla_4k_raw"

    def read(self, record: dict) -> dict:
        texts = [field(record, name, str, "text") for name in ("instruction", "input", "output")]
        output = texts[2].rpartition("</think>")[2]  # a call in a thought is none
        calls, whole = parse_calls(tagged(output, "tool_call"))
        if "<tool_call>" in output.lower() and not (calls and whole):
            raise UserError(
                f"field output: a call is cut off, or no JSON with name and parameters: {output[-60:]!r}"
            )
        id = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]  # the file has none
        return {"id": id, "instruction": texts[0], "input": texts[1], "calls": calls}

    def prompt(self, problem: Problem, m: int) -> str:
        form = "\n".join(f"<attempt_{i + 1}>...</attempt_{i + 1}>" for i in range(m))
        ask = "your output" if m == 1 else f"{m} different outputs, each complete,"
        return f"{problem.data['instruction']}\n\n{problem.data['input']}\n\nWrite {ask} within these tags:\n{form}"

    def reward(self, problem: Problem, answer: str) -> list[float]:
        called = tagged(answer.rpartition("</think>")[2], "tool_call")
        (ours, _), gold = parse_calls(called), problem.data["calls"]
        well_formed = float(
            "</think>" in answer.partition("<think>")[2] and (bool(ours) if gold else not called)
        )
        if not ours and not gold:
            return [well_formed, 1.0, 1.0, 1.0]
        keys, values, free = [], [], list(ours)
        for name, wanted in gold:
            if rivals := [
                call for call in free if call[0] == name
            ]:  # arguments of the wrong function earn nothing
                call = max(
                    rivals,
                    key=lambda call: (len(call[1].keys() & wanted.keys()), match(call[1], wanted)),
                )
                free.remove(call)
                keys.append(f1(call[1], wanted))
                values.append(match(call[1], wanted))
        n = max(len(ours), len(gold))
        return [
            well_formed,
            f1((c[0] for c in ours), (c[0] for c in gold)),
            sum(keys) / n,
            sum(values) / n,
        ]


def parse_calls(text: str) -> tuple[list[list], bool]:
    """[name, arguments] of the calls in a text, JSON objects one after the other or in a list, up to the first that
    cannot be read; and whether that was all of the text. It never raises."""
    found, decoder, text = [], json.JSONDecoder(parse_constant=str), text.strip()
    with contextlib.suppress(ValueError, RecursionError):
        while (
            text and text.count("[") + text.count("{") < 500
        ):  # what is nested deeper could not be compared
            value, place = decoder.raw_decode(text)
            found += value if isinstance(value, list) else [value]
            text = text[place:].lstrip(" \t\r\n,")
    calls = [call for call in found if isinstance(call, dict) and isinstance(call.get("name"), str)]
    given = [call.get("parameters", call.get("arguments")) or {} for call in calls]
    whole = not text and len(calls) == len(found) and all(isinstance(x, dict) for x in given)
    return [
        [c["name"].strip(), x if isinstance(x, dict) else {}]
        for c, x in zip(calls, given, strict=True)
    ], whole


def match(ours: object, gold: object) -> float:
    """How far a value is the wanted one, 0 to 1: words by F1, numbers and booleans by equality, in lists by F1 over the
    elements, in objects by the share of all keys of both, so that a key too many is not free."""
    if isinstance(gold, dict) and isinstance(ours, dict):
        both = ours.keys() | gold.keys()
        return (
            sum(match(ours[key], gold[key]) for key in ours.keys() & gold.keys()) / len(both)
            if both
            else 1.0
        )
    if isinstance(gold, list) and isinstance(ours, list):
        return f1(map(_element, ours), map(_element, gold))
    if isinstance(gold, bool) or isinstance(ours, bool) or gold is None or ours is None:
        return float(ours is gold)
    if (
        _number(ours) is not None or _number(gold) is not None
    ):  # "1.5" is not "15" without its point
        return float(_number(ours) == _number(gold))
    return (
        f1(_words(ours), _words(gold)) if isinstance(ours, str) and isinstance(gold, str) else 0.0
    )


def _words(text: str) -> list[str]:
    """The words of the normalised text, in which a sign before a digit stays: "15 km" is not "1.5 km"."""
    return normalized(re.sub(r"[-.,:/](?=[0-9])", "\u00b7", text)).split() or [text.strip()]


def _number(value: object) -> decimal.Decimal | None:
    """The number that a value is, or writes, to its last digit."""
    text = value.strip() if isinstance(value, str) else repr(value)
    return decimal.Decimal(text) if NUMBER.fullmatch(text) else None


def _element(value: object) -> decimal.Decimal | str:
    if (number := _number(value)) is not None:
        return number
    return (
        " ".join(_words(value))
        if isinstance(value, str)
        else "=" + json.dumps(value, sort_keys=True)
    )
