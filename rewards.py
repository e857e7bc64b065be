"""What a task is: problems, prompts, answers in a text, and the reward vector of an answer.

`--task maze` is tasks/maze.py. `--task my_task.py` is a file of yours, loaded in the same way
(tasks/__init__.py).
"""

from __future__ import annotations

import difflib
import numbers
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


NUMBERED_LINE = re.compile(r"\s*(\d{1,3})[.):](?!\d)\s*(\S.*?)\s*")  # "1. red blue" or "2) green"
FIRST_NUMBER = "1."  # with it a prompt for lines ends, and the rollout goes on


class UserError(Exception):
    """A mistake in what the user gave: reported as one line with exit code 2, without traceback."""


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message about a misspelt name: "; did you mean vpo?", or nothing."""
    close = difflib.get_close_matches(word, list(names), 1)
    return f"; did you mean {close[0]}?" if close else ""


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
    form = "tags"  # how a language model writes its answers: "tags" or numbered "lines"
    tag = "answer"  # answers stand between <answer_1> and </answer_1>, <answer_2> and </answer_2>, ...
    objectives: tuple[str, ...] = ()  # names of the k components; empty: k differs between problems
    minimum = 0.0  # the least a component can be, and each component of an answer that is missing
    flags: tuple[str, ...] = ()  # the flags of train.py that the constructor takes
    fingerprint = ""  # a digest of the files with the problems; --resume refuses other files
    reads_untagged = True  # whether numbered lines count where tags were asked for
    m = 3  # answers per rollout, where --m does not say
    steps = 200  # of RL, where --steps does not say
    eval_problems = 200  # held out, where --eval-problems does not say
    tokens_per_answer = 256  # of a language model, where --max-new-tokens does not say
    language_flags: dict[str, object] = {}  # defaults of train.py's flags for a language model

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

    def find_answers(self, text: str, m: int, finished: bool) -> list[str] | None:
        """The answers in a rollout's text, where it has a form of your own. None: the usual forms.

        Args:
            finished: whether the rollout has ended. While it is False the text still grows: return
                only answers that no further text can change. The rollout ends with the m-th of them.
        """
        return None

    def scalar(self, rewards: Tensor) -> Tensor:
        """The task scalar, which GRPO maximises: rewards (..., k) -> (...). By default the mean."""
        return rewards.mean(-1)

    def canonical(self, problem: Problem, answer: str) -> str:
        """Two answers of one rollout with equal canonical forms count once."""
        return " ".join(answer.split())

    def reachable(self, problem: Problem) -> list[list[float]]:
        """Reward vectors, one of which is the best possible whatever the preference weights.

        An empty list says that nobody knows.
        """
        return []

    wide = False  # whether a drawing is wider than high: policies then stand side by side

    legend = ""  # what the letters and colors of a drawing mean

    def draw(self, axes, problem: Problem, answers: list[str], color: str) -> bool:
        """Draw the answers to a problem on matplotlib axes. False if the task has no picture."""
        return False

    def summary(self, rewards: Tensor) -> str:
        """The title of a drawing: what matters in the reward vectors (n, k) of a pool, counted."""
        n_scoring = int((rewards > self.minimum).any(-1).sum())
        return f"{n_scoring} of {len(rewards)} score"

    # For --model tiny, whose whole language is single words separated by blanks.
    warm_steps = 300  # of the SFT warm-up, where --warm-steps does not say
    lr: float | None = None  # peak learning rate of every method; None: each method's own
    words: tuple[str, ...] = ()  # every word of a prompt or answer, except the tags
    answer_words = 0  # words in the longest answer

    def tiny_prompt(self, problem: Problem) -> str:
        """The problem in words. The number of answers and the tags are added around it."""
        raise UserError(f"task {self.name}: tiny_prompt is missing; --model tiny needs it")

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """One answer for the SFT warm-up to imitate.

        It need not be good: RL should discover what is not shown here.
        """
        raise UserError(
            f"task {self.name}: has no demonstrations, which --model tiny and --warm-steps need; "
            "define the method demonstration"
        )


def parse_answers(text: str, task: Task, m: int, finished: bool = True) -> list[str]:
    """The up to m answers in a rollout's text, in their order.

    They are looked for in this order:

    1. `task.find_answers`, a form of the task's own.
    2. Tags, <answer_1> ... </answer_1>. An answer without both its tags is left out. So is one that
       holds another's tag: it was never closed.
    3. Numbered lines, such as "1. red blue", where the text holds no tag and `task.reads_untagged`.
       Thoughts up to </think> are left out. A text in lines that begins with no number begins with
       the first answer, because the prompt ended with "1.".
    4. Where none was found in lines, for m = 1 and a finished rollout, the whole text.

    Args:
        finished: whether the rollout has ended; else only answers that can no longer change count.

    Raises:
        UserError: find_answers gives something else. No text raises.
    """
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
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return []
    lines = text
    if task.form == "lines" and not NUMBERED_LINE.match(text):
        lines = f"{FIRST_NUMBER} {text.lstrip()}"
    answers = _numbered_answers(lines, m, finished)
    if not answers and m == 1 and finished and text.strip():
        return [text.strip()]
    return answers


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
        numbered = NUMBERED_LINE.fullmatch(line)
        if numbered:
            by_number.setdefault(int(numbered[1]), numbered[2])
    return [by_number[i] for i in range(1, m + 1) if i in by_number]


def write_answers(task: Task, answers: list[str]) -> str:
    """The counterpart of `parse_answers`: the text that gives these answers. Code blocks need no tags."""
    if answers[0].startswith("```"):
        return "\n".join(answers)
    if task.form == "lines":
        return "\n".join(number_answers(task, answers)).removeprefix(FIRST_NUMBER)
    return " ".join(number_answers(task, answers))


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


def take_problems(task: Task, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
    """Exactly n problems of a split. Raises UserError if the task gives something else."""
    problems = task.problems(split, n, seed, start)
    is_list = isinstance(problems, list)
    if not is_list or not all(isinstance(problem, Problem) for problem in problems):
        raise UserError(
            f"task {task.name}: problems({split!r}, ...) must be a list of Problem, not {problems!r:.60}"
        )
    if len(problems) != n:
        fix = "it should wrap around" if problems else "it should not be empty"
        raise UserError(
            f"task {task.name}: problems({split!r}, n={n}, start={start}) gave {len(problems)}; {fix}"
        )
    by_id = {problem.id: problem for problem in problems}
    for problem in problems:
        if problem.data != by_id[problem.id].data:
            raise UserError(
                f"task {task.name}: problems({split!r}, ...) gave two with the id {problem.id!r} and "
                "different data; give each an id of its own"
            )
    return problems


def reward_vectors(task: Task, pairs: list[tuple[Problem, str]]) -> list[list[float]]:
    """task.rewards(pairs), checked.

    Raises:
        UserError: names problem, answer and value of what is no reward vector.
    """
    vectors = task.rewards(pairs)
    if not isinstance(vectors, list) or len(vectors) != len(pairs):
        raise UserError(
            f"task {task.name}: rewards must return a list of {len(pairs)} vectors, not {vectors!r:.80}"
        )
    sizes: dict[str, int] = {}  # of the vectors of each problem, where the objectives have no names
    for (problem, answer), vector in zip(pairs, vectors, strict=True):
        mistake = _mistake_in(vector, task, problem, sizes)
        if mistake:
            raise UserError(
                f"task {task.name}: the reward {vector!r:.80} of problem {problem.id!r}, "
                f"answer {answer!r:.80} {mistake}"
            )
    return vectors


def _mistake_in(vector: Any, task: Task, problem: Problem, sizes: dict[str, int]) -> str:
    """What is wrong with a reward vector, empty if nothing is."""
    is_list = isinstance(vector, list | tuple)
    if not is_list or not all(isinstance(value, numbers.Real) for value in vector):
        return "must be a list of numbers; of a tensor or array return .tolist()"
    size = len(task.objectives) or sizes.setdefault(problem.id, len(vector) or 1)
    if len(vector) != size:
        return f"has {len(vector)} numbers for {size} objectives"
    for value in vector:
        if not task.minimum <= value < 1e30:  # false for NaN, too
            return (
                f"holds {value}; each must be finite and at least Task.minimum = {task.minimum}, which "
                "the task may set"
            )
    return ""
