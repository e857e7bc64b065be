"""VPO in TRL's GRPOTrainer, for models that need several GPUs: a reward function that returns advantages.

    pip install -r examples/requirements.txt
    python train.py --steps 1 --eval-problems 0 --out runs/start-for-trl
    # On a CPU: the tiny model, the maze, 50 steps.
    python examples/trl_vpo.py --learning_rate 5e-4 --warmup_steps 10
    # The same with R of 200 held-out mazes before and after:
        --eval_strategy steps --eval_steps 50 --eval_on_start True
    # Two ranks, on CPUs too:
    accelerate launch --multi_gpu --num_processes 2 examples/trl_vpo.py --learning_rate 5e-4

With `--scale_rewards none` TRL's advantage of a rollout is its reward minus the mean of its group. The
advantages of every method in vpo.py have the mean 0. So if they are returned as rewards, they reach
TRL's loss as they are, and the metric `reward` is 0. What rises is `R` (the set reward under uniform
weights) and `scalar`. Every flag of GRPOConfig is a flag here; --help lists them all.

The commands below follow the manuals of accelerate and TRL. They were not run: several GPUs, vLLM,
DeepSpeed, FSDP, several nodes.

    MODEL="--model Qwen/Qwen2.5-7B-Instruct --max_new_tokens 256 --per_device_train_batch_size 4
        --gradient_accumulation_steps 3"
    # Without it every GPU holds 16 bytes per weight:
    SHARDED="--use_deepspeed --zero_stage 3 --zero3_init_flag true --zero3_save_16bit_model true
        --deepspeed_multinode_launcher standard"
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, HfArgumentParser
from transformers.modeling_utils import set_zero3_state
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.answers import open_thought
from engine.config import Config, estimator_of, task_defaults
from engine.doors import as_command
from engine.models import load_config_and_tokenizer
from engine.tasks import check_task, load_task, take_problems
from eval import diversity, weighted_best_at_k
from rewards import Problem, Task, UserError, parse_answers
from rollout import (
    Policy,
    build_prompt,
    encode_prompts,
    random_generator,
    rollout_length,
    score,
)
from vpo import ADVANTAGES, Scored, answers_per_rollout


class AdvantageReward:
    """TRL's reward function: rollouts -> their advantages."""

    def __init__(
        self, config: "VPOConfig", policy: Policy, task: Task, problems: list[Problem], m: int
    ):
        self.config = config
        self.policy = policy
        self.task = task
        self.problems = problems
        self.m = m  # answers per rollout

    def __call__(
        self,
        prompts: list[str],
        completion_ids: list[list[int]],
        problem: list[int],
        group_size: list[int],
        log_metric: Callable[[str, float], None],
        **_,
    ) -> list[float]:
        """The advantages of the B rollouts of a rank. TRL calls it on all ranks at the same time.

        Args:
            completion_ids: the tokens of the rollouts. TRL's own texts lack marks that are special tokens.
            problem: the number of each rollout's problem, a column of the data set.
            group_size: G, likewise.
            log_metric: of TRL; takes a name and a number.
        """
        problems = [self.problems[row] for row in problem]
        answers = []
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            opening, _ = open_thought(prompt)
            text = opening + self.policy.decode(torch.tensor(ids))
            has_ended = (
                len(ids) < self.config.max_completion_length or ids[-1] in self.policy.eos_ids
            )
            answers.append(parse_answers(text, self.task, self.m, has_ended))
        own = score(self.task, problems, answers, self.m)  # (B, 1, m, k)
        log_rewards(own, log_metric)

        # A group may be divided among ranks, so every rank computes the advantages of all.
        rows = gather_object(problem)  # P * G
        G = group_size[0]
        assert rows[::G] == rows[G - 1 :: G], "the rollouts of a problem must stand side by side"
        scored = in_groups(gather_object([own]), G)  # (P, G, m, k)
        generator = random_generator(self.config.seed, rows[0], "weights")
        estimator = estimator_of(self.config, generator)
        advantages = ADVANTAGES[self.config.method](scored, estimator)  # (P, G)
        first = PartialState().process_index * len(prompts)
        return advantages.flatten()[first : first + len(prompts)].tolist()


def in_groups(ranks: list[Scored], G: int) -> Scored:
    """The rollouts of all ranks, a `Scored` (B, 1, m, k) of each, as one of P groups: (P, G, m, k)."""
    k = max(own.vectors.shape[-1] for own in ranks)  # problems may differ in their objectives
    vectors = torch.cat([widened(own.vectors, k) for own in ranks])
    objective_mask = torch.cat([widened(own.objective_mask, k) for own in ranks])  # (P * G, k)
    m = vectors.shape[2]
    return Scored(
        vectors.view(-1, G, m, k),
        torch.cat([own.scalars for own in ranks]).view(-1, G, m),
        torch.cat([own.answer_mask for own in ranks]).view(-1, G, m),
        torch.cat([own.repeat_mask for own in ranks]).view(-1, G, m),
        objective_mask.view(-1, G, k)[:, 0],
        torch.cat([own.missing_scalar for own in ranks]).view(-1, G)[:, :1],
        ranks[0].minimum,
    )


def widened(x: Tensor, k: int) -> Tensor:
    """x with zeros at the end of its last dimension, so that this is k."""
    return pad(x, (0, k - x.shape[-1]))


def log_rewards(scored: Scored, log_metric) -> None:
    """Hand to TRL's log what B rollouts (B, 1, m, k) earn, which their advantages do not tell."""
    sets = scored.vectors[:, 0]  # (B, m, k)
    log_metric("R", weighted_best_at_k(sets, sets.shape[1], scored.objective_mask).mean().item())
    log_metric("scalar", scored.scalars.mean().item())
    log_metric("best_in_rollout", scored.scalars.amax(-1).mean().item())
    log_metric("set_diversity", diversity(sets).mean().item())


# The flags, and what they must not be.

COUNTS = (
    "num_generations num_generations_eval gradient_accumulation_steps steps_per_generation "
    "num_iterations per_device_train_batch_size per_device_eval_batch_size steps"
)
# Flags of TRL, the value that each must have, and why.
REQUIRED = (
    ("scale_rewards", "none", "advantages are normalised already"),
    ("multi_objective_aggregation", "sum_then_normalize", "advantages are normalised already"),
    ("reward_weights", None, "there is one reward, a weight changes only its size or its sign"),
    ("remove_unused_columns", False, "the column that tells a rollout's problem would be dropped"),
)
# Keys of --generation_kwargs that would cut a set of answers, or give a group of equal rollouts.
CUTS_SET = (
    "max_new_tokens max_tokens max_length max_time stopping_criteria eos_token_id stop stop_strings "
    "stop_token_ids num_return_sequences n"
)
REPEATS_ROLLOUT = "do_sample num_beams seed temperature"


def flag(default: object, help: str) -> object:
    """A field that is a flag of the command."""
    return field(default=default, metadata={"help": help})


@dataclass
class VPOConfig(GRPOConfig):
    """The flags of TRL and of this file. UserError: one normalises twice, or cuts a set of answers."""

    output_dir: str | None = flag("runs/trl", "folder for checkpoints")
    scale_rewards: str = flag("none", "none: the reward function returns advantages")
    per_device_train_batch_size: int = flag(
        96, "rollouts per rank and micro-batch, of all prompts together"
    )
    per_device_eval_batch_size: int = flag(96, "the same in the evaluation")
    max_completion_length: int | None = flag(
        None, "tokens of a rollout; not given: what its m answers need"
    )
    vllm_importance_sampling_mode: str = flag(
        "token_truncate", "sequence_mask, TRL's own, drops long rollouts, and ours hold m answers"
    )
    task: str = flag("maze", "a task's name as for train.py, or a Python file that defines a Task")
    data: str = flag("", "file of problems, for tasks that take one")
    model: str = flag("runs/start-for-trl/start", "a local Hugging Face checkpoint, or a Hub id")
    method: str = flag("vpo", "one of " + ", ".join(ADVANTAGES))
    m: int = flag(0, "answers per rollout of vpo and multi_rlvr; 0: the task's own")
    steps: int = flag(50, "updates")
    max_new_tokens: int = flag(
        0, "tokens of an answer, m times as many of a rollout; 0: as in train.py"
    )
    n_weights: int = flag(100, "K, preference weights per prompt")
    alpha: float = flag(1.0, "of the Dirichlet distribution of the preference weights")
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
        """Check what TRL would stumble over, and name a checkpoint to resume from in its way."""
        for name in COUNTS.split():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} {value}: must be at least 1")
        for name in ("m", "subset", "max_new_tokens"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name} {getattr(self, name)}: must not be negative")
        if self.method not in ADVANTAGES:
            raise UserError(f"--method {self.method}: choose from {', '.join(ADVANTAGES)}")
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
            if name in CUTS_SET.split():
                raise UserError(
                    f"--generation_kwargs {name}: a set of m answers must end by itself; leave it out"
                )
            if name in REPEATS_ROLLOUT.split():
                raise UserError(
                    f"--generation_kwargs {name}: a group must be sampled; leave it out"
                )

    def _check_groups(self) -> None:
        """Let the method refuse a group, a subset or an alpha that it cannot use."""
        names = ["num_generations"]
        if self.eval_strategy != "no":
            names.append("num_generations_eval")
        for name in names:
            G = getattr(self, name) or self.num_generations
            rewards = torch.zeros(1, G, 1, 2)
            present = torch.ones(1, G, 1, dtype=torch.bool)
            objectives = torch.ones(1, 2, dtype=torch.bool)
            missing = torch.zeros(1, 1)
            scored = Scored(rewards, rewards.mean(-1), present, ~present, objectives, missing)
            try:
                ADVANTAGES[self.method](scored, estimator_of(self))
            except ValueError as error:
                raise UserError(f"--{name} {G}: {error}") from error


# The trainer.


def build_trainer(config: VPOConfig) -> GRPOTrainer:
    """TRL's own trainer. UserError: a task, a model or a length cannot be used."""
    policy = policy_without_weights(config.model)
    kind = "tiny" if policy.is_tiny else config.model
    task = load_task(config.task, kind, data=config.data)
    if config.data and "data" not in task.flags:
        raise UserError(f"--data {config.data}: task {task.name} reads no file")
    defaults = Config(**task_defaults(task, kind))
    m = answers_per_rollout(config.method, config.m or defaults.m)
    check_task(task, m)
    length = rollout_length(task, m, config.max_new_tokens or defaults.max_new_tokens)
    config.max_completion_length = config.max_completion_length or length
    if config.max_completion_length < length:
        raise UserError(
            f"--max_completion_length {config.max_completion_length}: cuts a set of m = {m} answers, which "
            f"may take {length} tokens; leave it out, and say with --max_new_tokens how long an answer is"
        )

    if (config.temperature, config.beta) != (defaults.temperature, defaults.kl):
        print(
            f"temperature {config.temperature:g}, beta {config.beta:g}; train.py would take "
            f"{defaults.temperature:g} and --kl {defaults.kl:g}",
            file=sys.stderr,
        )
    n_train = train_problems(config)
    problems = take_problems(task, "train", n_train, config.seed)
    problems += take_problems(task, "test", defaults.eval_problems)
    prompts = [build_prompt(policy, task, problem, m) for problem in problems]
    longest = sorted(prompts, key=len)[-32:]
    encode_prompts(policy, longest, config.max_completion_length)  # UserError: they are too long
    if writes_bos(policy):
        prompts = [prompt.removeprefix(policy.tokenizer.bos_token) for prompt in prompts]
    group_sizes = [config.num_generations] * n_train
    group_sizes += [config.num_generations_eval or config.num_generations] * defaults.eval_problems
    rows = list(range(len(problems)))
    dataset = Dataset.from_dict({"prompt": prompts, "problem": rows, "group_size": group_sizes})
    # TRL ends a rollout at the tokenizer's EOS, vLLM at its own, where a template may have another mark.
    policy.tokenizer.eos_token = policy.tokenizer.convert_ids_to_tokens(policy.eos_ids[0])
    if config.use_vllm:
        stops = {"stop_token_ids": policy.eos_ids}
        config.generation_kwargs = (config.generation_kwargs or {}) | stops
    return GRPOTrainer(
        config.model,
        AdvantageReward(config, policy, task, problems, m),
        config,
        dataset.select(rows[:n_train]),
        dataset.select(rows[n_train:]),
        policy.tokenizer,
    )


def policy_without_weights(name: str) -> Policy:
    """The tokenizer and the shape of a model, whose weights TRL loads itself, to each GPU its part."""
    is_missing_default = name == VPOConfig.model and not Path(name).exists()
    if name == "tiny" or is_missing_default:
        raise UserError(
            f"--model {name}: no checkpoint; python train.py --steps 1 --eval-problems 0 "
            f"--out runs/start-for-trl makes {VPOConfig.model}"
        )
    model_config, tokenizer = load_config_and_tokenizer(name)
    # With ZeRO-3 it would be made and sharded, and all its weights have the shape (0).
    with torch.device("meta"), set_zero3_state():
        model = AutoModelForCausalLM.from_config(model_config)
    return Policy(model, tokenizer)


def train_problems(config: VPOConfig) -> int:
    """The number of training problems that all steps together take."""
    micro_batches = config.max_steps * config.gradient_accumulation_steps
    micro_batches_per_generation = config.steps_per_generation * config.num_iterations
    generations = math.ceil(micro_batches / micro_batches_per_generation)
    return generations * config.generation_batch_size // config.num_generations


def writes_bos(policy: Policy) -> bool:
    """Whether TRL would write a second BOS token before a prompt from a chat template."""
    tokenizer = policy.tokenizer
    bos = tokenizer.bos_token
    if not tokenizer.chat_template or not bos:
        return False
    return tokenizer(bos)["input_ids"] == [tokenizer.bos_token_id] * 2


def main(argv: list[str] | None = None) -> None:
    """The command."""

    def run() -> None:
        parser = HfArgumentParser(VPOConfig, prog="trl_vpo.py", allow_abbrev=False)
        try:
            (config,) = parser.parse_args_into_dataclasses(argv)
            trainer = build_trainer(config)
        except (ValueError, ImportError) as mistake:  # what TRL itself refuses
            raise UserError(mistake) from mistake
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
        if trainer.is_fsdp_enabled:  # of a sharded state, FSDP2's default, nothing would be saved
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model()
        trainer.accelerator.wait_for_everyone()  # a rank that ends first can abort the others
        trainer.accelerator.end_training()

    as_command("trl_vpo.py", run)


if __name__ == "__main__":
    main()
