"""Memory: where it goes in a training step, before anything is loaded, and what to change when it does not suffice.

    python train.py --model Qwen/Qwen2.5-0.5B-Instruct --plan        does it fit this machine's device?
    python train.py --model Qwen/Qwen2.5-0.5B-Instruct --plan 12     does it fit a card of 12 GiB?

Nothing here knows a formula for a transformer. The plan runs the sampler's and the update's own code on fake tensors, which
have shapes but no contents, and tallies the bytes of those that are alive at a time: any architecture, any setting.
Rollouts are taken at their longest or, if that takes more, so short that many share a micro-batch: a real step stays below.
"""

import argparse
import contextlib
import copy
import importlib.util
import os
import re
import weakref
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from folders import FREE
from policy import empty_policy, eos_ids
from rewards import Task, UserError
from rollout import Decoder, Rollouts, build_prompt, encode_prompts, rollout_length
from update import AdamW, backward, micro_batches
from vpo import answers_per_rollout

GIB = 2**30
CUDA_CONTEXT = 0.6 * GIB  # of the driver, cuBLAS and torch's kernels: an assumption, it differs between cards
CPU_RUNTIME = 0.1 * GIB  # of math libraries at work, fitted to three settings with torch 2.13 on two cores (0 to 0.25)
ROWS = ("weights", "reference policy", "gradients", "optimizer", "KV cache", "logits", "activations, temporaries")


class Tally(TorchDispatchMode):
    """Bytes of all tensors alive and the most there ever were; the storage of a tensor and its views counts once.

    `logits` are those among them whose last dimension is the vocabulary and whose rows are tokens, as far as sizes tell.
    """

    def __init__(self):
        super().__init__()
        self.alive, self.vocabulary, self.weights = {"logits": 0, "other": 0}, -1, set()
        self.peak, self.at_peak, self.known = 0, dict(self.alive), weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.see, out)
        return out

    def see(self, tensor: Tensor) -> None:
        """Count a tensor whose storage is new, until its storage is freed."""
        storage = tensor.untyped_storage()
        if storage in self.known:
            return
        self.known.add(storage)
        kind = "logits" if tensor.ndim and tensor.shape[-1] == self.vocabulary and tensor.shape not in self.weights else "other"
        size = storage.nbytes()
        self.alive[kind] += size
        weakref.finalize(storage, self.forget, kind, size)
        if sum(self.alive.values()) > self.peak:
            self.peak, self.at_peak = sum(self.alive.values()), dict(self.alive)

    def forget(self, kind: str, size: int) -> None:
        """A storage was freed."""
        self.alive[kind] -= size

    def measure(self) -> tuple[int, dict[str, int]]:
        """Start a new peak: the bytes alive now, by kind."""
        self.peak, self.at_peak = 0, dict(self.alive)
        return sum(self.alive.values()), dict(self.alive)


def step_memory(args: argparse.Namespace, task: Task, method: str) -> dict[str, dict[str, int]]:
    """Bytes of each of ROWS in each phase of a step: {phase: {row: bytes}}. Raises UserError for a model without
    a KV cache; what only its weights could show is checked when they are loaded."""
    m = answers_per_rollout(method, args.m)
    reference = None
    with torch.device("meta"):  # peft cannot put an adapter into a model of fake tensors
        model, tokenizer = empty_policy(args.model, task, dtype=args.dtype, lora_rank=args.lora_rank,
                                        gradient_checkpointing=args.gradient_checkpointing)
        if args.kl:
            reference = model if args.lora_rank else empty_policy(args.model, task, dtype=args.dtype)[0]
    with FakeTensorMode(allow_non_fake_inputs=True), Tally() as tally:
        for policy in {model, reference or model}:
            policy.to_empty(device="cpu")
            policy.tie_weights()
        weights = size_of(model)
        optimizer = AdamW(model)
        tally.vocabulary = model.config.get_text_config().vocab_size
        fixed = {"weights": weights, "reference policy": 0 if reference in (None, model) else size_of(reference),
                 "optimizer": sum(x.nbytes for x in (*optimizer.moments, *optimizer.lower) if x is not None)}
        problems = task.problems("train", args.prompts_per_step * args.m // m, args.seed, 0)
        T = rollout_length(task, tokenizer, m, args.max_new_tokens)
        prompts = [build_prompt(tokenizer, task, problem, m) for problem in problems]
        ids, lengths = encode_prompts(model.config, tokenizer, prompts, T)
        batch = args.sampling_batch or len(prompts) * args.group_size

        before, logits = tally.measure()
        P = max(1, min(len(prompts), batch // args.group_size))
        with torch.no_grad():
            decoder = Decoder(model, ids[:P], lengths[:P], args.group_size, T, args.temperature, None,
                              eos_ids(model, tokenizer) or [0], static=True)  # with the whole cache from the beginning
            decoder.step()
        cache = sum(x.nbytes for layer in decoder.cache.layers for x in (layer.keys, layer.values))
        phases = {"sampling": fixed | divide(tally, before, logits, cache)}
        del decoder
        # Two extremes: rollouts at their longest, and so short that most of them share a micro-batch and its copies of prompts.
        phases["update"] = max((fixed | update_memory(args, model, reference, optimizer, ids, lengths, length, tally)
                                for length in {T, min(T, max(1, max(lengths) // 4))}), key=lambda rows: sum(rows.values()))
    return phases


def update_memory(args: argparse.Namespace, model, reference, optimizer: AdamW, ids: Tensor, lengths: list[int], T: int,
                  tally: Tally) -> dict[str, int]:
    """Bytes of the rows that an update adds, with prompts ids (P, L) and rollouts of T tokens, all tensors fake."""
    G, B = args.group_size, len(lengths) * args.group_size
    whole = Rollouts(ids, lengths, torch.zeros(B, T), None, [T] * B, [])
    parts = micro_batches(whole, list(range(B)), args.micro_batch_tokens)
    P, rows = max(len(prompts) for prompts, _ in parts), max(len(batch) for _, batches in parts for batch in batches)
    G = min(G, -(-2 * rows // P))  # two micro-batches of one part: the others are like them
    before, logits = tally.measure()
    several = sum(len(batches) for _, batches in parts) > 1  # then gradients are there before the peak
    for parameter in optimizer.parameters:
        parameter.grad = torch.zeros_like(parameter) if several else None
    longest = sorted(range(len(lengths)), key=lambda p: -lengths[p])[:P]
    rollouts = Rollouts(ids[longest], [lengths[p] for p in longest], torch.zeros(P * G, T, dtype=torch.long), torch.zeros(P * G, T),
                        [T] * P * G, [])
    backward(model, reference, rollouts, [1.0] * P * G, kl=args.kl, temperature=args.temperature,
             micro_batch_tokens=args.micro_batch_tokens)
    gradients = sum(parameter.grad.nbytes for parameter in optimizer.parameters)
    rows = divide(tally, before + gradients, logits, 0)
    for parameter in optimizer.parameters:
        parameter.grad = None
    return {"gradients": gradients} | rows


def size_of(model: torch.nn.Module) -> int:
    """Bytes of all weights and buffers."""
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


def divide(tally: Tally, before: int, alive: dict[str, int], cache: int) -> dict[str, int]:
    """What a phase took at its peak, beyond what had been there."""
    logits = tally.at_peak["logits"] - alive["logits"]
    return {"KV cache": cache, "logits": logits, "activations, temporaries": max(tally.peak - before - logits - cache, 0)}


def device_memory(device: str) -> int:
    """Bytes of the device's memory; on mps what Metal lets one process have."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    if device == "mps":
        return torch.mps.recommended_max_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def libraries(device: str) -> int:
    """Bytes that the process takes beside its tensors: on a CPU what this one takes now and CPU_RUNTIME, else an assumption."""
    if device != "cpu":
        return int(CUDA_CONTEXT)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") + int(CPU_RUNTIME)
    except OSError:  # no Linux
        return int(0.6 * GIB)


def total_memory(args: argparse.Namespace, task: Task) -> tuple[int, dict[str, dict[str, int]]]:
    """The most that a step of any of the methods takes, and the columns of the table."""
    columns = {f"{method} {phase}": rows for method in args.method
               for phase, rows in step_memory(args, task, method).items()}
    return max(sum(rows.values()) for rows in columns.values()), columns


def print_plan(args: argparse.Namespace, task: Task) -> None:
    """The table of `--plan`, and which flags make it fit if it does not."""
    base = libraries(args.device)
    limit = int(args.plan * GIB) or device_memory(args.device)
    need, columns = total_memory(args, task)
    unit, name, digits = (GIB, "GiB", 2) if need > GIB else (2**20, "MiB", 0)
    print(f"{args.model} in {args.dtype}, a training step of {args.task}; {name}, with rollouts at their longest\n")
    width = max(map(len, columns)) + 2

    def line(title: str, values: list[float]) -> None:
        print(f"{title:28}" + "".join(f"{value / unit:{width}.{digits}f}" for value in values))

    print(f"{'':28}" + "".join(f"{column:>{width}}" for column in columns))
    for row in ROWS:
        line(row, [rows.get(row, 0) for rows in columns.values()])
    line("libraries" if args.device == "cpu" else "device context (assumed)", [base] * len(columns))
    line("total", [sum(rows.values()) + base for rows in columns.values()])
    where = f"a card of {limit / GIB:.1f} GiB" if args.plan else f"this machine's {limit / GIB:.1f} GiB ({args.device})"
    if need + base <= limit:
        print(f"\nfits {where}: {(need + base) / GIB:.2f} GiB")
        return
    print(f"\ndoes not fit {where}: {(need + base) / GIB:.2f} GiB")
    changed, flags = copy.copy(args), {}
    for change in leaner(args):
        flags |= {flag: flag_text(flag, value) for flag, value in change.items()}
        for flag, value in change.items():
            setattr(changed, flag, value)
            if value == getattr(args, flag):  # taken back
                del flags[flag]
        need, _ = total_memory(changed, task)
        print(f"  {(need + base) / unit:{width}.{digits}f} {name} with {' '.join(flags.values())}")
        if need + base <= limit:
            print("which fits")
            return
    print("not enough: take a smaller --model, fewer --max-new-tokens, a larger device"
          + ("" if importlib.util.find_spec("peft") else ", or --lora-rank 16 (pip install peft)"))


def leaner(args: argparse.Namespace, with_peft: bool = False) -> list[dict[str, object]]:
    """Changes that save memory, those first that change least of what is learnt; each adds to the ones before.

    An adapter only where peft is installed, or with_peft.
    """
    changes: list[dict[str, object]] = []
    if not args.gradient_checkpointing:
        changes.append({"gradient_checkpointing": True})
    if args.dtype == "float32":
        changes.append({"dtype": "bfloat16"})
    if args.micro_batch_tokens == 0 or args.micro_batch_tokens > 1024:
        changes.append({"micro_batch_tokens": 1024})
    if args.sampling_batch == 0 or args.sampling_batch > 2 * args.group_size:
        changes.append({"sampling_batch": 2 * args.group_size})
    if args.kl and not args.lora_rank:
        changes.append({"kl": 0.0})
    if not args.lora_rank and (with_peft or importlib.util.find_spec("peft")):
        changes.append({"lora_rank": 16, "kl": args.kl})
    return changes


def flag_text(flag: str, value: object) -> str:
    """A flag as one types it."""
    name = f"--{flag.replace('_', '-')}"
    return name if value is True else f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


@contextlib.contextmanager
def explain_out_of_memory(phase: str, args: argparse.Namespace):
    """Turn an allocation that failed into a UserError: the phase, how much was asked for, and which flags take less."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; MPS and the CPU allocator raise the plain kind
        asked = re.search(r"tried to allocate (\d+ bytes|[\d.]+ ?[KMG]?i?B)", str(error), re.IGNORECASE)
        if not isinstance(error, torch.OutOfMemoryError) and not asked:
            raise
        helpful = {"loading": ("dtype", "kl", "lora_rank"), "sampling": ("sampling_batch", "dtype", "lora_rank"),
                   "the update": ("gradient_checkpointing", "micro_batch_tokens", "dtype", "lora_rank"),
                   "the evaluation": ("sampling_batch", "dtype")}[phase]
        flags = {flag: flag_text(flag, value) for change in leaner(args, with_peft=True) for flag, value in change.items() if flag in helpful}
        now, later = [text for flag, text in flags.items() if flag in FREE], [text for flag, text in flags.items() if flag not in FREE]
        advice = [f"{when}: {', '.join(texts)}" for when, texts in (("go on with --resume and", now), ("in a new run", later)) if texts]
        raise UserError(f"out of memory on {args.device} in {phase}, {asked.group(1) if asked else 'an unknown amount'} was asked for; "
                        f"{'; '.join(advice) or 'take a smaller --model or fewer --max-new-tokens'}; "
                        "--plan shows where the memory goes") from error
