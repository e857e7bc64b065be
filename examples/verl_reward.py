"""VPO in veRL: its GRPO as it is, with a reward function that returns R, the worth of a rollout's set.

    python examples/verl_reward.py --task maze --m 3 --problems 4000 > train.jsonl
    python examples/verl_reward.py --task maze --m 3 --problems 200 --split test > test.jsonl
    python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.jsonl data.val_files=test.jsonl
        reward.custom_reward_function.path=examples/verl_reward.py actor_rollout_ref.rollout.n=8
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct
        data.train_batch_size=12 actor_rollout_ref.actor.ppo_mini_batch_size=12 data.max_response_length=768
        actor_rollout_ref.actor.use_dynamic_bsz=True data.max_prompt_length=1024 trainer.logger='[console]'
        trainer.n_gpus_per_node=8 trainer.nnodes=1

Written after the sources of veRL 0.9.1 and called in tests as they call it; it was NOT run inside veRL. This folder,
torch and transformers must be on every worker; a task with files gets them by
+reward.custom_reward_function.reward_kwargs.data=FILE, and --data FILE in the first two commands. veRL normalises R in
the group with correction 1 and eps 1e-6. The estimators that need the vectors have no place there: a registered one
sees R alone.
"""

import argparse
import functools
import json
import sys
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval import diversity
from rewards import Problem, UserError, load_task, take_problems
from rollout import score_texts
from vpo import sample_weights, set_reward

task_of = functools.cache(load_task)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict | None = None,
    *,
    n_weights: int = 100,
    alpha: float = 1.0,
    sampler: str = "iid",
    **options,
) -> dict[str, float]:
    """R of a rollout as `score`, and what to watch beside it: scalars, as veRL wants, the same keys for all rollouts.

    data_source is the task, ground_truth the problem as `rows` writes it, extra_info holds m. The weightings are drawn
    from the problem alone, so that all workers give a group the same. Raises UserError for a row of another kind.
    """
    task = task_of(data_source, **options)
    m = (extra_info or {}).get("m") or task.m
    try:
        problem = Problem(**json.loads(ground_truth))
        if not (isinstance(m, int) and m > 0):
            raise ValueError("m must be a whole number from 1")
    except (TypeError, ValueError) as error:
        raise UserError(
            f"ground_truth {ground_truth!r:.60}, m = {m}: no row of {data_source}; write the rows with "
            "examples/verl_reward.py"
        ) from error
    scored = score_texts(task, [problem], [solution_str], m)  # (1, 1, m, k)
    generator = torch.Generator().manual_seed(zlib.crc32(ground_truth.encode()))
    weights = sample_weights(
        n_weights, scored.vectors.shape[-1], alpha=alpha, sampler=sampler, generator=generator
    )
    return {
        "score": set_reward(scored.vectors, weights[None], scored.mask, task.minimum).item(),
        "scalar": scored.scalars.mean().item(),
        "best_in_rollout": scored.scalars.amax().item(),
        "answers": scored.mask.float().mean().item(),
        "set_diversity": diversity(scored.vectors[:, 0]).item(),
    }


def rows(task_name: str, split: str, n: int, m: int, seed: int = 0, **options) -> list[dict]:
    """n rows of a data set of veRL's, whose prompts ask for m answers (0: the task's own)."""
    task = task_of(task_name, **options)
    return [
        {
            "data_source": task_name,
            "prompt": [{"role": "user", "content": task.prompt(problem, m or task.m)}],
            "reward_model": {
                "style": "rule",
                "ground_truth": json.dumps({"id": problem.id, "data": problem.data}),
            },
            "extra_info": {"index": index, "m": m or task.m},
        }
        for index, problem in enumerate(take_problems(task, split, n, seed))
    ]


def main() -> None:
    """Write rows to stdout, a line each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--task", default="maze")
    parser.add_argument(
        "--data", default="", help="JSON Lines file of problems, for tasks that take one"
    )
    parser.add_argument("--m", type=int, default=0, help="answers per rollout; 0: the task's own")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--split", default="train", choices=("train", "validation", "test"))
    args = parser.parse_args()
    if args.m < 0 or args.problems < 1:
        parser.error(f"--m {args.m} --problems {args.problems}: must be positive")
    try:
        for row in rows(
            args.task,
            args.split,
            args.problems,
            args.m,
            **({"data": args.data} if args.data else {}),
        ):
            print(json.dumps(row))
    except UserError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
