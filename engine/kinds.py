"""What differs between the tiny model and a pretrained language model, in one object each."""

import dataclasses
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from engine.checks import check_text
from engine.config import MAX_ANSWERS, Config
from engine.tiny import is_tiny
from rewards import FIRST_NUMBER, Problem, Task, UserError, parse_answers
from tasks import as_user_error

StopRule = Callable[[str], bool]  # whether a rollout is finished, given its text so far
LATER = ("x", "1")  # letters that a growing text may go on with
# Peak learning rates of the tiny model: the best of a common grid on validation problems
# (study/pages/learning_rates.md). Tasks that are not named take those of the maze.
TINY_LR = {
    "maze": {
        "grpo": 1.2e-3,
        "dr_grpo": 8e-4,
        "maxrl": 8e-4,
        "gdpo": 1.2e-3,
        "max_at_k": 1.2e-3,
        "random_weighting": 5e-4,
        "goal_conditioned": 8e-4,
        "multi_rlvr": 1.2e-3,
        "vpo": 5e-4,
        "group_vpo": 1.2e-3,
    },
    "code": {
        "grpo": 5e-4,
        "dr_grpo": 8e-4,
        "maxrl": 1.2e-3,
        "gdpo": 8e-4,
        "max_at_k": 8e-4,
        "random_weighting": 8e-4,
        "goal_conditioned": 8e-4,
        "multi_rlvr": 1.2e-3,
        "vpo": 8e-4,
        "group_vpo": 8e-4,
    },
}
TINY_LR["nested"] = TINY_LR["code"]
# Those of a language model, chosen with SmolLM2-135M (study/pages/headlines.md).
LANGUAGE_LR = {
    "headline": {
        "grpo": 2e-5,
        "max_at_k": 1e-5,
        "multi_rlvr": 2e-5,
        "vpo": 4e-5,
        "group_vpo": 2e-5,
    },
}


class LanguageModel:
    """A pretrained model: prompts are text, and an SFT warm-up is an option."""

    warmup_lr = 2e-5
    warmup_prompts = 8  # per step of the warm-up
    warmup_rollouts = 1  # demonstrations per prompt
    warmup_micro_batch = 1  # demonstrations per backward pass: they may be long
    is_pretrained = True  # it reads goals and, in a search, parents; its own answers can be shown
    rollouts_per_batch = 96  # sampled at a time, where --sampling-batch does not say

    def prepare(self, task: Task) -> None:
        """Set what this kind of model needs of the task and of the machine."""

    def defaults(self, config: Config, task: Task, cuda: bool) -> dict[str, object]:
        """Values of the flags that depend on the model and were not given."""
        warm_steps = config.warm_steps
        if warm_steps is None:
            warm_steps = task.language_flags.get("warm_steps", 0)
        return {
            # In bfloat16 the warm-up would be lost (check_warm_up).
            "dtype": "bfloat16" if cuda and not warm_steps else "float32",
            "warm_steps": 0,
            "gradient_checkpointing": True,
            "micro_batch_tokens": 4096 if cuda else 512,
            "sampling_batch": self.rollouts_per_batch,
            **task.language_flags,
        }

    def peak_lr(self, config: Config, method: str) -> float:
        """The peak learning rate where neither a flag nor the task says."""
        rates = LANGUAGE_LR.get(config.task_name)
        if rates:
            return rates.get(method, 2e-5)
        return 1e-5 if config.lora_rank else 1e-6

    def rollout_length(self, task: Task, m: int, max_new_tokens: int) -> int:
        """New tokens that a rollout of m answers may take."""
        return m * (max_new_tokens or task.tokens_per_answer)

    def pool_batch(self, config: Config, m: int) -> int:
        """Candidates that an evaluation samples at a time."""
        return m * (config.sampling_batch or self.rollouts_per_batch)

    def prompt(
        self, tokenizer: Tokenizer, task: Task, problem: Problem, m: int, goal: list[float] | None
    ) -> str:
        """The task's prompt, inside a chat template if there is one."""
        text = task.prompt(problem, m)
        if goal:
            shares = zip(task.objectives, goal, strict=True)
            weights = ", ".join(f"{name} {share:.0%}" for name, share in shares)
            text += f"\nThis time the answer is judged by: {weights}."
        opening = (
            FIRST_NUMBER if task.form == "lines" else ""
        )  # small models then go on with a list
        if tokenizer.chat_template is None:
            return f"{text}\n{opening}"
        with as_user_error(f"--model {tokenizer.name_or_path}: its chat template cannot be used"):
            chat = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            )
            if text.strip() not in chat:
                raise ValueError("it leaves out what the user says")
        return chat + opening

    def stop_rule(self, tokenizer: Tokenizer, task: Task, m: int) -> StopRule | None:
        """Ends a rollout with its m-th answer: nobody reads what follows, so no reward teaches to end.

        A model whose chat template knows thoughts must have closed them.
        """
        thinks = "<think>" in str(tokenizer.chat_template)

        def is_finished(text: str) -> bool:
            answers = parse_answers(text, task, m, finished=False)
            if len(answers) < m or (thinks and "</think>" not in text):
                return False
            check_ended(task, text, answers)
            return True

        return is_finished


def check_ended(task: Task, text: str, answers: list[str]) -> None:
    """Refuse answers that change with the next letter: they would cut each rollout there.

    Args:
        answers: the m answers in a text that may still grow.

    Raises:
        UserError: a find_answers that disregards `finished`.
    """
    for letter in LATER:
        later = parse_answers(text + letter, task, len(answers), finished=False)
        if len(later) == len(answers) and later != answers:
            raise UserError(
                f"task {task.name}: find_answers gave {answers!r:.80} with finished=False, but the next "
                f"letter of the text {text!r:.80} may change them; return only answers that have ended"
            )


class TinyModel(LanguageModel):
    """The embedded model: prompts are a task's own words, and demonstrations teach it to read them."""

    warmup_lr = 5e-3
    warmup_prompts = 16
    warmup_rollouts = 3
    warmup_micro_batch = 48
    is_pretrained = False  # in a search it writes the rest of a parent
    rollouts_per_batch = 0  # all at once

    def prepare(self, task: Task) -> None:
        task.form = "tags"  # which it imitates
        task.reads_untagged = False
        # Its matrices are so small that threads would wait for one another, on a busy machine for
        # long. And so its numbers do not depend on how many cores there are.
        torch.set_num_threads(1)

    def defaults(self, config: Config, task: Task, cuda: bool) -> dict[str, object]:
        return {
            "lr": task.lr,
            "dtype": "float32",
            "warm_steps": task.warm_steps,
            "gradient_checkpointing": False,
            "micro_batch_tokens": 2048,
            "sampling_batch": self.rollouts_per_batch,
        }

    def peak_lr(self, config: Config, method: str) -> float:
        rates = TINY_LR.get(config.task_name, TINY_LR["maze"])
        return rates.get(method, 5e-4)

    def rollout_length(self, task: Task, m: int, max_new_tokens: int) -> int:
        if max_new_tokens:
            return m * max_new_tokens
        return m * (task.answer_words + 2) + 1  # two tags for each answer, and the EOS

    def pool_batch(self, config: Config, m: int) -> int:
        return 750

    def prompt(
        self, tokenizer: Tokenizer, task: Task, problem: Problem, m: int, goal: list[float] | None
    ) -> str:
        """The number of answers, the problem, and a goal in words that the vocabulary has."""
        text = task.tiny_prompt(problem)
        check_text(task, "tiny_prompt", problem, text)
        words = [f"answers={m}", text]
        for weight in goal or []:
            level = 1 + round((MAX_ANSWERS - 1) * weight)
            words.append(f"answers={level}")
        return " ".join(words)

    def stop_rule(self, tokenizer: Tokenizer, task: Task, m: int) -> StopRule | None:
        return None  # its rollouts have no room for more


def kind_of(tokenizer: Tokenizer) -> LanguageModel:
    """The kind of the policy that a tokenizer belongs to."""
    return TinyModel() if is_tiny(tokenizer) else LanguageModel()


def kind_named(model: str) -> LanguageModel:
    """The kind of the policy that --model names."""
    return TinyModel() if model == "tiny" else LanguageModel()


def fill_in(config: Config, task: Task, cuda: bool) -> None:
    """Give the flags that depend on task, model and device, and were not given, their values.

    Raises:
        UserError: the task has a default for what is no such flag.
    """
    depending = {field.name for field in dataclasses.fields(Config) if field.default is None}
    for name in task.language_flags:
        if name not in depending:
            raise UserError(
                f"task {task.name}: language_flags has {name!r}; it can have "
                f"{', '.join(sorted(depending))}"
            )
    steps = config.steps or task.steps
    values = {
        "m": task.m,
        "steps": task.steps,
        "eval_problems": task.eval_problems,
        "prompts_per_step": 12,
        "temperature": 1.0,
        "kl": 1e-3,
        "snapshots": min(20, max(2, steps // 6)),
    }
    values |= kind_named(config.model).defaults(config, task, cuda)
    for name, value in values.items():
        if getattr(config, name) is None:
            setattr(config, name, value)
