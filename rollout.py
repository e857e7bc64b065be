"""Rollouts: problem -> prompt -> rollout -> answers -> reward vectors.

    build_prompt     a problem -> the text that asks a model for m answers
    sample           P prompts -> P * G rollouts, with the log-probability of every sampled token
    parse_answers    a rollout's text -> its answers
    score            answers -> reward vectors (P, G, m, k), task scalars, and which answers form the set S

Sampling itself is in engine/decoding.py, parsing in rewards.py. A prompt of the toy for the tiny model,
and a rollout of two answers:

    answers=2 bits
    <answer_1> 0 0 0 1 1 1 0 0 0 </answer_1> <answer_2> 1 1 1 0 0 0 0 0 0 </answer_2>
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checks import task_scalars
from engine.decoding import Rollouts, SamplingOptions, sample  # noqa: F401 - handed on
from engine.kinds import kind_of
from engine.models import Tokenizer
from rewards import Problem, Task, parse_answers, reward_vectors


def build_prompt(
    tokenizer: Tokenizer, task: Task, problem: Problem, m: int, goal: list[float] | None = None
) -> str:
    """The text that a model sees: words for the tiny model, else the task's prompt in a chat template.

    Args:
        m: answers that are asked for.
        goal: (k) preference weights that a goal-conditioned policy is told.
    """
    return kind_of(tokenizer).prompt(tokenizer, task, problem, m, goal)


def sampling_options(
    tokenizer: Tokenizer, task: Task, m: int, max_new_tokens: int, **options
) -> SamplingOptions:
    """How rollouts of m answers are sampled: their length and where they stop follow from the task.

    Args:
        max_new_tokens: of an answer; 0: what the longest answer may need.
        options: other fields of SamplingOptions.
    """
    kind = kind_of(tokenizer)
    return SamplingOptions(
        max_new_tokens=kind.rollout_length(task, m, max_new_tokens),
        stop=kind.stop_rule(tokenizer, task, m),
        **options,
    )


@dataclass
class Scored:
    """The rewards of P problems, G rollouts each, m answers each, k objectives. Tensors on the CPU."""

    # (P, G, m, k) the task's minimum where an answer is missing, 0 beyond a problem's own k
    vectors: Tensor
    scalars: Tensor  # (P, G, m) the task scalar
    answer_mask: Tensor  # (P, G, m) bool, False on repeated and missing answers
    objective_mask: Tensor  # (P, k) bool, the objectives that each problem has


def score(task: Task, problems: list[Problem], answers: list[list[str]], m: int) -> Scored:
    """Reward vectors of the up to m answers of every rollout.

    An answer that repeats an earlier one of its rollout, by its canonical form, keeps its vector but is
    False in `answer_mask`. So Multi-RLVR does not pay it again, and the metric `answers` does not count
    it. The best answer of a set, which VPO pays, is the same with and without it. Answers of different
    rollouts are not compared.

    Args:
        answers: of P * G rollouts, those of one problem side by side.

    Raises:
        UserError: a reward vector or a task scalar is not what it should be.
    """
    P = len(problems)
    G = len(answers) // P
    groups = [answers[first : first + G] for first in range(0, P * G, G)]  # (P, G)
    vectors_of = _score_distinct(task, problems, groups)  # P dictionaries
    sizes = [len(next(iter(vectors.values()))) for vectors in vectors_of]
    k = max(sizes)

    vectors = torch.zeros(P, G, m, k)
    scalars = torch.zeros(P, G, m)
    answer_mask = torch.zeros(P, G, m, dtype=torch.bool)
    objective_mask = torch.arange(k) < torch.tensor(sizes)[:, None]  # (P, k)
    for p, problem in enumerate(problems):
        own = torch.full((G, m, sizes[p]), float(task.minimum))
        for g, rollout_answers in enumerate(groups[p]):
            forms = set()
            for j, answer in enumerate(rollout_answers):
                own[g, j] = torch.tensor(vectors_of[p][answer])
                form = str(task.canonical(problem, answer))
                answer_mask[p, g, j] = form not in forms
                forms.add(form)
        vectors[p, :, :, : sizes[p]] = own
        scalars[p] = task_scalars(task, own)
    return Scored(vectors, scalars, answer_mask, objective_mask)


def score_texts(
    task: Task,
    problems: list[Problem],
    texts: list[str],
    m: int,
    finished: list[bool] | None = None,
) -> Scored:
    """Parse and score rollouts.

    Args:
        texts: (P * G), those of one problem side by side.
        finished: (P * G), False where a rollout was cut off; None: all have ended.
    """
    answers = parse_texts(task, texts, m, finished)
    return score(task, problems, answers, m)


def parse_texts(
    task: Task, texts: list[str], m: int, finished: list[bool] | None = None
) -> list[list[str]]:
    """The up to m answers of every rollout. The arguments are those of `score_texts`."""
    finished = finished or [True] * len(texts)
    return [
        parse_answers(text, task, m, has_ended)
        for text, has_ended in zip(texts, finished, strict=True)
    ]


def _score_distinct(
    task: Task, problems: list[Problem], answers: list[list[list[str]]]
) -> list[dict[str, list[float]]]:
    """For each problem the reward vectors of its distinct answers, all scored in one call.

    A problem without any answer gets that of an empty one, which tells the number of objectives.
    """
    keys = []  # (number of the problem, answer)
    for p, groups in enumerate(answers):
        distinct = dict.fromkeys(itertools.chain.from_iterable(groups))
        keys += [(p, answer) for answer in distinct or [""]]
    vectors = reward_vectors(task, [(problems[p], answer) for p, answer in keys])
    by_answer = [{} for _ in problems]
    for (p, answer), vector in zip(keys, vectors, strict=True):
        by_answer[p][answer] = vector
    return by_answer
