"""VPO in TRL's GRPOTrainer, for models that need several GPUs: a reward function that returns R.

    pip install -r examples/requirements.txt
    python train.py --steps 1 --eval-problems 0 --out runs/start-for-trl
    # On a CPU: the tiny model, the maze, 50 steps.
    python examples/trl_vpo.py --learning_rate 5e-4 --warmup_steps 10
    # The same with R of 200 held-out mazes before and after:
        --eval_strategy steps --eval_steps 50 --eval_on_start True
    # Two ranks, on CPUs too:
    accelerate launch --multi_gpu --num_processes 2 examples/trl_vpo.py --learning_rate 5e-4

Every flag of GRPOConfig is a flag here too; --help lists them all. TRL normalises R in its group,
over all ranks, by a standard deviation with correction 1 and eps 1e-4: its advantages are
sqrt((G-1)/G) times ours. Methods whose advantage is not the z-norm of one number (gdpo, maxrl,
max_at_k, group_vpo ...) get a trainer that calls vpo.ADVANTAGES.

The commands below follow the manuals of accelerate and TRL. They were not run: several GPUs, vLLM,
DeepSpeed, FSDP, several nodes.

    MODEL="--model Qwen/Qwen2.5-7B-Instruct --max_new_tokens 256 --per_device_train_batch_size 4
        --gradient_accumulation_steps 3"
    # Without it every GPU holds 16 bytes per weight:
    SHARDED="--use_deepspeed --zero_stage 3 --zero3_init_flag true"
    # One node with vLLM, then without:
    accelerate launch --num_processes 8 $SHARDED
        examples/trl_vpo.py $MODEL --use_vllm --vllm_mode colocate
    accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP examples/trl_vpo.py $MODEL
    # vLLM on a node of its own, named VLLM, then the command for each of two others:
    trl vllm-serve --model Qwen/Qwen2.5-7B-Instruct
    accelerate launch --num_machines 2 --machine_rank RANK --main_process_ip FIRST
        --main_process_port 29500 $SHARDED --num_processes 16
        examples/trl_vpo.py $MODEL --use_vllm --vllm_mode server --vllm_server_host VLLM
"""

import math
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

from engine.checks import check_task
from engine.config import as_command
from engine.decoding import encode_prompts
from engine.models import Tokenizer, load_config_and_tokenizer
from eval import diversity
from rewards import Problem, Task, UserError, take_problems
from rollout import Scored, build_prompt, sampling_options, score_texts
from tasks import load_task
from vpo import ADVANTAGES, answers_per_rollout, sample_weights, set_reward

# A goal-conditioned prompt holds preference weights, which TRL's data set cannot draw anew.
METHODS = [method for method in ADVANTAGES if method != "goal_conditioned"]
# The methods whose advantage is the z-norm of one number in the group: GRPOTrainer computes it.
SCALAR_METHODS = ("grpo", "multi_rlvr", "vpo")

AT_LEAST_ONE = (
    "num_generations",
    "num_generations_eval",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
)
# Flags of TRL, the value that each must have, and why.
REQUIRED = (
    ("scale_rewards", "group", "a reward is normalised once, in its group"),
    (
        "multi_objective_aggregation",
        "sum_then_normalize",
        "R would be normalised in its group, then again",
    ),
    ("reward_weights", None, "R is one number, a weight changes only its size or its sign"),
    (
        "remove_unused_columns",
        False,
        "the column that tells a rollout's problem would be dropped",
    ),
)
# Keys of --generation_kwargs that are refused.
CUTS_SET = {
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
REPEATS_ROLLOUT = {"do_sample", "num_beams"}


def flag(default, help: str):
    """A field of VPOConfig with its help text."""
    return field(default=default, metadata={"help": help})


@dataclass
class VPOConfig(GRPOConfig):
    """The flags of TRL and of this file. UserError: one normalises twice, or cuts a set of answers."""

    output_dir: str | None = flag("runs/trl", "folder for checkpoints")
    per_device_train_batch_size: int = flag(
        96, "rollouts per rank and micro-batch, of all prompts together"
    )
    per_device_eval_batch_size: int = flag(96, "the same in the evaluation")
    max_completion_length: int | None = flag(
        None, "tokens of a rollout; not given: what its m answers need"
    )
    task: str = flag("maze", "maze, toy, code, or a Python file that defines a Task")
    data: str = flag("", "JSON Lines file of problems, for tasks that take one")
    model: str = flag("runs/start-for-trl/start", "a local Hugging Face checkpoint, or a Hub id")
    method: str = flag("vpo", ", ".join(METHODS))
    m: int = flag(0, "answers per rollout of vpo and multi_rlvr; 0: the task's own")
    steps: int = flag(50, "updates")
    max_new_tokens: int = flag(
        0, "of an answer, m times as many of a rollout; 0: 256, tiny what it needs"
    )
    n_weights: int = flag(100, "K, preference weights per prompt")
    alpha: float = flag(1.0, "of the Dirichlet distribution of the preference weights")
    sampler: str = flag("iid", "of the preference weights: iid or sobol")
    subset: int = flag(
        0, "s, rollouts that form a set together; 0: 1 for vpo, half the group for the others"
    )

    def __post_init__(self) -> None:
        self._check_flags()
        if self.max_steps <= 0:
            self.max_steps = self.steps
        if not torch.accelerator.is_available():
            self.use_cpu = True  # else every rank on a CPU would train alone, without a word
            self.bf16 = bool(self.bf16)
        super().__post_init__()
        self._check_trl_flags()
        self._check_groups()

    def _check_flags(self) -> None:
        """Check the ranges of flags, and name a checkpoint to resume from in TRL's way."""
        if self.steps < 1 or min(self.m, self.subset, self.max_new_tokens) < 0:
            raise UserError(
                f"--steps {self.steps} --m {self.m} --subset {self.subset}: must be positive"
            )
        if self.method not in METHODS:
            raise UserError(f"--method {self.method}: choose from {', '.join(METHODS)}")
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} {value}: must be at least 1")
        checkpoint = self.resume_from_checkpoint
        if checkpoint == "True":
            self.resume_from_checkpoint = True  # the newest in output_dir
        elif checkpoint and not Path(checkpoint).is_dir():
            raise UserError(f"--resume_from_checkpoint {checkpoint}: no such folder; or say True")

    def _check_trl_flags(self) -> None:
        """Refuse what would normalise twice, cut a set of answers, or repeat a rollout."""
        for name, required, why in REQUIRED:
            value = getattr(self, name)
            if value != required:
                raise UserError(f"--{name} {value}: {why}; take --{name} {required}")
        generation = self.generation_kwargs or {}
        if not isinstance(generation, dict):
            raise UserError(f"--generation_kwargs {generation}: must be a JSON object")
        for name in sorted(generation):
            if name in CUTS_SET:
                raise UserError(
                    f"--generation_kwargs {name}: a set of m answers must end by itself; leave it out"
                )
            if name in REPEATS_ROLLOUT:
                raise UserError(
                    f"--generation_kwargs {name}: a group must be sampled; leave it out"
                )

    def _check_groups(self) -> None:
        """Let the estimator refuse a group, a subset or an alpha that it cannot use."""
        names = ["num_generations"]
        if self.eval_strategy != "no":
            names.append("num_generations_eval")
        for name in names:
            G = getattr(self, name) or self.num_generations
            zeros = torch.zeros(1, G, 1, 2)
            try:
                self.advantages(zeros, zeros[..., 0], torch.ones(1, G, 1))
            except ValueError as error:
                raise UserError(f"--{name} {G}: {error}") from error

    def advantages(self, rewards: Tensor, scalars: Tensor, mask: Tensor, **options) -> Tensor:
        """Rewards (P, G, m, k), scalars (P, G, m) and answer mask (P, G, m) -> advantages (P, G)."""
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
    """The reward function: R of the B rollouts of a rank, which may hold a part of a group."""

    def __init__(self, config: VPOConfig, task: Task, problems: list[Problem], m: int):
        self.config = config
        self.task = task
        self.problems = problems
        self.m = m
        self.scored: Scored | None = None  # of the newest call

    def __call__(self, completions: list[str], problem: list[int], log_metric, **_) -> list[float]:
        """Called by TRL. `problem` is a column of the data set: the row of each rollout's problem."""
        problems = [self.problems[row] for row in problem]
        scored = score_texts(self.task, problems, completions, self.m)  # (B, 1, m, k)
        self.scored = scored
        log_metric("scalar", scored.scalars.mean().item())
        log_metric("best_in_rollout", scored.scalars.amax(-1).mean().item())
        log_metric("set_diversity", diversity(scored.vectors[:, 0]).mean().item())
        if self.config.method != "vpo":  # Multi-RLVR pays distinct answers, GRPO has one
            paid = torch.where(scored.answer_mask, scored.scalars, self.task.minimum)  # (B, 1, m)
            return paid.sum((1, 2)).tolist()

        B, _, _, k = scored.vectors.shape
        weights = torch.zeros(B, self.config.n_weights, k)
        for b, n_objectives in enumerate(scored.objective_mask.sum(1).tolist()):
            weights[b, :, :n_objectives] = self.weights(problem[b], n_objectives)
        rewards = set_reward(
            scored.vectors, weights, scored.answer_mask, self.task.minimum
        )  # (B, 1)
        return rewards[:, 0].tolist()

    def weights(self, row: int, k: int) -> Tensor:
        """The preference weights (K, k) of a prompt. Its rollouts share them on all ranks."""
        return sample_weights(
            self.config.n_weights,
            k,
            alpha=self.config.alpha,
            sampler=self.config.sampler,
            generator=self.generator(row),
        )

    def generator(self, row: int) -> torch.Generator:
        """Random numbers that depend on the prompt, not on the rank."""
        return torch.Generator().manual_seed(self.config.seed * 1_000_003 + row)


class MatrixTrainer(GRPOTrainer):
    """GRPOTrainer with the advantages of any method, computed from the rollouts of all ranks."""

    def _calculate_rewards(self, inputs: list[dict], *args) -> Tensor:
        rewards = super()._calculate_rewards(inputs, *args)
        reward = self.reward_funcs[0]
        rows = gather_object([example["problem"] for example in inputs])  # P * G
        ranks = gather_object([reward.scored])  # one Scored per rank, together P * G rollouts
        G = self.num_generations if self.model.training else self.num_generations_eval
        m = reward.m
        k = max(scored.vectors.shape[-1] for scored in ranks)
        vectors = torch.cat([pad_last(scored.vectors, k) for scored in ranks])
        objective_mask = torch.cat([pad_last(scored.objective_mask, k) for scored in ranks])
        scalars = torch.cat([scored.scalars for scored in ranks])
        mask = torch.cat([scored.answer_mask for scored in ranks])
        advantages = self.args.advantages(
            vectors.view(-1, G, m, k),
            scalars.view(-1, G, m),
            mask.view(-1, G, m),
            objective_mask=objective_mask.view(-1, G, k)[:, 0],
            missing_answer_reward=reward.task.minimum,
            generator=reward.generator(rows[0]),
        )  # (P, G)
        self.all_advantages = advantages.flatten()
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        outputs = super()._generate_and_score_completions(inputs)
        first = self.accelerator.process_index * len(inputs)
        own = self.all_advantages[first : first + len(inputs)]
        outputs["advantages"] = own.to(self.accelerator.device)
        return outputs


def pad_last(x: Tensor, size: int) -> Tensor:
    """x with zeros at the end of its last dimension."""
    return pad(x, (0, size - x.shape[-1]))


def build_trainer(config: VPOConfig) -> GRPOTrainer:
    """The trainer. UserError: a task, a model or a length cannot be used."""
    task = load_task(config.task, data=config.data)
    if config.data and "data" not in task.flags:
        raise UserError(f"--data {config.data}: task {task.name} reads no file")
    m = answers_per_rollout(config.method, config.m or task.m)
    check_task(task, m)
    check_model(config.model)
    model_config, tokenizer = load_config_and_tokenizer(config.model, task)
    length = sampling_options(tokenizer, task, m, config.max_new_tokens).max_new_tokens
    config.max_completion_length = config.max_completion_length or length
    if config.max_completion_length < length:
        raise UserError(
            f"--max_completion_length {config.max_completion_length}: cuts a set of m = {m} answers, which "
            f"may take {length} tokens; leave it out, and say with --max_new_tokens how long an answer is"
        )

    n_train = train_problems(config)
    problems = take_problems(task, "train", n_train, config.seed)
    problems += take_problems(task, "test", task.eval_problems)
    prompts = [build_prompt(tokenizer, task, problem, m) for problem in problems]
    encode_prompts(model_config, tokenizer, prompts[:32], length)  # UserError: they are too long
    if writes_bos(tokenizer):
        prompts = [prompt.removeprefix(tokenizer.bos_token) for prompt in prompts]
    rows = list(range(len(prompts)))
    dataset = Dataset.from_dict({"prompt": prompts, "problem": rows})
    is_scalar = config.method in SCALAR_METHODS and config.subset <= 1
    trainer_class = GRPOTrainer if is_scalar else MatrixTrainer
    return trainer_class(
        config.model,
        SetReward(config, task, problems, m),
        config,
        dataset.select(rows[:n_train]),
        dataset.select(rows[n_train:]),
        tokenizer,
    )


def check_model(model: str) -> None:
    """UserError: the model has no checkpoint; those of the Hub are not looked up here."""
    is_missing_default = model == VPOConfig.model and not Path(model).exists()
    if model == "tiny" or is_missing_default:
        raise UserError(
            f"--model {model}: no checkpoint; python train.py --steps 1 --eval-problems 0 "
            f"--out runs/start-for-trl makes {VPOConfig.model}"
        )


def train_problems(config: VPOConfig) -> int:
    """The number of training problems that all steps together take."""
    micro_batches = config.max_steps * config.gradient_accumulation_steps
    micro_batches_per_generation = config.steps_per_generation * config.num_iterations
    generations = math.ceil(micro_batches / micro_batches_per_generation)
    return generations * config.generation_batch_size // config.num_generations


def writes_bos(tokenizer: Tokenizer) -> bool:
    """Whether TRL would write a second BOS token before a prompt from a chat template."""
    bos = tokenizer.bos_token
    if not tokenizer.chat_template or not bos:
        return False
    return tokenizer(bos)["input_ids"] == [tokenizer.bos_token_id] * 2


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = HfArgumentParser(
        VPOConfig, allow_abbrev=False, usage="python examples/trl_vpo.py [--FLAG VALUE ...]"
    )

    def error(message: str) -> None:
        parser.exit(2, f"{parser.prog}: error: {message}; --help lists all flags\n")

    def run() -> None:
        try:
            (config,) = parser.parse_args_into_dataclasses(argv)
            trainer = build_trainer(config)
        except (ValueError, ImportError) as mistake:  # what TRL itself refuses
            raise UserError(mistake) from mistake
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
        trainer.save_model()

    parser.error = error
    as_command(parser, run)


if __name__ == "__main__":
    main()
