"""VPO in TRL's GRPOTrainer, for models that need several GPUs: a reward function that returns advantages.

    pip install -r requirements.txt -r examples/requirements.txt
    python train.py --steps 1 --eval-problems 0 --out runs/start-for-trl
    # The tiny model, the maze, 50 steps; and with R of 200 held-out mazes before and after:
    python examples/trl_vpo.py --learning_rate 5e-4 --warmup_steps 10 \
        --eval_strategy steps --eval_steps 50 --eval_on_start True
    # Two ranks: data parallel, and FSDP2. Where there are no GPUs put ACCELERATE_USE_CPU=true before it.
    accelerate launch --multi_gpu --num_processes 2 examples/trl_vpo.py --learning_rate 5e-4
    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 \
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP examples/trl_vpo.py --learning_rate 5e-4
    # A language model, with rollouts from vLLM:
    python examples/trl_vpo.py --task fence --model HuggingFaceTB/SmolLM2-135M-Instruct \
        --method group_vpo --per_device_train_batch_size 8 --num_generations 4 --max_steps 2 \
        --use_vllm --vllm_mode colocate

They ran on CPUs (docs/own.md says where, when and how). With `--scale_rewards none` TRL's advantage of a
rollout is its reward minus the mean of its group, which is 0 for the advantages of every method in
vpo.py. So they reach TRL's loss as they are. What rises in the log is `R`, the set reward under uniform
weights, and `scalar`. Every flag of GRPOConfig is a flag here; temperature and beta are TRL's own.
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
from engine.config import Config, check_methods, options_of, task_defaults
from engine.errors import as_command
from engine.models import load_config_and_tokenizer
from engine.tasks import check_task, load_task, take_problems
from eval import diversity, weighted_best_at_k
from examples.groups import in_groups
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


@dataclass
class AdvantageReward:
    """TRL's reward function: rollouts -> their advantages."""

    config: "VPOConfig"
    policy: Policy
    task: Task
    problems: list[Problem]
    m: int  # answers per rollout

    def __call__(
        self,
        prompts: list[str],
        completion_ids: list[list[int]],
        problem: list[int],
        log_metric: Callable[[str, float], None],
        **_,
    ) -> list[float]:
        """The advantages of the B rollouts of a rank. TRL calls it on all ranks at the same time.

        TRL's own texts lack marks that are special tokens, so the tokens are read. `problem` holds the
        numbers of their problems, a column of the data set.
        """
        problems = [self.problems[row] for row in problem]
        answers = []
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            opening, _ = open_thought(prompt)
            text = opening + self.policy.decode(torch.tensor(ids))
            is_cut = len(ids) == self.config.max_completion_length
            has_ended = not is_cut or ids[-1] in self.policy.eos_ids
            answers.append(parse_answers(text, self.task, self.m, has_ended))
        own = score(self.task, problems, answers, self.m)  # (B, 1, m, d)
        sets = own.vectors[:, 0]  # (B, m, d)
        R = weighted_best_at_k(sets, self.m, own.objective_mask)  # (B)
        log_metric("R", R.mean().item())
        log_metric("scalar", own.scalars.mean().item())
        log_metric("set_diversity", diversity(sets).mean().item())

        # A group may be divided among ranks, so every rank computes the advantages of all.
        rows = gather_object(problem)  # P * G
        others = [place for place, row in enumerate(rows) if row != rows[0]]
        G = others[0] if others else len(rows)
        assert rows[::G] == rows[G - 1 :: G], "the rollouts of a problem must stand side by side"
        scored = in_groups(gather_object([own]), G)  # (P, G, m, d)
        generator = random_generator(self.config.seed, rows[0], "weights")
        options = options_of(self.config, generator)
        advantages = ADVANTAGES[self.config.method](scored, options)  # (P, G)
        first = PartialState().process_index * len(prompts)
        return advantages.flatten()[first : first + len(prompts)].tolist()


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
    max_steps: int = flag(50, "updates")
    max_new_tokens: int = flag(0, "tokens of an answer; 0: as in train.py")
    n_weights: int = flag(100, "K, preference weights per prompt")
    alpha: float = flag(1.0, "of the Dirichlet distribution of the preference weights")
    subset: int = flag(0, "s, rollouts that form a set together; 0: the method's own")

    def __post_init__(self) -> None:
        checkpoint = self.resume_from_checkpoint
        if checkpoint and not Path(checkpoint).is_dir():
            raise UserError(f"--resume_from_checkpoint {checkpoint}: no such folder")
        if not torch.accelerator.is_available():
            self.use_cpu = True  # else every rank on a CPU would train alone, without a word
            self.bf16 = bool(self.bf16)
        super().__post_init__()
        normalised = (self.scale_rewards, self.multi_objective_aggregation, self.reward_weights)
        assert normalised == ("none", "sum_then_normalize", None), (
            "--scale_rewards {} --multi_objective_aggregation {} --reward_weights {}: advantages are "
            "normalised already; leave them out".format(*normalised)
        )
        assert not (self.generation_kwargs or self.mask_truncated_completions), (
            "--generation_kwargs, --mask_truncated_completions: could cut or drop sets; leave them out"
        )
        options = {"n_weights": self.n_weights, "alpha": self.alpha, "subset": self.subset}
        for G in (self.num_generations, self.num_generations_eval or self.num_generations):
            check_methods(Config(method=[self.method], group_size=G, **options))


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
    assert config.max_completion_length in (None, length), (
        f"--max_completion_length {config.max_completion_length}: m = {m} answers may take {length} "
        "tokens; leave it out, and say with --max_new_tokens how long an answer is"
    )
    config.max_completion_length = length
    micro_batches = config.max_steps * config.gradient_accumulation_steps
    generations = math.ceil(micro_batches / (config.steps_per_generation * config.num_iterations))
    n_train = generations * config.generation_batch_size // config.num_generations
    problems = take_problems(task, "train", n_train, config.seed)
    problems += take_problems(task, "test", defaults.eval_problems)
    prompts = [build_prompt(policy, task, problem, m) for problem in problems]
    encode_prompts(policy, prompts, length)  # UserError: too long
    bos = policy.tokenizer.bos_token
    if policy.tokenizer.chat_template and bos and len(policy.tokenizer(bos)["input_ids"]) == 2:
        prompts = [prompt.removeprefix(bos) for prompt in prompts]  # TRL would write a second one
    rows = list(range(len(problems)))
    dataset = Dataset.from_dict({"prompt": prompts, "problem": rows})
    # TRL ends a rollout at the tokenizer's EOS, vLLM at its own, where a template may have another mark.
    policy.tokenizer.eos_token = policy.tokenizer.convert_ids_to_tokens(policy.eos_ids[0])
    if config.use_vllm:
        config.generation_kwargs = {"stop_token_ids": policy.eos_ids}
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
    if name == "tiny" or (name == VPOConfig.model and not Path(name).exists()):
        start = "python train.py --steps 1 --eval-problems 0 --out runs/start-for-trl"
        raise UserError(f"--model {name}: no checkpoint; {start} makes {VPOConfig.model}")
    model_config, tokenizer = load_config_and_tokenizer(name)
    # With ZeRO-3 it would be made and sharded, and all its weights have the shape (0).
    with torch.device("meta"), set_zero3_state():
        model = AutoModelForCausalLM.from_config(model_config)
    return Policy(model, tokenizer)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    with as_command("trl_vpo.py"):
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


if __name__ == "__main__":
    main()
