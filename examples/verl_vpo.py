"""VPO in veRL: its synchronous trainer with the advantages of any method in vpo.py.

    pip install verl==0.9.1 TransferQueue==0.1.11 matplotlib tqdm    # and vLLM
    python examples/verl_vpo.py --task my_task.py --m 1 --problems 4000 > train.jsonl
    python examples/verl_vpo.py --task my_task.py --m 1 --problems 200 --split test > test.jsonl
    export PYTHONPATH=. VERL_USE_EXTERNAL_MODULES=examples.verl_vpo
    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=vpo +trainer.v1.vpo.method=group_vpo \
        reward.custom_reward_function.path=pkg://examples.verl_vpo algorithm.adv_estimator=grpo \
        data.train_files=train.jsonl data.val_files=test.jsonl data.train_batch_size=2 \
        data.max_prompt_length=256 data.max_response_length=32 trainer.logger='[console]' \
        actor_rollout_ref.model.path=HuggingFaceTB/SmolLM2-135M-Instruct actor_rollout_ref.rollout.n=4 \
        actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_mini_batch_size=2 \
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
        trainer.n_gpus_per_node=1 trainer.nnodes=1

my_task.py is the first task of docs/own.md. Two steps ran on a CPU, as tests/optional/verl_cpu.py says; a GPU was
not tried. A rollout ends with an EOS, not with its m-th answer. `trainer.use_v1=False` ignores this file.
"""

import argparse
import copy
import functools
import json
import sys
import threading
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.config import Config, check_methods, options_of, task_defaults
from engine.errors import as_command
from engine.tasks import load_task, take_problems
from eval import weighted_best_at_k
from examples.groups import as_text, group_advantages, of_text
from rewards import Problem, Task, UserError, parse_answers
from rollout import random_generator, score
from vpo import answers_per_rollout

LOCK = threading.Lock()  # veRL calls from several threads, of which one should load the task
# Settings of veRL, the value that each must have, and why.
REQUIRED = (
    ("algorithm.adv_estimator", "grpo", "gae would train a critic, too"),
    ("algorithm.use_kl_in_reward", False, "reward vectors hold no KL; take actor.use_kl_loss"),
    ("reward.custom_reward_function.path", "pkg://examples.verl_vpo", "it gives reward vectors"),
)


@functools.cache
def task_of(name: str, **options) -> Task:
    """The task of this name, as a language model sees it."""
    return load_task(name, "a language model", **options)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict, **task_options
) -> dict[str, float | str]:
    """What a rollout earns: R as `score`, metrics, and as JSON all that advantages need.

    The other arguments are a row's, as `write_rows` writes it. veRL does not tell the prompt: where it
    opened a thought, one that was not closed counts as answers. It leaves out special tokens: where the
    marks of thoughts are such, drafts count.
    """
    with LOCK:
        task = task_of(data_source, **task_options)
    problem, m = Problem(**json.loads(ground_truth)), extra_info["m"]
    reader = copy.copy(task)
    reader.form = "tags"  # numbered lines are read, too; "lines" needs a prompt that ends with "1."
    answers = parse_answers(solution_str, reader, m)
    scored = score(task, [problem], [answers], m)  # (1, 1, m, d)
    is_distinct = scored.answer_mask & ~scored.repeat_mask
    return {
        "score": weighted_best_at_k(scored.vectors[:, 0], m, scored.objective_mask).item(),
        "scalar": scored.scalars.mean().item(),
        "answers": is_distinct.float().mean().item(),
        "scored": as_text(scored),  # veRL would average lists
    }


@dataclass
class Flags:
    """The settings +trainer.v1.vpo.NAME, as in train.py."""

    method: str = "vpo"
    n_weights: int = 100
    alpha: float = 1.0
    subset: int = 0
    seed: int = 0


@register_trainer("vpo")
class VPOTrainer(PPOTrainerSync):
    """veRL's synchronous trainer with our advantages. UserError: a setting cannot be honoured."""

    def __init__(self, config: DictConfig):
        for name, required, why in REQUIRED:
            value = OmegaConf.select(config, name)
            if value != required:
                raise UserError(f"{name}={value}: {why}; take {name}={required}")
        try:
            self.flags = Flags(**config.trainer.v1.get("vpo", {}))
        except TypeError as error:
            raise UserError(f"+trainer.v1.vpo: {error}") from error
        options = asdict(self.flags) | {"method": [self.flags.method]}
        check_methods(Config(group_size=config.actor_rollout_ref.rollout.n, **options))
        config.trainer.v1.trainer_mode = "sync"  # veRL compares this name where it samples
        super().__init__(config)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        m = self.train_dataset.dataframe[0]["extra_info"].get("m", 0)
        if m < 1 or m != answers_per_rollout(self.flags.method, m):
            raise UserError(f"data.train_files: m = {m} for {self.flags.method}; write it with --m")

    def _compute_advantage(self, batch: tq.KVBatchMeta, metrics: dict) -> tq.KVBatchMeta:
        """Replace GRPO's advantages in the rows of a step, which come in any order."""
        batch = super()._compute_advantage(batch, metrics)
        data = tq.kv_batch_get(batch.keys, batch.partition_id, ["extra_fields", "response_mask"])
        extra_fields = data.pop("extra_fields").tolist()
        # PROMPT_ROLLOUT of each row; several turns of a rollout are several rows.
        names = [key.rpartition("_")[0] for key in batch.keys]
        groups = defaultdict(dict)  # of each prompt: what its rollouts earned
        for name, tag, fields in zip(names, batch.tags, extra_fields, strict=True):
            if not tag.get("is_padding"):
                earned = of_text(fields["reward_extra_info"]["scored"])
                groups[name.rpartition("_")[0]][name] = earned
        n = self.config.actor_rollout_ref.rollout.n
        generator = random_generator(self.flags.seed, self.global_steps, "weights")
        options = options_of(self.flags, generator)
        advantage_of = group_advantages(list(groups.values()), n, self.flags.method, options)
        masks = data["response_mask"].unbind()
        rows = [mask * advantage_of.get(name, 0.0) for name, mask in zip(names, masks, strict=True)]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        fields = TensorDict({"advantages": nested, "returns": nested}, len(rows))
        return tq.kv_batch_put(batch.keys, batch.partition_id, fields)


def write_rows(task: str, split: str, problems: int, m: int, data: str = "") -> None:
    """Print a data set for veRL, a row for each problem, whose prompts ask for m answers."""
    loaded = task_of(task, data=data)
    m = m or Config(**task_defaults(loaded, "a language model")).m
    for index, problem in enumerate(take_problems(loaded, split, problems)):
        row = {
            "data_source": task,
            "prompt": [{"role": "user", "content": loaded.prompt(problem, m)}],
            "reward_model": {"style": "rule", "ground_truth": json.dumps(vars(problem))},
            "extra_info": {"index": index, "m": m},
        }
        print(json.dumps(row))


def main() -> None:
    """The command that writes the data set."""
    parser = argparse.ArgumentParser()
    defaults = {"task": "maze", "split": "train", "problems": 1000, "m": 0, "data": ""}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    with as_command("verl_vpo.py"):
        write_rows(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
