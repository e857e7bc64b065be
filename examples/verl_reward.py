"""VPO in veRL: GRPO with a reward function that returns R, the reward of a rollout's set.

    pip install "verl[vllm]==0.9.1"    # in an environment of its own, with the torch that it pins
    python examples/verl_reward.py --task maze --m 3 --problems 4000 > train.jsonl
    python examples/verl_reward.py --task maze --m 3 --problems 200 --split test > test.jsonl
    python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.jsonl data.val_files=test.jsonl
        reward.custom_reward_function.path=examples/verl_reward.py actor_rollout_ref.rollout.n=8
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct
        data.train_batch_size=12 actor_rollout_ref.actor.ppo_mini_batch_size=12 data.max_response_length=768
        actor_rollout_ref.actor.use_dynamic_bsz=True data.max_prompt_length=1024 trainer.logger='[console]'
        trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=50 trainer.test_freq=50

This file follows the sources of veRL 0.9.1, and tests call it as they do. It was NOT run inside
veRL. Every worker needs this repository, torch and transformers. For a task with files add
+reward.custom_reward_function.reward_kwargs.data=FILE, and --data FILE to the first two commands.
veRL normalises R in the group with correction 1 and eps 1e-6. Its GRPO sees one number per rollout, so
methods that compare rollouts (Group VPO, Max@K) cannot be used. veRL has a GDPO of its own, which
needs a key per objective; this file returns none. A rollout that was cut off is read as if it had ended.
"""

import argparse
import copy
import functools
import json
import numbers
import sys
import threading
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.config import Config, task_defaults
from engine.tasks import load_task, take_problems
from eval import diversity
from rewards import Problem, Task, UserError, parse_answers
from rollout import score
from vpo import sample_weights, set_reward

LOCK = threading.Lock()  # veRL calls from several threads, of which one should load the task
LANGUAGE_MODEL = (
    "a language model"  # whichever veRL trains; tasks ask the tiny model in another way
)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict | None = None,
    *,
    n_weights: int = 100,
    alpha: float = 1.0,
    **task_options,
) -> dict[str, float]:
    """R of a rollout as `score`, and metrics beside it. veRL needs the same keys for all rollouts.

    The preference weights are drawn from the problem alone, so that all workers draw the same ones
    for a group.

    Args:
        data_source: the task.
        solution_str: the rollout's text. veRL does not tell the prompt: where it opened a thought, one
            that was not closed counts as answers. It leaves out special tokens: where the marks of
            thoughts are such, drafts count.
        ground_truth: the problem as `rows` writes it.
        extra_info: holds m.
        n_weights, alpha: of `vpo.sample_weights`.
        task_options: of the task, such as `data`.
    """
    with LOCK:
        task = task_of(data_source, **task_options)
    m = (extra_info or {}).get("m") or default_m(task)
    problem = read_problem(ground_truth, m, data_source)

    reader = copy.copy(task)
    reader.form = "tags"  # numbered lines are read, too; "lines" needs a prompt that ends with "1."
    answers = parse_answers(solution_str, reader, m)
    scored = score(task, [problem], [answers], m)  # (1, 1, m, k)
    generator = torch.Generator().manual_seed(zlib.crc32(ground_truth.encode()))
    weights = sample_weights(
        1, n_weights, scored.vectors.shape[-1], alpha=alpha, generator=generator
    )  # (1, K, k)
    R = set_reward(scored.vectors, weights, scored.answer_mask, task.minimum)  # (1, 1)

    is_distinct = scored.answer_mask & ~scored.repeat_mask
    return {
        "score": R.item(),
        "scalar": scored.scalars.mean().item(),
        "best_in_rollout": scored.scalars.amax().item(),
        "answers": is_distinct.float().mean().item(),
        "set_diversity": diversity(scored.vectors[:, 0]).item(),
    }


@functools.cache
def task_of(name: str, **options) -> Task:
    """The task of this name, as a language model sees it."""
    return load_task(name, LANGUAGE_MODEL, **options)


def default_m(task: Task) -> int:
    """The answers per rollout that train.py would ask for."""
    return Config(**task_defaults(task, LANGUAGE_MODEL)).m


def read_problem(ground_truth: str, m: object, data_source: str) -> Problem:
    """The problem of a row. UserError: `rows` did not write it."""
    try:
        if not isinstance(m, numbers.Integral) or m < 1:
            raise ValueError("m must be a whole number from 1")
        return Problem(**json.loads(ground_truth))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"ground_truth {ground_truth!r:.60}, m = {m}: no row of {data_source}; write the rows with "
            "examples/verl_reward.py"
        ) from error


def rows(task_name: str, split: str, n: int, m: int, **task_options) -> list[dict]:
    """n rows of a data set for veRL, whose prompts ask for m answers (0: the task's own)."""
    task = task_of(task_name, **task_options)
    m = m or default_m(task)
    records = []
    for index, problem in enumerate(take_problems(task, split, n)):
        message = {"role": "user", "content": task.prompt(problem, m)}
        truth = json.dumps({"id": problem.id, "data": problem.data})
        records.append(
            {
                "data_source": task_name,
                "prompt": [message],
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"index": index, "m": m},
            }
        )
    return records


def main() -> None:
    """Write rows to stdout, one per line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--task", default="maze")
    parser.add_argument("--data", help="file of problems, for tasks that take one")
    parser.add_argument("--m", type=int, default=0, help="answers per rollout; 0: the task's own")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--split", default="train", choices=("train", "validation", "test"))
    args = parser.parse_args()
    if args.m < 0 or args.problems < 1:
        parser.error(f"--m {args.m} --problems {args.problems}: must be positive")
    task_options = {"data": args.data} if args.data else {}
    try:
        for row in rows(args.task, args.split, args.problems, args.m, **task_options):
            print(json.dumps(row))
    except UserError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
