"""Where a policy collapses: how open its choices are, word by word, and what lies behind a door it left.

    python study/collapse.py RUN RUN ...     runs of train.py that hold grpo and vpo

A *door* of a problem is the most frequent first word of the start model's answers that none of GRPO's
answers begins with. Behind it GRPO's policy goes on by itself. What is measured is added to
study/results/collapse.json, from which study/tables.py and result_plots.py read it.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.config import Config, device_of, open_device
from engine.errors import as_command
from engine.files import write_text
from engine.runs import StoredPolicy, load_run, policies, task_of
from engine.tasks import held_out
from eval import best_at_k, pool_of, weighted_best_at_k
from rewards import Problem, Task, UserError
from rollout import (
    Policy,
    Rollouts,
    build_prompt,
    load_policy,
    random_generator,
    read_answers,
    sample,
    sampling_options,
)

RESULTS = Path(__file__).parent / "results" / "collapse.json"
PROBLEMS = 40  # held-out problems
CANDIDATES = 30  # of each
TEMPERATURE = 0.7
WORDS = 12  # of an answer that are looked at


def measure_policies(config: Config, stored: dict[str, StoredPolicy]) -> dict:
    """How open the choices of policies are, and what lies behind the doors that GRPO left.

    Args:
        config: of their runs.
        stored: the start model, GRPO's policy and VPO's, by name.
    """
    task = task_of(config)
    problems = held_out(task, "test", PROBLEMS)
    device = device_of("auto", config.is_tiny)
    open_device(device)
    nats = {}
    distinct = {}
    loaded = {}
    answers = {}  # policy -> problem -> its candidates
    for name in ("start", "grpo", "vpo"):
        folder = str(stored[name].folder)
        loaded[name] = load_policy(folder, task, device=device, dtype=config.dtype)
        rollouts, by_rollout = write_answers(loaded[name], task, config, problems, stored[name].m)
        nats[name] = nats_by_word(loaded[name], rollouts, by_rollout)
        if name == "grpo":
            grpo_rollouts = by_rollout  # of one answer each, or none
        answers[name] = by_problem(by_rollout, len(problems))
        distinct[name] = distinct_prefixes(answers[name])

    doors = {}  # number of a problem -> the first word
    for p in range(len(problems)):
        taken = first_words(answers["grpo"][p])
        left = [word for word, _ in first_words(answers["start"][p]).most_common()]
        left = [word for word in left if word not in taken]
        if left:
            doors[p] = left[0]
    behind = [problems[p] for p in doors]
    own = []
    for p in doors:
        own += grpo_rollouts[p * CANDIDATES : (p + 1) * CANDIDATES]
    rows = {"GRPO, its own way": scores(task, behind, own)}
    for title, name in (("GRPO", "grpo"), ("start model", "start")):
        words = list(doors.values())
        _, by_rollout = write_answers(loaded[name], task, config, behind, 1, words)
        rows[f"{title}, behind the door"] = scores(task, behind, by_rollout)
    share = len(doors) / len(problems)
    return {"nats": nats, "distinct": distinct, "doors": share, "scores": rows}


def write_answers(
    policy: Policy,
    task: Task,
    config: Config,
    problems: list[Problem],
    m: int,
    doors: list[str] | None = None,
) -> tuple[Rollouts, list[list[str]]]:
    """Sample candidates for every problem, in rollouts of m answers.

    Args:
        doors: the first word of the answers to each problem; None: the policy chooses it.

    Returns:
        The rollouts, and the answers of each, the door included.
    """
    openings = [""] * len(problems)
    if doors:
        tag = f" <{task.tag}_1>" if policy.is_tiny else ""  # a model's own prompt ends with "1."
        openings = [f"{tag} {door}" for door in doors]
    prompts = []
    for problem, opening in zip(problems, openings, strict=True):
        prompts.append(build_prompt(policy, task, problem, m) + opening)
    generator = random_generator(config.seed, 0, "evaluation")
    options = sampling_options(policy, task, config, m, generator)
    options.temperature = TEMPERATURE
    options.batch = 240
    G = math.ceil(CANDIDATES / m)
    rollouts = sample(policy, prompts, G, options)
    blank = " " if policy.is_tiny else ""  # its tokens are words
    rollouts.texts = [openings[i // G] + blank + text for i, text in enumerate(rollouts.texts)]
    return rollouts, read_answers(task, rollouts, m)


def by_problem(answers: list[list[str]], P: int) -> list[list[str]]:
    """The answers of P * G rollouts, gathered by problem."""
    G = len(answers) // P
    gathered = []
    for p in range(P):
        own = answers[p * G : (p + 1) * G]
        gathered.append([answer for rollout in own for answer in rollout])
    return gathered


def first_words(answers: list[str]) -> Counter:
    """How many answers begin with each word."""
    return Counter(answer.split()[0] for answer in answers if answer)


def scores(task: Task, problems: list[Problem], answers: list[list[str]]) -> dict[str, float]:
    """Measures of rollouts that hold one answer each."""
    pool = pool_of(task, problems, answers, 1, CANDIDATES)
    k = pool.scalars.shape[1]
    return {
        "best@1": round(best_at_k(pool.scalars, 1).mean().item(), 4),
        "best@30": round(best_at_k(pool.scalars, k).mean().item(), 4),
        "W@30": round(weighted_best_at_k(pool.rewards, k, pool.objective_mask).mean().item(), 4),
    }


def distinct_prefixes(answers: list[list[str]]) -> list[float]:
    """How many different beginnings of 1, 2, ... words the candidates of a problem have, in the mean."""
    counts = []
    for length in range(1, WORDS + 1):
        prefixes = [{tuple(answer.split()[:length]) for answer in own} for own in answers]
        counts.append(round(sum(map(len, prefixes)) / len(prefixes), 2))
    return counts


def nats_by_word(policy: Policy, rollouts: Rollouts, answers: list[list[str]]) -> list[float]:
    """The mean of -log p of an answer's first, second, ... word: the entropy of that choice, in nats."""
    sums = [0.0] * WORDS
    counts = [0] * WORDS
    for row, own in enumerate(answers):
        for words in word_nats(policy, rollouts, row, own):
            for position, nats in enumerate(words[:WORDS]):
                sums[position] += nats
                counts[position] += 1
    return [round(total / max(count, 1), 3) for total, count in zip(sums, counts, strict=True)]


def word_nats(
    policy: Policy, rollouts: Rollouts, row: int, answers: list[str]
) -> list[list[float]]:
    """-log p of each word of each answer of a rollout: the sum over the word's tokens."""
    tokens = rollouts.tokens[row, : rollouts.lengths[row]].cpu()
    logprobs = rollouts.logprobs[row].tolist()
    ends = [0]  # where each token ends in the text
    for t in range(len(tokens)):
        ends.append(len(policy.decode(tokens[: t + 1])))
    text = rollouts.texts[row]
    cursor = 0
    found = []
    for answer in answers:
        start = text.index(answer, cursor)
        cursor = start + len(answer)
        words = []
        for word in re.finditer(r"\S+", answer):
            own = 0.0
            for t in range(len(tokens)):
                is_inside = start + word.start() < ends[t + 1] <= start + word.end()
                if is_inside and ends[t + 1] > ends[t]:
                    own -= logprobs[t]
            words.append(own)
        found.append(words)
    return found


def run(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser("study/collapse.py", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    found: dict[str, dict[str, StoredPolicy]] = {}  # task and seed -> policies
    configs = {}
    for folder in parser.parse_args(argv).runs:
        config = load_run(folder).config
        name = f"{config.task_name}-seed{config.seed}"
        configs[name] = config
        found.setdefault(name, {}).update(policies(folder, config.m))
    records = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for name, stored in found.items():
        missing = {"grpo", "vpo"} - stored.keys()
        if missing:
            raise UserError(f"{name}: no run of {' and '.join(missing)}; name one")
        records[name] = measure_policies(configs[name], stored)
        write_text(RESULTS, json.dumps(records, indent=1, sort_keys=True))


if __name__ == "__main__":
    with as_command("study/collapse.py"):
        run(None)
