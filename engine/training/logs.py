"""The logs of a training: metrics, rollouts, snapshots, trackers, and lines on the screen."""

import json
import secrets
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import Config
from engine.evaluations import Pool
from engine.files import add_record, cut_log, write_text
from rewards import EXAMPLES, Problem, Task, parse_answers
from vpo import Scored

LOGS = ("metrics", "samples", "snapshots", "evaluations")
SHOWN = ("reward", "diversity", "W@m")  # metrics beside the progress bar
SILENT_STEPS = 10  # without a signal, after which a user hears of it


class MethodLog:
    """The logs of one method's training, cut off after the step of its newest checkpoint."""

    def __init__(self, method: str, config: Config, task: Task, step: int):
        self.method = method
        self.config = config
        self.task = task
        self.folder = Path(config.out) / method
        for name in LOGS:
            cut_log(self.folder / f"{name}.jsonl", step or -1)  # at step 0 nothing is kept
        self.track = open_tracker(config.log, self.folder, step)
        self.gaps: list[float] = []  # of the steps without a signal until now
        self.has_warned = False
        if config.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def write(self, step: int, metrics: dict[str, float | Tensor], example: dict) -> dict:
        """Log a training step. Returns the metrics that are shown beside the progress bar."""
        row = {}
        for name, value in metrics.items():
            row[name] = value.item() if isinstance(value, Tensor) else value
        row["tokens_per_second"] = row["tokens"] / row["seconds"]
        if step == 1 and not self.config.is_tiny:
            show_first_step(self.method, self.config, self.task, example, row)
        self.tell_no_signal(step, row)
        add_record(self.folder / "metrics.jsonl", {"step": step} | row)
        if step % 10 == 1 or step == self.config.steps:
            add_record(self.folder / "samples.jsonl", {"step": step} | example)
            if self.config.device == "cuda":
                record = {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3)}
                write_text(self.folder / "memory.json", json.dumps(record))
        self.track(row, step)
        return {name: row[name] for name in SHOWN}

    def write_snapshot(self, step: int, pool: Pool) -> None:
        """Log the policy's answers to a few held-out problems, for the page and the film."""
        records = []
        for i, problem in enumerate(pool.problems):
            vectors = pool.rewards[i][:, pool.objective_mask[i]]  # (n, d of the problem)
            rewards = vectors.double().round(decimals=6).tolist()
            records.append({"id": problem.id, "answers": pool.answers[i], "rewards": rewards})
        add_record(self.folder / "snapshots.jsonl", {"step": step, "problems": records})

    def write_evaluation(self, step: int, measures: dict[str, Tensor]) -> None:
        """Log measures (N) of N held-out problems, for a figure of their course."""
        means = {name: value.mean().item() for name, value in measures.items()}
        add_record(self.folder / "evaluations.jsonl", {"step": step} | means)

    def tell_no_signal(self, step: int, row: dict[str, float]) -> None:
        """Say once that learning has stopped."""
        self.gaps = [] if row["signal"] else [*self.gaps, row["gap"]]
        if len(self.gaps) < SILENT_STEPS or self.has_warned:
            return
        self.has_warned = True
        message = f"no signal in {SILENT_STEPS} steps, step {step}: the rollouts of each group earn the same"
        gap = f"in a group rewards differ by {max(self.gaps):.2g} at most"
        print(f"\n{self.method}: {message}; {gap}; {shares(row)} (docs/faq.md)", file=sys.stderr)


def sample_record(
    task: Task,
    prompts: list[str],
    problems: list[Problem],
    answers: list[list[str]],
    rollouts: Any,
    scored: Scored,
    advantages: Tensor,
) -> dict:
    """The rollouts of a step's first problem, and the step's best one, for samples.jsonl."""
    records = []
    for g, A in enumerate(advantages[0].tolist()):
        vectors = scored.vectors[0, g].tolist()
        records.append({"text": rollouts.texts[g], "rewards": vectors, "advantage": A})
    best = scored.scalars.amax(-1).argmax().item()  # row p * G + g, the one with the best answer
    best_record = {
        "problem": asdict(problems[best // len(records)]),
        "prompt": prompts[best // len(records)],
        "text": rollouts.texts[best],
        "rewards": scored.vectors.flatten(0, 1)[best].tolist(),
    }
    record = {"problem": asdict(problems[0]), "rollouts": records, "best": best_record}
    return record | {"copied": share_of_copies(task, prompts, answers)}


def shown_examples(prompt: str, task: Task) -> list[str]:
    """The examples that `Task.request` wrote into a prompt."""
    _, begin, shown = prompt.rpartition(EXAMPLES)
    return parse_answers(shown, task, m=shown.count("\n")) if begin else []


def share_of_copies(task: Task, prompts: list[str], answers: list[list[str]]) -> float:
    """The share of the answers of P * G rollouts that are examples of their prompts (P)."""
    examples = [shown_examples(prompt, task) for prompt in prompts]
    is_copy = []
    for row, row_answers in enumerate(answers):
        p = row * len(prompts) // len(answers)
        is_copy += [answer in examples[p] for answer in row_answers]
    return sum(is_copy) / max(1, len(is_copy))


def snapshot_steps(config: Config) -> set[int]:
    """The steps after which answers are kept, six steps or more apart; 0 is the start model."""
    n = min(config.snapshots, max(2, config.steps // 6))
    gaps = max(1, n - 1)
    return {config.steps - round(i * config.steps / gaps) for i in range(n)}


def shares(row: dict[str, float]) -> str:
    """The shares of the answers asked for that are there and distinct, and that earn a reward."""
    distinct = f"{row['answers']:.0%} of the answers asked for are there and distinct"
    return f"{distinct}; {row['rewarded']:.0%} earn a reward"


def show_first_step(
    method: str, config: Config, task: Task, example: dict, row: dict[str, float]
) -> None:
    """Show the best rollout of a language model's first step, and what each objective earned."""
    best = example["best"]
    lines = [
        f"\n{method}, the end of the prompt of problem {best['problem']['id']!r}:",
        best["prompt"][-500:],
        f"the best of the first step's {row['rollouts']} rollouts:",
        best["text"][:1000],
    ]
    for vector in best["rewards"]:
        numbers = [f"{value:.2f}" for value in vector]
        lines.append(f"rewards: {', '.join(numbers)}")
    cut_off = f"{row['cut_off']:.0%} of the rollouts were cut off (--max-new-tokens)"
    lines.append(f"{shares(row)}; {cut_off}")
    if example["copied"]:
        copied = f"{example['copied']:.0%} of the answers copy an example of the prompt"
        lines.append(f"{copied}: these should earn little (docs/own.md)")
    for name in task.objectives:
        share = row[f"rewarded_{name}"]
        lines.append(f"{name}: {share:.0%} earn a reward, mean {row[f'reward_{name}']:.3f}")
    if not all(row[f"rewarded_{name}"] for name in task.objectives):
        advice = "show examples in Task.prompt, or imitate some (Task.demonstration, --warm-steps)"
        lines.append(f"what no answer earns is not learnt: {advice}")
    if config.device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        lines.append(f"the first step took {peak:.1f} GiB at most")
    print("\n".join(lines), file=sys.stderr)


def open_tracker(name: str, folder: Path, done: int) -> Callable[[dict[str, float], int], None]:
    """A function (metrics, step) that sends a method's metrics to the tracker that --log names."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

        def add_scalars(metrics: dict[str, float], step: int) -> None:
            for metric, value in metrics.items():
                writer.add_scalar(metric, value, step)
            writer.flush()

        return add_scalars
    if name == "wandb":
        import wandb

        title = f"{folder.parent.name}-{folder.name}"
        id_file = folder / "wandb-id"  # by which a resume goes on with the run
        if done == 0 or not id_file.exists():
            id_file.write_text(secrets.token_hex(4), "utf-8")
        id = id_file.read_text("utf-8")
        return wandb.init(
            project="vpo", name=title, id=id, resume="allow", dir=str(folder), reinit=True
        ).log
    return lambda metrics, step: None
