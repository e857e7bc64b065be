"""Tasks on text whose problems come from local files: records, what is held out, and how texts are compared."""

import collections
import hashlib
import json
import random
import re
import string
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import rewards
from rewards import Problem, UserError


class FileTask(rewards.Task):
    """Problems from a JSON Lines file, or a JSON list: `data`; `test_data`, or one in `share` by its ids, is held out,
    a tenth of the rest is for validation. UserError names the file, the line and the field that is not as it should."""

    flags = ("data", "test_data")
    source, share = (
        "",
        5,
    )  # which files, and where they are to be had; what is held out of a single one

    def __init__(self, data: str = "", test_data: str = ""):
        if not data:
            raise UserError(f"--task {self.name}: needs --data FILE ({self.source})")
        paths = [path for path in (data, test_data) if path]
        train, *test = [
            shuffled(read_records(flag, path, lambda record, place: self.read(record), self.source))
            for flag, path in zip(("--data", "--test-data"), paths, strict=False)
        ]
        train, held_out = self.hold_out(train, test[0] if test else None)
        n = len(train) // 10
        self.parts = {"train": train[n:], "validation": train[:n], "test": held_out}
        if not (train[n:] and held_out) or data == test_data:
            raise UserError(
                f"--data {' --test-data '.join(paths)}: {len(train)} problems to train on, {len(held_out)} "
                "held out: too few, or one file twice"
            )
        tell_shared(
            paths[-1],
            *([repr(problem | {"id": 0}) for problem in part] for part in (held_out, train)),
        )
        self.fingerprint = hashlib.sha256(
            b"".join(Path(path).read_bytes() for path in paths)
        ).hexdigest()

    def hold_out(self, data: list[dict], test: list[dict] | None) -> tuple[list[dict], list[dict]]:
        """What is not held out, and what is."""
        n = -(-len(data) // self.share)
        return (data[n:], data[:n]) if test is None else (data, test)

    def read(self, record: dict) -> dict:
        """The data of a problem from a record of the file, with an id; `field` says what is wrong with one."""
        raise NotImplementedError

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        part = self.parts["train" if split == "demonstrations" else split]
        if not part:
            raise UserError(f"--data: no problem is left for the split {split}; give a larger file")
        places = [divmod(i, len(part)) for i in range(start, start + n)]
        order = {
            turn: self.order(split, part, random.Random(f"{split}-{seed}-{turn}"))
            for turn in dict(places)
        }
        return [Problem(order[turn][i]["id"], order[turn][i]) for turn, i in places]

    def order(self, split: str, part: list[dict], rng: random.Random) -> list[dict]:
        return rng.sample(part, len(part))


def read_records(
    flag: str, path: str, read: Callable[[dict, str], dict], source: str = ""
) -> list[dict]:
    """What `read` makes of the records of a JSON Lines file, or a JSON list, and of their place in it; each with an id
    of its own. UserError names file, place and what is wrong, and the source of such files."""
    found: dict[str, dict] = {}
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # with a byte order mark or without
        whole = json.loads(text) if text.lstrip().startswith("[") else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{flag} {path}: cannot be read ({error}); it must be a JSON Lines file"
        ) from error
    for number, line in enumerate(text.split("\n") if whole is None else whole, 1):
        place = f"{path}, {'item' if whole else 'line'} {number}"
        if isinstance(line, str) and not line.strip():
            continue
        try:
            record = json.loads(line) if whole is None else line
            if not isinstance(record, dict):
                raise UserError(
                    f"not a JSON object but {json.dumps(record):.60}: each must be one problem"
                )
            json.dumps(
                record, ensure_ascii=False
            ).encode()  # half a surrogate pair is no text for a tokenizer
            problem = read(record, place)
            if found.setdefault(problem["id"], problem) != problem:
                raise UserError(f"field id: {problem['id']!r:.60} stands there twice")
        except Exception as error:  # whatever a record does to its reader
            told = {
                UserError: ", {}",
                json.JSONDecodeError: ": not JSON ({})",
                SyntaxError: ": not Python ({})",
            }
            why = told.get(type(error), ": cannot be used ({})").format(error)
            raise UserError(f"{flag} {place}{why}{f' ({source})' if source else ''}") from error
    return list(found.values())


def tell_shared(path: str, test: list[str], train: Collection[str]) -> None:
    """Say on stderr how many of these held-out texts are in the training part."""
    if shared := len([text for text in test if text in train]):
        print(
            f"{path}: {shared} of {len(test)} held-out problems stand in training too: not held out",
            file=sys.stderr,
        )


def shuffled(problems: list[dict]) -> list[dict]:
    """In an order that the ids alone decide."""
    return sorted(
        problems, key=lambda problem: hashlib.sha256(repr(problem["id"]).encode()).digest()
    )


def field(record: dict, name: str, kind: type, what: str) -> Any:
    """record[name] if it is of its kind and not empty; else UserError, `what` says what it must be."""
    value = record.get(name) if isinstance(record, dict) else None
    if (
        not isinstance(value, kind)
        or isinstance(value, bool)
        or str(value).strip() in ("", "[]", "{}")
    ):
        raise UserError(f"field {name}: must be {what}, not {value!r:.60}")
    return value


def tagged(text: str, tag: str) -> str:
    """What stands in the first <tag>...</tag> that holds no other <tag>, "" if nothing."""
    found = re.search(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL | re.IGNORECASE)
    return found[1].strip() if found else ""


def normalized(text: str) -> str:
    """Lower case, without the articles a, an, the and ASCII punctuation, single blanks."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", bare).split())


def f1(ours: Iterable, gold: Iterable) -> float:
    """Harmonic mean of precision and recall of two multisets; 1 if both are empty, 0 if one is."""
    ours, gold = (
        collections.Counter(list(ours)),
        collections.Counter(list(gold)),
    )  # of a mapping the keys
    total = ours.total() + gold.total()
    return 2 * (ours & gold).total() / total if total else 1.0


def word_f1(ours: str, gold: str) -> float:
    """F1 over the words of two normalised texts."""
    return f1(normalized(ours).split(), normalized(gold).split())
