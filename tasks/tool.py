"""ToolRL (arXiv 2504.13958): function calls.

The reward vector judges the format, the names of the functions, their arguments and the values.
"""

import decimal
import hashlib
import itertools
import json
import re
from typing import Any

from engine.answers import THOUGHTS
from rewards import Problem, UserError
from tasks.files import FileTask, all_tagged, f1, normalized, plain, text_field

NUMBER = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d{1,3})?", re.ASCII)
SEPARATORS = re.compile(r"[\s,]*")  # between calls
MAX_BRACKETS = 500  # of calls that are read; what is nested deeper could not be compared


class Tool(FileTask):
    """Call functions where the true answer does.

    format is 1 for thoughts, followed by calls if the true answer has some. tool_name is the F1 of
    the functions' names. arg_key and arg_value are means over the calls; a call without a partner
    of the same name counts 0. All three are 1 if neither side has a call.
    """

    name = "tool"
    tag = "attempt"
    share = 50  # of 4,000 problems 80 are held out, as in the paper
    objectives = ("format", "tool_name", "arg_key", "arg_value")
    source = "rlla_rl.json of github.com/qiancheng0/ToolRL, dataset/rlla_4k_raw"

    def read(self, record: dict) -> dict:
        instruction = text_field(record, "instruction")
        conversation = text_field(record, "input")
        text = text_field(record, "output")
        output = _without_thoughts(text)
        blocks = all_tagged(output, "tool_call")
        if output.lower().count("<tool_call>") != len(blocks) or not all(map(is_whole, blocks)):
            problem = "a call is cut off, or no JSON with name and parameters"
            raise UserError(f"field output: {problem}: {output[-60:]!r}")
        digest = hashlib.sha256(f"{instruction}\0{conversation}\0{text}".encode())
        return {
            "id": digest.hexdigest()[:16],  # the file has none
            "instruction": instruction,
            "input": conversation,
            "calls": calls_in(output),
        }

    def prompt(self, problem: Problem, m: int) -> str:
        outputs = "your output" if m == 1 else f"{m} different outputs, each complete,"
        return (
            f"{problem.data['instruction']}\n\n{problem.data['input']}\n\nWrite {outputs} within these tags:\n"
            + self.write_form("...", m)
        )

    def without_thoughts(self, text: str) -> str:
        """A rollout's text without the thought that it begins with: an attempt has its own."""
        for opening, closing in THOUGHTS:
            if text.lstrip().startswith(opening):
                return text.partition(closing)[2]
        return text

    def reward(self, problem: Problem, answer: str) -> list[float]:
        gold = problem.data["calls"]
        output = _without_thoughts(answer)
        ours = calls_in(output)
        has_thoughts = "</think>" in answer.partition("<think>")[2]
        calls_where_gold_does = bool(ours) if gold else not any(all_tagged(output, "tool_call"))
        well_formed = float(has_thoughts and calls_where_gold_does)
        if not ours and not gold:
            return [well_formed, 1.0, 1.0, 1.0]
        tool_name = f1([name for name, _ in ours], [name for name, _ in gold])
        return [well_formed, tool_name, *_argument_scores(ours, gold)]


def _without_thoughts(text: str) -> str:
    """The text behind the thoughts: a call in a thought is none."""
    return text.rpartition("</think>")[2]


def calls_in(output: str) -> list[list]:
    """The calls of all <tool_call> blocks, see `parse_calls`."""
    blocks = all_tagged(output, "tool_call")
    return list(itertools.chain(*map(parse_calls, blocks)))


def is_whole(block: str) -> bool:
    """Whether a block holds calls and nothing else, so that none of the data's calls is lost."""
    values, rest = json_values(block)
    has_calls = len(parse_calls(block)) == len(values) > 0
    return has_calls and not rest and all(isinstance(_arguments(value), dict) for value in values)


def _arguments(call: dict) -> Any:
    """What a call says of its arguments."""
    return call.get("parameters", call.get("arguments")) or {}


def parse_calls(text: str) -> list[list]:
    """The calls in a text as [name, arguments]: JSON objects, one after the other or in a list."""
    values, _ = json_values(text)
    calls = []
    for value in values:
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            arguments = _arguments(value)
            given = arguments if isinstance(arguments, dict) else {}
            calls.append([value["name"].strip(), given])
    return calls


def json_values(text: str) -> tuple[list, str]:
    """The JSON values with which a text begins, those of a list one by one, and what follows them.

    Reading ends where the text is no JSON; it never raises.
    """
    decoder = json.JSONDecoder(parse_constant=str)
    values = []
    position = SEPARATORS.match(text).end()
    is_flat = text.count("[") + text.count("{") < MAX_BRACKETS
    try:
        while is_flat and position < len(text):
            value, end = decoder.raw_decode(text, position)
            values += value if isinstance(value, list) else [value]
            position = SEPARATORS.match(text, end).end()
    except (ValueError, RecursionError):
        pass
    return values, text[position:]


def _argument_scores(ours: list[list], gold: list[list]) -> list[float]:
    """The components arg_key and arg_value.

    Each true call gets the most similar call of the same name that has no partner yet. Calls
    without a partner, on either side, count 0.
    """
    free = list(ours)
    key_scores = []
    value_scores = []
    for name, wanted in gold:
        rivals = [arguments for rival, arguments in free if rival == name]
        if rivals:
            partner = max(rivals, key=lambda arguments: _similarity(arguments, wanted))
            free.remove([name, partner])
            key_scores.append(f1(partner.keys(), wanted.keys()))
            value_scores.append(match(partner, wanted))
    n_calls = max(len(ours), len(gold))
    return [sum(key_scores) / n_calls, sum(value_scores) / n_calls]


def _similarity(arguments: dict, wanted: dict) -> tuple[int, float]:
    return len(arguments.keys() & wanted.keys()), match(arguments, wanted)


def match(ours: object, gold: object) -> float:
    """The match of a value with the true one, from 0 to 1.

    Objects: the mean over all keys of both sides, so that a key too many costs something. Lists: F1
    over the elements. Text: F1 over the words. Numbers, booleans and null: equality.
    """
    if isinstance(gold, dict) and isinstance(ours, dict):
        all_keys = ours.keys() | gold.keys()
        if not all_keys:
            return 1.0
        shared_keys = ours.keys() & gold.keys()
        return sum(match(ours[key], gold[key]) for key in shared_keys) / len(all_keys)
    if isinstance(gold, list) and isinstance(ours, list):
        return f1(map(_element, ours), map(_element, gold))
    if isinstance(gold, bool) or isinstance(ours, bool) or gold is None or ours is None:
        return float(ours is gold)
    our_number = _number(ours)
    gold_number = _number(gold)
    if our_number is not None or gold_number is not None:
        return float(our_number == gold_number)
    if isinstance(ours, str) and isinstance(gold, str):
        return f1(_words(ours), _words(gold))
    return 0.0


def _words(text: str) -> list[str]:
    """The words of the normalised text, or the text itself if it has none.

    A sign before a digit stays in its word: "15 km" is not "1.5 km".
    """
    with_signs = re.sub(r"[-.,:/](?=[0-9])", "\u00b7", plain(text))
    return normalized(with_signs).split() or [text.strip()]


def _number(value: object) -> decimal.Decimal | None:
    """The number that a value is, or that a text writes, with all its digits."""
    text = plain(value).strip() if isinstance(value, str) else repr(value)
    return decimal.Decimal(text) if NUMBER.fullmatch(text) else None


def _element(value: object) -> decimal.Decimal | str:
    """An element of a list in a form that is equal for equal elements."""
    number = _number(value)
    if number is not None:
        return number
    if isinstance(value, str):
        return " ".join(_words(value))
    return "=" + json.dumps(value, sort_keys=True)
