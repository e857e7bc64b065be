"""What one card does in at most eight minutes: sampling, gradient, estimator, a step, memory. One JSON file.

    python study/benchmarks/one_gpu.py            on a card; writes one_gpu.json
    python study/benchmarks/one_gpu.py --dry      tiny shapes on the CPU: whether every part runs
    python study/benchmarks/one_gpu.py --parts sampling gradient

Architectures of SmolLM2-135M and Qwen2.5-0.5B with random weights in bfloat16: 12 prompts of 100 tokens,
8 rollouts each of 256. A part that fails is noted, and the others go on.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fast
import rollout
import train
from engine import memory
from engine.config import Config, open_device
from engine.doors import as_command
from engine.models import recompute_layers
from engine.optimizer import MasterWeightAdamW
from fast import graphs
from rollout import Policy, Rollouts, SamplingOptions
from study.benchmarks.estimator import loop
from vpo import vpo_advantage

Numbers = dict[str, float | str]
SECONDS = 450  # after which no part begins
SHAPES = {
    "SmolLM2-135M": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
}
TINY = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=512,
)


@dataclass
class Bench:
    """How large everything is, and where it runs."""

    device: str
    shapes: dict[str, PreTrainedConfig]
    P: int = 12
    G: int = 8
    L: int = 100
    T: int = 256
    estimators: tuple = ((12, 8, 3, 4), (128, 8, 3, 4), (512, 16, 5, 16), (4096, 16, 5, 16))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


def policy_of(bench: Bench, name: str) -> Policy:
    """A random model of an architecture. Its tokens are words w0, w1, ..., of which w0 ends a rollout."""
    shape = bench.shapes[name]
    shape.eos_token_id = 0
    words = {f"w{i}": i for i in range(shape.vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0", pad_token="w1")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape, dtype=bench.dtype).eval()
    return Policy(model.to(bench.device), tokenizer)


def prompts_of(bench: Bench, policy: Policy) -> tuple[Tensor, list[int]]:
    """Token ids (P, L) without padding, and their lengths."""
    generator = torch.Generator().manual_seed(0)
    size = (bench.P, bench.L)
    ids = torch.randint(2, len(policy.tokenizer), size, generator=generator)
    return ids.to(bench.device), [bench.L] * bench.P


@torch.no_grad()
def sampled(bench: Bench, policy: Policy, decode: Callable) -> Rollouts:
    """The rollouts that a function draws."""
    ids, lengths = prompts_of(bench, policy)
    options = SamplingOptions(bench.T, torch.Generator().manual_seed(1))
    uniform = torch.rand(bench.P * bench.G, bench.T, generator=options.generator)
    drawn = decode(policy, ids, lengths, uniform.to(bench.device), options)
    texts = [""] * len(uniform)
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


# The parts.


def sampling(bench: Bench, name: str) -> dict[str, Numbers]:
    """Plain, with graphs, and `generate` of transformers with a static cache."""
    policy = policy_of(bench, name)
    results = {}
    tokens = {}
    for side, decode in (("plain", rollout.decode), ("graph", graphs.decode)):
        first = seconds_of(bench, sampled, bench, policy, decode)
        seconds = seconds_of(bench, sampled, bench, policy, decode)
        rollouts = sampled(bench, policy, decode)
        tokens[side] = rollouts.tokens
        results[side] = {
            "ms_per_position": 1000 * seconds / rollouts.tokens.shape[1],
            "tokens_per_second": sum(rollouts.lengths) / seconds,
            "first_call_seconds": first,
            "peak_gib": peak_gib(bench),
        }
    same = (tokens["plain"] == tokens["graph"]).all(1).float().mean().item()
    results["graph"]["rows_as_plain"] = same
    results["graph"]["refused"] = graphs.refused.get(policy.model, "no")

    graphs.workspaces.clear()
    ids, _ = prompts_of(bench, policy)
    rows = ids.repeat_interleave(bench.G, 0)

    def generate() -> None:
        policy.model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            top_k=0,
            min_new_tokens=bench.T,
            max_new_tokens=bench.T,
            cache_implementation="static",
            disable_compile=True,
        )

    generate()
    seconds = seconds_of(bench, generate)
    results["generate"] = {
        "ms_per_position": 1000 * seconds / bench.T,
        "tokens_per_second": len(rows) * bench.T / seconds,
        "peak_gib": peak_gib(bench),
    }
    return results


def gradient(bench: Bench, name: str) -> dict[str, Numbers]:
    """The gradient of all rollouts: what was the default, and what `auto` gives a large card."""
    policy = policy_of(bench, name)
    rollouts = sampled(bench, policy, rollout.decode)
    generator = torch.Generator().manual_seed(2)
    advantages = torch.randn(bench.P * bench.G, generator=generator).to(bench.device)
    n = policy.model.num_parameters()
    n_tokens = sum(rollouts.lengths) + sum(rollouts.prompt_lengths)
    peak = matmul_flops(bench)
    sides = (
        ("fast, auto", fast.backward, memory.MOST_TOKENS),
        ("fast, 4096, checkpointing", fast.backward, 4096),
        ("plain, 4096, checkpointing", train.backward, 4096),
    )
    results = {}
    for side, backward, budget in sides:
        if side == "fast, 4096, checkpointing":  # and so is the next
            recompute_layers(policy.model)
        config = Config(micro_batch_tokens=budget, kl=0.0)

        arguments = (policy, None, rollouts, advantages, config)
        backward(*arguments)
        seconds = min(seconds_of(bench, backward, *arguments) for _ in range(2))
        policy.model.zero_grad()
        flops = 6 * n * n_tokens / seconds
        results[side] = {
            "seconds": seconds,
            "tokens_per_second": sum(rollouts.lengths) / seconds,
            "tflops": flops / 1e12,
            "mfu": flops / peak,
            "peak_gib": peak_gib(bench),
        }
    return results


def matmul_flops(bench: Bench) -> float:
    """Operations per second of a large matrix product."""
    n = 8192 if bench.device == "cuda" else 256
    a = torch.randn(n, n, device=bench.device, dtype=bench.dtype)
    seconds = min(seconds_of(bench, torch.matmul, a, a) for _ in range(5))
    return 2 * n**3 / seconds


def step(bench: Bench, name: str) -> dict[str, Numbers]:
    """A training step, here and in TRL."""
    ours = own_step(bench, name)
    graphs.workspaces.clear()
    return {"ours": ours, "trl": trl_step(bench, name)}


def own_step(bench: Bench, name: str) -> Numbers:
    """Sampling, gradient, clip and AdamW, without rewards; and their memory against the formula."""
    policy = policy_of(bench, name)
    optimizer = MasterWeightAdamW(policy.model)
    config = Config(micro_batch_tokens=memory.MOST_TOKENS, kl=0.0)
    advantages = torch.randn(bench.P * bench.G, generator=torch.Generator().manual_seed(2))
    advantages = advantages.to(bench.device)

    def once() -> None:
        rollouts = sampled(bench, policy, graphs.decode)
        fast.backward(policy, None, rollouts, advantages, config)
        torch.nn.utils.clip_grad_norm_(optimizer.weights, 1.0)
        optimizer.step(1e-6)
        policy.model.zero_grad()

    once()
    seconds = min(seconds_of(bench, once) for _ in range(2))
    tokens = bench.P * bench.G * bench.T
    formula = memory.resident(config, policy) + memory.HEAD
    formula += min(tokens, memory.MOST_TOKENS) * memory.per_token(policy, is_checkpointed=False)
    for keys, values in graphs.workspaces[policy.model].layers:
        formula += keys.nbytes + values.nbytes
    return {"seconds": seconds, "peak_gib": peak_gib(bench), "formula_gib": formula / memory.GIB}


def trl_step(bench: Bench, name: str) -> Numbers:
    """The same with TRL's GRPOTrainer, its rewards random."""
    if not importlib.util.find_spec("trl"):
        return {"error": "trl is not installed"}
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    policy = policy_of(bench, name)
    ids, _ = prompts_of(bench, policy)
    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kwargs) -> None:
            if bench.device == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder,
            per_device_train_batch_size=bench.P * bench.G,
            num_generations=bench.G,
            max_completion_length=bench.T,
            generation_kwargs={"min_new_tokens": bench.T},
            max_steps=3,
            beta=0.0,
            learning_rate=1e-6,
            bf16=bench.device == "cuda",
            use_cpu=bench.device == "cpu",
            gradient_checkpointing=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
        )
        trainer = GRPOTrainer(
            policy.model,
            lambda completions, **kwargs: torch.rand(len(completions)).tolist(),
            config,
            Dataset.from_dict({"prompt": policy.tokenizer.batch_decode(ids)}),
            processing_class=policy.tokenizer,
            callbacks=[Clock()],
        )
        seconds_of(bench, trainer.train)
    return {"seconds": ends[-1] - ends[-2], "peak_gib": peak_gib(bench)}


def estimator(bench: Bench) -> dict[str, Numbers]:
    """`vpo_advantage`, compiled, and a loop over groups in NumPy, in milliseconds."""
    compiled = torch.compile(vpo_advantage) if bench.device == "cuda" else vpo_advantage
    results = {}
    for shape in bench.estimators:
        rewards = torch.rand(shape)
        own = rewards.to(bench.device)
        numbers = {}
        for side, function in (("eager", vpo_advantage), ("compiled", compiled)):
            function(own)
            best = min(seconds_of(bench, function, own) for _ in range(5))
            numbers[f"{side}_ms"] = 1000 * best
        if shape[0] <= 512:
            numbers["numpy_ms"] = 1000 * seconds_of(bench, loop, rewards, None)
        results[", ".join(map(str, shape))] = numbers
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


def measured(function: Callable, *args) -> object:
    """What a part returns, or why it failed."""
    try:
        return function(*args)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def run() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    per_model = {"sampling": sampling, "gradient": gradient, "step": step}
    parser.add_argument("--parts", nargs="*", default=[*per_model, "estimator"])
    parser.add_argument("--out", default="one_gpu.json")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    flags = parser.parse_args()
    bench = Bench("cuda", SHAPES)
    if flags.dry:
        bench = Bench("cpu", {"tiny": TINY}, P=2, G=2, L=10, T=9, estimators=((4, 4, 3, 2),))
    open_device(bench.device)
    began = time.perf_counter()
    record = {"machine": machine(bench.device)}
    for part in flags.parts:
        record[part] = {} if part in per_model else measured(estimator, bench)
        for name in bench.shapes if part in per_model else ():
            if time.perf_counter() - began > SECONDS:
                record[part][name] = {"error": "no time was left"}
                continue
            record[part][name] = measured(per_model[part], bench, name)
            graphs.workspaces.clear()
            gc.collect()  # a model whose layers are computed again refers to itself
        record["seconds"] = time.perf_counter() - began
        Path(flags.out).write_text(
            json.dumps(record, indent=1), "utf-8"
        )  # a part that hangs loses no other
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    as_command("one_gpu.py", run)
