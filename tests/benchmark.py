"""Speed and memory, measured side by side in one run and printed as ratios; asserts nothing.

    python tests/benchmark.py                        everything, some eight minutes on two cores
    python tests/benchmark.py sampling update        only these

advantage  vpo_advantage against a plain loop over the prompt groups, at P, G, m, k, K = 128, 8, 3, 4, 100
sandbox    programs against a fresh interpreter per test
sampling   tokens per second against generate; on CUDA also a model of 0.5B, and its share of the bandwidth limit
update     one update of the maze's main job against the plain one: prompts repeated, all logits at once
head       the hand-written backward pass of the LM head against torch.utils.checkpoint over the same chunks
vocabulary peak memory of an update at a vocabulary of 151,936 and 8 x 1024 tokens against the plain one's
trl        a whole GRPO step against TRL's GRPOTrainer, where trl is installed
search     candidates per second of search.py against one problem and one sample at a time
phases     where the seconds of a training step go, in the maze and in code
plan       what --plan says against the peak memory of a real step, in three settings
cards      the table of docs/hardware.md

Maze and code start from a model that is warmed up here once (half a minute).
"""

import argparse
import contextlib
import copy
import functools
import importlib.util
import io
import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_rollout import save_random_model

import rollout
import search
import train
import vpo
from engine import memory, models, update
from engine.flags import fill_in, train_parser
from engine.imitation import warm_start
from rewards import Task, load_task
from tasks.sandbox import Job, Sandbox

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QWEN = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
}  # Qwen2.5-0.5B
MODELS = {
    "Qwen2.5-0.5B": QWEN,
    "Qwen2.5-1.5B": QWEN
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
}
SMALL = QWEN | {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def seconds_per_call(function) -> float:
    """Mean over as many calls as fit into a tenth of a second, one at least."""
    calls, began = 0, time.perf_counter()
    while not calls or time.perf_counter() - began < 0.1:
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        calls += 1
    return (time.perf_counter() - began) / calls


def compare(name: str, ours, plain, repeats: int) -> float:
    """Run the two in turn, A B A B ..., and print the medians and the median of the pairwise ratios. Our seconds."""
    times = [(seconds_per_call(ours), seconds_per_call(plain)) for _ in range(repeats + 1)][
        1:
    ]  # the first round warms up
    fast, slow = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    print(
        f"{name:60}{fast * 1e3:10.2f} ms   plain {slow * 1e3:10.2f} ms   {ratio:6.1f} times faster"
    )
    return fast


def plain_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """VPO's advantage as one would first write it, one prompt group after the other: rewards (P, G, m, k) -> (P, G)."""
    advantages = []
    for group in rewards:  # (G, m, k)
        concentration = torch.ones(group.shape[-1], device=group.device)
        weights = torch.distributions.Dirichlet(concentration).sample((100,))  # (K, k)
        R = torch.einsum("gmk,jk->gmj", group, weights).amax(1).mean(-1)
        advantages.append((R - R.mean()) / (R.std(correction=0) + 1e-6))
    return torch.stack(advantages)


def fresh_interpreters(jobs: list[Job]) -> None:
    """Every test in a Python process of its own, as many at a time as there are cores; the expected outputs inside."""

    def check(program: str, test: tuple, entry_point: str | None) -> bool:
        if entry_point:
            program += f"\nassert {entry_point}(*{test[0]!r}) == {test[1]!r}"
        done = subprocess.run(
            [sys.executable, "-c", program],
            input="" if entry_point else test[0],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode == 0 and (entry_point is not None or done.stdout == test[1])

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        assert all(
            threads.map(
                lambda pair: check(*pair),
                [(job.program, test, job.entry_point) for job in jobs for test in job.tests],
            )
        )


def sandboxed(sandbox: Sandbox, jobs: list[Job], calls: Iterator[int]) -> None:
    """The same in the sandbox; a comment makes the programs new in every call, so that none of them is remembered."""
    verdicts = sandbox.run(
        [job._replace(program=f"{job.program}\n# {next(calls)}") for job in jobs]
    )
    assert all(map(all, verdicts))


def advantage() -> None:
    """The estimator of the paper."""
    rewards = torch.rand(128, 8, 3, 4, device=DEVICE)
    compare(
        "vpo_advantage, 128 x 8 x 3 x 4, K = 100",
        lambda: vpo.vpo_advantage(rewards),
        lambda: plain_advantage(rewards),
        20,
    )
    rewards = torch.rand(128, 24, 1, 4, device=DEVICE)  # the same number of answers
    compare(
        "the same with Group VPO, s = 12; plain: VPO, m = 3",
        lambda: vpo.vpo_advantage(rewards, subset=12),
        lambda: vpo.vpo_advantage(rewards.view(128, 8, 3, 4)),
        20,
    )


def sandbox() -> None:
    """Programs per second, at 8 tests each, every layer on."""
    functions = [
        Job(
            f"def f(x):\n    return x * {i} if x < 3 else x + {i}",
            [([x], x * i if x < 3 else x + i) for x in range(8)],
            "f",
        )
        for i in range(48)
    ]
    scripts = [
        Job(f"x = int(input())\nprint(x + {i})", [(f"{x}\n", f"{x + i}\n") for x in range(8)])
        for i in range(16)
    ]
    with Sandbox() as box:
        for kind, jobs in (("functions", functions), ("scripts", scripts)):
            compare(
                f"{len(jobs)} {kind} x 8 tests; plain: fresh interpreters",
                functools.partial(sandboxed, box, jobs, itertools.count()),
                functools.partial(fresh_interpreters, jobs),
                3,
            )


def flags_of(name: str) -> tuple[argparse.Namespace, Task]:
    """The default flags of a task's main job, with a warm-up long enough for rollouts of the usual length."""
    args = train_parser().parse_args(["--task", name, "--device", DEVICE])
    task = load_task(name)
    fill_in(args, task, DEVICE == "cuda")
    args.warm_steps = min(args.warm_steps, 300)
    return args, task


@functools.cache
def start_model(name: str):
    """The task's flags, the task, and a model and tokenizer as they are when training begins."""
    args, task = flags_of(name)
    model, tokenizer = models.load_policy("tiny", task)
    show = functools.partial(rollout.demonstrations, task, tokenizer, args.m, args.seed)
    model, tokenizer = warm_start(task, name, show, model, tokenizer, steps=args.warm_steps)
    return args, task, model.to(DEVICE), tokenizer


def batch_of(name: str, method: str, step: int = 0):
    """Problems and prompts of a training step, and how many answers a rollout holds."""
    args, task, _, tokenizer = start_model(name)
    problems, prompts, _ = train.ask(args, task, method, tokenizer, step)
    return problems, prompts, vpo.answers_per_rollout(method, args.m)


def endless(model, tokenizer) -> None:
    """No token ends a rollout, so that both sides do the same work."""
    model.generation_config.eos_token_id, tokenizer.eos_token = (
        model.config.get_text_config().vocab_size,
        None,
    )


def generate(model, tokenizer, prompts: list[str], group_size: int, new_tokens: int) -> None:
    """The same rollouts by transformers' own loop; as there the prompt of a group is repeated."""
    ids, lengths = rollout.encode_prompts(
        model.config, tokenizer, prompts, new_tokens, model.device
    )
    mask = (
        torch.arange(ids.shape[1], device=model.device)
        >= ids.shape[1] - torch.tensor(lengths, device=model.device)[:, None]
    )
    ends = models.eos_ids(model, tokenizer)
    model.generate(
        ids.repeat_interleave(group_size, 0),
        attention_mask=mask.long().repeat_interleave(group_size, 0),
        do_sample=True,
        top_k=0,
        max_new_tokens=new_tokens,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )


def sampling() -> None:
    """Batch 512 of the maze on the tiny model, as the rollouts end and at equal lengths; on CUDA also a 0.5B model."""
    _, task, model, tokenizer = start_model("maze")
    prompts = [
        rollout.build_prompt(tokenizer, task, problem, 3) for problem in task.problems("train", 64)
    ]
    T = rollout.rollout_length(task, tokenizer, 3)
    compare_sampling(
        f"tiny, batch 512, up to {T} new tokens; plain: generate",
        model,
        tokenizer,
        prompts,
        8,
        T,
        11,
    )
    model, tokenizer = models.load_policy("tiny", task, device=DEVICE)
    endless(model, tokenizer)
    compare_sampling(
        "tiny, batch 512, all 45 new tokens; plain: generate", model, tokenizer, prompts, 8, 45, 11
    )
    if DEVICE == "cuda":
        model = (
            AutoModelForCausalLM.from_config(Qwen2Config(**QWEN), dtype=torch.bfloat16)
            .to(DEVICE)
            .eval()
        )
        endless(model, tokenizer)
        rate = compare_sampling(
            "0.5B, bfloat16, batch 128, all 512 tokens; plain: generate",
            model,
            tokenizer,
            prompts[:16],
            8,
            512,
            2,
        )
        source, target = (torch.empty(2**31, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        bandwidth = (
            2 * source.numel() / seconds_per_call(lambda: target.copy_(source))
        )  # read and written
        cache = 2 * 2 * 64 * 24 * 2 * (len(prompts[0].split()) + 256)  # bytes of a rollout halfway
        limit = 128 / ((memory.size_of(model) + 128 * cache) / bandwidth)
        print(
            f"{'':60}{rate / limit:10.1%} of the bandwidth limit (weights and cache read once a token)"
        )


def compare_sampling(
    name: str, model, tokenizer, prompts: list[str], G: int, T: int, repeats: int
) -> float:
    """Print both; returns our tokens per second."""
    tokens = []

    def ours() -> None:
        tokens.append(sum(rollout.sample(model, tokenizer, prompts, G, max_new_tokens=T).lengths))

    seconds = compare(name, ours, lambda: generate(model, tokenizer, prompts, G, T), repeats)
    print(f"{'':60}{statistics.mean(tokens) / seconds:10.0f} tokens/s")
    return statistics.mean(tokens) / seconds


def plain_backward(
    model,
    reference,
    rollouts: rollout.Rollouts,
    advantages: list[float],
    kl: float,
    rows: int,
    softmax: torch.dtype = torch.float32,
) -> None:
    """The update as one would first write it: prompt and rollout in one row, all logits at once, `rows` at a time."""
    G, L, device = rollouts.group_size, rollouts.prompt_ids.shape[1], rollouts.tokens.device
    A, mask = torch.tensor(advantages, device=device), rollouts.mask
    prompt_mask = (
        torch.arange(L, device=device)
        >= L - torch.tensor(rollouts.prompt_lengths, device=device)[:, None]
    )
    ids = torch.cat([rollouts.prompt_ids.repeat_interleave(G, 0), rollouts.tokens], 1)
    seen = torch.cat([prompt_mask.repeat_interleave(G, 0), mask], 1)

    def logprobs(model, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        positions = (seen[part].cumsum(1) - 1).clamp_min(0)
        logits = model(
            input_ids=ids[part],
            attention_mask=seen[part].long(),
            position_ids=positions,
            use_cache=False,
        ).logits
        log_p = torch.log_softmax(logits[:, L - 1 : -1].to(softmax), -1).float()
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(2, rollouts.tokens[part, :, None])[..., 0], entropy

    for first in range(0, len(ids), rows):
        part = slice(first, first + rows)
        log_p, _ = logprobs(model, part)
        ref_log_p = None
        if reference is not None:
            with torch.no_grad():
                ref_log_p, _ = logprobs(reference, part)
        loss, _ = vpo.policy_loss(
            log_p,
            rollouts.logprobs[part],
            A[part],
            mask[part],
            sum(rollouts.lengths),
            ref_logprobs=ref_log_p,
            kl_coef=kl,
        )
        loss.backward()


def updates() -> None:
    """The maze's main job: both methods, a micro-batch of 64 rollouts for the plain one."""
    args, task, model, tokenizer = start_model("maze")
    reference = models.load_policy("tiny", task, device=DEVICE)[0]

    def ours(rollouts: rollout.Rollouts, A: list[float]) -> None:
        update.backward(
            model, reference, rollouts, A, kl=args.kl, micro_batch_tokens=args.micro_batch_tokens
        )

    def plain(rollouts: rollout.Rollouts, A: list[float]) -> None:
        plain_backward(model, reference, rollouts, A, args.kl, 64)

    for method in ("vpo", "grpo"):
        _, prompts, m = batch_of("maze", method)
        rollouts = rollout.sample(
            model,
            tokenizer,
            prompts,
            args.group_size,
            max_new_tokens=rollout.rollout_length(task, tokenizer, m),
        )
        A = torch.randn(len(rollouts.tokens), generator=torch.Generator().manual_seed(0)).tolist()
        compare(
            f"update of the maze, {method}",
            functools.partial(ours, rollouts, A),
            functools.partial(plain, rollouts, A),
            7,
        )


class CheckpointedHead:
    """update.HeadLogProbs in ten lines: the same chunks through torch.utils.checkpoint."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, cap):
        def chunk(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            z = update._scaled_logits(hidden, weight, bias, temperature, cap)
            log_sum = z.logsumexp(-1)
            with torch.no_grad():
                entropy = log_sum - ((z - log_sum[:, None]).exp() * z).sum(-1)
            return z.gather(1, targets[:, None])[:, 0] - log_sum, entropy

        parts = [
            torch.utils.checkpoint.checkpoint(
                chunk, hidden[part], targets[part], use_reentrant=False
            )
            for part in update._chunks(hidden, weight)
        ]
        return tuple(map(torch.cat, zip(*parts, strict=True)))


def head() -> None:
    """Time and memory of an update with either, at Qwen's vocabulary and in the maze."""
    ours, model = (
        update.HeadLogProbs,
        AutoModelForCausalLM.from_config(Qwen2Config(**SMALL)).to(DEVICE).eval(),
    )

    def run(kind, model, reference, rollouts: rollout.Rollouts) -> None:
        update.HeadLogProbs = kind
        update.backward(
            model,
            reference,
            rollouts,
            [1.0] * len(rollouts.tokens),
            kl=1e-3,
            micro_batch_tokens=4096,
        )
        update.HeadLogProbs = ours

    short = long_rollouts(2)
    short.lengths, short.tokens = [128, 128], short.tokens[:, :128]
    args, task, tiny, tokenizer = start_model("maze")
    _, prompts, m = batch_of("maze", "vpo")
    maze = rollout.sample(
        tiny,
        tokenizer,
        prompts,
        args.group_size,
        max_new_tokens=rollout.rollout_length(task, tokenizer, m),
    )
    reference = models.load_policy("tiny", task, device=DEVICE)[0]
    for name, inputs in (
        ("256 tokens at vocabulary 151,936", (model, None, short)),
        ("maze, vpo", (tiny, reference, maze)),
    ):
        compare(
            f"LM head, {name}; plain: checkpoint",
            functools.partial(run, ours, *inputs),
            functools.partial(run, CheckpointedHead, *inputs),
            3,
        )
    for kind in (ours, CheckpointedHead):
        with FakeTensorMode(), memory.Tally() as tally:
            model, rollouts = (
                AutoModelForCausalLM.from_config(Qwen2Config(**SMALL)).eval(),
                long_rollouts(8),
            )
            before = tally.peak = tally.alive
            run(kind, model, None, rollouts)
        print(
            f"{'':60}{(tally.peak - before) / memory.GIB:10.2f} GiB computed, 8 x 1024 tokens: {kind.__name__}"
        )


def long_rollouts(rows: int) -> rollout.Rollouts:
    """Rollouts of 1024 random tokens after one prompt of 100."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(1, QWEN["vocab_size"], shape, device=DEVICE)

    return rollout.Rollouts(
        draw(1, 100),
        [100],
        draw(rows, 1024),
        torch.zeros(rows, 1024, device=DEVICE),
        [1024] * rows,
        [],
        [],
    )


def peak_of(kind: str, rows: int) -> None:
    """Print the bytes by which an update raises this process's peak: run in a process of its own."""
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SMALL)).to(DEVICE).eval()
    rollouts, A = long_rollouts(rows), [1.0] * rows
    before = most_bytes()
    if kind == "ours":
        update.backward(model, None, rollouts, A, micro_batch_tokens=4096)
    else:
        plain_backward(model, None, rollouts, A, 0.0, rows)
    print(f"peak {most_bytes() - before}")


def most_bytes() -> int:
    """The most that this process has taken so far."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def vocabulary() -> None:
    """8 x 1024 tokens; the plain update at a quarter of them too, because all of them may not fit this machine."""
    computed = {}
    for kind in ("ours", "plain"):
        with FakeTensorMode(), memory.Tally() as tally:
            model, rollouts = (
                AutoModelForCausalLM.from_config(Qwen2Config(**SMALL)).eval(),
                long_rollouts(8),
            )
            before = tally.peak = tally.alive
            if kind == "ours":
                update.backward(model, None, rollouts, [1.0] * 8, micro_batch_tokens=4096)
            else:
                plain_backward(model, None, rollouts, [1.0] * 8, 0.0, 8)
            computed[kind] = (tally.peak - before) / memory.GIB
    print(
        f"update at vocabulary 151,936, 8 x 1024 tokens, GiB computed: {computed['ours']:.2f}, "
        f"plain {computed['plain']:.2f}, "
        f"{computed['plain'] / computed['ours']:.1f} times less"
    )
    for kind, rows in (("ours", 8), ("plain", 2)):
        done = subprocess.run(
            [sys.executable, __file__, f"peak-{kind}-{rows}"],
            capture_output=True,
            text=True,
            check=True,
        )
        print(
            f"{'':60}{kind}, {rows} x 1024 tokens, measured: {int(done.stdout.split()[-1]) / memory.GIB:.2f} GiB"
        )


def grpo_step(step: int) -> None:
    """A whole GRPO step of the maze; the policy moves."""
    args, task, model, tokenizer = start_model("maze")
    problems, prompts, m = batch_of("maze", "grpo", step)
    rollouts = rollout.sample(
        model,
        tokenizer,
        prompts,
        args.group_size,
        max_new_tokens=rollout.rollout_length(task, tokenizer, m),
    )
    scored = rollout.score_texts(task, problems, rollouts.texts, m)
    A = vpo.ADVANTAGES["grpo"](scored.vectors, scored.scalars, scored.mask).flatten().tolist()
    update.backward(
        model, references()[0], rollouts, A, kl=args.kl, micro_batch_tokens=args.micro_batch_tokens
    )
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    references()[1].step(1e-5)
    model.zero_grad()


@functools.cache
def references():
    """The reference policy and the optimizer of grpo_step."""
    _, task, model, _ = start_model("maze")
    return models.load_policy("tiny", task, device=DEVICE)[0], update.AdamW(model)


def trl_steps(model, tokenizer, prompts: list[str], reward, **settings) -> list[float]:
    """Seconds of every step of GRPOTrainer on a copy of the model; reward(prompts, completions) as TRL calls it."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        """Times of the steps."""

        def on_step_begin(self, *args, **kwargs) -> None:
            seconds.append(-time.perf_counter())

        def on_step_end(self, *args, **kwargs) -> None:
            seconds[-1] += time.perf_counter()

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = GRPOConfig(
            output_dir=folder,
            temperature=1.0,
            lr_scheduler_type="constant",
            use_cpu=DEVICE == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            logging_steps=1000,
            shuffle_dataset=False,
            disable_tqdm=True,
            **settings,
        )
        GRPOTrainer(
            model=copy.deepcopy(model),
            reward_funcs=reward,
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            callbacks=[Clock()],
        ).train()
    return seconds


def trl() -> None:
    """The same model, prompts, rewards, group, lengths, KL and learning rate through GRPOTrainer."""
    if not importlib.util.find_spec("trl"):
        print("trl is not installed: pip install trl")
        return
    args, task, model, tokenizer = start_model("maze")
    steps, P, G = 8, args.prompts_per_step * args.m, args.group_size
    by_prompt, rows = {}, []
    for step in range(steps):
        problems, prompts, _ = batch_of("maze", "grpo", step)
        by_prompt |= dict(zip(prompts, problems, strict=True))
        rows += prompts

    def reward(prompts: list[str], completions: list[str], **rest) -> list[float]:
        scored = rollout.score_texts(
            task, [by_prompt[prompt] for prompt in prompts], completions, 1
        )
        return scored.scalars.flatten().tolist()

    theirs = trl_steps(
        model,
        tokenizer,
        rows,
        reward,
        per_device_train_batch_size=P * G,
        num_generations=G,
        max_steps=steps,
        beta=args.kl,
        learning_rate=1e-5,
        max_completion_length=rollout.rollout_length(task, tokenizer, 1),
    )
    ours = []
    for step in range(steps):
        began = time.perf_counter()
        grpo_step(step)
        ours.append(time.perf_counter() - began)
    fast, slow = statistics.median(ours[1:]), statistics.median(theirs[1:])
    print(
        f"{'GRPO step of the maze; plain: GRPOTrainer of TRL':60}{fast * 1e3:10.2f} ms   "
        f"plain {slow * 1e3:10.2f} ms   {slow / fast:6.1f} times faster"
    )


def searching() -> None:
    """Best-of-n in 40 mazes towards a goal that is never reached, so that both score as many candidates."""
    _, task, model, tokenizer = start_model("maze")
    problems, budget = task.problems("test", 40), 48
    goal = search.Goal(lambda rewards, answer: sum(rewards), lambda problem: 5.0)
    settings = {
        "strategy": "best_of_n",
        "selection": "",
        "budget": budget,
        "temperature": 0.7,
        "seed": 0,
    }
    T = rollout.rollout_length(task, tokenizer, 1)

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            search.search(
                model,
                tokenizer,
                task,
                problems,
                goal,
                Path(folder) / "log.jsonl",
                settings,
                m=1,
                max_new_tokens=T,
            )

    def plain() -> None:
        for problem in problems[:4]:  # each of 12 candidates, a fortieth of ours
            for _ in range(12):
                prompt = rollout.build_prompt(tokenizer, task, problem, 1)
                text = rollout.sample(
                    model, tokenizer, [prompt], 1, max_new_tokens=T, temperature=0.7
                ).texts[0]
                goal.score(task.reward(problem, text), text)

    fast, slow = seconds_per_call(ours), seconds_per_call(plain)
    print(
        f"{'search, 40 mazes x 48 candidates; plain: one at a time':60}{40 * budget / fast:10.0f} /s   "
        f"plain {48 / slow:10.0f} /s   {40 * budget / fast / (48 / slow):6.1f} times faster"
    )


def phases() -> None:
    """Where the seconds of a step go, from the task's start model."""
    for name, method in itertools.product(("maze", "code"), ("vpo", "multi_rlvr", "grpo")):
        args, task, model, tokenizer = start_model(name)
        reference = models.load_policy("tiny", task, device=DEVICE)[0]
        seconds: dict[str, list[float]] = {
            name: [] for name in ("problems", "sampling", "scoring", "advantage", "update")
        }
        for step in range(9):
            marks = [time.perf_counter()]

            def mark(marks=marks) -> None:
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                marks.append(time.perf_counter())

            problems, prompts, m = batch_of(name, method, step)
            mark()
            rollouts = rollout.sample(
                model,
                tokenizer,
                prompts,
                args.group_size,
                max_new_tokens=rollout.rollout_length(task, tokenizer, m),
            )
            mark()
            scored = rollout.score_texts(task, problems, rollouts.texts, m)
            mark()
            A = (
                vpo.ADVANTAGES[method](scored.vectors, scored.scalars, scored.mask)
                .flatten()
                .tolist()
            )
            mark()
            update.backward(
                model,
                reference,
                rollouts,
                A,
                kl=args.kl,
                micro_batch_tokens=args.micro_batch_tokens,
            )
            model.zero_grad()
            mark()
            if step:
                for phase, began, ended in zip(seconds, marks, marks[1:], strict=False):
                    seconds[phase].append(ended - began)
        total = sum(map(statistics.median, seconds.values()))
        print(
            f"a step of {name}, {method}: {total:.2f} s: "
            + ", ".join(
                f"{phase} {statistics.median(times) / total:.1%}"
                for phase, times in seconds.items()
            )
        )


def planned_and_measured(model: str, flags: list[str]) -> tuple[float, float, float]:
    """GiB that --plan says, GiB at the peak of a real run of two steps, seconds of the second."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(train.__file__)),
            "--model",
            model,
            "--method",
            "vpo",
            "--steps",
            "2",
            "--eval-problems",
            "0",
            "--device",
            DEVICE,
            *flags,
        ]
        planned = subprocess.run(
            [sys.executable, *command, "--plan"], capture_output=True, text=True, check=True
        ).stdout
        said, unit = re.search(r"fit .*: ([\d.]+) (.)iB|fits .*: ([\d.]+) (.)iB", planned).group(
            3, 4
        )
        report = (
            "import resource, runpy, sys, torch; sys.argv = sys.argv[1:]; "
            "runpy.run_path(sys.argv[0], run_name='__main__'); "
            "print('peak', torch.cuda.max_memory_allocated() if torch.cuda.is_available() else "
            "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
        )
        done = subprocess.run(
            [sys.executable, "-c", report, *command, "--out", f"{folder}/run"],
            capture_output=True,
            text=True,
            check=True,
        )
        peak = int(re.search(r"peak (\d+)", done.stdout).group(1)) + (
            memory.CUDA_CONTEXT if DEVICE == "cuda" else 0
        )
        seconds = json.loads(Path(f"{folder}/run/vpo/metrics.jsonl").read_text().splitlines()[-1])[
            "seconds"
        ]
        return float(said) * (1 if unit == "G" else 1 / 1024), peak / memory.GIB, seconds


def random_qwen(folder: str, shape: dict, weights: bool = True) -> str:
    """A random model of this shape with a byte-level tokenizer; without weights only what --plan needs."""
    model = save_random_model(folder, "qwen2", **{} if not weights else shape)
    if not weights:
        path = Path(folder) / "config.json"
        config = json.loads(path.read_text()) | shape
        path.write_text(
            json.dumps({key: value for key, value in config.items() if key != "layer_types"})
        )
    return model


def plan() -> None:
    """A model of 43M weights with Qwen's vocabulary: three settings."""
    with tempfile.TemporaryDirectory() as folder:
        model = random_qwen(folder, SMALL)
        for settings in (
            "--dtype float32 --no-gradient-checkpointing --micro-batch-tokens 0",
            "--dtype float32",
            "--dtype bfloat16 --micro-batch-tokens 1024 --kl 0",
        ):
            said, measured, _ = planned_and_measured(
                model, ["--prompts-per-step", "2", "--max-new-tokens", "256", *settings.split()]
            )
            print(
                f"--plan {said:.2f} GiB, measured {measured:.2f} GiB ({said / measured - 1:+.0%}): {settings}"
            )


def cards() -> None:
    """The plan of a training step of the maze (vpo) in bfloat16 on a card, without its driver's share."""
    print("| model | flags | sampling | update | | time per step |\n|---|---|---|---|---|---|")
    task = load_task("maze")
    lean = "--micro-batch-tokens 1024 --sampling-batch 32"
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in itertools.product(
            MODELS, ("", f"{lean} --kl 0", f"{lean} --lora-rank 16")
        ):
            if "lora" in flags and not importlib.util.find_spec("peft"):
                continue
            model = random_qwen(f"{folder}/{name}", MODELS[name], weights=False)
            args = train_parser().parse_args(
                ["--model", model, "--dtype", "bfloat16", *flags.split()]
            )
            fill_in(args, task, True)
            phases = memory.step_memory(args, task, "vpo", functools.partial(train.ask, args, task))
            sampling, update = (sum(rows.values()) / memory.GIB for rows in phases.values())
            print(
                f"| {name} | {flags or 'defaults'} | {sampling:.1f} | {update:.1f} | computed | not measured |",
                flush=True,
            )
        model, small = (
            random_qwen(f"{folder}/random", QWEN),
            "--prompts-per-step 2 --group-size 4 --max-new-tokens 64",
        )
        for flags in (f"{small} --dtype float32", f"{small} --dtype bfloat16"):
            said, measured, seconds = planned_and_measured(model, flags.split())
            print(
                f"| Qwen2.5-0.5B, random weights, two CPU cores | {flags} | | "
                f"{measured:.1f} (plan: {said:.1f}) | measured | {seconds:.0f} s |",
                flush=True,
            )


SECTIONS = {
    "advantage": advantage,
    "sandbox": sandbox,
    "sampling": sampling,
    "update": updates,
    "head": head,
    "vocabulary": vocabulary,
    "trl": trl,
    "search": searching,
    "phases": phases,
    "plan": plan,
    "cards": cards,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; none: all")
    chosen = parser.parse_args().sections
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if chosen and chosen[0].startswith("peak-"):
        _, kind, rows = chosen[0].split("-")
        peak_of(kind, int(rows))
        return
    for name in chosen:
        if name not in SECTIONS:
            parser.error(f"{name}: unknown; choose from {', '.join(SECTIONS)}")
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads")
    for name in chosen or SECTIONS:
        SECTIONS[name]()


if __name__ == "__main__":
    main()
