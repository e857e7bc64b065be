"""Rollouts: problem -> prompt -> rollout -> answers -> reward vectors. Sampling itself is engine/decoding.py.

build_prompt     a problem -> the text that asks a model for m answers
sample           P prompts -> P * G rollouts, with the log-probability of every sampled token
parse_answers    a rollout's text -> its answers
score            answers -> reward vectors (P, G, m, k), task scalars, and which answers form the set S"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import decoding
from engine.decoding import Rollouts, encode_prompts  # noqa: F401 - handed on
from engine.flags import MAX_ANSWERS
from engine.models import Model, Tokenizer
from engine.tiny import is_tiny
from rewards import Problem, Task, UserError, blame, reward_vectors, take_problems


def build_prompt(
    tokenizer: Tokenizer, task: Task, problem: Problem, m: int, goal: list[float] | None = None
) -> str:
    """The text that the model sees: the tiny model's words, a chat template if there is one, else the plain prompt.
    goal (k) is the weighting that a goal-conditioned policy is told; to the tiny model in its own numbers, 1 to 8."""
    if is_tiny(tokenizer):
        levels = [f"answers={1 + round((MAX_ANSWERS - 1) * weight)}" for weight in goal or ()]
        return " ".join([f"answers={m}", task.tiny_prompt(problem), *levels])
    prompt = task.prompt(problem, m)
    if goal:
        weights = ", ".join(
            f"{name} {weight:.0%}" for name, weight in zip(task.objectives, goal, strict=True)
        )
        prompt += f"\nThis time the answer is judged by: {weights}."
    if tokenizer.chat_template is None:
        return prompt + "\n"
    with blame(f"--model {tokenizer.name_or_path}: its chat template cannot be used"):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        if prompt.strip() not in text:
            raise ValueError("it leaves out what the user says")
    return text


def rollout_length(task: Task, tokenizer: Tokenizer, m: int, max_new_tokens: int = 0) -> int:
    """New tokens that a rollout of m answers may take: m times max_new_tokens, or if 0 what the task's longest need."""
    if is_tiny(tokenizer) and not max_new_tokens:
        return m * (task.answer_words + 2) + 1  # two tags each, and the EOS
    return m * (max_new_tokens or 256)


def sample(
    model: Model,
    tokenizer: Tokenizer,
    prompts: list[str],
    G: int,
    *,
    task: Task | None = None,
    m: int = 1,
    **settings,
) -> Rollouts:
    """`engine.decoding.sample`. Of a task, a language model's rollouts end with their m-th answer: nobody reads what
    follows, so no reward teaches to end. A model whose template knows thoughts must have closed them."""
    template = str(tokenizer.chat_template)
    stop = (
        None
        if not task or is_tiny(tokenizer)
        else lambda text: (  # tiny has no room for more
            len(parse_answers(text, task, m)) == m
            and ("</think>" in text or "<think>" not in template)
        )
    )
    return decoding.sample(model, tokenizer, prompts, G, stop=stop, **settings)


def parse_answers(text: str, task: Task, m: int) -> list[str]:
    """The answers tagged 1 to m in a rollout's text, in that order; whatever the text, it never raises.
    One without both its tags is left out, and so is one that holds another's: it was never closed."""
    found = task.find_answers(text, m)
    if found is not None:
        return [answer.strip() for answer in found[:m]]
    answers = []
    for i in range(1, m + 1):
        _, opened, rest = text.partition(f"<{task.tag}_{i}>")
        answer, closed, _ = rest.partition(f"</{task.tag}_{i}>")
        if opened and closed and f"<{task.tag}_" not in answer and f"</{task.tag}_" not in answer:
            answers.append(answer.strip())
    return answers


def write_answers(task: Task, answers: list[str]) -> str:
    """The counterpart of `parse_answers`: what a model should write to give these answers; a block needs no tags."""
    if answers[0].startswith("```"):
        return "\n".join(answers)
    return " ".join(
        f"<{task.tag}_{i}> {answer} </{task.tag}_{i}>" for i, answer in enumerate(answers, 1)
    )


@dataclass
class Scored:
    """The rewards of a batch: P problems, G rollouts each, m answers each, k objectives; CPU tensors."""

    vectors: Tensor  # (P, G, m, k) the task's minimum where there is no answer, 0 beyond a problem's own objectives
    scalars: Tensor  # (P, G, m) the task scalar
    mask: Tensor  # (P, G, m) bool, the distinct answers: what a set is made of
    objective_mask: Tensor  # (P, k) bool, the objectives that each problem has


def score(task: Task, problems: list[Problem], answers: list[list[list[str]]], m: int) -> Scored:
    """Reward vectors of answers[p][g], the up to m answers of every rollout. Equal answers to a problem are scored
    once. An answer whose canonical form already stands in its rollout keeps its vector but leaves the mask. Raises
    UserError for what is no reward vector or task scalar."""
    P, G = len(problems), len(answers[0])
    # Where there is no answer at all, an empty one tells the number of objectives.
    distinct = [
        dict.fromkeys(answer for group in groups for answer in group) or {"": None}
        for groups in answers
    ]
    pairs = [(p, answer) for p in range(P) for answer in distinct[p]]
    vectors = dict(
        zip(
            pairs, reward_vectors(task, [(problems[p], answer) for p, answer in pairs]), strict=True
        )
    )
    rows = []  # one (G, m, objectives of p) tensor per problem
    mask = torch.zeros(P, G, m, dtype=torch.bool)
    for p, groups in enumerate(answers):
        rows.append(
            torch.full((G, m, len(vectors[p, next(iter(distinct[p]))])), float(task.minimum))
        )
        for g, group in enumerate(groups):
            forms = [str(task.canonical(problems[p], answer)) for answer in group]
            for j, answer in enumerate(group):
                rows[p][g, j] = torch.tensor(vectors[p, answer])
                mask[p, g, j] = forms[j] not in forms[:j]
    k = max(row.shape[-1] for row in rows)
    padded = torch.stack([torch.nn.functional.pad(row, (0, k - row.shape[-1])) for row in rows])
    objective_mask = torch.stack([torch.arange(k) < row.shape[-1] for row in rows])
    scalars = [task.scalar(row) for row in rows]
    for x in scalars:
        if not isinstance(x, Tensor) or x.shape != (G, m) or not x.isfinite().all():
            raise UserError(
                f"task {task.name}: scalar must turn (..., k) into finite numbers (...), not {x!r:.60}"
            )
    return Scored(padded, torch.stack(scalars), mask, objective_mask)


def score_texts(task: Task, problems: list[Problem], texts: list[str], m: int) -> Scored:
    """Parse and score the rollouts of P problems: texts (P * G), those of one problem side by side."""
    G = len(texts) // len(problems)
    return score(
        task,
        problems,
        [
            [parse_answers(text, task, m) for text in texts[i : i + G]]
            for i in range(0, len(texts), G)
        ],
        m,
    )


def demonstrations(
    task: Task,
    tokenizer: Tokenizer,
    m: int,
    seed: int,
    step: int,
    *,
    goals: bool = False,
    model=None,
    temperature: float = 1.0,
    max_new_tokens: int = 0,
) -> tuple[list[str], list[str]]:
    """Prompts (P) and texts (P * G) that one step of the warm start imitates, 16 * 3, of a language model 8 * 1. A
    third of the steps shows sets of m independent answers: no deliberate diversity. A language `model`, of which only
    one reference is known, is shown its own: m sampled single answers, the reference alone where not all can be read.
    `goals`: every prompt names a random weighting, which its answers do not heed. UserError for one too long."""
    P, G, longest = (16, 3, task.answer_words) if is_tiny(tokenizer) else (8, 1, 2**20)
    m = m if step % 3 == 2 and (model or is_tiny(tokenizer)) else 1
    rng = random.Random(f"demonstrations-{seed}-{step}")
    problems = take_problems(task, "demonstrations", P, seed, step * P)
    answers = [
        [task.demonstration(problem, rng) for _ in range(m)]
        for problem in problems
        for _ in range(G)
    ]
    for answer in (answer for group in answers for answer in group):
        if not isinstance(answer, str) or len(answer.split()) > longest:
            raise UserError(
                f"task {task.name}: the demonstration {answer!r:.80} must be text of at most "
                f"answer_words = {task.answer_words} words"
            )
    if m > 1 and not is_tiny(tokenizer):
        singles = [build_prompt(tokenizer, task, problem, 1) for problem in problems]
        own = sample(
            model,
            tokenizer,
            singles,
            m,
            task=task,
            temperature=temperature,
            max_new_tokens=rollout_length(task, tokenizer, 1, max_new_tokens),
            generator=torch.Generator(model.device).manual_seed(rng.getrandbits(32)),
        ).texts
        form = "```python\n{}\n```" if answers[0][0].startswith("```") else "{}"
        found = [
            [
                form.format(*parsed)
                for text in own[i : i + m]
                if (parsed := parse_answers(text, task, 1))
            ]
            for i in range(0, len(own), m)
        ]
        answers = [
            mine if len(mine) == m else shown[:1]
            for mine, shown in zip(found, answers, strict=True)
        ]
    told = [[rng.expovariate(1) for _ in task.objectives] if goals else None for _ in problems]
    told = [goal and [x / sum(goal) for x in goal] for goal in told]
    sizes = [len(group) for group in answers[::G]]
    return (
        [
            build_prompt(tokenizer, task, *asked)
            for asked in zip(problems, sizes, told, strict=True)
        ],
        [write_answers(task, group) for group in answers],
    )
