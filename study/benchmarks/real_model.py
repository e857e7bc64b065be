"""What a real language model costs and whether its numbers are right, measured side by side.

    python study/benchmarks/real_model.py MODEL            a checkpoint's folder, or a Hub id
    python study/benchmarks/real_model.py MODEL exact      these sections; not given: all

exact     log-probabilities while sampling against a fresh forward pass; the shared update's gradient and the plain
          one against an exact one; in float32 and in bfloat16
limit     share of the time that the matrix products of sampling and of an update alone would take
plan      what --plan says against the peak memory of a real step
trl       seconds of a whole GRPO step against TRL's GRPOTrainer, where trl is installed
headlines the same for the headline task, with its own settings, after its SFT warm-up
tasks     a step of VPO with each task for language models, HumanEval's format among them, on small files of our own

The problems are tasks/open_cases.jsonl, two prompts with eight rollouts each, where nothing else is said.
"""

import argparse
import contextlib
import copy
import functools
import importlib.util
import io
import json
import os
import tempfile
from pathlib import Path

import torch
from at_root import ROOT
from limit import share_of_limit
from plain import PlainUpdate
from side_by_side import (
    SharedUpdate,
    compare_grpo_step,
    compare_plan,
    config_of,
)
from torch import Tensor
from transformers.utils import logging as transformers_logging

import train
from engine import decoding
from engine.models import load_policy
from engine.warmup import start_model, write_start
from rewards import Task, UserError
from rollout import build_prompt
from tasks import load_task

DATA = "tasks/open_cases.jsonl"
P = 2
G = 8
TOKENS = 96
FLAGS = f"--task code --data {DATA} --prompts-per-step {P} --max-new-tokens {TOKENS}"


@functools.cache
def loaded(name: str, dtype: str = "float32") -> tuple[Task, tuple]:
    """The task, and the model with its tokenizer."""
    task = load_task("code", data=DATA)
    return task, load_policy(name, task, dtype=dtype)


def prompts_of(task: Task, policy: tuple) -> list[str]:
    """The prompts of the first problems that ask for one answer."""
    _, tokenizer = policy
    return [build_prompt(tokenizer, task, problem, 1) for problem in task.problems("train", P)]


def sample(policy: tuple, prompts: list[str], G: int, T: int) -> decoding.Rollouts:
    """The same rollouts in every run."""
    generator = torch.Generator().manual_seed(0)
    options = decoding.SamplingOptions(T, generator=generator)
    return decoding.sample(*policy, prompts, G, options)


def random_advantages(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


def exact(name: str) -> None:
    """Differences relative to the norm of what they are compared with."""
    compare_exactly(name, "float32", G, TOKENS)
    compare_exactly(name, "bfloat16", 2, 24)  # ten times slower on many CPUs


def compare_exactly(name: str, dtype: str, G: int, T: int) -> None:
    """Log-probabilities against a fresh pass; both gradients against that of the weights in float32.

    torch's log_softmax over 49,152 words in float32 is itself off by some 3e-5, so the exact
    gradient is taken with a float64 softmax.
    """
    task, policy = loaded(name, dtype)
    model, _ = policy
    rollouts = sample(policy, prompts_of(task, policy), G, T)
    sampled = rollouts.logprobs[rollouts.token_mask]  # (tokens)
    fresh = fresh_logprobs(model, rollouts)  # (tokens)

    ours = gradient(SharedUpdate(token_budget=512), model, rollouts)
    plain = gradient(PlainUpdate(rows=G), model, rollouts)
    exact_update = PlainUpdate(rows=G, softmax=torch.float64)
    exactly = gradient(exact_update, copy.deepcopy(model).float(), rollouts)
    print(
        f"{dtype}, {P} x {G} rollouts of up to {T} tokens: log-probabilities differ by "
        f"{difference(sampled, fresh):.1e}; from the exact gradient the shared one differs by "
        f"{difference(ours, exactly):.1e}, the plain one by {difference(plain, exactly):.1e}",
        flush=True,
    )


@torch.no_grad()
def fresh_logprobs(model, rollouts: decoding.Rollouts) -> Tensor:
    """Log-probabilities of all sampled tokens, each rollout in a forward pass of its own."""
    logprobs = []
    for row, length in enumerate(rollouts.lengths):
        p = row // rollouts.group_size
        prompt = rollouts.prompt_ids[p, -rollouts.prompt_lengths[p] :]
        tokens = rollouts.tokens[row, :length]
        logits = model(torch.cat([prompt, tokens])[None]).logits[0]
        log_p = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        logprobs.append(log_p.gather(1, tokens[:, None])[:, 0])
    return torch.cat(logprobs)


def gradient(update: SharedUpdate | PlainUpdate, model, rollouts: decoding.Rollouts) -> Tensor:
    """The gradient of all weights in one vector."""
    update.backward(model, None, rollouts, random_advantages(len(rollouts.tokens)))
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten().double() for gradient in gradients])
    model.zero_grad()
    return flat


def difference(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).norm() / b.norm()


def limit(name: str) -> None:
    """Sampling and an update."""
    task, policy = loaded(name)
    model, _ = policy
    prompts = prompts_of(task, policy)
    rollouts = sample(policy, prompts, G, TOKENS)
    update = SharedUpdate(token_budget=512)

    def learn() -> None:
        update.backward(model, None, rollouts, random_advantages(P * G))
        model.zero_grad()

    sampling = share_of_limit(functools.partial(sample, policy, prompts, G, TOKENS))
    print(f"{P} x {G} rollouts, share of the matmul limit: sampling {sampling:.0%}", flush=True)
    print(f"update {share_of_limit(learn):.0%}", flush=True)


def plan(name: str) -> None:
    """Settings that fit a laptop."""
    compare_plan(f"--model {name} {FLAGS}")
    if importlib.util.find_spec("peft"):
        compare_plan(f"--model {name} {FLAGS} --lora-rank 16")


def trl(name: str) -> None:
    """The same model, prompts, rewards, group, lengths, KL and learning rate on both sides."""
    task, policy = loaded(name)
    flags = f"--model {name} {FLAGS} --m 1 --lr 1e-6 --micro-batch-tokens 512 --dtype float32"
    config, _ = config_of(flags)
    row = f"GRPO step, {P} x {G} rollouts of up to {TOKENS} tokens; plain: TRL"
    compare_grpo_step(row, policy, config, task, steps=3)


def headlines(name: str) -> None:
    """Six prompts with eight headlines each. Before the warm-up few headlines earn anything."""
    config, task = config_of(f"--task headline --model {name} --lr 2e-5")
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder, "start")
        write_start(config, task, start, start_model(config, task, "cpu"))
        policy = load_policy(str(start), task)
    row = "GRPO step of the headline task, 6 x 8 rollouts; plain: TRL"
    compare_grpo_step(row, policy, config, task, steps=3)


def tasks(name: str) -> None:
    """Two prompts, four rollouts of two answers each, one held-out problem."""
    from test_text_tasks import write  # here, because it needs pytest

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for task in ("musique", "eureqa", "tool", "code"):
            if task == "code":
                write_humaneval(30)
            else:
                write(task, 30)
            flags = (
                f"--task {task} --data data.jsonl --model {name} --out {task} --method vpo --m 2 "
                "--steps 1 --prompts-per-step 2 --group-size 4 --eval-problems 1 --pool 2 "
                "--max-new-tokens 64 --kl 0 --device cpu"
            )
            with contextlib.redirect_stdout(io.StringIO()):
                train.main(flags.split())
            row = json.loads(Path(task, "vpo", "metrics.jsonl").read_text().splitlines()[0])
            print(
                f"{task}: {row['seconds']:.0f} s, {row['tokens']:.0f} tokens, "
                f"reward {row['reward']:.3f}, {row['answers']:.0%} of the slots filled, "
                f"{row['cut_off']:.0%} cut off",
                flush=True,
            )


def write_humaneval(n: int) -> None:
    """A file of n problems in HumanEval's format."""
    from test_code import HUMANEVAL  # here, because it needs pytest

    lines = []
    for i in range(n):
        own = {"task_id": f"own/{i}", "prompt": HUMANEVAL["prompt"] + f"# {i}\n"}
        lines.append(json.dumps(HUMANEVAL | own))
    Path("data.jsonl").write_text("\n".join(lines))


SECTIONS = {
    "exact": exact,
    "limit": limit,
    "plan": plan,
    "trl": trl,
    "headlines": headlines,
    "tasks": tasks,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("sections", nargs="*", help="not given: all")
    args = parser.parse_args()
    for section in args.sections:
        if section not in SECTIONS:
            parser.error(f"{section}: unknown; choose from {', '.join(SECTIONS)}")
    model = args.model
    if Path(model).exists():
        model = str(Path(model).resolve())
    os.chdir(ROOT)  # the problems and commands are named from there
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    print(f"torch {torch.__version__}, CPU, {torch.get_num_threads()} threads")
    for section in args.sections or SECTIONS:
        try:
            SECTIONS[section](model)
        except UserError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
