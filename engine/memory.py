"""Memory: where it goes in a training step, and what to change when it does not suffice.

The plan has no formula. It runs the sampling and the update on tensors without contents, before
any weights are loaded, and counts the bytes of the tensors that are alive.
"""

import contextlib
import ctypes
import math
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.config import Config
from engine.decoding import Rollouts, draw, encode_prompts, start_decoding
from engine.forward import recompute_layers
from engine.models import Model, Tokenizer, add_adapter, empty_policy
from engine.optimizer import AdamW
from engine.update import micro_batches
from rewards import Task, UserError
from vpo import policy_loss

MIB = 2**20
GIB = 2**30
CUDA_CONTEXT = int(0.6 * GIB)  # driver, cuBLAS and kernels: assumed, it differs between cards
ROWS = ("weights", "reference policy", "gradients", "optimizer", "KV cache", "activations, logits")
Plan = dict[str, dict[str, int]]  # column of the table -> row of the table -> bytes


@dataclass
class StepPrompts:
    """What the rollouts of a training step begin with."""

    prompts: list[str]
    max_new_tokens: int


def print_plan(
    config: Config, task: Task, device: str, step_prompts: dict[str, StepPrompts]
) -> None:
    """Print the table of `--plan`, and flags that save memory if the step does not fit.

    Args:
        step_prompts: method -> the prompts of its first step.
    """
    plan = plan_of(config, task, device, step_prompts)
    print_table(config, plan)

    need = max(rows["total"] for rows in plan.values())
    limit = memory_limit(config, device)
    verdict = "fits" if need <= limit else "does not fit"
    print(f"\n{verdict} {limit / GIB:.1f} GiB ({device}): {need / GIB:.2f} GiB")
    if need > limit:
        print(
            "flags that save memory, first those that change least of what is learnt: "
            "--gradient-checkpointing --dtype bfloat16 --micro-batch-tokens 1024 "
            f"--sampling-batch {2 * config.group_size}; then --kl 0 or --lora-rank 16 (needs peft), "
            "a lower --max-new-tokens, a smaller --model"
        )


def plan_of(config: Config, task: Task, device: str, step_prompts: dict[str, StepPrompts]) -> Plan:
    """What each phase of each method's first step takes."""
    plan = {}
    for method, step in step_prompts.items():
        for phase, rows in step_memory(config, task, step).items():
            rows = {row: rows.get(row, 0) for row in ROWS}
            rows["process, libraries"] = process_memory(device)
            plan[f"{method} {phase}"] = rows | {"total": sum(rows.values())}
    return plan


def planned_bytes(
    config: Config, task: Task, device: str, step_prompts: dict[str, StepPrompts]
) -> int:
    """The most that a method's training takes."""
    plan = plan_of(config, task, device, step_prompts)
    return max(rows["total"] for rows in plan.values())


def print_table(config: Config, plan: Plan) -> None:
    """Print a row for each kind of tensor and a column for each method and phase."""
    print(
        f"{config.model} in {config.dtype}, a training step of {config.task}; MiB, "
        "with rollouts at their longest\n"
    )
    width = max(len(column) for column in plan) + 2
    print(" " * 28 + "".join(f"{column:>{width}}" for column in plan))
    for row in next(iter(plan.values())):
        numbers = [f"{rows[row] / MIB:{width}.0f}" for rows in plan.values()]
        print(f"{row:28}" + "".join(numbers))


def memory_limit(config: Config, device: str) -> int:
    """Bytes of the card that `--plan` names, else of the device that is there."""
    if config.plan:
        return int(config.plan * GIB)
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    if device == "mps":
        return torch.mps.recommended_max_memory()  # what Metal lets one process have
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def process_memory(device: str) -> int:
    """Bytes of the process without tensors: on Linux what it takes now, on CUDA an assumption."""
    statm = Path("/proc/self/statm")
    if device != "cpu" or not statm.exists():
        return CUDA_CONTEXT
    pages = int(statm.read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def step_memory(config: Config, task: Task, step: StepPrompts) -> Plan:
    """Bytes of the tensors of a training step: phase (sampling, update) -> row -> bytes.

    Raises:
        UserError: if the model has no KV cache.
    """
    policy, reference, tokenizer = empty_models(config, task)
    own_reference = reference if reference is not policy else None
    optimizer = AdamW(policy)
    state = optimizer.moments + optimizer.lower
    fixed = {
        "weights": size_of(policy),
        "reference policy": size_of(own_reference) if own_reference is not None else 0,
        "optimizer": sum(x.nbytes for x in state if x is not None),
    }
    T = step.max_new_tokens
    with FakeTensorMode(allow_non_fake_inputs=True), Tally() as tally:
        for model in (policy, own_reference):
            if model is not None:
                model.to_empty(device="cpu")
                model.tie_weights()
        prompts = encode_prompts(policy.config, tokenizer, step.prompts, T)
        sampling = sampling_memory(config, policy, prompts, T, tally)
        # Rollouts at their longest, and so short that one micro-batch holds most of them and as many
        # copies of their prompts.
        update = update_memory(config, policy, reference, prompts, T, tally)
        short = min(T, max(1, max(prompts[1]) // 4))
        of_short = update_memory(config, policy, reference, prompts, short, tally)
        if sum(of_short.values()) > sum(update.values()):
            update = of_short
    return {"sampling": fixed | sampling, "update": fixed | update}


def empty_models(config: Config, task: Task) -> tuple[Model, Model | None, Tokenizer]:
    """The policy, the reference policy if there is one, and the tokenizer, on the meta device."""
    # peft cannot put an adapter into a model of fake tensors, so the models begin as meta tensors.
    with torch.device("meta"):
        policy, tokenizer = empty_policy(config.model, task, config.dtype)
        if config.lora_rank:
            add_adapter(policy, config.lora_rank)
        if config.gradient_checkpointing:
            recompute_layers(policy)
        reference = None
        if config.kl and config.lora_rank:
            reference = policy
        elif config.kl:
            reference, _ = empty_policy(config.model, task, config.dtype)
    return policy, reference, tokenizer


def size_of(model: torch.nn.Module) -> int:
    """Bytes of all weights and buffers."""
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


class Tally(TorchDispatchMode):
    """Counts the bytes of all tensors alive, and the most there were.

    The storage of a tensor and of its views counts once.
    """

    def __init__(self):
        super().__init__()
        self.alive = 0
        self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if not isinstance(x, Tensor):
                continue
            storage = x.untyped_storage()
            if storage not in self.known:
                self.known.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return out

    def add(self, size: int) -> None:
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def begin(self) -> int:
        """Forget the peak so far; returns the bytes alive."""
        self.peak = self.alive
        return self.alive


def sampling_memory(
    config: Config,
    policy: Model,
    prompts: tuple[Tensor, list[int]],
    T: int,
    tally: Tally,
) -> dict[str, int]:
    """Bytes of the rows that sampling adds: prompts (P, L) and lengths, rollouts of T tokens."""
    ids, lengths = prompts
    G = config.group_size
    P = len(lengths)
    if config.sampling_batch:
        P = max(1, config.sampling_batch // G)
    before = tally.begin()
    with torch.no_grad():
        decoder, logits = start_decoding(policy, (ids[:P], lengths[:P]), G, T)
        uniform = torch.rand(len(logits), 1)
        token, _ = draw(logits / config.temperature, uniform)
        del logits
        # Then the last step, as if all tokens before it were there.
        for layer in decoder.cache.layers:
            layer.grow(layer.room)
            layer.length = layer.keys.shape[2] - 1
        logits = decoder.feed(token)
        draw(logits / config.temperature, uniform)
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in decoder.cache.layers)
    return {"KV cache": cache, "activations, logits": max(tally.peak - before - cache, 0)}


def update_memory(
    config: Config,
    policy: Model,
    reference: Model | None,
    prompts: tuple[Tensor, list[int]],
    T: int,
    tally: Tally,
) -> dict[str, int]:
    """Bytes of the rows that an update adds: prompts (P, L) and lengths, rollouts of T tokens."""
    rollouts = sample_of_update(config, prompts, T)
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    before = tally.begin()
    for parameter in parameters:  # from the second micro-batch on all gradients exist
        parameter.grad = torch.zeros_like(parameter)
    n = len(rollouts.tokens)
    advantages = torch.ones(n)
    for batch in micro_batches(
        policy,
        reference,
        rollouts,
        list(range(n)),
        temperature=config.temperature,
        token_budget=config.micro_batch_tokens,
    ):
        loss, _ = policy_loss(
            batch.logprobs,
            batch.old_logprobs,
            advantages[batch.rows],
            batch.token_mask,
            n * T,
            ref_logprobs=batch.ref_logprobs,
            kl_coef=config.kl,
        )
        loss.backward()

    gradients = sum(parameter.grad.nbytes for parameter in parameters)
    activations = max(tally.peak - before - gradients, 0)
    return {"gradients": gradients, "activations, logits": activations}


def sample_of_update(config: Config, prompts: tuple[Tensor, list[int]], T: int) -> Rollouts:
    """Two micro-batches with the longest prompts. All others take as much memory as these or less."""
    ids, lengths = prompts
    P = len(lengths)
    G = config.group_size
    budget = config.micro_batch_tokens
    if budget:  # as update.prompt_chunks divides prompts and rollouts
        L = max(lengths)
        P = min(P, max(1, budget // L))
        batch_size = max(1, budget // max(T, L // 4))
        G = min(G, math.ceil(2 * batch_size / P))
    longest = sorted(range(len(lengths)), key=lambda p: -lengths[p])[:P]
    n = P * G
    return Rollouts(
        prompt_ids=ids[longest],
        prompt_lengths=[lengths[p] for p in longest],
        tokens=torch.zeros(n, T, dtype=torch.long),
        logprobs=torch.zeros(n, T),
        lengths=[T] * n,
        texts=[],
        ended=[],
    )


@contextlib.contextmanager
def explain_out_of_memory(device: str) -> Iterator[None]:
    """Turn an allocation that failed into a UserError with what was asked for and what may help."""
    try:
        yield
    except (
        RuntimeError
    ) as error:  # torch.OutOfMemoryError is one, MPS and the CPU raise the plain kind
        reason = " ".join(str(error).split())
        if "tried to allocate" not in reason.lower():
            raise
        raise UserError(
            f"out of memory on {device} ({reason:.200}); go on with --resume and a lower "
            "--micro-batch-tokens or --sampling-batch, or begin a new run with --lora-rank 16; "
            "--plan shows where the memory goes"
        ) from error


def return_freed_memory() -> None:
    """Make glibc's malloc hand the blocks that it keeps for later back to the system.

    On a CPU they are nearly a quarter of the peak with an adapter.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
