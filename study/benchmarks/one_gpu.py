"""What one card does, in about six minutes, for docs/hardware.md. One JSON file.

    python study/benchmarks/one_gpu.py                   on a card; writes one_gpu.json
    python study/benchmarks/one_gpu.py --only token      one part, or several
    python study/benchmarks/one_gpu.py --dry             tiny models on the CPU: whether every part runs

    token      a token of 96 rollouts by a CUDA graph: each lean step alone, and all
    profile    the kernels of a replay and of a gradient
    gradient   at the micro-batch that `auto` gives a large card, and at a small one
    headline   a step of train.py and its peak, one method alone and five side by side
    laptop     the rows of hardware.md on a card that pretends to be as small, three side by side
    others     all tokens: plain, with graphs, and by `generate` with a static cache

Weights are random, in bfloat16, of SmolLM2-135M's and Qwen2.5-0.5B's shapes: 12 prompts of 100 tokens,
8 rollouts each of 256. A part that fails is noted, and the others go on. For another version of
transformers put a folder with it into PYTHONPATH (pip install --target).
"""

import argparse
import contextlib
import functools
import gc
import json
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fast
import rollout
from engine.config import Config, open_device
from engine.errors import as_command
from engine.models import recompute_layers, save_model
from engine.processes import PROCESS_BYTES
from engine.training import memory
from fast import graphs, lean
from rollout import Policy, Rollouts, SamplingOptions
from study.benchmarks.memory_table import LAPTOPS, Laptop

ROOT = Path(__file__).resolve().parents[2]
Numbers = dict[str, float]
# Of train.py. Random models earn nothing; with an entropy bonus all rollouts have a gradient anyway.
RUN = (
    "--task headline --warm-steps 2 --steps 4 --eval-problems 0 --snapshots 0 "
    "--entropy-coef 1e-6 --out run"
)
# width, width of the MLP, layers, heads, heads of keys and values, words; the head is the embedding
SHAPES = {
    "tiny": (Qwen2Config, 32, 64, 2, 4, 2, 512),
    "SmolLM2-135M": (LlamaConfig, 576, 1536, 30, 9, 3, 49152),
    "Qwen2.5-0.5B": (Qwen2Config, 896, 4864, 24, 14, 2, 151936),
    "Qwen2.5-1.5B": (Qwen2Config, 1536, 8960, 28, 12, 2, 151936),
    "Qwen2.5-3B": (Qwen2Config, 2048, 11008, 36, 16, 2, 151936),
}


@dataclass
class Bench:
    """How large everything is, and where it runs."""

    device: str  # "meta": shapes alone
    names: tuple[str, ...]  # of the models
    P: int = 12
    G: int = 8
    L: int = 100
    T: int = 256

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16


# Models, rollouts and clocks.


def policy_of(bench: Bench, name: str) -> Policy:
    """A random model of an architecture, and a tokenizer whose tokens are bytes. Token 0 ends a rollout."""
    kind, width, mlp, layers, heads, kv_heads, n_words = SHAPES[name]
    shape = kind(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=n_words,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    # Bytes: transformers loads any tokenizer of a Qwen2 as one of bytes and their merges.
    tokens = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(shape, dtype=bench.dtype).eval()
    return Policy(model, tokenizer)


def prompts_of(bench: Bench) -> list[str]:
    """P texts of L random letters, which are as many tokens."""
    rng = random.Random(0)
    return ["".join(rng.choices(string.ascii_letters, k=bench.L)) for _ in range(bench.P)]


def sampled(bench: Bench, policy: Policy, decode: Callable) -> Rollouts:
    """G rollouts of T tokens for each prompt, drawn by a function."""
    options = SamplingOptions(bench.T, torch.Generator().manual_seed(1))
    return rollout.sample(policy, prompts_of(bench), bench.G, options, decode)


@torch.no_grad()
def space_of(bench: Bench, policy: Policy) -> graphs.Workspace:
    """A workspace with all prompts, and one token of each rollout."""
    ids, lengths = rollout.encode_prompts(policy, prompts_of(bench), bench.T)
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(bench.P * bench.G, bench.T, generator=generator).to(bench.device)
    return graphs.begin(policy.model, ids, lengths, uniform, 1.0)


def seconds_of(bench: Bench, function: Callable, *arguments) -> float:
    """Seconds of one call."""
    if bench.device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    function(*arguments)
    if bench.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def bytes_per_second(bench: Bench) -> float:
    """What a copy reads and writes."""
    n = 2**30 if bench.device == "cuda" else 2**20
    source = torch.zeros(n, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds_of(bench, target.copy_, source) for _ in range(5))


def matmul_flops(bench: Bench) -> float:
    """Operations per second of a large matrix product."""
    n = 8192 if bench.device == "cuda" else 256
    a = torch.randn(n, n, device=bench.device, dtype=bench.dtype)
    return 2 * n**3 / min(seconds_of(bench, torch.matmul, a, a) for _ in range(5))


# The parts.


def token(bench: Bench, name: str) -> Numbers:
    """Milliseconds of a token of all rollouts: without lean steps, with each alone, and with all."""
    policy = policy_of(bench, name)
    space = space_of(bench, policy)
    model = policy.model
    norms = [*lean.find_norms(model)]
    rope = [*lean.find_rope(model)]
    float_mask = graphs.ready_mask

    def bool_mask(*arguments) -> Tensor:
        return float_mask(*arguments) == 0

    sides = {
        "own operators": ([], bool_mask),
        "one float mask": ([], float_mask),
        "RoPE by a roll": (rope, bool_mask),
        "F.rms_norm": (norms, bool_mask),
        "all": ([*norms, *rope], float_mask),
    }
    results = {}
    for side, (swaps, mask) in sides.items():
        with patch.dict(lean.swaps, {model: swaps}), patch.object(graphs, "ready_mask", mask):
            results[side] = token_ms(bench, policy, space)
    read = sum(weight.nbytes for weight in model.parameters())
    for keys, values in space.layers:
        read += keys.nbytes + values.nbytes
    results["to read weights and KV cache"] = 1000 * read / bytes_per_second(bench)
    return results


@torch.no_grad()
def token_ms(bench: Bench, policy: Policy, space: graphs.Workspace) -> float:
    """Milliseconds of a token of all rollouts, after the one in which the graph is captured."""
    B = bench.P * bench.G
    n_tokens = bench.T - 2
    space.place.fill_(bench.L)
    space.graphs.clear()
    space.next_token(policy.model, B, 1.0)

    def tokens() -> None:
        for _ in range(n_tokens):
            space.next_token(policy.model, B, 1.0)

    return 1000 * seconds_of(bench, tokens) / n_tokens


def gradient_of(bench: Bench, policy: Policy, rollouts: Rollouts, budget: int) -> Callable:
    """A function that computes the gradient of rollouts in micro-batches of so many tokens."""
    generator = torch.Generator().manual_seed(2)
    advantages = torch.randn(bench.P * bench.G, generator=generator).to(bench.device)
    config = Config(micro_batch_tokens=budget, kl=0.0)
    return functools.partial(fast.backward, policy, None, rollouts, advantages, config)


def gradient(bench: Bench, name: str) -> dict[str, Numbers]:
    """The gradient of all rollouts by what `auto` gives a large card, and by less."""
    policy = policy_of(bench, name)
    rollouts = sampled(bench, policy, graphs.decode)
    results = {"matrix products": {"tflops": matmul_flops(bench) / 1e12}}
    at_auto = gradient_of(bench, policy, rollouts, memory.MOST_TOKENS)
    results["auto"] = gradient_numbers(bench, policy, rollouts, at_auto)
    with patch.dict(lean.swaps, {policy.model: []}):
        results["auto, own operators"] = gradient_numbers(bench, policy, rollouts, at_auto)
    recompute_layers(policy.model)
    in_small_parts = gradient_of(bench, policy, rollouts, 4096)
    results["4096, layers twice"] = gradient_numbers(bench, policy, rollouts, in_small_parts)
    return results


def gradient_numbers(
    bench: Bench, policy: Policy, rollouts: Rollouts, backward: Callable
) -> Numbers:
    """Seconds of a gradient, what it computes in a second, and its peak."""
    backward()
    if bench.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = min(seconds_of(bench, backward) for _ in range(3))
    n_tokens = sum(rollouts.lengths) + sum(rollouts.prompt_lengths)
    flops = 6 * policy.model.num_parameters() * n_tokens / seconds
    numbers = {"seconds": seconds, "tflops": flops / 1e12}
    if bench.device == "cuda":
        numbers["peak_gib"] = torch.cuda.max_memory_allocated() / memory.GIB
    return numbers


def kernels(bench: Bench, name: str) -> dict[str, dict]:
    """The longest kernels of a replay and of a gradient."""
    policy = policy_of(bench, name)
    rollouts = sampled(bench, policy, graphs.decode)
    backward = gradient_of(bench, policy, rollouts, memory.MOST_TOKENS)
    space = space_of(bench, policy)
    with torch.no_grad():
        replay = profiled(bench, space.next_token, policy.model, bench.P * bench.G, 1.0)
    return {"replay": replay, "gradient": profiled(bench, backward)}


def profiled(bench: Bench, function: Callable, *arguments) -> dict:
    """Seconds of a second call, and the profiler's table of its kernels."""
    function(*arguments)
    activity = ProfilerActivity.CUDA if bench.device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as records:
        seconds = seconds_of(bench, function, *arguments)
    order = f"self_{bench.device}_time_total"
    table = records.key_averages().table(sort_by=order, row_limit=15)
    return {"seconds": seconds, "kernels": table.splitlines()}


def headline(bench: Bench, name: str) -> dict[str, dict]:
    """One method alone, and five side by side."""
    five = "grpo max_at_k multi_rlvr vpo group_vpo"
    with saved(bench, name) as model:
        alone = trained(bench, model, "--method vpo")
        together = trained(bench, model, f"--method {five} --jobs 5")
    return {"alone": alone, "five side by side": together}


def laptop(bench: Bench, _: str) -> dict[str, dict]:
    """The rows of hardware.md: whether what `auto` plans holds. Their times say nothing."""
    with ThreadPoolExecutor(3) as pool:  # three take 45 GiB of a card and of a disk
        runs = {}
        for row in LAPTOPS:
            name = f"{row.gib} GiB, {row.model} {row.flags}"
            runs[name] = pool.submit(measured, laptop_run, bench, row)
    return {name: run.result() for name, run in runs.items()}


def laptop_run(bench: Bench, row: Laptop) -> dict[str, Numbers]:
    """A run of a row on a card that looks as small as the laptop's."""
    with saved(bench, row.model if row.model in bench.names else bench.names[0]) as model:
        return trained(bench, model, f"--method vpo {row.flags}", row.gib)


@contextlib.contextmanager
def saved(bench: Bench, name: str) -> Iterator[str]:
    """A folder with a random model, which is gone from the card."""
    policy = policy_of(bench, name)
    with tempfile.TemporaryDirectory() as folder:
        save_model(policy.model, policy.tokenizer, folder)
        del policy
        gc.collect()
        if bench.device == "cuda":
            torch.cuda.empty_cache()
        yield folder


def trained(bench: Bench, model: str, flags: str, gib: int = 0) -> dict[str, Numbers]:
    """Seconds of a step of train.py with headlines, and the peak of a method, by method. No evaluation.

    Args:
        model: its folder.
        gib: of the card that it is given to see; 0: the whole one.
    """
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train\n"
    if gib and bench.device == "cuda":
        code += f"from study.benchmarks import one_gpu; one_gpu.pretend_small({gib})\n"
    command = [sys.executable, "-c", code + "if __name__ == '__main__': train.main()"]
    command += [*RUN.split(), "--model", model, "--device", bench.device, *flags.split()]
    numbers = {}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90)
        if done.returncode:
            raise RuntimeError(done.stderr[-300:])
        for path in sorted(Path(folder, "run").glob("*/metrics.jsonl")):
            rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            own = {"seconds": statistics.median(row["seconds"] for row in rows[1:])}
            if bench.device == "cuda":
                own |= json.loads(path.with_name("memory.json").read_text("utf-8"))
            numbers[path.parent.name] = own
    return numbers


def pretend_small(gib: float) -> None:
    """Let this process see a card of so many GiB, and take no more of it."""
    _, total = torch.cuda.mem_get_info()
    most = int(gib * memory.GIB - PROCESS_BYTES)  # the driver's part is not counted below
    torch.cuda.set_per_process_memory_fraction(most / total)
    torch.cuda.mem_get_info = lambda: (most - torch.cuda.memory_reserved(), most)


def others(bench: Bench, name: str) -> Numbers:
    """Milliseconds per token of all rollouts, by ours and by transformers."""
    policy = policy_of(bench, name)
    ids, _ = rollout.encode_prompts(policy, prompts_of(bench), bench.T)
    rows = ids.repeat_interleave(bench.G, 0)
    generate = functools.partial(
        policy.model.generate,
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=True,
        top_k=0,
        min_new_tokens=bench.T,
        max_new_tokens=bench.T,
        cache_implementation="static",
        disable_compile=True,
    )
    sides = {
        "plain": functools.partial(sampled, bench, policy, rollout.decode),
        "graph": functools.partial(sampled, bench, policy, graphs.decode),
        "generate": generate,
    }
    results = {}
    for side, function in sides.items():
        function()
        results[side] = 1000 * seconds_of(bench, function) / bench.T
        graphs.workspaces.clear()
    return results


# The file.


def measured(function: Callable, *arguments) -> dict:
    """What a measurement returns, or why it failed."""
    try:
        return function(*arguments)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


# Each of the first models: how many of them, and what is done.
PARTS = {
    "token": (2, token),
    "profile": (1, kernels),
    "gradient": (2, gradient),
    "headline": (1, headline),
    "laptop": (1, laptop),
    "others": (1, others),
}


def run() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--out", default="one_gpu.json")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU")
    flags = parser.parse_args()
    bench = Bench("cuda", ("SmolLM2-135M", "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B"))
    if flags.dry:
        bench = Bench("cpu", ("tiny",), P=2, G=2, L=10, T=9)
    open_device(bench.device)
    record = {"torch": torch.__version__, "transformers": transformers.__version__}
    if bench.device == "cuda":
        record["card"] = torch.cuda.get_device_name()
    began = time.perf_counter()
    for part in flags.only:
        n_models, function = PARTS[part]
        record[part] = {}
        for name in bench.names[:n_models]:
            record[part][name] = measured(function, bench, name)
            graphs.workspaces.clear()
            gc.collect()  # a model whose layers are computed again refers to itself
        record[f"seconds until {part} was done"] = time.perf_counter() - began
        # A part that hangs loses no other.
        Path(flags.out).write_text(json.dumps(record, indent=1), "utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    with as_command("one_gpu.py"):
        run()
