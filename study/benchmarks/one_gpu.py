"""What one card does, for docs/hardware.md. One JSON file.

    python study/benchmarks/one_gpu.py                    on a card; writes one_gpu.json
    python study/benchmarks/one_gpu.py --only gradient    one part, or several
    python study/benchmarks/one_gpu.py --dry              tiny models on the CPU: whether every part runs

    others     a token of 96 rollouts: plain, by graphs without and with lean steps, and by `generate`
    gradient   at the micro-batch that `auto` gives a large card, and at a small one
    headline   a step of train.py and its peak, one method alone and five side by side
    laptop     the rows of hardware.md on a card that pretends to be as small, three side by side

Weights are random, in bfloat16: 12 prompts of 100 tokens, 8 rollouts each of 256. A part that fails is
noted, and the others go on.
"""

import argparse
import functools
import gc
import json
import random
import statistics
import string
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.benchmark import Timer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

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
from study.benchmarks.memory_table import LAPTOPS, MODELS, Model

Numbers = dict[str, float]
TINY = Model("qwen2", layers=2, width=32, mlp=64, heads=4, kv_heads=2, words=512)
# Of train.py. Random models earn nothing; with an entropy bonus all rollouts have a gradient anyway.
RUN = (
    "--task headline --model model --out run --warm-steps 2 --steps 4 --eval-problems 0 "
    "--snapshots 0 --entropy-coef 1e-6"
)


@dataclass
class Bench:
    """How large everything is, and where it runs."""

    device: str  # "meta": shapes alone
    P: int = 12
    G: int = 8
    L: int = 100
    T: int = 256


# Models, rollouts and a clock.


def policy_of(bench: Bench, name: str) -> Policy:
    """A random model, tiny on the CPU, and a tokenizer whose tokens are bytes. Token 0 ends a rollout."""
    shape = TINY if bench.device == "cpu" else MODELS[name]
    config = AutoConfig.for_model(
        shape.kind,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.words,
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
    dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return Policy(model, tokenizer)


def sampled(bench: Bench, policy: Policy, decode: Callable) -> Rollouts:
    """G rollouts of T tokens for each of P prompts of L random letters, drawn by a function."""
    rng = random.Random(0)
    prompts = ["".join(rng.choices(string.ascii_letters, k=bench.L)) for _ in range(bench.P)]
    options = SamplingOptions(bench.T, torch.Generator().manual_seed(1))
    return rollout.sample(policy, prompts, bench.G, options, decode)


def seconds_of(function: Callable, calls: int) -> float:
    """Mean seconds of some calls, after two that warm up. The clock waits for the card."""
    return Timer("function()", globals={"function": function}).timeit(calls).mean


# The parts.


def others(bench: Bench, name: str) -> Numbers:
    """Milliseconds per token of all rollouts, by ours and by transformers."""
    policy = policy_of(bench, name)
    plain = functools.partial(sampled, bench, policy, rollout.decode)
    graph = functools.partial(sampled, bench, policy, graphs.decode_with_graphs)
    prompts = graph().prompt_ids.repeat_interleave(bench.G, 0)  # (P * G, L)
    generate = functools.partial(
        policy.model.generate,
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        min_new_tokens=bench.T,
        max_new_tokens=bench.T,
        cache_implementation="static",
        disable_compile=True,
    )
    seconds = {"graph": seconds_of(graph, 1)}
    graphs.workspaces.clear()  # its graphs have lean steps
    with patch.dict(lean.swaps, {policy.model: []}):
        seconds["graph, own operators"] = seconds_of(graph, 1)
    seconds["plain"] = seconds_of(plain, 1)
    seconds["generate"] = seconds_of(generate, 1)
    return {side: 1000 * own / bench.T for side, own in seconds.items()}


def gradient(bench: Bench, name: str) -> dict[str, Numbers]:
    """The gradient of all rollouts by what `auto` gives a large card, and by less."""
    policy = policy_of(bench, name)
    rollouts = sampled(bench, policy, graphs.decode)
    results = {"auto": gradient_numbers(policy, rollouts, memory.MOST_TOKENS)}
    with patch.dict(lean.swaps, {policy.model: []}):
        results["auto, own operators"] = gradient_numbers(policy, rollouts, memory.MOST_TOKENS)
    recompute_layers(policy.model)
    results["4096, layers twice"] = gradient_numbers(policy, rollouts, 4096)
    return results


def gradient_numbers(policy: Policy, rollouts: Rollouts, budget: int) -> Numbers:
    """A gradient in micro-batches of so many tokens: seconds, what it computes in a second, and its peak."""
    generator = torch.Generator().manual_seed(2)
    advantages = torch.randn(len(rollouts.lengths), generator=generator).to(policy.device)
    config = Config(micro_batch_tokens=budget, kl=0.0)
    backward = functools.partial(fast.backward, policy, None, rollouts, advantages, config)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(backward, 3)
    n_tokens = sum(rollouts.lengths) + sum(rollouts.prompt_lengths)
    flops = 6 * policy.model.num_parameters() * n_tokens / seconds
    peak = torch.cuda.max_memory_allocated() / memory.GIB  # 0 on the CPU
    return {"seconds": seconds, "tflops": flops / 1e12, "peak_gib": peak}


def headline(bench: Bench, name: str) -> dict[str, dict]:
    """One method alone, and five side by side."""
    five = "grpo max_at_k multi_rlvr vpo group_vpo"
    return {
        "alone": trained(bench, name, "--method vpo"),
        "five side by side": trained(bench, name, f"--method {five} --jobs 5"),
    }


def laptop(bench: Bench, _: str) -> dict[str, dict]:
    """The rows of hardware.md: whether what `auto` plans holds. Their times say nothing."""
    with ThreadPoolExecutor(3) as pool:  # three take 45 GiB of a card and of a disk
        runs = {}
        for row in LAPTOPS:
            title = f"{row.gib} GiB, {row.model} {row.flags}"
            flags = f"--method vpo {row.flags}"
            runs[title] = pool.submit(measured, trained, bench, row.model, flags, row.gib)
    return {title: run.result() for title, run in runs.items()}


def trained(bench: Bench, name: str, flags: str, gib: int = 0) -> dict[str, Numbers]:
    """Seconds of a step of train.py with headlines, and its peak, by method. No evaluation.

    It is given to see a card of so many GiB; 0: the whole one.
    """
    code = f"import sys; sys.path.insert(0, {str(Path(rollout.__file__).parent)!r}); import train\n"
    if gib and bench.device == "cuda":
        code += f"from study.benchmarks import one_gpu; one_gpu.pretend_small({gib})\n"
    command = [sys.executable, "-c", code + "if __name__ == '__main__': train.main()"]
    command += f"{RUN} --device {bench.device} {flags}".split()
    numbers = {}
    with tempfile.TemporaryDirectory() as folder:
        policy = policy_of(bench, name)
        save_model(policy.model, policy.tokenizer, f"{folder}/model")
        del policy
        gc.collect()
        torch.cuda.empty_cache()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
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


# The file.


def measured(function: Callable, *arguments) -> dict:
    """What a measurement returns, or why it failed."""
    try:
        return function(*arguments)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


SMALL = "SmolLM2-135M"
PARTS = {  # what is done, and of which models
    "others": (others, [SMALL, "Qwen2.5-0.5B"]),
    "gradient": (gradient, [SMALL, "Qwen2.5-0.5B"]),
    "headline": (headline, [SMALL]),
    "laptop": (laptop, ["LAPTOPS"]),
}


def run() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU")
    flags = parser.parse_args()
    bench = Bench("cpu", P=2, G=2, L=10, T=9) if flags.dry else Bench("cuda")
    open_device(bench.device)
    record = {"torch": torch.__version__, "transformers": transformers.__version__}
    if bench.device == "cuda":
        record["card"] = torch.cuda.get_device_name()
    for part in flags.only:
        function, names = PARTS[part]
        record[part] = {}
        for name in names:
            record[part][name] = measured(function, bench, name)
            graphs.workspaces.clear()
            gc.collect()  # a model whose layers are computed again refers to itself
        # A part that hangs loses no other.
        Path("one_gpu.json").write_text(json.dumps(record, indent=1), "utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    with as_command("one_gpu.py"):
        run()
