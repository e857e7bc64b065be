"""Rewards: what a task is, the answers in a text, and two whole tasks, the fence and the toy.

    problem                     what is asked, and what its task needs to score an answer
    prompt                      the text that asks a model for m answers
    parse_answers               a rollout's text -> its up to m answers
    reward                      an answer -> its reward vector of k objectives
    scalar                      the reward vector -> the number that GRPO maximises, by default the mean

`--task fence` and `--task toy` are at the end of this file. `--task maze` is tasks/maze.py, and
`--task my_task.py` is a file of yours with a subclass of `Task`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NUMBER = re.compile(r"\s*(\d{1,3})[.):](?!\d)")  # of a line: "1. red blue" or "2) green"
# The beginning of a line whose number is in bold: "**1.** red blue" or "**1. red blue**".
BOLD = re.compile(r"^([ \t]*+)\*\*(\d{1,3}[.):].*?)\*\*", re.MULTILINE)
MAX_ANSWERS = 8  # of one rollout; the tiny model's vocabulary has a tag for each
FIRST_NUMBER = "1."  # a prompt for lines ends with it, so that the model continues the list
# What stands around a model's thoughts, by family of models.
THOUGHTS = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, GLM, Phi-4, SmolLM3 and most others
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<Thought>", "</Thought>"),  # Marco-o1
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("<longcat_think>", "</longcat_think>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("[unused16]", "[unused17]"),  # Pangu
    ("<unused94>thought", "<unused95>"),  # MedGemma
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<|open|>think<|sep|>", "<|open|>response<|sep|>"),  # Kimi K3
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker, Sky-T1
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss
    ("Here is my thought process:", "Here is my response:"),  # Granite 3
    ("Here's my thought process:", "Here's my response:"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)


class UserError(Exception):
    """A mistake in what the user gave: reported as one line with exit code 2, without traceback."""


@dataclass
class Problem:
    """One problem of a task. `data` is whatever the task needs to score an answer, as plain JSON."""

    id: str
    data: Any


class Task:
    """What a task must offer. A reward is a list of k floats, higher is better, none below `minimum`.

    A language model needs `problems`, `prompt` and `reward`. `--model tiny` starts from nothing and
    needs `words`, `answer_words`, `tiny_prompt` and `demonstration`, too. The rest has defaults.
    """

    name = "task"
    objectives: tuple[str, ...] = ()  # names of the k components; empty: k differs between problems
    minimum = 0.0  # the least a component can be, and each component of an answer that is missing
    flags: tuple[str, ...] = ()  # flags of train.py that the constructor takes, such as ("data",)
    # Defaults of train.py's flags: for every model, then for the tiny one, for a language model.
    defaults: dict[str, object] = {}
    tiny_defaults: dict[str, object] = {}
    language_defaults: dict[str, object] = {}

    # How a language model writes its answers: "tags" or numbered "lines". The tiny one writes tags.
    form = "tags"
    tag = "answer"  # answers stand between <answer_1> and </answer_1>, <answer_2> and </answer_2>, ...
    reads_untagged = True  # whether numbered lines count where tags were asked for
    # With find_answers: a rollout is checked for its end only after one of these characters; empty:
    # after every token.
    ends = ""

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        """Problems start .. start + n - 1 of a split. A finite data set wraps around.

        Equal arguments give equal problems. The splits are "train", "validation", "test", and for
        the SFT warm-up "demonstrations", which may be those of "train".
        """
        raise UserError(f"task {self.name}: the method problems is missing")

    def prompt(self, problem: Problem, m: int) -> str:
        """The text that asks a language model for m answers."""
        raise UserError(f"task {self.name}: the method prompt is missing")

    def request(self, question: str, m: int, examples: list[str]) -> str:
        """A prompt that asks a language model for m answers in the task's form.

        Args:
            examples: three answers or so that show what an answer is. They need not be good.
        """
        shown = "\n".join(number_answers(self, examples))
        answers = "1 other answer" if m == 1 else f"{m} other answers"
        form = "a numbered list" if self.form == "lines" else "this form"
        return f"{question}\nFor example:\n{shown}\nGive {answers} as {form}, and nothing else."

    def reward(self, problem: Problem, answer: str) -> list[float]:
        """The reward vector (k) of one answer. It must not raise, whatever the text."""
        raise UserError(f"task {self.name}: the method reward is missing")

    def rewards(self, pairs: list[tuple[Problem, str]]) -> list[list[float]]:
        """The reward vectors of many answers, for tasks that score them faster together."""
        return [self.reward(problem, answer) for problem, answer in pairs]

    def scalar(self, rewards: Tensor) -> Tensor:
        """The task scalar, which GRPO maximises: rewards (..., k) -> (...). By default the mean."""
        return rewards.mean(-1)

    def find_answers(self, text: str, m: int, finished: bool) -> list[str] | None:
        """The answers in a rollout's text, where it has a form of your own. None: the usual forms.

        Args:
            finished: whether the rollout has ended. While it is False the text still grows: return
                only answers that no further text can change. The rollout ends with the m-th of them.
        """
        return None

    def without_thoughts(self, text: str) -> str:
        """The part of a rollout's text in which answers are looked for."""
        return without_thoughts(text)

    def canonical(self, problem: Problem, answer: str) -> str:
        """Two answers of one rollout with equal canonical forms count once."""
        return " ".join(answer.split())

    def reachable(self, problem: Problem) -> list[list[float]]:
        """Reward vectors, one of which is the best possible whatever the preference weights.

        An empty list says that nobody knows.
        """
        return []

    # For --model tiny, whose whole language is single words separated by blanks.
    words: tuple[str, ...] = ()  # every word of a prompt or answer, except the tags
    answer_words = 0  # words in the longest answer

    def tiny_prompt(self, problem: Problem) -> str:
        """The problem in words. The number of answers and the tags are added around it."""
        raise UserError(f"task {self.name}: tiny_prompt is missing; --model tiny needs it")

    def demonstration(self, problem: Problem, rng: Random) -> str:
        """One answer for the SFT warm-up to imitate.

        It need not be good: RL should discover what is not shown here.
        """
        raise UserError(
            f"task {self.name}: has no demonstrations, which --model tiny and --warm-steps need; "
            "define the method demonstration"
        )


# Answers in a text.


def parse_answers(text: str, task: Task, m: int, finished: bool = True) -> list[str]:
    """The up to m answers in a rollout's text, in their order.

    Thoughts are left out. Then answers are looked for in this order:

    1. `task.find_answers`, a form of the task's own.
    2. Tags, <answer_1> ... </answer_1>. An answer without both its tags is left out. So is one that
       holds another's tag: it was never closed.
    3. Numbered lines, such as "1. red blue", where the text holds no tag and `task.reads_untagged`.
       A text in lines that begins with no number, and had no thoughts, begins with the first
       answer, because the prompt ended with "1.".
    4. Where none was found in lines, for m = 1 and a finished rollout, the whole text.

    Args:
        finished: whether the rollout has ended; else only answers that can no longer change count.

    Raises:
        UserError: find_answers gives something else. No text raises.
    """
    rest = task.without_thoughts(text)
    had_thoughts = rest != text
    text = rest
    own = task.find_answers(text, m, finished)
    if own is not None:
        if not isinstance(own, list) or not all(isinstance(answer, str) for answer in own):
            raise UserError(
                f"task {task.name}: find_answers must return a list of texts or None, not {own!r:.80}"
            )
        return [answer.strip() for answer in own[:m]]
    has_tags = f"<{task.tag}_" in text or f"</{task.tag}_" in text
    if has_tags or not task.reads_untagged:
        return _tagged_answers(text, task.tag, m)
    lines = BOLD.sub(r"\1\2", text)
    if task.form == "lines" and not had_thoughts and not NUMBER.match(lines):
        lines = f"{FIRST_NUMBER} {lines.lstrip()}"
    answers = _numbered_answers(lines, m, finished)
    if not answers and m == 1 and finished and text.strip():
        return [text.strip()]
    return answers


def without_thoughts(text: str) -> str:
    """A text without its thoughts. One that was never closed goes on to the end.

    What stands before a closing mark without an opening one is a thought, too: it was opened in the
    prompt. Marks of another family in a thought are a part of it. Those in plain words count only
    where the text begins with them.
    """

    def begin(marks: tuple[str, str]) -> int:
        """Where a family's first thought begins, or -1: in the prompt, or there is none."""
        opening, closing = marks
        first = text.find(opening)
        end = text.find(closing)
        was_opened = end >= 0 and not 0 <= first < end
        return -1 if was_opened else first

    for opening, closing in sorted(THOUGHTS, key=begin):
        is_plain = closing[0].isalpha()
        if is_plain and not text.lstrip().startswith(opening):
            continue
        parts = text.split(opening)
        kept = [parts[0].rpartition(closing)[2]]
        for thought in parts[1:]:
            if closing in thought:
                kept.append(thought.rpartition(closing)[2])
        text = "".join(kept)
    return text


def open_thought(prompt: str) -> tuple[str, str]:
    """The marks of the thought that a prompt leaves open at its end; ("", "") if it leaves none."""
    for opening, closing in THOUGHTS:
        if prompt.rstrip().endswith(opening):
            return opening, closing
    return "", ""


def _tagged_answers(text: str, tag: str, m: int) -> list[str]:
    answers = []
    for i in range(1, m + 1):
        _, opening, rest = text.partition(f"<{tag}_{i}>")
        answer, closing, _ = rest.partition(f"</{tag}_{i}>")
        is_open = f"<{tag}_" in answer or f"</{tag}_" in answer
        if opening and closing and not is_open:
            answers.append(answer.strip())
    return answers


def _numbered_answers(text: str, m: int, finished: bool) -> list[str]:
    """The lines that are numbered 1 to m."""
    lines = text.split("\n")
    if not finished:
        lines.pop()  # no newline has ended it
    by_number: dict[int, str] = {}
    for line in lines:
        number = NUMBER.match(line)
        answer = line[number.end() :].strip() if number else ""
        if answer:
            by_number.setdefault(int(number[1]), answer)
    return [by_number[i] for i in range(1, m + 1) if i in by_number]


def write_answers(task: Task, answers: list[str], closing: str = "") -> str:
    """The counterpart of `parse_answers`: the text that gives these answers. Code blocks need no tags.

    Args:
        closing: the mark that ends the thought which the prompt left open; empty: it left none.
    """
    if answers[0].startswith("```"):
        text = "\n".join(answers)
    elif task.form == "lines":
        text = "\n".join(number_answers(task, answers))
    else:
        text = " ".join(number_answers(task, answers))
    if closing:
        return f"\n{closing}\n\n{text}"
    if task.form == "lines":
        return text.removeprefix(FIRST_NUMBER)  # it is in the prompt
    return text


def number_answers(task: Task, answers: list[str]) -> list[str]:
    """Answers in their tags or with their numbers.

    Raises:
        UserError: they are no list of texts, or one has lines that would not be read again.
    """
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f"task {task.name}: answers must be a list of texts, not {answers!r:.80}")
    if task.form == "lines":
        for answer in answers:
            if "\n" in answer.strip():
                raise UserError(
                    f"task {task.name}: the answer {answer!r:.80} has several lines, of which "
                    'form = "lines" reads the first; write it in one line or take form = "tags"'
                )
        return [f"{i}. {answer}" for i, answer in enumerate(answers, 1)]
    tagged = []
    for i, answer in enumerate(answers, 1):
        tag = f"{task.tag}_{i}"
        tagged.append(f"<{tag}> {answer} </{tag}>")
    return tagged


# Two whole tasks.


class Fence(Task):
    """Paint six boards: Ann likes red, Bob likes blue, Cid likes green, and nobody minds grey.

    On average a grey fence is best, so that is what GRPO paints. Of a set with one fence in each
    color everybody's best is far better.
    """

    name = "fence"
    objectives = ("ann", "bob", "cid")
    form = "lines"  # a language model answers in numbered lines
    words = ("fence", "red", "blue", "green", "grey")  # all that the tiny model reads and writes
    answer_words = 6
    defaults = {"steps": 60, "eval_problems": 200}
    tiny_defaults = {"steps": 90, "warm_steps": 100, "lr": ["1.5e-3"]}
    language_defaults = {
        "lr": ["2e-5"],
        "temperature": 0.7,
        "max_new_tokens": 24,
        "prompts_per_step": 2,
    }

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        """The one problem of this task, n times."""
        return [Problem(f"{split}-{start + i}", None) for i in range(n)]

    def prompt(self, problem: Problem, m: int) -> str:
        examples = [
            "red red grey green red blue",
            "blue green blue green grey red",
            "grey red blue blue green red",
        ]
        return self.request("Paint six boards red, blue, green or grey.", m, examples)

    def tiny_prompt(self, problem: Problem) -> str:
        return "fence"

    def reward(self, problem: Problem, answer: str) -> list[float]:
        boards = answer.split()
        if len(boards) != 6 or not set(boards) <= set(self.words[1:]):
            return [0.0, 0.0, 0.0]
        grey = 0.35 * boards.count("grey")
        return [(boards.count(color) + grey) / 6 for color in ("red", "blue", "green")]

    def demonstration(self, problem: Problem, rng: Random) -> str:
        return " ".join(rng.choices(self.words[1:], k=6))


class Toy(Task):
    """A deceptive valley: three blocks of three bits, each a component of the reward vector.

    A block with one or two bits set scores less than a safe block without any, and three bits
    score best. Partial progress is punished.
    """

    name = "toy"
    objectives = ("block_1", "block_2", "block_3")
    words = ("bits", "0", "1")
    answer_words = 9
    scores = (0.8, 0.4, 0.0, 1.0)  # of a block with 0, 1, 2 and 3 bits set
    defaults = {"m": 5, "steps": 60}
    tiny_defaults = {"warm_steps": 150, "lr": ["2.5e-4"]}

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        """The one problem of this task, n times."""
        return [Problem(f"toy-{split}-{start + i}", {}) for i in range(n)]

    def prompt(self, problem: Problem, m: int) -> str:
        tags = " ".join(f"<answer_{i + 1}>0 1 ...</answer_{i + 1}>" for i in range(m))
        return f"Write {m} strings of 9 bits (0 or 1, separated by blanks), each in its own tags: {tags}"

    def tiny_prompt(self, problem: Problem) -> str:
        return "bits"

    def reward(self, problem: Problem, answer: str) -> list[float]:
        bits = answer.split()
        if len(bits) != 9 or not set(bits) <= {"0", "1"}:
            return [0.0, 0.0, 0.0]
        blocks = [bits[:3], bits[3:6], bits[6:]]
        return [self.scores[block.count("1")] for block in blocks]

    def demonstration(self, problem: Problem, rng: Random) -> str:
        return " ".join(rng.choice("01") for _ in range(9))
