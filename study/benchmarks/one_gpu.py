"""What one card does, in at most six minutes, for docs/hardware.md. One JSON file.

    python study/benchmarks/one_gpu.py                   on a card; writes one_gpu.json
    python study/benchmarks/one_gpu.py --only token      one part, or several
    python study/benchmarks/one_gpu.py --dry             tiny models on the CPU: whether every part runs

    token      a token of 96 rollouts by a CUDA graph: each lean step alone, and all
    profile    the kernels of a replay and of a gradient, their time, and the time between them
    gradient   at the micro-batch that `auto` gives a large card; clip and AdamW
    headline   a step of train.py and its peak, one method alone and five side by side
    laptop     the rows of hardware.md on a card that pretends to be as small, several side by side
    others     all tokens: plain, with graphs, and by `generate` with a static cache

Weights are random, in bfloat16, of SmolLM2-135M's and Qwen2.5-0.5B's shapes: 12 prompts of 100 tokens,
8 rollouts each of 256. A part that fails is noted, and the others go on. Another version of transformers
is measured by a second call, from a wheel that travelled with the project (10 MiB):

    python -m pip download --no-deps -d wheels transformers==5.23.0           here
    python -m pip install --no-deps --no-index --target pinned wheels/*.whl   on the card's machine
    PYTHONPATH=pinned python study/benchmarks/one_gpu.py --only token --out pinned.json
"""

import argparse
import contextlib
import functools
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fast
import rollout
from engine.config import AUTO, Config, open_device
from engine.errors import as_command
from engine.models import recompute_layers, save_model
from engine.optimizer import MasterWeightAdamW
from engine.tasks import load_task_class
from engine.training import memory
from engine.training.jobs import PROCESS_BYTES
from fast import graphs, lean
from rollout import Policy, Rollouts, SamplingOptions
from study.benchmarks.memory_table import LAPTOPS, Laptop

ROOT = Path(__file__).resolve().parents[2]
Numbers = dict[str, float | str]
SECONDS = 300  # after which no measurement begins
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
    began: float = 0.0

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


def prompts_of(bench: Bench, policy: Policy) -> tuple[Tensor, list[int]]:
    """Token ids (P, L) without padding, and their lengths."""
    generator = torch.Generator().manual_seed(0)
    size = (bench.P, bench.L)
    ids = torch.randint(2, len(policy.tokenizer), size, generator=generator)
    return ids.to(bench.device), [bench.L] * bench.P


def uniform_of(bench: Bench) -> Tensor:
    """Random numbers (B, T) that draw the tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(bench.P * bench.G, bench.T, generator=generator).to(bench.device)


@torch.no_grad()
def sampled(bench: Bench, policy: Policy, decode: Callable) -> Rollouts:
    """The rollouts that a function draws."""
    ids, lengths = prompts_of(bench, policy)
    options = SamplingOptions(bench.T, torch.Generator())
    drawn = decode(policy, ids, lengths, uniform_of(bench), options)
    texts = [""] * len(drawn.lengths)
    n_sampled = drawn.lengths.tolist()
    tokens = drawn.tokens.to(bench.device)
    ended = drawn.ended.tolist()
    return Rollouts(ids, lengths, tokens, drawn.logprobs, n_sampled, texts, ended)


def seconds_of(bench: Bench, function: Callable, *arguments) -> float:
    """Seconds of one call."""
    if bench.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    function(*arguments)
    if bench.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def peak_gib(bench: Bench) -> float:
    """The most memory of tensors since the last clock began, without a graph's scratch; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / memory.GIB if bench.device == "cuda" else 0.0


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
    seconds = min(seconds_of(bench, torch.matmul, a, a) for _ in range(5))
    return 2 * n**3 / seconds


class Operators(TorchDispatchMode):
    """Counts operators that are kernels on a card: no views, and `F.rms_norm`, which a CPU takes apart, once."""

    VIEWS = (
        "view _unsafe_view expand transpose t unsqueeze slice select permute squeeze alias detach "
        "as_strided split split_with_sizes unbind reshape _reshape_alias lift_fresh narrow chunk"
    )
    count = 0
    is_inside = False  # F.rms_norm

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator._schema.name.removeprefix("aten::")
        self.count += name not in self.VIEWS.split() and not self.is_inside
        return operator(*args, **(kwargs or {}))

    def rms_norm(self, *args, **options) -> Tensor:
        """In place of F.rms_norm."""
        self.count += 1
        self.is_inside = True
        norm = torch.rms_norm(*args, **options)
        self.is_inside = False
        return norm


def count_operators(function: Callable, *arguments) -> int:
    """How many operators a call dispatches to the device."""
    operators = Operators()
    with operators, patch.object(F, "rms_norm", operators.rms_norm):
        function(*arguments)
    return operators.count


# The parts.


def token(bench: Bench, name: str) -> dict[str, Numbers]:
    """A token of all rollouts: as without lean steps, with each alone, and with all."""
    policy = policy_of(bench, name)
    space = space_of(bench, policy)
    model = policy.model
    norms = [*lean.find_norms(model)]
    rope = [*lean.find_rope(model)]
    float_mask = graphs.ready_mask

    def bool_mask(*arguments) -> Tensor:
        return float_mask(*arguments) == 0

    sides = {
        "plain operators": ([], bool_mask),
        "one float mask": ([], float_mask),
        "F.rms_norm": (norms, bool_mask),
        "RoPE by a roll": (rope, bool_mask),
        "all": ([*norms, *rope], float_mask),
    }
    results = {}
    expected = None  # logits without lean steps
    for side, (swaps, mask) in sides.items():
        with patch.dict(lean.swaps, {model: swaps}), patch.object(graphs, "ready_mask", mask):
            if expected is None:
                expected = logits_of(bench, policy, space)
            results[side] = measured(token_of_side, bench, policy, space, expected)
            results[side]["operators"] = count_operators(logits_of, bench, policy, space)
    kept = sum(weight.nbytes for weight in model.parameters())
    for keys, values in space.layers:
        kept += keys.nbytes + values.nbytes
    results["memory limit"] = {"ms": 1000 * kept / bytes_per_second(bench)}
    return results


@torch.no_grad()
def space_of(bench: Bench, policy: Policy) -> graphs.Workspace:
    """A workspace with all prompts, and one token of each rollout."""
    ids, lengths = prompts_of(bench, policy)
    return graphs.begin(policy.model, ids, lengths, uniform_of(bench), 1.0)


@torch.no_grad()
def logits_of(bench: Bench, policy: Policy, space: graphs.Workspace) -> Tensor:
    """Logits after the first token of each rollout."""
    space.place.fill_(bench.L)
    return space.logits(policy.model, bench.P * bench.G)


@torch.no_grad()
def token_of_side(
    bench: Bench, policy: Policy, space: graphs.Workspace, expected: Tensor
) -> Numbers:
    """Milliseconds of a token, seconds of the first ones, and how far logits are from the expected ones."""
    B = bench.P * bench.G
    n_tokens = bench.T - 3
    began = time.perf_counter()
    change = (logits_of(bench, policy, space) - expected).std() / expected.std()
    space.graphs.clear()
    space.next_token(policy.model, B, 1.0)
    first_seconds = time.perf_counter() - began

    def tokens() -> None:
        for _ in range(n_tokens):
            space.next_token(policy.model, B, 1.0)

    ms = 1000 * seconds_of(bench, tokens) / n_tokens
    return {"ms": ms, "first_seconds": first_seconds, "change_of_logits": change.item()}


def kernels(bench: Bench, name: str) -> dict[str, Numbers]:
    """The longest kernels of a replay and of a gradient."""
    policy = policy_of(bench, name)
    space = space_of(bench, policy)
    B = bench.P * bench.G
    arguments = gradient_arguments(bench, policy, memory.MOST_TOKENS)
    space.place.fill_(bench.L)
    with torch.no_grad():
        replay = profiled(bench, space.next_token, policy.model, B, 1.0)
    return {"replay": replay, "gradient": profiled(bench, fast.backward, *arguments)}


def profiled(bench: Bench, function: Callable, *arguments) -> Numbers:
    """Milliseconds of a call's kernels, by name, and of the time when none ran. The first call is not looked at."""
    function(*arguments)
    own = ProfilerActivity.CUDA if bench.device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[own]) as records:
        seconds_of(bench, function, *arguments)
    wanted = torch.autograd.DeviceType.CUDA if bench.device == "cuda" else None
    events = [event for event in records.events() if wanted in (None, event.device_type)]
    names: Counter[str] = Counter()
    for event in events:
        names[event.name[:80]] += event.time_range.elapsed_us() / 1000
    busy = names.total()
    began = min(event.time_range.start for event in events)
    ended = max(event.time_range.end for event in events)
    numbers = {"kernels": len(events), "busy_ms": busy, "idle_ms": (ended - began) / 1000 - busy}
    return numbers | {name: round(ms, 3) for name, ms in names.most_common(15)}


def gradient_arguments(bench: Bench, policy: Policy, budget: int) -> tuple:
    """Arguments of a gradient of all rollouts."""
    rollouts = sampled(bench, policy, graphs.decode)
    generator = torch.Generator().manual_seed(2)
    advantages = torch.randn(bench.P * bench.G, generator=generator).to(bench.device)
    return policy, None, rollouts, advantages, Config(micro_batch_tokens=budget, kl=0.0)


def gradient(bench: Bench, name: str) -> dict[str, Numbers]:
    """The gradient of all rollouts by what `auto` gives a large card, and by less; clip and AdamW."""
    policy = policy_of(bench, name)
    peak = matmul_flops(bench)
    results = {"matrix products": {"tflops": peak / 1e12}}
    sides = (
        ("auto", None, memory.MOST_TOKENS),
        ("auto, plain operators", [], memory.MOST_TOKENS),
        ("4096, layers computed again", None, 4096),
    )
    for side, swaps, budget in sides:
        if budget == 4096:
            recompute_layers(policy.model)
        lean.swaps.pop(policy.model, None)
        if swaps is not None:
            lean.swaps[policy.model] = swaps
        arguments = gradient_arguments(bench, policy, budget)
        fast.backward(*arguments)
        seconds = min(seconds_of(bench, fast.backward, *arguments) for _ in range(3))
        rollouts = arguments[2]
        n_tokens = sum(rollouts.lengths) + sum(rollouts.prompt_lengths)
        flops = 6 * policy.model.num_parameters() * n_tokens / seconds
        results[side] = {"seconds": seconds, "tflops": flops / 1e12, "share_of_peak": flops / peak}
        results[side]["peak_gib"] = peak_gib(bench)
    optimizer = MasterWeightAdamW(policy.model)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(optimizer.weights, 1.0)
        optimizer.step(1e-6)

    update()
    fast.backward(*arguments)
    results["clip and AdamW"] = {"seconds": seconds_of(bench, update), "peak_gib": peak_gib(bench)}
    return results


def headline(bench: Bench, name: str) -> dict[str, Numbers]:
    """One method alone, and five side by side."""
    five = ["grpo", "max_at_k", "multi_rlvr", "vpo", "group_vpo"]
    with saved(bench, name) as model:
        alone = measured(trained, bench, model, ["--method", "vpo"])
        together = measured(trained, bench, model, ["--method", *five, "--jobs", "5"])
    return {"alone": alone, "five side by side": together}


def laptop(bench: Bench, name: str) -> dict[str, Numbers]:
    """The rows of hardware.md: what `auto` plans, and whether it holds. Their times say nothing."""
    results = {}
    for rows in (
        LAPTOPS[:4],
        LAPTOPS[4:],
    ):  # side by side: they take 45 GiB of a card and of a disk
        with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
            runs = {}
            for row in rows:
                own = row.model if row.model in bench.names else name
                model = stack.enter_context(saved(bench, own))
                flags = ["--method", "vpo", *row.flags.split()]
                key = f"{row.gib} GiB, {row.model} {row.flags}"
                results[key] = {"plan": measured(plan, bench, row)}
                runs[key] = pool.submit(measured, trained, bench, model, flags, row.gib)
            for key, run in runs.items():
                results[key] |= run.result()
    return results


def plan(bench: Bench, row: Laptop) -> Numbers:
    """The numbers that `auto` gets on a laptop's card, from the shape of the model alone."""
    is_adapter = "--lora-rank" in row.flags
    config = Config(model=row.model, method=["vpo"], max_new_tokens=16, gradient_checkpointing=True)
    config.micro_batch_tokens = config.sampling_batch = AUTO
    config.lora_rank = 16 if is_adapter else 0
    config.kl = 1e-3 if "--kl" in row.flags else 0.0
    policy = policy_of(Bench("meta", ()), row.model)
    policy.model.to(torch.bfloat16 if is_adapter else torch.float32)
    used = policy.model.num_parameters() * policy.model.dtype.itemsize
    free = row.gib * memory.GIB - PROCESS_BYTES - used
    memory.fill_card(config, policy, load_task_class("headline")(), int(free))
    return {
        "stays_gib": memory.resident(config, policy) / memory.GIB,
        "sampling_batch": config.sampling_batch,
        "micro_batch_tokens": config.micro_batch_tokens,
        "layers are computed again": config.gradient_checkpointing,
    }


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


def trained(bench: Bench, model: str, flags: list[str], gib: int = 0) -> Numbers:
    """Seconds of a step of train.py with headlines, and the peak of a method, by method. No evaluation.

    Args:
        model: its folder.
        gib: of the card that it is given to see; 0: the whole one.
    """
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train\n"
    if gib and bench.device == "cuda":
        code += f"from study.benchmarks import one_gpu; one_gpu.pretend_small({gib})\n"
    command = [sys.executable, "-c", code + "if __name__ == '__main__': train.main()"]
    command += [*RUN.split(), "--model", model, "--device", bench.device, *flags]
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


def others(bench: Bench, name: str) -> dict[str, Numbers]:
    """All tokens of all rollouts, by ours and by transformers."""
    policy = policy_of(bench, name)
    ids, _ = prompts_of(bench, policy)
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
        seconds = seconds_of(bench, function)
        results[side] = {"ms_per_token": 1000 * seconds / bench.T, "peak_gib": peak_gib(bench)}
        graphs.workspaces.clear()
    results["graph"]["refused"] = graphs.refused.get(policy.model, "no")
    return results


# The file.


def machine(device: str) -> Numbers:
    """What the numbers belong to."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = ""
    with contextlib.suppress(OSError):  # there may be no git
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    facts = {
        "commit": commit,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device,
    }
    if device == "cuda":
        facts["card"] = torch.cuda.get_device_name()
        facts["memory_gib"] = torch.cuda.get_device_properties(0).total_memory / memory.GIB
    return facts


def measured(function: Callable, bench: Bench, *arguments) -> dict:
    """What a measurement returns, or why it failed."""
    if time.perf_counter() > bench.began + SECONDS:
        return {"error": "no time was left"}
    try:
        return function(bench, *arguments)
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
    bench.began = time.perf_counter()
    record = {"machine": machine(bench.device)}
    for part in flags.only:
        n_models, function = PARTS[part]
        record[part] = {}
        for name in bench.names[:n_models]:
            record[part][name] = measured(function, bench, name)
            graphs.workspaces.clear()
            gc.collect()  # a model whose layers are computed again refers to itself
        record[f"seconds until {part} was done"] = time.perf_counter() - bench.began
        # A part that hangs loses no other.
        Path(flags.out).write_text(json.dumps(record, indent=1), "utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    with as_command("one_gpu.py"):
        run()
