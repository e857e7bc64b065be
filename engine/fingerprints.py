"""What tells that a task is no longer the one that a run began with, whatever its file looks like."""

import hashlib
import json
import random
from pathlib import Path

from engine.checks import check_task, check_text
from rewards import Problem, Task, reward_vectors, take_problems

N_PROBLEMS = 3  # of each split that are compared
VARYING = "vary"  # of rewards that differ from call to call: their change cannot be noticed


def fingerprint_of(task: Task, source: str) -> str:
    """Digests of what a task's problems and rewards are made of, as JSON: part -> digest.

    Of a task that is a file of the user's own, some problems are drawn, their prompts are written, and
    some answers are scored. A task of tasks/ has the digest of its data files alone.

    Args:
        source: what --task names.
    """
    parts = {}
    if task.fingerprint:
        parts["data files"] = task.fingerprint[:16]
    if Path(source).suffix == ".py":
        check_task(task, m=2)
        problems = []
        for split in ("train", "test"):
            problems += take_problems(task, split, N_PROBLEMS)
        parts["problems"] = digest([[problem.id, problem.data] for problem in problems])
        parts["prompts"] = digest([task.prompt(problem, 2) for problem in problems])
        parts["rewards"] = digest(sample_rewards(task, problems))
        if digest(sample_rewards(task, problems)) != parts["rewards"]:
            parts["rewards"] = VARYING
    return json.dumps(parts) if parts else ""


def sample_rewards(task: Task, problems: list[Problem]) -> list[list[float]]:
    """The reward vectors of some answers: nothing, words of the prompt, demonstrations."""
    has_demonstrations = type(task).demonstration is not Task.demonstration
    pairs = []
    for problem in problems:
        words = task.prompt(problem, 1).split()
        answers = ["", "1"]
        answers += [" ".join(part) for part in (words, words[:5], words[-5:])]
        if has_demonstrations:
            for seed in range(4):
                demonstration = task.demonstration(problem, random.Random(seed))
                check_text(task, "demonstration", problem, demonstration)
                answers.append(demonstration)
        pairs += [(problem, answer) for answer in answers]
    return reward_vectors(task, pairs)


def changed_parts(stored: str, current: str, task: Task, source: str) -> list[str]:
    """The parts of a stored fingerprint that are no longer the same, empty if all are.

    An older run has stored a digest of the bytes of all files instead.
    """
    if stored in ("", current):
        return []
    if not stored.startswith("{"):
        return [] if stored == digest_of_files(task, source) else ["files"]
    before = json.loads(stored)
    after = json.loads(current or "{}")
    return [name for name in after | before if before.get(name) != after.get(name)]


def digest_of_files(task: Task, source: str) -> str:
    """The fingerprint of older runs."""
    if Path(source).suffix != ".py":
        return task.fingerprint
    content = Path(source).read_bytes() + task.fingerprint.encode()
    return hashlib.sha256(content).hexdigest()


def digest(value: object) -> str:
    text = json.dumps(value, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
