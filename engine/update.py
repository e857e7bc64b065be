"""The update: rollouts and advantages in, gradients (`backward`) and new weights (`AdamW`) out.
The gradients are the plain ones, but a prompt is computed once for its rollouts (shared prefix, arXiv 2506.05433), the
LM head in chunks and at sampled positions only, and rollouts without a gradient not at all."""

import torch
from torch import Tensor

from engine.decoding import Rollouts
from engine.models import (
    Model,
    PromptLayer,
    adapter_off,
    cache_of,
    hidden_states,
    prefill,
    prompt_mask,
    soft_cap,
)
from vpo import policy_loss

CHUNK_BYTES = 2**27  # of the float32 logits that exist at a time
CHUNK_WEIGHTS = 2**22  # weights that the optimizer holds in float32 at a time


def share_prompts(model: Model, rollouts: Rollouts, prompts: list[int]) -> list[Tensor]:
    """What the rollouts of these prompts have in common, with gradients: last hidden states (P, H), then of every layer
    keys and values (P, heads, L, head size)."""
    lengths = [rollouts.prompt_lengths[p] for p in prompts]
    cache, hidden = prefill(model, rollouts.prompt_ids[prompts, -max(lengths) :], lengths)
    return [hidden, *(x for layer in cache.layers for x in (layer.keys, layer.values))]


def token_logprobs(
    model: Model,
    rollouts: Rollouts,
    rows: list[int],
    *,
    temperature: float = 1.0,
    prompts: list[int] | None = None,
    shared: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, T) of these rollouts' tokens, with gradients, and entropies (B, T) without; in nats at the
    sampling temperature, 0 after a rollout's end. `shared`: share_prompts(model, rollouts, prompts), if at hand."""
    G, device = rollouts.group_size, rollouts.tokens.device
    if shared is None:
        prompts = sorted({row // G for row in rows})
        shared = share_prompts(model, rollouts, prompts)
    owner, lengths = (
        [prompts.index(row // G) for row in rows],
        [rollouts.lengths[row] for row in rows],
    )
    T, owner = max(lengths), torch.tensor(owner, device=device)
    tokens = rollouts.tokens[torch.tensor(rows, device=device), :T]
    hidden = shared[0].index_select(0, owner)[
        :, None
    ]  # (B, 1, H): the first token follows the prompt
    if T > 1:
        start = [rollouts.prompt_lengths[row // G] for row in rows]
        copies = [x.index_select(0, owner) for x in shared[1:]]
        cache = cache_of(
            model, [PromptLayer(*pair) for pair in zip(copies[::2], copies[1::2], strict=True)]
        )
        mask = prompt_mask(start, copies[0].shape[2], device, T - 1)
        rest = hidden_states(model, tokens[:, :-1], cache, torch.tensor(start, device=device), mask)
        hidden = torch.cat([hidden, rest], 1)  # (B, T, H)
    sampled = torch.tensor(
        [b * T + t for b, length in enumerate(lengths) for t in range(length)], device=device
    )
    hidden, targets = hidden.flatten(0, 1).index_select(0, sampled), tokens.flatten()[sampled]
    layer, cap = model.get_output_embeddings(), soft_cap(model)
    both = HeadLogProbs.apply(hidden, layer.weight, layer.bias, targets, temperature, cap)
    return tuple(
        torch.zeros(len(rows) * T, device=device).index_copy(0, sampled, x).view(len(rows), T)
        for x in both
    )


class HeadLogProbs(torch.autograd.Function):
    """log p(y | h) of targets y (N) after hidden states h (N, H), and the entropies there (N), without gradient. Logits
    z = (W h + b) / T exist in chunks: log p = z_y - log Z, and once more backward: d log p / d z_j = [j = y] - p_j."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, log_Z = (
            torch.empty(len(hidden), device=hidden.device) for _ in range(3)
        )
        for part in _chunks(hidden, weight):
            z = _scaled_logits(hidden[part], weight, bias, temperature, cap)  # (n, V)
            largest = z.amax(-1, keepdim=True)
            p = z.sub_(largest).exp()  # not normalised yet
            log_sum = p.sum(-1).log()
            log_Z[part] = log_sum + largest[:, 0]
            logprobs[part] = z.gather(1, targets[part, None])[:, 0] - log_sum
            entropy[part] = (
                log_sum - torch.bmm(p[:, None], z[..., None])[:, 0, 0] / log_sum.exp()
            )  # log Z - E[z]
            del z, p  # before the next chunk is there
        ctx.save_for_backward(hidden, weight, bias, targets, log_Z)
        ctx.temperature, ctx.cap = temperature, cap
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, gradient: Tensor, _) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_Z = ctx.saved_tensors
        d_hidden, gradient = torch.empty_like(hidden), gradient[:, None] / ctx.temperature
        d_weight, d_bias = (
            torch.zeros_like(x) if needed else None
            for x, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        for part in _chunks(hidden, weight):
            z = _scaled_logits(hidden[part], weight, bias, ctx.temperature, ctx.cap)
            slope = None if ctx.cap is None else 1 - (z * (ctx.temperature / ctx.cap)) ** 2
            d = z.sub_(log_Z[part, None]).exp_().mul_(-gradient[part])
            d.scatter_add_(1, targets[part, None], gradient[part])
            d = (d if slope is None else d * slope).to(weight.dtype)
            d_hidden[part] = d @ weight
            if d_weight is not None:
                d_weight.addmm_(d.T, hidden[part])
            if d_bias is not None:
                d_bias += d.sum(0)
            del z, d
        return d_hidden, d_weight, d_bias, None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Slices of the N rows whose logits are CHUNK_BYTES at most."""
    rows = max(1, CHUNK_BYTES // (4 * len(weight)))
    return [slice(first, first + rows) for first in range(0, len(hidden), rows)]


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, cap: float | None
):
    """What models.head gives, divided by the temperature."""
    z = torch.nn.functional.linear(hidden, weight, bias).float()
    return z.div_(temperature) if cap is None else z.div_(cap).tanh_().mul_(cap / temperature)


def micro_batches(
    rollouts: Rollouts, rows: list[int], budget: int
) -> list[tuple[list[int], list[list[int]]]]:
    """[(prompts, [rows, rows, ...]), ...]: prompts, and rows of like length, of at most `budget` padded tokens each (0:
    all; one at least). A row holds a copy of its prompt's keys and values: it counts for a quarter of it at least."""

    def fill(items: list[int], lengths: list[int]) -> list[list[int]]:
        parts: list[list[int]] = []
        for item in items:
            if not parts or max(lengths[i] for i in (*parts[-1], item)) * (len(parts[-1]) + 1) > (
                budget or torch.inf
            ):
                parts.append([])
            parts[-1].append(item)
        return parts

    G, ordered = rollouts.group_size, sorted(rows, key=lambda row: -rollouts.lengths[row])
    sizes = [
        max(length, rollouts.prompt_lengths[row // G] // 4)
        for row, length in enumerate(rollouts.lengths)
    ]
    return [
        (prompts, fill([row for row in ordered if row // G in prompts], sizes))
        for prompts in fill(list(dict.fromkeys(row // G for row in rows)), rollouts.prompt_lengths)
    ]


def backward(
    model: Model,
    reference: Model | None,
    rollouts: Rollouts,
    advantages: list[float],
    *,
    kl: float = 0.0,
    temperature: float = 1.0,
    micro_batch_tokens: int = 0,
) -> dict[str, Tensor]:
    """Add the gradient of the whole batch to the model's; advantages, one a rollout. The reference may be the model, if
    that trains an adapter. Returns the metrics: means over tokens, of the entropy over those that were computed."""
    rows = [row for row, A in enumerate(advantages) if A != 0 or (reference is not None and kl > 0)]
    n_tokens, n_computed = sum(rollouts.lengths), max(1, sum(rollouts.lengths[row] for row in rows))
    mask, A, ref_logprobs = (
        rollouts.mask,
        torch.tensor(advantages, device=rollouts.tokens.device),
        None,
    )
    totals = dict.fromkeys(
        ("loss", "policy_loss", "clip_fraction", "entropy"), torch.zeros((), device=A.device)
    )
    for prompts, batches in micro_batches(rollouts, rows, micro_batch_tokens):
        at = {"temperature": temperature, "prompts": prompts}
        with torch.no_grad(), adapter_off(reference):
            ref_shared = None if reference is None else share_prompts(reference, rollouts, prompts)
        shared = share_prompts(model, rollouts, prompts)
        leaves = [
            x.detach().requires_grad_() for x in shared
        ]  # gather gradients, which then pass the prompts once
        for batch in batches:
            if reference is not None:
                with torch.no_grad(), adapter_off(reference):
                    ref_logprobs, _ = token_logprobs(
                        reference, rollouts, batch, shared=ref_shared, **at
                    )
            logprobs, entropy = token_logprobs(model, rollouts, batch, shared=leaves, **at)
            part, T = torch.tensor(batch, device=A.device), logprobs.shape[1]
            loss, metrics = policy_loss(
                logprobs,
                rollouts.logprobs[part, :T],
                A[part],
                mask[part, :T],
                n_tokens,
                ref_logprobs=ref_logprobs,
                kl_coef=kl,
            )
            loss.backward()
            metrics |= {"loss": loss.detach(), "entropy": entropy.sum() / n_computed}
            totals = {key: totals.get(key, 0.0) + value for key, value in metrics.items()}
        used = [
            (x, leaf.grad) for x, leaf in zip(shared, leaves, strict=True) if leaf.grad is not None
        ]
        torch.autograd.backward(*zip(*used, strict=True))
        del used, shared, leaves, ref_shared  # before the next prompts are there
    for parameter in model.parameters():
        if (
            parameter.requires_grad and parameter.grad is None
        ):  # nothing was computed: zero, not missing
            parameter.grad = torch.zeros_like(parameter)
    return totals


class AdamW:
    """AdamW (arXiv 1711.05101), the same as torch's, but bfloat16 weights move as if they were float32: it keeps what
    rounding cuts off beside each, the lower 16 bits, and its moments in float32 (docs/hardware.md)."""

    betas, eps, weight_decay = (0.9, 0.999), 1e-8, 0.01

    def __init__(self, model: torch.nn.Module):
        self.parameters, self.steps = (
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            0,
        )
        self.moments = [torch.zeros(2, x.numel(), device=x.device) for x in self.parameters]
        self.lower = [
            torch.zeros(x.numel(), dtype=torch.int16, device=x.device)
            if x.dtype == torch.bfloat16
            else None
            for x in self.parameters
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.steps += 1
        beta1, beta2 = self.betas
        size, scale = lr / (1 - beta1**self.steps), 1 / (1 - beta2**self.steps)
        for parameter, moments, lower in zip(
            self.parameters, self.moments, self.lower, strict=True
        ):
            weights, gradient = parameter.view(-1), parameter.grad.reshape(-1)
            for first in range(
                0, parameter.numel(), CHUNK_WEIGHTS
            ):  # or the largest matrix would exist several times
                part = slice(first, first + CHUNK_WEIGHTS)
                (m, v), g = moments[:, part], gradient[part].float()
                w = weights[part] if lower is None else join(weights[part], lower[part])
                m.lerp_(g, 1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                w.mul_(1 - lr * self.weight_decay).addcdiv_(
                    m, (v * scale).sqrt_().add_(self.eps), value=-size
                )
                if lower is not None:
                    weights[part], lower[part] = split(w)

    def state_dict(self) -> dict:
        return {"steps": self.steps, "moments": self.moments, "lower": self.lower}

    def load_state_dict(self, state: dict) -> None:
        self.steps = state["steps"]
        for mine, saved in zip(
            self.moments + self.lower, state["moments"] + state["lower"], strict=True
        ):
            if mine is not None:
                mine.copy_(saved)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> (nearest bfloat16, int16 that `join` needs to get the float32 back, bit for bit); NaN stays NaN."""
    bits = torch.where(x.isnan(), torch.nan, x).view(
        torch.int32
    )  # some bits of a NaN would overflow
    bits = (
        bits + 2**15
    )  # ties go away from zero: rounded to even, the rest would not always be an int16
    return (bits >> 16).short().view(torch.bfloat16), ((bits & 0xFFFF) - 2**15).short()


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The float32 that `split` took apart."""
    return ((upper.view(torch.int16).int() << 16) + lower.int()).view(torch.float32)
