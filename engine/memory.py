"""Memory: where it goes in a training step, before anything is loaded, and what to change when it does not suffice.
The plan knows no formula: it runs the sampler and the update on fake tensors and tallies the bytes of those alive."""

import argparse
import contextlib
import ctypes
import importlib.util
import os
import re
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.decoding import Decoder, Rollouts, encode_prompts
from engine.flags import FREE, text_of
from engine.models import check_device, eos_ids, load_policy
from engine.update import AdamW, backward, micro_batches
from rewards import Task, UserError

GIB = 2**30
CUDA_CONTEXT = (
    0.6 * GIB
)  # of the driver, cuBLAS and torch's kernels: an assumption, it differs between cards
CPU_RUNTIME = (
    0.1 * GIB
)  # of math libraries at work, fitted to three settings with torch 2.13 on two cores (0 to 0.25)
ROWS = ("weights", "reference policy", "gradients", "optimizer", "KV cache", "activations, logits")
Ask = Callable[
    [str, object], tuple[list, list[str], int]
]  # method, tokenizer -> problems, prompts, most new tokens


class Tally(TorchDispatchMode):
    """Bytes of all tensors alive, and the most there were; the storage of a tensor and its views counts once."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.known = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)):
            if storage not in self.known:
                self.known.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return out

    def add(self, size: int) -> None:
        self.alive += size
        self.peak = max(self.peak, self.alive)


def step_memory(
    args: argparse.Namespace, task: Task, method: str, ask: Ask
) -> dict[str, dict[str, int]]:
    """{phase: {one of ROWS: bytes}} of a step. UserError for a model without KV cache; no weights are looked at."""
    G, lean = args.group_size, {"dtype": args.dtype, "empty": True}
    with torch.device("meta"):  # peft cannot put an adapter into a model of fake tensors
        model, tokenizer = load_policy(
            args.model,
            task,
            lora_rank=args.lora_rank,
            gradient_checkpointing=args.gradient_checkpointing,
            **lean,
        )
        copied = args.kl and not args.lora_rank
        reference = (
            load_policy(args.model, task, **lean)[0] if copied else model if args.kl else None
        )
    _, prompts, T = ask(method, tokenizer)
    with FakeTensorMode(allow_non_fake_inputs=True), Tally() as tally:
        for policy in {model, reference or model}:
            policy.to_empty(device="cpu")
            policy.tie_weights()
        optimizer = AdamW(model)
        fixed = {
            "weights": size_of(model),
            "reference policy": size_of(reference) if copied else 0,
            "optimizer": sum(
                x.nbytes for x in (*optimizer.moments, *optimizer.lower) if x is not None
            ),
        }
        ids, lengths = encode_prompts(model.config, tokenizer, prompts, T)
        P = max(1, args.sampling_batch // G) if args.sampling_batch else len(prompts)
        before = tally.peak = tally.alive  # a new peak begins
        with torch.no_grad():
            decoder = Decoder(
                model,
                ids[:P],
                lengths[:P],
                G,
                T,
                args.temperature,
                None,
                eos_ids(model, tokenizer) or [0],
                static=True,
            )  # with the whole cache from the beginning
            decoder.step()
        cache = sum(x.nbytes for layer in decoder.cache.layers for x in (layer.keys, layer.values))
        sampling = fixed | {"KV cache": cache, ROWS[-1]: max(tally.peak - before - cache, 0)}
        del decoder
        # Rollouts at their longest, and so short that most of them share a micro-batch and its copies of prompts.
        updates = [
            fixed | update_memory(args, model, reference, optimizer, ids, lengths, length, tally)
            for length in {T, min(T, max(1, max(lengths) // 4))}
        ]
    return {"sampling": sampling, "update": max(updates, key=lambda rows: sum(rows.values()))}


def update_memory(
    args: argparse.Namespace,
    model,
    reference,
    optimizer: AdamW,
    ids: Tensor,
    lengths: list[int],
    T: int,
    tally: Tally,
) -> dict[str, int]:
    """Bytes of the rows that an update adds, with prompts ids (P, L) and rollouts of T tokens, all tensors fake."""

    def rollouts_of(prompts: list[int], G: int) -> Rollouts:
        tokens, logprobs = (
            torch.zeros(len(prompts) * G, T, dtype=torch.long),
            torch.zeros(len(prompts) * G, T),
        )
        return Rollouts(
            ids[prompts], [lengths[p] for p in prompts], tokens, logprobs, [T] * len(tokens), [], []
        )

    prompts, G, budget = list(range(len(lengths))), args.group_size, args.micro_batch_tokens
    parts = micro_batches(rollouts_of(prompts, G), list(range(len(prompts) * G)), budget)
    P, batches = (
        max(len(part) for part, _ in parts),
        [batch for _, batches in parts for batch in batches],
    )
    G = min(
        G, -(-2 * max(map(len, batches)) // P)
    )  # two micro-batches of one part: the others are like them
    before = tally.peak = tally.alive
    for (
        parameter
    ) in optimizer.parameters:  # after the first of several micro-batches they are there
        parameter.grad = torch.zeros_like(parameter) if len(batches) > 1 else None
    fake = rollouts_of(sorted(prompts, key=lambda p: -lengths[p])[:P], G)
    backward(
        model,
        reference,
        fake,
        [1.0] * P * G,
        kl=args.kl,
        temperature=args.temperature,
        micro_batch_tokens=budget,
    )
    gradients = sum(parameter.grad.nbytes for parameter in optimizer.parameters)
    model.zero_grad()
    return {"gradients": gradients, ROWS[-1]: max(tally.peak - before - gradients, 0)}


def size_of(model: torch.nn.Module) -> int:
    """Bytes of all weights and buffers."""
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


def print_plan(args: argparse.Namespace, task: Task, device: str, ask: Ask) -> None:
    """The table of `--plan`, and which flags make it fit if it does not."""
    there = {
        "cpu": lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cuda": lambda: torch.cuda.get_device_properties(0).total_memory,
        "mps": torch.mps.recommended_max_memory,
    }  # what Metal lets one process have
    limit = int(args.plan * GIB) or there[check_device(device)]()
    base, extra, statm = int(CUDA_CONTEXT), "device context (assumed)", Path("/proc/self/statm")
    if device == "cpu" and statm.exists():  # Linux: what the process takes now
        base, extra = (
            int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") + int(CPU_RUNTIME),
            "libraries",
        )

    def plan(args: argparse.Namespace) -> tuple[dict[str, dict[str, int]], int]:
        columns = {
            f"{method} {phase}": rows | {extra: base, "total": sum(rows.values()) + base}
            for method in args.method
            for phase, rows in step_memory(args, task, method, ask).items()
        }
        return columns, max(rows["total"] for rows in columns.values())

    columns, need = plan(args)
    unit, name, digits = (GIB, "GiB", 2) if need - base > GIB else (2**20, "MiB", 0)
    width = max(map(len, columns)) + 2
    print(
        f"{args.model} in {args.dtype}, a training step of {args.task}; {name}, with rollouts at their longest\n"
    )
    print(f"{'':28}" + "".join(f"{column:>{width}}" for column in columns))
    for row in (*ROWS, extra, "total"):
        print(
            f"{row:28}"
            + "".join(f"{rows.get(row, 0) / unit:{width}.{digits}f}" for rows in columns.values())
        )
    where = (
        f"a card of {limit / GIB:.1f} GiB"
        if args.plan
        else f"this machine's {limit / GIB:.1f} GiB ({device})"
    )
    print(f"\n{'fits' if need <= limit else 'does not fit'} {where}: {need / GIB:.2f} GiB")
    changed = argparse.Namespace(**vars(args))
    for flag, value in leaner(args) if need > limit else ():
        setattr(changed, flag, value)
        if flag == "lora_rank":  # then the reference policy costs nothing
            changed.kl = args.kl
        _, need = plan(changed)
        flags = [
            text_of(name, value)
            for name, value in vars(changed).items()
            if value != getattr(args, name)
        ]
        print(f"  {need / unit:{width}.{digits}f} {name} with {' '.join(flags)}")
        if need <= limit:
            return print("which fits")
    if need > limit:
        print(
            "not enough: take a smaller --model, fewer --max-new-tokens, a larger device"
            + ("" if importlib.util.find_spec("peft") else ", or --lora-rank 16 (pip install peft)")
        )


def leaner(args: argparse.Namespace, with_peft: bool = False) -> list[tuple[str, object]]:
    """Flags that save memory, those first that change least of what is learnt; an adapter where peft is."""
    worth = {
        "gradient_checkpointing": (True, not args.gradient_checkpointing),
        "dtype": ("bfloat16", args.dtype == "float32"),
        "micro_batch_tokens": (1024, not 0 < args.micro_batch_tokens <= 1024),
        "sampling_batch": (2 * args.group_size, not 0 < args.sampling_batch <= 2 * args.group_size),
        "kl": (0.0, args.kl and not args.lora_rank),
        "lora_rank": (16, not args.lora_rank and (with_peft or importlib.util.find_spec("peft"))),
    }
    return [(flag, value) for flag, (value, helps) in worth.items() if helps]


@contextlib.contextmanager
def explain_out_of_memory(args: argparse.Namespace, device: str) -> Iterator[None]:
    """Turn an allocation that failed into a UserError: the phase, how much was asked for, and which flags take less.
    Before, on a CPU, glibc's malloc hands back what it kept of freed blocks: nearly a quarter of an adapter's peak."""
    phases = {
        "evaluate_runs": ("the evaluation", ("sampling_batch", "dtype")),
        "load": ("loading", ("dtype", "kl", "lora_rank")),
        "sample": ("sampling", ("sampling_batch", "dtype", "lora_rank")),
        "train_step": (
            "the update",
            ("gradient_checkpointing", "micro_batch_tokens", "dtype", "lora_rank"),
        ),
    }
    if device == "cpu" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
    try:
        yield
    except (
        RuntimeError
    ) as error:  # torch.OutOfMemoryError is one; MPS and the CPU allocator raise the plain kind
        asked = re.search(
            r"tried to allocate (\d+ bytes|[\d.]+ ?[KMG]?i?B)", str(error), re.IGNORECASE
        )
        if not isinstance(error, torch.OutOfMemoryError) and not asked:
            raise
        called = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        phase, helpful = next((phases[name] for name in phases if name in called), phases["load"])
        flags = [
            (flag, text_of(flag, value))
            for flag, value in leaner(args, with_peft=True)
            if flag in helpful
        ]
        now, later = (
            ", ".join(text for flag, text in flags if (flag in FREE) is free)
            for free in (True, False)
        )
        advice = [f"go on with --resume and: {now}"] * bool(now) + [
            f"in a new run: {later}"
        ] * bool(later)
        advice = "; ".join(advice) or "take a smaller --model or fewer --max-new-tokens"
        raise UserError(
            f"out of memory on {device} in {phase}, {asked[1] if asked else 'an unknown amount'} was asked "
            f"for; {advice}; --plan shows where the memory goes"
        ) from error
