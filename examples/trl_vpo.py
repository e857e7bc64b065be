"""VPO in TRL's GRPOTrainer, for models that need several GPUs: a reward function that returns advantages.

HEAD
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import AutoModelForCausalLM, HfArgumentParser
from transformers.modeling_utils import set_zero3_state
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.answers import open_thought
from engine.config import Config, estimator_of, task_defaults, try_method
from engine.doors import as_command
from engine.groups import in_groups
from engine.models import load_config_and_tokenizer
from engine.tasks import check_task, load_task, take_problems
from eval import diversity, weighted_best_at_k
from rewards import Problem, Task, UserError, parse_answers
from rollout import (
    Policy,
    StopRule,
    build_prompt,
    encode_prompts,
    random_generator,
    rollout_length,
    score,
)
from vpo import ADVANTAGES, answers_per_rollout

TRL = "1.16.0"  # of another version neither the names nor the advantages were looked at


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
        sets = own.vectors[:, 0]  # (B, m, k)
        R = weighted_best_at_k(sets, self.m, own.objective_mask)  # (B)
        log_metric("R", R.mean().item())
        log_metric("scalar", own.scalars.mean().item())
        log_metric("best_in_rollout", own.scalars.amax(-1).mean().item())
        log_metric("set_diversity", diversity(sets).mean().item())

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


# The flags.


def flag(default: object, help: str) -> object:
    """A field that is a flag of the command."""
    return field(default=default, metadata={"help": help})


@dataclass
class VPOConfig(GRPOConfig):
    """The flags of TRL and of this file. UserError: one normalises twice, or cuts a set of answers."""

    output_dir: str | None = flag("runs/trl", "folder for checkpoints")
    scale_rewards: str = flag("none", "none: the reward function returns advantages")
    per_device_train_batch_size: int = flag(96, "rollouts per rank and micro-batch")
    per_device_eval_batch_size: int = flag(96, "the same in the evaluation")
    max_completion_length: int | None = flag(None, "tokens of a rollout; by default of m answers")
    # The default of TRL, sequence_mask, drops long rollouts, and ours hold m answers.
    vllm_importance_sampling_mode: str = flag("token_truncate", "as in TRL")
    task: str = flag("maze", "a task's name as for train.py, or a Python file that defines a Task")
    data: str = flag("", "file of problems, for tasks that take one")
    model: str = flag("runs/start-for-trl/start", "a local Hugging Face checkpoint, or a Hub id")
    method: str = flag("vpo", "one of " + ", ".join(ADVANTAGES))
    m: int = flag(0, "answers per rollout of vpo and multi_rlvr; 0: the task's own")
    steps: int = flag(50, "updates")
    max_new_tokens: int = flag(0, "tokens of an answer; 0: as in train.py")
    n_weights: int = flag(100, "K, preference weights per prompt")
    alpha: float = flag(1.0, "of the Dirichlet distribution of the preference weights")
    subset: int = flag(0, "s, rollouts that form a set together; 0: the method's own")

    def __post_init__(self) -> None:
        if self.method not in ADVANTAGES:
            raise UserError(f"--method {self.method}: choose from {', '.join(ADVANTAGES)}")
        checkpoint = self.resume_from_checkpoint
        if checkpoint == "True":
            self.resume_from_checkpoint = True  # the newest in output_dir
        elif checkpoint and not Path(checkpoint).is_dir():
            raise UserError(f"--resume_from_checkpoint {checkpoint}: no such folder; or say True")
        if self.max_steps <= 0:
            self.max_steps = self.steps
        if not torch.accelerator.is_available():
            self.use_cpu = True  # else every rank on a CPU would train alone, without a word
            self.bf16 = bool(self.bf16)
        super().__post_init__()
        assert self.scale_rewards == "none" and not self.reward_weights, (
            f"--scale_rewards {self.scale_rewards} --reward_weights {self.reward_weights}: advantages "
            "are normalised already; leave them out"
        )
        assert self.multi_objective_aggregation == "sum_then_normalize", (
            f"--multi_objective_aggregation {self.multi_objective_aggregation}: the same; leave it out"
        )
        assert not (self.generation_kwargs or self.mask_truncated_completions), (
            "--generation_kwargs, --mask_truncated_completions: could cut or drop a set; leave them out"
        )
        names = ["num_generations"]
        if self.eval_strategy != "no":
            names.append("num_generations_eval")
        for name in names:
            G = getattr(self, name) or self.num_generations
            options = {"n_weights": self.n_weights, "alpha": self.alpha, "subset": self.subset}
            try_method(self.method, Config(group_size=G, **options))


# The trainer.


class VPOTrainer(GRPOTrainer):
    """TRL's own trainer, in which a rollout ends with its m-th answer, whatever else was generated."""

    stop: StopRule | None = None

    def _generate_single_turn(self, *args, **options):
        completion_ids, logprobs = super()._generate_single_turn(*args, **options)
        if self.stop:
            ends = [first_stop(self.stop, ids) for ids in completion_ids]
            completion_ids = [ids[:end] for ids, end in zip(completion_ids, ends, strict=True)]
            if logprobs:
                logprobs = [own[:end] for own, end in zip(logprobs, ends, strict=True)]
        return completion_ids, logprobs


def first_stop(stop: StopRule, ids: list[int]) -> int:
    """How many tokens of a rollout there are up to its m-th answer; all if there are fewer answers."""
    tokens = torch.tensor([ids])
    is_alive = torch.tensor([True])
    for end in range(1, len(ids)):
        if stop(tokens[:, :end], is_alive):
            return end
    return len(ids)


def build_trainer(config: VPOConfig) -> VPOTrainer:
    """The trainer. UserError: a task, a model or a length cannot be used."""
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
    trainer = VPOTrainer(
        config.model,
        AdvantageReward(config, policy, task, problems, m),
        config,
        dataset.select(rows[:n_train]),
        dataset.select(rows[n_train:]),
        policy.tokenizer,
    )
    if not policy.is_tiny:
        trainer.stop = StopRule(policy, task, m)
        trainer.stop.opening, _ = open_thought(prompts[0])
    if trainer.is_fsdp_enabled:  # a sharded checkpoint, FSDP2's default, is no model for others
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    return trainer


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
        if version("trl") != TRL:
            raise UserError(f"trl {version('trl')}: this file is for {TRL}; pip install trl=={TRL}")
        parser = HfArgumentParser(VPOConfig, prog="trl_vpo.py", allow_abbrev=False)
        try:
            (config,) = parser.parse_args_into_dataclasses(argv)
            trainer = build_trainer(config)
        except (ValueError, ImportError, AssertionError) as mistake:  # what TRL refuses, and we
            raise UserError(mistake) from mistake
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
        trainer.save_model()
        trainer.accelerator.wait_for_everyone()  # a rank that ends first can abort the others
        trainer.accelerator.end_training()

    as_command("trl_vpo.py", run)


if __name__ == "__main__":
    main()
