"""What a user is told about rollouts: the best of the first step, no answers, no signal."""

import sys
from pathlib import Path

from engine.config import Config
from engine.files import read_log
from rewards import Task

SHOWN = 1000  # characters of a rollout
SILENT_STEPS = 10  # without a signal, after which a user is told
FEW = 0.5  # share of the slots that hold a distinct answer, below which the prompt should be looked at


def show_first_step(
    method: str, config: Config, task: Task, example: dict, metrics: dict[str, float]
) -> None:
    """Show the best rollout of a language model's first step, before minutes are spent.

    Args:
        example: the rollouts of the step's first problem and its best one, see `train.StepResult`.
    """
    best = example["best"]
    print(
        f"\n{method}, the best of the first step's {metrics['rollouts']} rollouts, of problem "
        f"{best['id']!r}:\n{best['text'][:SHOWN]}\nrewards: {best['rewards']}\n"
        f"of all: {metrics['earned']:.0%} of the slots earn something, {metrics['answers']:.0%} hold a "
        f"distinct answer; {metrics['cut_off']:.0%} of the rollouts were cut off (--max-new-tokens "
        f"{config.max_new_tokens} per answer)",
        file=sys.stderr,
    )
    if not metrics["answers"]:
        print(
            f"{method}: no rollout of the first step holds an answer that can be read.\n"
            f"{why_unread(config, task, best['text'])}",
            file=sys.stderr,
        )
    elif metrics["answers"] < FEW:
        print(
            f"{method}: few slots hold a distinct answer. The others repeat one of their rollout, or "
            f"hold none that can be read, which earns the least, {task.minimum:g}. Does the prompt ask "
            "for the form, with examples? Task.request writes such a prompt; small models follow "
            'form = "lines" best. If many were cut off, raise --max-new-tokens.',
            file=sys.stderr,
        )
    elif not metrics["earned"]:
        print(
            f"{method}: all answers of the first step earn the least, {task.minimum:g}. If the next "
            "steps show no reward above it, nothing is learnt: look at what the answers lack in "
            "samples.jsonl, show an example in the prompt, or choose an easier reward to begin with.",
            file=sys.stderr,
        )


def why_unread(config: Config, task: Task, text: str) -> str:
    """What to look at where no rollout holds an answer, the likeliest reason first.

    Args:
        text: one of the rollouts.
    """
    opening = f"<{task.tag}_1>"
    if config.model == "tiny":
        reasons = [
            f"are --warm-steps {config.warm_steps} too few, so that it cannot write the tags yet?"
        ]
        if config.max_new_tokens:
            reasons.append(f"is --max-new-tokens {config.max_new_tokens} per answer too few?")
        return "\n".join(f"- {reason}" for reason in reasons)
    if task.form == "lines":
        reasons = ["the first line is empty, a <think> is not closed, or the line was cut off"]
    elif opening in text:
        reasons = [f"{opening} is there, but no </{task.tag}_1> after it"]
    else:
        reasons = [f"the tag {opening} is missing"]
    reasons.append("does find_answers(text, m, finished) of the task read this form?")
    reasons.append(
        "does the prompt ask for this form, with examples? Task.request writes such a prompt; small "
        'models follow form = "lines" best'
    )
    limit = config.max_new_tokens
    reasons.append(f"is --max-new-tokens {limit} per answer too few (metric cut_off)?")
    if type(task).demonstration is not Task.demonstration:
        reasons.append(f"are --warm-steps {config.warm_steps} too few?")
    return "\n".join(f"- {reason}" for reason in reasons)


def tell_no_signal(method: str, metrics: dict[str, float]) -> None:
    """Say that learning has stopped, with what it means and what to do.

    Args:
        metrics: of the last step.
    """
    fix = "no answer earns more than the least: take easier problems, a denser reward or a warm-up"
    if metrics["earned"]:
        fix = (
            "if the answers are all alike (metric diversity), begin anew with a lower --lr or another "
            "--method; else take harder or easier problems, a larger --group-size or --temperature"
        )
    print(
        f"\n{method}: no signal in the last {SILENT_STEPS} steps: all rollouts of each group were paid "
        f"the same, so nothing is learnt from them; {fix}",
        file=sys.stderr,
    )


def tell_unread(method: str, config: Config, task: Task, samples: Path) -> None:
    """Say at the end of a training in which no answer was read that nothing was learnt.

    Args:
        samples: the method's samples.jsonl, whose last rollout is shown.
    """
    text = read_log(samples)[-1]["rollouts"][0]["text"]
    print(
        f"{method}: no rollout held an answer that could be read, so nothing was learnt. "
        f"One of the last:\n{text[:SHOWN]}\n{why_unread(config, task, text)}",
        file=sys.stderr,
    )
