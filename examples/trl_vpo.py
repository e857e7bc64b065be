"""VPO in TRL's GRPOTrainer, for models that need several GPUs: no patch, a reward function that returns R.

    pip install -r examples/requirements.txt
    python train.py --steps 1 --eval-problems 0 --out runs/start-for-trl
    python examples/trl_vpo.py --learning_rate 5e-4 --warmup_steps 10          a CPU, the tiny model, the maze, 50 steps
        --eval_strategy steps --eval_steps 50 --eval_on_start True             R of 200 held-out mazes before and after
    accelerate launch --multi_gpu --num_processes 2 examples/trl_vpo.py --learning_rate 5e-4      two ranks, on CPUs too

Every setting of GRPOConfig is a flag too; --help lists them all. TRL normalises R in the group, over all ranks, by a
standard deviation with correction 1 and eps 1e-4: its advantages are sqrt((G-1)/G) of ours. Methods that are no z-norm
of one number (gdpo, maxrl, max_at_k, group_vpo ...) get a trainer whose advantages are those of vpo.ADVANTAGES.

Written after accelerate's and TRL's manuals, not run: several GPUs, vLLM, DeepSpeed, FSDP, nodes. MODEL="--model
Qwen/Qwen2.5-7B-Instruct --max_new_tokens 256 --per_device_train_batch_size 4 --gradient_accumulation_steps 3":

    SHARDED="--use_deepspeed --zero_stage 3 --zero3_init_flag true"     without it every GPU holds 16 bytes per weight
    accelerate launch --num_processes 8 $SHARDED examples/trl_vpo.py $MODEL --use_vllm --vllm_mode colocate
    accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP
        examples/trl_vpo.py $MODEL                                                               the same without vLLM
    trl vllm-serve --model Qwen/Qwen2.5-7B-Instruct                 on a node of its own, VLLM; on each of two others:
    accelerate launch --num_machines 2 --machine_rank RANK --main_process_ip FIRST --main_process_port 29500 $SHARDED
        --num_processes 16 examples/trl_vpo.py $MODEL --use_vllm --vllm_mode server --vllm_server_host VLLM
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.decoding import encode_prompts
from engine.flags import as_command
from engine.models import check_task, load_config_and_tokenizer
from eval import diversity
from rewards import Problem, Task, UserError, load_task, take_problems
from rollout import build_prompt, rollout_length, score_texts
from vpo import ADVANTAGES, answers_per_rollout, sample_weights, set_reward

METHODS = [
    method for method in ADVANTAGES if method != "goal_conditioned"
]  # its weighting must stand in the prompt
SCALAR = (
    "grpo",
    "multi_rlvr",
    "vpo",
)  # the z-norm of one number in the group: what GRPOTrainer itself does
NEEDED = {
    "scale_rewards": ("group", "a reward is normalised once, in its group"),
    "multi_objective_aggregation": (
        "sum_then_normalize",
        "R would be normalised in its group, then again",
    ),
    "reward_weights": (None, "R is one number, a weight changes only its size or its sign"),
    "remove_unused_columns": (False, "the column that tells a rollout's problem would be dropped"),
}
CUTS = {
    "max_new_tokens",
    "max_tokens",
    "max_length",
    "max_time",
    "stopping_criteria",
    "eos_token_id",
    "stop",
    "stop_strings",
    "stop_token_ids",
    "num_return_sequences",
    "n",
}
NO_GROUP = {"do_sample", "num_beams"}  # rollouts of a group would all be the same


def about(default, help: str):
    """A setting of our own."""
    return field(default=default, metadata={"help": help})


@dataclass
class VPOConfig(GRPOConfig):
    """TRL's settings and ours. Raises UserError for those that would normalise twice or cut a set of m answers."""

    output_dir: str | None = about("runs/trl", "folder for checkpoints")
    per_device_train_batch_size: int = about(
        96, "rollouts per rank and micro-batch, of all prompts together"
    )
    per_device_eval_batch_size: int = about(96, "the same in the evaluation")
    max_completion_length: int | None = about(
        None, "tokens of a rollout; not given: what its m answers need"
    )
    task: str = about("maze", "maze, toy, code, or a Python file that defines a Task")
    data: str = about("", "JSON Lines file of problems, for tasks that take one")
    model: str = about("runs/start-for-trl/start", "a local Hugging Face checkpoint, or a Hub id")
    method: str = about("vpo", ", ".join(METHODS))
    m: int = about(0, "answers per rollout of vpo and multi_rlvr; 0: the task's own")
    steps: int = about(50, "updates")
    max_new_tokens: int = about(
        0, "of an answer, m times as many of a rollout; 0: 256, tiny what it needs"
    )
    n_weights: int = about(100, "K, weightings per prompt")
    alpha: float = about(1.0, "of the Dirichlet of the weightings")
    sampler: str = about("iid", "of the weightings: iid or sobol")
    subset: int = about(
        0, "s, rollouts that form a set together; 0: 1 for vpo, half the group for the others"
    )

    def __post_init__(self):
        if min(self.steps, self.m + 1, self.subset + 1, self.max_new_tokens + 1) < 1:
            raise UserError(
                f"--steps {self.steps} --m {self.m} --subset {self.subset}: must be positive"
            )
        for name in (
            "num_generations",
            "num_generations_eval",
            "gradient_accumulation_steps",
            "steps_per_generation",
            "num_iterations",
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least 1")
        if self.resume_from_checkpoint == "True":  # the newest in output_dir
            self.resume_from_checkpoint = True
        elif self.resume_from_checkpoint and not Path(self.resume_from_checkpoint).is_dir():
            raise UserError(
                f"--resume_from_checkpoint {self.resume_from_checkpoint}: no such folder; or say True"
            )
        self.max_steps = self.max_steps if self.max_steps > 0 else self.steps
        if not torch.accelerator.is_available():
            self.use_cpu, self.bf16 = (
                True,
                bool(self.bf16),
            )  # else ranks on CPUs would train alone, without a word
        super().__post_init__()
        if self.method not in METHODS:
            raise UserError(f"--method {self.method}: choose from {', '.join(METHODS)}")
        for name, (value, why) in NEEDED.items():
            if getattr(self, name) != value:
                raise UserError(f"--{name} {getattr(self, name)}: {why}; take --{name} {value}")
        if not isinstance(self.generation_kwargs or {}, dict):
            raise UserError(f"--generation_kwargs {self.generation_kwargs}: must be a JSON object")
        for names, why in (
            (CUTS, "a set of m answers must end by itself"),
            (NO_GROUP, "a group must be sampled"),
        ):
            if named := names & set(self.generation_kwargs or {}):
                raise UserError(f"--generation_kwargs {min(named)}: {why}; leave it out")
        for name in ["num_generations"] + ["num_generations_eval"] * (self.eval_strategy != "no"):
            shape = (1, getattr(self, name) or self.num_generations, 1)
            try:
                self.advantages(torch.zeros(*shape, 2), torch.zeros(shape), torch.ones(shape))
            except ValueError as error:
                raise UserError(f"--{name} {shape[1]}: {error}") from error

    def advantages(self, rewards: Tensor, scalars: Tensor, mask: Tensor, **options) -> Tensor:
        """vpo.ADVANTAGES with these settings: rewards (P, G, m, k), scalars and mask (P, G, m) -> (P, G)."""
        return ADVANTAGES[self.method](
            rewards,
            scalars,
            mask,
            n_weights=self.n_weights,
            alpha=self.alpha,
            sampler=self.sampler,
            subset=self.subset or None,
            **options,
        )


class SetReward:
    """What TRL calls with the B rollouts of a rank, which may hold a part of a group only: R of each."""

    def __init__(self, config: VPOConfig, task: Task, problems: list[Problem], m: int):
        self.config, self.task, self.problems, self.m = config, task, problems, m

    def __call__(self, completions: list[str], problem: list[int], log_metric, **_) -> list[float]:
        asked = [self.problems[row] for row in problem]
        self.scored = scored = score_texts(self.task, asked, completions, self.m)  # (B, 1, m, k)
        log_metric("scalar", scored.scalars.mean().item())
        log_metric("best_in_rollout", scored.scalars.amax(-1).mean().item())
        log_metric("set_diversity", diversity(scored.vectors[:, 0]).mean().item())
        if self.config.method != "vpo":
            return scored.scalars.sum((1, 2)).tolist()
        k = scored.vectors.shape[-1]
        weights = torch.stack(
            [
                pad(self.weights(row, int(n)), (0, k - int(n)))
                for row, n in zip(problem, scored.objective_mask.sum(1), strict=True)
            ]
        )
        return set_reward(scored.vectors, weights, scored.mask, self.task.minimum)[:, 0].tolist()

    def weights(self, row: int, k: int) -> Tensor:
        """The weightings (K, k) of a prompt: its rollouts share them, on whatever ranks they lie."""
        return sample_weights(
            self.config.n_weights,
            k,
            alpha=self.config.alpha,
            sampler=self.config.sampler,
            generator=self.generator(row),
        )

    def generator(self, row: int) -> torch.Generator:
        """Seeded by the prompt: every rank has random states of its own."""
        return torch.Generator().manual_seed(self.config.seed * 1_000_003 + row)


class MatrixTrainer(GRPOTrainer):
    """GRPOTrainer with the advantages of any method: the reward matrices of all ranks go through vpo.ADVANTAGES."""

    def _calculate_rewards(self, inputs, *args):
        rewards, reward = super()._calculate_rewards(inputs, *args), self.reward_funcs[0]
        mine = [row["problem"] for row in inputs], *vars(reward.scored).values()
        rows, vectors, scalars, mask, exists = zip(
            *gather_object(list(zip(*mine, strict=True))), strict=True
        )
        k, G = (
            max(map(len, exists)),
            self.num_generations if self.model.training else self.num_generations_eval,
        )
        vectors, exists = (
            torch.stack([pad(x, (0, k - x.shape[-1])) for x in xs]) for xs in (vectors, exists)
        )
        scalars, mask = (torch.stack(xs).view(-1, G, reward.m) for xs in (scalars, mask))
        self.all_advantages = self.args.advantages(
            vectors.view(-1, G, reward.m, k),
            scalars,
            mask,
            objective_mask=exists.view(-1, G, k)[:, 0],
            floor=reward.task.minimum,
            generator=reward.generator(rows[0]),
        ).flatten()
        return rewards

    def _generate_and_score_completions(self, inputs):
        outputs, first = (
            super()._generate_and_score_completions(inputs),
            self.accelerator.process_index * len(inputs),
        )
        return outputs | {
            "advantages": self.all_advantages[first : first + len(inputs)].to(
                self.accelerator.device
            )
        }


def trainer_of(config: VPOConfig) -> GRPOTrainer:
    """The trainer, its prompts and its reward. Raises UserError for a task, a model or a length that cannot be."""
    task = load_task(config.task, data=config.data)
    if config.data and "data" not in task.flags:
        raise UserError(f"--data {config.data}: task {task.name} reads no file")
    m = answers_per_rollout(config.method, config.m or task.m)
    check_task(task, m)
    if config.model == "tiny" or (
        config.model == VPOConfig.model and not Path(config.model).exists()
    ):
        raise UserError(
            f"--model {config.model}: no checkpoint; python train.py --steps 1 --eval-problems 0 "
            f"--out runs/start-for-trl makes {VPOConfig.model}"
        )
    model_config, tokenizer = load_config_and_tokenizer(config.model, task)
    length = rollout_length(task, tokenizer, m, config.max_new_tokens)
    config.max_completion_length = config.max_completion_length or length
    if config.max_completion_length < length:
        raise UserError(
            f"--max_completion_length {config.max_completion_length}: cuts a set of m = {m} answers, which "
            f"may take {length} tokens; leave it out, and say with --max_new_tokens how long an answer is"
        )
    generations = -(
        -config.max_steps
        * config.gradient_accumulation_steps
        // (config.steps_per_generation * config.num_iterations)
    )
    n = generations * config.generation_batch_size // config.num_generations
    problems = take_problems(task, "train", n, config.seed) + take_problems(
        task, "test", task.eval_problems
    )
    prompts = [build_prompt(tokenizer, task, problem, m) for problem in problems]
    encode_prompts(model_config, tokenizer, prompts[:32], length)
    bos = tokenizer.bos_token
    if (
        tokenizer.chat_template
        and bos
        and tokenizer(bos)["input_ids"] == [tokenizer.bos_token_id] * 2
    ):
        prompts = [prompt.removeprefix(bos) for prompt in prompts]  # TRL writes one of its own
    dataset = Dataset.from_dict({"prompt": prompts, "problem": list(range(len(prompts)))})
    kind = GRPOTrainer if config.method in SCALAR and config.subset <= 1 else MatrixTrainer
    return kind(
        config.model,
        SetReward(config, task, problems, m),
        config,
        dataset.select(range(n)),
        dataset.select(range(n, len(prompts))),
        tokenizer,
    )


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = HfArgumentParser(
        VPOConfig, allow_abbrev=False, usage="python examples/trl_vpo.py [--FLAG VALUE ...]"
    )
    parser.error = lambda message: parser.exit(
        2, f"{parser.prog}: error: {message}; --help lists all flags\n"
    )

    def run() -> None:
        try:
            (config,) = parser.parse_args_into_dataclasses(argv)
            trainer = trainer_of(config)
        except (ValueError, ImportError) as error:  # what TRL itself refuses
            raise UserError(error) from error
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
        trainer.save_model()

    as_command(parser, run)


if __name__ == "__main__":
    main()
