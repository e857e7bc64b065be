"""Speed and memory, measured side by side in one run and printed as ratios.

    python study/benchmarks/benchmark.py                      all up to phases, four minutes on two cores
    python study/benchmarks/benchmark.py sampling update      only these

advantage  vpo_advantage against a plain loop over the prompt groups, at P, G, m, k, K = 128, 8, 3, 4, 100
sandbox    programs against a fresh interpreter per test
sampling   tokens per second against generate
update     one update of the maze's main job against the plain one: prompts repeated, all logits at once
head       the LM head's own backward pass against torch.utils.checkpoint over the same chunks
vocabulary peak memory of an update at a vocabulary of 151,936 and 8 x 1024 tokens against the plain one's
trl        a whole GRPO step against TRL's GRPOTrainer, where trl is installed
search     candidates per second of search.py against one problem and one sample at a time
phases     where the seconds of a training step go, in the maze and in code

plan       what --plan says against the peak memory of a real step, in three settings
cards      the table of docs/hardware.md; both take a quarter of an hour or more

Maze and code start from a model that is warmed up here once (half a minute).
"""

import argparse
import functools
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import plain
import torch
from side_by_side import (
    DEVICE,
    SharedUpdate,
    compare,
    compare_grpo_step,
    compare_plan,
    compare_sampling,
    config_of,
    most_bytes,
    run_python,
    seconds_per_call,
)
from test_rollout import save_random_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging as transformers_logging

import search
import train
import vpo
from engine import lm_head, memory
from engine.config import Config, SearchConfig
from engine.decoding import Rollouts
from engine.models import Model, Tokenizer, load_policy
from engine.warmup import warm_up_of, warmed_up
from rewards import Problem, Task
from rollout import build_prompt, sample, sampling_options, score_texts
from tasks.sandbox import Job, Sandbox

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
LARGER = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
SMALLER = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
MODELS = {"Qwen2.5-0.5B": QWEN, "Qwen2.5-1.5B": QWEN | LARGER}
SMALL = QWEN | SMALLER


def advantage() -> None:
    """The estimator of the paper."""
    rewards = torch.rand(128, 8, 3, 4, device=DEVICE)
    compare(
        "vpo_advantage, 128 x 8 x 3 x 4, K = 100",
        lambda: vpo.vpo_advantage(rewards),
        lambda: plain.advantage(rewards),
        20,
    )
    singles = torch.rand(128, 24, 1, 4, device=DEVICE)  # the same number of answers
    compare(
        "the same with Group VPO, s = 12; plain: VPO, m = 3",
        lambda: vpo.vpo_advantage(singles, subset=12),
        lambda: vpo.vpo_advantage(rewards),
        20,
    )


def sandbox() -> None:
    """Programs per second, at 8 tests each, every layer on."""
    functions = []
    for i in range(48):
        program = f"def f(x):\n    return x * {i} if x < 3 else x + {i}"
        tests = [([x], x * i if x < 3 else x + i) for x in range(8)]
        functions.append(Job(program, tests, "f"))
    scripts = []
    for i in range(16):
        program = f"x = int(input())\nprint(x + {i})"
        scripts.append(Job(program, [(f"{x}\n", f"{x + i}\n") for x in range(8)]))
    calls = itertools.count()

    def run(jobs: list[Job]) -> None:
        """With a comment that makes the programs new, so that no verdict is remembered."""
        call = next(calls)
        jobs = [replace(job, program=f"{job.program}\n# {call}") for job in jobs]
        assert all(map(all, box.run(jobs)))

    with Sandbox() as box:
        for kind, jobs in (("functions", functions), ("scripts", scripts)):
            compare(
                f"{len(jobs)} {kind} x 8 tests; plain: fresh interpreters",
                functools.partial(run, jobs),
                functools.partial(plain.run_in_fresh_interpreters, jobs),
                3,
            )


@dataclass
class Start:
    """What training a task begins with."""

    config: Config
    task: Task
    model: Model  # after a warm-up that is long enough for rollouts of the usual length
    tokenizer: Tokenizer
    reference: Model

    def batch(self, method: str, t: int = 0) -> tuple[list[Problem], list[str]]:
        return train.build_batch(method, self.tokenizer, self.task, self.config, t)

    def sample(self, method: str, prompts: list[str]) -> Rollouts:
        m = vpo.answers_per_rollout(method, self.config.m)
        options = sampling_options(self.tokenizer, self.task, m, 0)
        return sample(self.model, self.tokenizer, prompts, self.config.group_size, options)

    def update(self) -> SharedUpdate:
        return SharedUpdate(self.config.kl, self.config.micro_batch_tokens)


@functools.cache
def start_of(task_name: str) -> Start:
    config, task = config_of(f"--task {task_name}")
    config.warm_steps = min(config.warm_steps, 300)
    model, tokenizer = load_policy("tiny", task)
    model, tokenizer = warmed_up(model, tokenizer, task, warm_up_of(config))
    reference, _ = load_policy("tiny", task, device=DEVICE)
    return Start(config, task, model.to(DEVICE), tokenizer, reference)


def sampling() -> None:
    """Batch 512 of the maze on the tiny model, as the rollouts end and at equal lengths."""
    start = start_of("maze")
    prompts = []
    for problem in start.task.problems("train", 64):
        prompts.append(build_prompt(start.tokenizer, start.task, problem, 3))
    T = sampling_options(start.tokenizer, start.task, 3, 0).max_new_tokens
    policy = (start.model, start.tokenizer)
    name = f"tiny, batch 512, up to {T} new tokens; plain: generate"
    compare_sampling(name, policy, prompts, T, 11)

    model, tokenizer = load_policy("tiny", start.task, device=DEVICE)
    # No token ends a rollout, so that both sides do the same work.
    model.generation_config.eos_token_id = model.config.vocab_size
    tokenizer.eos_token = None
    name = "tiny, batch 512, all 45 new tokens; plain: generate"
    compare_sampling(name, (model, tokenizer), prompts, 45, 11)


def updates() -> None:
    """The maze's main job, a micro-batch of 64 rollouts for the plain update."""
    start = start_of("maze")
    plain_update = plain.PlainUpdate(start.config.kl)
    for method in ("vpo", "grpo"):
        _, prompts = start.batch(method)
        rollouts = start.sample(method, prompts)
        generator = torch.Generator().manual_seed(0)
        advantages = torch.randn(len(rollouts.tokens), generator=generator).to(DEVICE)
        inputs = (start.model, start.reference, rollouts, advantages)
        compare(
            f"update of the maze, {method}",
            functools.partial(start.update().backward, *inputs),
            functools.partial(plain_update.backward, *inputs),
            7,
        )


def head() -> None:
    """Time and memory of an update with either, at Qwen's vocabulary and in the maze."""
    own = lm_head.HeadLogProbs

    def run(kind, model, reference, rollouts: Rollouts) -> None:
        lm_head.HeadLogProbs = kind
        ones = torch.ones(len(rollouts.tokens), device=rollouts.tokens.device)
        SharedUpdate(1e-3, all_rows=True).backward(model, reference, rollouts, ones)
        lm_head.HeadLogProbs = own

    start = start_of("maze")
    _, prompts = start.batch("vpo")
    maze = (start.model, start.reference, start.sample("vpo", prompts))
    large = (small_qwen().to(DEVICE), None, random_rollouts(2, 128))
    for name, inputs in (("256 tokens at vocabulary 151,936", large), ("maze, vpo", maze)):
        compare(
            f"LM head, {name}; plain: checkpoint",
            functools.partial(run, own, *inputs),
            functools.partial(run, plain.CheckpointedHead, *inputs),
            3,
        )
    for kind in (own, plain.CheckpointedHead):
        gib = computed_gib(functools.partial(run, kind))
        print(f"{'':60}{gib:10.2f} GiB computed, 8 x 1024 tokens: {kind.__name__}")


def small_qwen() -> Model:
    """A random model of 43M weights with Qwen's vocabulary."""
    return AutoModelForCausalLM.from_config(Qwen2Config(**SMALL)).eval()


def random_rollouts(rows: int, T: int = 1024) -> Rollouts:
    """Rollouts of random tokens after one prompt of 100."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(1, QWEN["vocab_size"], shape, device=DEVICE)

    logprobs = torch.zeros(rows, T, device=DEVICE)
    return Rollouts(draw(1, 100), [100], draw(rows, T), logprobs, [T] * rows, [], [])


def computed_gib(backward) -> float:
    """GiB that an update of 8 x 1024 tokens adds, on tensors without contents."""
    with FakeTensorMode(allow_non_fake_inputs=True), memory.Tally() as tally:
        model = small_qwen()
        rollouts = random_rollouts(8)
        before = tally.begin()
        backward(model, None, rollouts)
    return (tally.peak - before) / memory.GIB


UPDATES = {"ours": SharedUpdate(all_rows=True), "plain": plain.PlainUpdate()}


def vocabulary() -> None:
    """8 x 1024 tokens, measured for the plain update with 2 x 1024: all may not fit this machine."""
    computed = {}
    for name, kind in UPDATES.items():
        computed[name] = computed_gib(functools.partial(kind.backward, advantages=torch.ones(8)))
    print(
        f"update at vocabulary 151,936, 8 x 1024 tokens, GiB computed: {computed['ours']:.2f}, "
        f"plain {computed['plain']:.2f}, {computed['plain'] / computed['ours']:.1f} times less"
    )
    for name, rows in (("ours", 8), ("plain", 2)):
        added = run_python(__file__, "peak", name, str(rows))
        gib = int(added) / memory.GIB
        print(f"{'':60}{name}, {rows} x 1024 tokens, measured: {gib:.2f} GiB")


def print_peak(name: str, rows: int) -> None:
    """Print by how many bytes an update raises this process's peak: for a process of its own."""
    model = small_qwen().to(DEVICE)
    rollouts = random_rollouts(rows)
    before = most_bytes()
    UPDATES[name].backward(model, None, rollouts, torch.ones(rows, device=DEVICE))
    print(most_bytes() - before)


def trl() -> None:
    """The same model, prompts, rewards, group, lengths, KL and learning rate on both sides."""
    start = start_of("maze")
    start.config.lr = 1e-5
    name = "GRPO step of the maze; plain: GRPOTrainer of TRL"
    compare_grpo_step(name, (start.model, start.tokenizer), start.config, start.task, steps=8)


def searching() -> None:
    """Best-of-n in 40 mazes towards a goal that is never reached, so that the budget is spent."""
    start = start_of("maze")
    problems = start.task.problems("test", 40)
    goal = search.make_goal("scalar", start.task)
    goal.target = 5.0
    options = sampling_options(start.tokenizer, start.task, 1, 0, temperature=0.7)
    policy = search.SearchPolicy(
        start.model,
        start.tokenizer,
        weights="",
        task=start.task,
        m=1,
        goal=None,
        options=options,
    )
    config = SearchConfig(runs=[], strategy="best_of_n", selection="", budget=48)

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log.jsonl"
            search.Search(config, policy, goal, problems, log).run()

    def one_at_a_time() -> None:
        for problem in problems[:4]:  # 12 candidates each
            prompt = build_prompt(start.tokenizer, start.task, problem, 1)
            for _ in range(12):
                rollouts = sample(start.model, start.tokenizer, [prompt], 1, options)
                answer = rollouts.texts[0]
                goal.score(start.task.reward(problem, answer), answer)

    fast = 40 * 48 / seconds_per_call(ours)
    slow = 4 * 12 / seconds_per_call(one_at_a_time)
    name = "search, 40 mazes x 48 candidates; plain: one at a time"
    print(f"{name:60}{fast:10.0f} /s   plain {slow:10.0f} /s   {fast / slow:6.1f} times faster")


class Stopwatch:
    """Seconds of the phases of several steps."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}
        self.began = time.perf_counter()

    def end(self, phase: str) -> None:
        """The phase that began with the end of the last one is over."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.setdefault(phase, []).append(now - self.began)
        self.began = now


def phases() -> None:
    """Where the seconds of a step go, from the task's start model."""
    for task_name, method in itertools.product(("maze", "code"), ("vpo", "multi_rlvr", "grpo")):
        start = start_of(task_name)
        m = vpo.answers_per_rollout(method, start.config.m)
        stopwatch = Stopwatch()
        for t in range(9):
            problems, prompts = start.batch(method, t)
            stopwatch.end("problems")
            rollouts = start.sample(method, prompts)
            stopwatch.end("sampling")
            scored = score_texts(start.task, problems, rollouts.texts, m)
            stopwatch.end("scoring")
            advantages = vpo.ADVANTAGES[method](scored.vectors, scored.scalars, scored.answer_mask)
            stopwatch.end("advantage")
            row_advantages = advantages.flatten().to(DEVICE)
            start.update().backward(start.model, start.reference, rollouts, row_advantages)
            start.model.zero_grad()
            stopwatch.end("update")
        medians = {
            phase: statistics.median(times[1:]) for phase, times in stopwatch.seconds.items()
        }
        total = sum(medians.values())
        shares = ", ".join(f"{phase} {time / total:.1%}" for phase, time in medians.items())
        print(f"a step of {task_name}, {method}: {total:.2f} s: {shares}", flush=True)


def plan() -> None:
    """A model of 43M weights with Qwen's vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_random_model(folder, "qwen2", **SMALL)
        for settings in (
            "--dtype float32 --no-gradient-checkpointing --micro-batch-tokens 0",
            "--dtype float32",
            "--dtype bfloat16 --micro-batch-tokens 1024 --kl 0",
        ):
            compare_plan(f"--model {model} --prompts-per-step 2 --max-new-tokens 256 {settings}")


def cards() -> None:
    """The plan of a training step of the maze (vpo) in bfloat16 on a card, without its driver."""
    print("| model | flags | sampling | update | | time per step |\n|---|---|---|---|---|---|")
    lean = "--micro-batch-tokens 1024 --sampling-batch 32"
    settings = ["", f"{lean} --kl 0"]
    if importlib.util.find_spec("peft"):
        settings.append(f"{lean} --lora-rank 16")
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in itertools.product(MODELS, settings):
            model = save_empty_model(f"{folder}/{name}", MODELS[name])
            config, task = config_of(f"--model {model} --method vpo --dtype bfloat16 {flags}")
            step = memory.step_memory(config, task, train.step_prompts(config, task)["vpo"])
            sampling = sum(step["sampling"].values()) / memory.GIB
            update = sum(step["update"].values()) / memory.GIB
            print(
                f"| {name} | {flags or 'defaults'} | {sampling:.1f} | {update:.1f} | computed "
                "| not measured |",
                flush=True,
            )
        model = save_random_model(f"{folder}/random", "qwen2", **QWEN)
        small = "--prompts-per-step 2 --group-size 4 --max-new-tokens 64"
        compare_plan(f"--model {model} {small} --dtype bfloat16")


def save_empty_model(folder: str, shape: dict) -> str:
    """What --plan needs of a model of this shape, without weights of its size."""
    model = save_random_model(folder, "qwen2")
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | shape
    del config["layer_types"]
    path.write_text(json.dumps(config))
    return model


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
BY_NAME_ALONE = ("plan", "cards")


def main() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if sys.argv[1:2] == ["peak"]:
        _, _, name, rows = sys.argv
        print_peak(name, int(rows))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [name for name in SECTIONS if name not in BY_NAME_ALONE]
    parser.add_argument("sections", nargs="*", help=f"not given: {' '.join(usual)}")
    chosen = parser.parse_args().sections or usual
    for name in chosen:
        if name not in SECTIONS:
            parser.error(f"{name}: unknown; choose from {', '.join(SECTIONS)}")
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads")
    for name in chosen:
        SECTIONS[name]()


if __name__ == "__main__":
    main()
