"""The text of answers: thoughts, tags, numbered lines; how they are read and how they are written."""

import re
import unicodedata
from typing import Protocol

# The number of a list: "1.", "2)", "(3)", "4:", and as Chinese, Japanese and Korean models write it:
# "5、", "6\.", "７．", "（８）", "【9】", "②", "三、". "3.14" and "2、3" are none.
AFTER_NUMBER = r"(?:\\?[.):．）：、。・】]|\ufe0f?\u20e3)"
CIRCLED = "[①-⒛❶-➓㈠-㈩㊀-㊉]"
RANGE = "一、二|二、三|三、四|四、五|五、六|六、七|七、八|八、九|九、十"  # "two or three"
LIST_NUMBER = (
    rf"(?:\\?[(（【]?(?:\d{{1,3}}|(?!{RANGE})[一二三四五六七八九十]){AFTER_NUMBER}(?!\d)"
    rf"|{CIRCLED}{AFTER_NUMBER}?(?!{CIRCLED}))"
)
# Of a line: "1. red blue", "## 4. blue" or "> 5. grey".
NUMBER = re.compile(rf"\s*(?:[#>]+\s*)?{LIST_NUMBER}")
# The beginning of a line whose number is in bold: "**1.** red blue" or "**1. red blue**".
BOLD = re.compile(rf"^([^\S\n]*+)\*\*({LIST_NUMBER}.*?)\*\*", re.MULTILINE)
FIRST_NUMBER = "1."  # a prompt for lines ends with it, so that the model continues the list
THOUGHTS = (  # what stands around a model's thoughts
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, GLM, Phi-4, SmolLM3 and most others
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss
)
MARKS = {mark: marks for marks in THOUGHTS for mark in marks}
ANY_MARK = re.compile("|".join(map(re.escape, MARKS)))


class Form(Protocol):
    """The form of a task's answers, see rewards.Task."""

    form: str
    tag: str


# Reading.


def without_thoughts(text: str) -> str:
    """A text without its thoughts. One that was never closed goes on to the end.

    The first mark tells the model's family, and other marks are words. What stands before a closing
    mark without an opening one is a thought, too: it was opened in the prompt.
    """
    first = ANY_MARK.search(text)
    if not first:
        return text
    opening, closing = MARKS[first[0]]
    before, *thoughts = text.split(opening)
    kept = [before.rpartition(closing)[2]]
    for thought in thoughts:
        _, end, rest = thought.rpartition(closing)
        if end:
            kept.append(rest)
    return "".join(kept)


def open_thought(prompt: str) -> tuple[str, str]:
    """The marks of the thought that a prompt leaves open at its end; ("", "") if it leaves none."""
    for opening, closing in THOUGHTS:
        if prompt.rstrip().endswith(opening):
            return opening, closing
    return "", ""


def has_tags(text: str, tag: str) -> bool:
    return f"<{tag}_" in text or f"</{tag}_" in text


def tagged_answers(text: str, tag: str, m: int) -> list[str]:
    """The texts in the tags 1 to m. A text that holds another tag was never closed, and is left out.

    Where a text begins with a preface, which may mention tags, a later pair of the same number counts.
    """
    parts = re.split(rf"(</?{re.escape(tag)}_\d+>)", text)  # text, tag, text, tag, ..., text
    if len(parts) == 1:  # no tag
        return []
    # Before a closing tag stands an answer that was never opened.
    has_preface = bool(parts[0].strip()) and not parts[1].startswith("</")
    answers: dict[str, str | None] = {}  # by opening tag; None: it was never closed
    for i in range(1, len(parts) - 2, 2):
        opening, answer, closing = parts[i : i + 3]
        if closing == f"</{opening[1:]}" and not has_tags(answer, tag):
            answers.setdefault(opening, answer.strip())
        elif not has_preface:
            answers.setdefault(opening, None)
    found = [answers.get(f"<{tag}_{i}>") for i in range(1, m + 1)]
    return [answer for answer in found if answer is not None]


def numbered_answers(text: str, m: int, finished: bool, in_list: bool) -> list[str]:
    """The lines that are numbered 1 to m.

    Args:
        finished: whether the text has ended; else its last line may still grow, and is left out.
        in_list: whether the text goes on after a first number in the prompt.
    """
    text = BOLD.sub(r"\1\2", text)
    lines = text.split("\n")
    numbers = [value_of(number) for number in map(NUMBER.match, lines) if number]
    # What stands before a line numbered 1 is a preface, else the first answer. Another list may follow.
    has_colon = text.lstrip().split("\n")[0].rstrip().endswith((":", "："))
    has_preface = numbers[:1] == [1] or (has_colon and 1 in numbers)
    if in_list and not NUMBER.match(text) and not has_preface:
        lines = f"{FIRST_NUMBER} {text.lstrip()}".split("\n")
        if has_colon and not numbers and not finished:
            return []
    if not finished:
        lines.pop()
    by_number: dict[int, str] = {}
    for line in lines:
        number = NUMBER.match(line)
        answer = line[number.end() :].strip() if number else ""
        if answer:
            by_number.setdefault(value_of(number), answer)
    return [by_number[i] for i in range(1, m + 1) if i in by_number]


def value_of(number: re.Match) -> int:
    """The value of a list's number: 2 of "(2)", "（２）", "②" and "二、"."""
    numeral = re.search(r"\d+|\w", number[0])[0]
    return int(numeral) if numeral.isdecimal() else int(unicodedata.numeric(numeral))


# Writing.


def write_answers(task: Form, answers: list[str], closing: str = "") -> str:
    """A rollout that gives these answers, as `parse_answers` reads it. Code blocks need no tags.

    `closing` is the mark that ends the thought which the prompt left open; empty: it left none.
    """
    if answers[0].startswith("```"):
        text = "\n".join(answers)
    else:
        separator = "\n" if task.form == "lines" else " "
        text = separator.join(number_answers(task, answers))
    if closing:
        return f"\n{closing}\n\n{text}"
    if task.form == "lines":
        return text.removeprefix(FIRST_NUMBER)  # it is in the prompt
    return text


def number_answers(task: Form, answers: list[str]) -> list[str]:
    """Answers in their tags or with their numbers."""
    if isinstance(answers, str):
        raise ValueError(f"answers must be a list of texts, not {answers!r:.80}")
    if task.form == "tags":
        tag = task.tag
        return [f"<{tag}_{i}> {answer} </{tag}_{i}>" for i, answer in enumerate(answers, 1)]
    for answer in answers:
        if "\n" in answer.strip():
            raise ValueError(f'form = "lines" reads one line of {answer!r:.80}; take form = "tags"')
    return [f"{i}. {answer}" for i, answer in enumerate(answers, 1)]
