"""Tasks on text whose problems come from local files: how they are read, held out and compared."""

import collections
import gzip
import hashlib
import json
import math
import random
import re
import string
import unicodedata
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import rewards
from rewards import Problem, UserError

# Quotes and dashes, as they are typed; None: what nobody sees.
QUOTES = dict.fromkeys("‘’‚‛“”„‟‹›«»′ʼʻ〝〞〟「」『』《》〈〉", "'")
DASHES = dict.fromkeys("‐‒–—―−˗", "-")
STRAIGHT = str.maketrans(QUOTES | DASHES | dict.fromkeys("\ufe0e\ufe0f\u034f"))
RAISED = str.maketrans({digit: f"^{i}" for i, digit in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})  # 10⁵ is no 105
PUNCTUATION = str.maketrans("", "", f"{string.punctuation}。、・؟،।¿¡")  # in NFKC
GZIP_MAGIC = b"\x1f\x8b"  # the first bytes of a file in gzip


class FileTask(rewards.Task):
    """A task whose problems come from a JSON Lines file, or a JSON list, `data`.

    The problems of `test_data` are held out, or without it one in `share` of those of `data`. A
    tenth of the rest is for validation. A subclass defines `read`. UserError names the file, the
    line and the field that is wrong.
    """

    flags = ("data", "test_data")
    reads_untagged = False  # its answers have parts, which no line of a list would hold
    source = ""  # which files the task takes, and where they can be found
    share = 5
    may_test_on_training = False  # one file may be given twice
    trained_share = 0.0  # of `test_data`: the part that is trained on, too

    def __init__(self, data: str = "", test_data: str = ""):
        if not data:
            raise UserError(f"--task {self.name}: needs --data FILE ({self.source})")
        if data == test_data and not self.may_test_on_training:
            raise UserError(f"--data {data}: one file twice, so nothing would be held out")
        train = self.load("--data", data)
        if test_data:
            test = self.load("--test-data", test_data)
            n_trained = int(self.trained_share * len(test))
            train = shuffled(train + test[:n_trained])
            held_out = test[n_trained:]
        else:
            train, held_out = self.hold_out(train)
        if not train or not held_out:
            counts = f"{len(train)} problems to train on, {len(held_out)} held out"
            raise UserError(f"--data {data}: {counts}; give a larger file, or --test-data FILE")
        n_validation = len(train) // 10
        self.parts = {
            "train": train[n_validation:],
            "validation": train[:n_validation],
            "test": held_out,
        }

    def load(self, flag: str, path: str) -> list[dict]:
        """The problems of a file, in an order that depends on their ids alone."""
        return shuffled(read_records(flag, path, self.read))

    def read(self, record: dict) -> dict:
        """A problem's data, with an id, from a record of the file; `field` checks fields."""
        raise NotImplementedError

    def hold_out(self, data: list[dict]) -> tuple[list[dict], list[dict]]:
        """The problems that are not held out, and those that are, if all come from one file."""
        n_test = math.ceil(len(data) / self.share)
        return data[n_test:], data[:n_test]

    def write_form(self, body: str, m: int) -> str:
        """The tags of m answers, each with this body, as a prompt shows them."""
        forms = [f"<{self.tag}_{i}>{body}</{self.tag}_{i}>" for i in range(1, m + 1)]
        return "\n".join(forms)

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        part = self.parts["train" if split == "demonstrations" else split]
        if not part:
            raise UserError(f"--data: no problem is left for the split {split}; give a larger file")
        turn, offset = divmod(start, len(part))
        sequence: list[dict] = []  # turn after turn through the part
        while len(sequence) < offset + n:
            sequence += self.order(split, part, random.Random(f"{split}-{seed}-{turn}"))
            turn += 1
        return [Problem(data["id"], data) for data in sequence[offset : offset + n]]

    def order(self, split: str, part: list[dict], rng: random.Random) -> list[dict]:
        """The problems of a split in the order in which one turn goes through them."""
        return rng.sample(part, len(part))


def read_records(flag: str, path: str, read: Callable[[dict], dict]) -> list[dict]:
    """The problems that `read` makes of the records of a JSON Lines file, or of a JSON list, also in gzip.

    Each result has an id of its own, else the file's name and the line. Equal ones count once.
    UserError names the flag, the file, the line, the field and what it must be.
    """
    try:
        content = Path(path).read_bytes()
        if content.startswith(GZIP_MAGIC):  # as HumanEval is published
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig")  # with a byte order mark or without
        lines = text.split("\n")
        kind = "line"
        if text.lstrip().startswith("["):
            lines = [json.dumps(item) for item in json.loads(text)]
            kind = "item"
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        message = f"cannot be read ({error}); it must be a JSON Lines file, or one in gzip"
        raise UserError(f"{flag} {path}: {message}") from error

    problems: dict[str, dict] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            problem = read_line(line, read)
            id = problem.setdefault("id", f"{Path(path).stem}-{number}")
            if problems.setdefault(id, problem) != problem:
                raise UserError(f"field id: {id!r:.60} stands there twice")
        except UserError as error:
            comma = "" if str(error).startswith(("has no ", "is no")) else ","
            raise UserError(f"{flag} {path}, {kind} {number}{comma} {error}") from error
    return list(problems.values())


def read_line(line: str, read: Callable[[dict], dict]) -> dict:
    """The problem that `read` makes of a line. Raises UserError, whatever the line does to its reader."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise UserError(f"is no JSON object with fields: {line!r:.60}")
        json.dumps(record, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        return read(record)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, json.JSONDecodeError) and error.doc == line:  # not of a field
            reason = f"{error.msg} at column {error.colno}"
            raise UserError(f"is not JSON: {reason}; each line must be a record") from error
        raise UserError(f"cannot be used ({type(error).__name__}: {error})") from error


def shuffled(problems: list[dict]) -> list[dict]:
    """The problems in an order that depends on their ids alone."""

    def digest(problem: dict) -> bytes:
        return hashlib.sha256(repr(problem["id"]).encode()).digest()

    return sorted(problems, key=digest)


def field(record: dict, name: str, kind: type, wanted: str) -> Any:
    """The field record[name]. UserError says what is wanted if it is missing, empty or of another kind."""
    if isinstance(record, dict) and name not in record:
        raise UserError(f"has no field {name}; it has {', '.join(record)}")
    value = record[name] if isinstance(record, dict) else None
    if not isinstance(value, kind) or value == [] or not str(value).strip():
        raise UserError(f"field {name}: must be {wanted}, not {value!r:.60}")
    return value


def text_field(record: dict, name: str) -> str:
    """A field that must be text, with the line ends of Unix."""
    return unix_lines(field(record, name, str, "text"))


def unix_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def texts_field(record: dict, name: str) -> list[str]:
    """A field that must be a list of texts, or one text, which counts as a list of one."""
    value = field(record, name, list | str, "a list of texts")
    texts = [value] if isinstance(value, str) else value
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"field {name}: must be a list of texts, not {texts!r:.60}")
    return [unix_lines(text) for text in texts]


def optional_text(record: dict, name: str) -> str:
    """A field that must be text where it is not missing, empty or null; "" then."""
    return text_field(record, name) if record.get(name) else ""


def tagged(text: str, tag: str) -> str:
    """The text in the first <tag>...</tag> without another <tag> in it, "" if there is none."""
    return next(iter(all_tagged(text, tag)), "")


def all_tagged(text: str, tag: str) -> list[str]:
    """The texts in all <tag>...</tag> without another <tag> in them."""
    pattern = rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>"
    found = re.findall(pattern, text, re.DOTALL | re.IGNORECASE)
    return [part.strip() for part in found]


def plain(text: str) -> str:
    """A text in NFKC, with straight quotes and plain dashes, without characters that nobody sees."""
    text = text.translate(RAISED).replace("´", "'")  # NFKC gives it a blank
    composed = unicodedata.normalize("NFKC", text)
    letters = composed.translate(STRAIGHT)
    return "".join(letter for letter in letters if unicodedata.category(letter) != "Cf")


def normalized(text: str) -> str:
    """A plain text in lower case and with single blanks, without a, an, the and punctuation.

    What would leave nothing, such as the answer "A", stays as it is.
    """
    text = plain(text)
    without_punctuation = text.lower().translate(PUNCTUATION)
    without_articles = re.sub(r"\b(?:a|an|the)\b", " ", without_punctuation)
    words = without_articles.split() or without_punctuation.split() or text.lower().split()
    return " ".join(words)


def f1(ours: Iterable, gold: Iterable) -> float:
    """The F1 score of two multisets: 1 if both are empty, 0 if one is."""
    our_counts = collections.Counter(ours)
    gold_counts = collections.Counter(gold)
    total = our_counts.total() + gold_counts.total()
    if total == 0:
        return 1.0
    return 2 * (our_counts & gold_counts).total() / total


def word_f1(ours: str, gold: str) -> float:
    """The F1 score over the words of two normalised texts."""
    return f1(normalized(ours).split(), normalized(gold).split())
