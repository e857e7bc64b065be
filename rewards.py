"""Rewards: what a task is, the answers of a rollout, and two whole tasks, the fence and the toy.

    problem                     what is asked, and what its task needs to score an answer
    prompt                      the text that asks a model for m answers
    parse_answers               a rollout's text -> its up to m answers
    reward                      an answer -> its reward vector of d objectives
    scalar                      the reward vector -> what GRPO maximises, by default the mean

`--task fence` and `--task toy` are at the end of this file. `--task maze` is tasks/maze.py, and
examples/my_task.py is a task to copy: `--task my_task.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import engine.answers as forms

if TYPE_CHECKING:
    from torch import Tensor

MAX_ANSWERS = 8  # of one rollout; the tiny model's vocabulary has a tag for each
EXAMPLES = "\nFor example:\n"  # stands before the examples of a prompt


@dataclass
class Problem:
    """One problem of a task. `data` is all that its task needs to score answers, as plain JSON."""

    id: str
    data: Any


class Task:
    """What a task offers. A reward is a list of d floats, higher is better, none below `minimum`.

    Let rewards differ by 0.01 or more, beyond 1 by 1%: 1e-4 trains 10% less, 1e-5 half or nothing.

    A language model needs `problems`, `prompt` and `reward`. `--model tiny` starts from nothing and
    needs `words`, `answer_words`, `tiny_prompt` and `demonstration`, too. The rest has defaults.
    """

    name = "task"
    objectives: tuple[str, ...] = ()  # names of the d components; empty: d differs between problems
    minimum = 0.0  # the least a component can be, and each component of an answer that is missing

    def reward(self, problem: Problem, answer: str) -> list[float]:
        """The reward vector (d) of one answer. It must not raise, whatever the text."""
        raise NotImplementedError(f"task {self.name} must define reward(problem, answer)")

    def scalar(self, rewards: Tensor) -> Tensor:
        """The task scalar, which GRPO maximises: rewards (..., d) -> (...). By default the mean."""
        return rewards.mean(-1)

    def rewards(self, pairs: list[tuple[Problem, str]]) -> list[list[float]]:
        """The reward vectors of many answers, for tasks that score them faster together."""
        return [self.reward(problem, answer) for problem, answer in pairs]

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        """Problems start .. start + n - 1 of a split. A finite data set wraps around.

        Equal arguments give equal problems. The splits are "train", "validation", "test", and for
        the SFT warm-up "demonstrations", which may be those of "train".
        """
        raise NotImplementedError(f"task {self.name} must define problems(split, n, seed, start)")

    def prompt(self, problem: Problem, m: int) -> str:
        """The text that asks a language model for m answers, such as `request` writes."""
        raise NotImplementedError(f"task {self.name} must define prompt(problem, m)")

    def request(self, question: str, m: int, examples: list[str]) -> str:
        """A prompt that shows some examples and asks for m other answers in the task's form."""
        shown = "\n".join(forms.number_answers(self, examples))
        others = "1 other answer" if m == 1 else f"{m} other answers"
        form = "as a numbered list" if self.form == "lines" else "in this form"
        return f"{question}{EXAMPLES}{shown}\nGive {others} {form}, and nothing else."

    flags: tuple[str, ...] = ()  # flags of train.py that the constructor takes, such as ("data",)
    # Defaults of train.py's flags: for every model, then for the tiny one, for a language model.
    defaults: dict[str, object] = {}
    tiny_defaults: dict[str, object] = {}
    language_defaults: dict[str, object] = {}

    # How a language model writes its answers: "tags" or numbered "lines". The tiny one writes tags.
    form = "tags"
    tag = "answer"  # of an answer's tags: <answer_1>...</answer_1>, <answer_2>...</answer_2>
    reads_untagged = True  # whether numbered lines count where tags were asked for
    ends = ""  # with find_answers: the characters that can end an answer; empty: every one

    def find_answers(self, text: str, m: int, finished: bool) -> list[str] | None:
        """The answers in a rollout's text, where it has a form of your own. None: the usual forms.

        Args:
            finished: whether the rollout has ended. While it is False the text still grows: return
                only answers that no further text can change. The m-th of them ends the rollout.
        """
        return None

    def without_thoughts(self, text: str) -> str:
        """The part of a rollout's text in which answers are looked for."""
        return forms.without_thoughts(text)

    def canonical(self, problem: Problem, answer: str) -> str:
        """Two answers of one rollout with equal canonical forms count once."""
        return " ".join(answer.split())

    def reachable(self, problem: Problem) -> list[list[float]]:
        """Vectors, one of which is best under any preference weights; empty: unknown."""
        return []

    # For --model tiny, whose whole language is single words separated by blanks.
    words: tuple[str, ...] = ()  # every word of a prompt or answer, except the tags
    answer_words = 0  # words in the longest answer

    def tiny_prompt(self, problem: Problem) -> str:
        """The problem in words. The number of answers and the tags are added around it."""
        raise NotImplementedError(f"task {self.name} must define tiny_prompt(problem)")

    def demonstration(self, problem: Problem, rng: Random) -> str:
        """One answer for the SFT warm-up to imitate. It need not be good: RL finds better ones."""
        needed = "which --model tiny and --warm-steps need"
        raise UserError(f"task {self.name} has no demonstrations, {needed}")


def parse_answers(text: str, task: Task, m: int, finished: bool = True) -> list[str]:
    """The up to m answers in a rollout's text, in their order, without thoughts.

    They are what `task.find_answers` gives. If it gives None, they stand in tags, or in numbered
    lines if there is no tag. A finished text of one answer may have neither.

    Args:
        finished: whether the rollout has ended; else only answers that can no longer change count.
    """
    rest = task.without_thoughts(text)
    own = task.find_answers(rest, m, finished)
    if own is not None:
        return [answer.strip() for answer in own[:m]]
    if forms.has_tags(rest, task.tag) or not task.reads_untagged:
        return forms.tagged_answers(rest, task.tag, m)
    # The prompt of a list ended with its first number, but for one that opened a thought.
    in_list = task.form == "lines" and rest == text
    found = forms.numbered_answers(rest, m, finished, in_list)
    if not found and m == 1 and finished and rest.strip():
        return [rest.strip()]
    return found


class UserError(Exception):
    """A mistake in what the user gave: reported as one line with exit code 2, without traceback."""


# Two whole tasks.


class Fence(Task):
    """Paint six boards: Ann likes red, Bob likes blue, Cid likes green, and nobody minds grey.

    On average a grey fence is best, so that is what GRPO paints. Of a set with one fence in each
    color everybody's best is far better.
    """

    name = "fence"
    objectives = ("Ann", "Bob", "Cid")
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
        request = f"Write {m} strings of 9 bits (0 or 1, separated by blanks)"
        return f"{request}, each in its own tags: {tags}"

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
