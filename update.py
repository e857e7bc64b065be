"""The update: rollouts and advantages in, gradients and new weights out, in as little time and memory as exactness allows.

    backward        the gradient of a whole batch of rollouts, micro-batch by micro-batch
    AdamW           moves bfloat16 weights as if they were float32

What is saved, without changing a gradient (tests/test_update.py compares each with the plain computation):
1. A prompt is computed once, its G rollouts share its keys and values (shared prefix, arXiv 2506.05433).
2. Only sampled positions go through the LM head, and their logits are computed in chunks, again in the backward pass:
   no tensor of (rollouts, tokens, vocabulary) ever exists.
3. Rollouts of like length share a micro-batch, so that little of it is padding.
4. Rollouts whose gradient is exactly zero (advantage 0, no KL term) are not computed.
"""

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy import PromptLayer, adapter_off, cache_of, hidden_states, prefill, prompt_mask, soft_cap
from rollout import Rollouts
from vpo import policy_loss

CHUNK_BYTES = 2**27  # of the float32 logits that exist at a time
CHUNK_WEIGHTS = 2**22  # weights that the optimizer holds in float32 at a time


def share_prompts(model: PreTrainedModel, rollouts: Rollouts, prompts: list[int]) -> list[Tensor]:
    """What the rollouts of these prompts have in common: [last hidden state (P, H), then (P, heads, L, head size) keys
    and values of every layer], with gradients."""
    lengths = [rollouts.prompt_lengths[p] for p in prompts]
    cache, hidden = prefill(model, rollouts.prompt_ids[prompts, -max(lengths):], lengths)
    return [hidden, *(x for layer in cache.layers for x in (layer.keys, layer.values))]


def token_logprobs(model: PreTrainedModel, rollouts: Rollouts, rows: list[int], *, temperature: float = 1.0,
                   prompts: list[int] | None = None, shared: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, T) of the sampled tokens of these rollouts, with gradients, and the entropies (B, T) without.

    In nats, at the sampling temperature; T is the longest of these rollouts, values after a rollout's end are zero.
    `shared` is share_prompts(model, rollouts, prompts) where it is at hand.
    """
    G, device = rollouts.group_size, rollouts.tokens.device
    if shared is None:
        prompts = sorted({row // G for row in rows})
        shared = share_prompts(model, rollouts, prompts)
    place = {p: i for i, p in enumerate(prompts)}
    owner = torch.tensor([place[row // G] for row in rows], device=device)
    lengths, prompt_lengths = [rollouts.lengths[row] for row in rows], [rollouts.prompt_lengths[row // G] for row in rows]
    T = max(lengths)
    tokens = rollouts.tokens[torch.tensor(rows, device=device), :T]
    hidden = shared[0].index_select(0, owner)[:, None]  # (B, 1, H): the first token follows the prompt
    if T > 1:
        L = shared[1].shape[2]
        layers = [PromptLayer(keys.index_select(0, owner), values.index_select(0, owner))
                  for keys, values in zip(shared[1::2], shared[2::2], strict=True)]
        rest = hidden_states(model, tokens[:, :-1], cache_of(model, layers), torch.tensor(prompt_lengths, device=device),
                             prompt_mask(prompt_lengths, L, device, T - 1))
        hidden = torch.cat([hidden, rest], 1)  # (B, T, H)
    sampled = torch.tensor([b * T + t for b, length in enumerate(lengths) for t in range(length)], device=device)
    hidden, targets = hidden.flatten(0, 1).index_select(0, sampled), tokens.flatten()[sampled]
    layer, cap = model.get_output_embeddings(), soft_cap(model)
    logprobs, entropy = HeadLogProbs.apply(hidden, layer.weight, layer.bias, targets, temperature, cap)
    return tuple(torch.zeros(len(rows) * T, device=device).index_copy(0, sampled, x).view(len(rows), T)
                 for x in (logprobs, entropy))


class HeadLogProbs(torch.autograd.Function):
    """The LM head and log p(y | h) of targets y (N) after hidden states h (N, H), and the entropies there: two tensors (N).

    In chunks, because logits (N, V) may not fit; the backward pass computes each chunk's again. With z = (W h + b) / T,
    log p = z_y - log sum_j exp z_j, so d log p / d z_j = [j = y] - p_j. The entropies have no gradient.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
                cap: float | None) -> tuple[Tensor, Tensor]:
        logprobs, entropy, normalizer = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        for part in _chunks(hidden, weight):
            z = _scaled_logits(hidden[part], weight, bias, temperature, cap)  # (n, V)
            largest = z.amax(-1, keepdim=True)
            p = z.sub_(largest).exp()  # not normalised yet
            log_sum = p.sum(-1).log()
            normalizer[part] = log_sum + largest[:, 0]
            logprobs[part] = z.gather(1, targets[part, None])[:, 0] - log_sum
            entropy[part] = log_sum - torch.bmm(p[:, None], z[..., None])[:, 0, 0] / log_sum.exp()  # log Z - E[z]
            del z, p  # before the next chunk is there
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer)
        ctx.temperature, ctx.cap = temperature, cap
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, gradient: Tensor, _) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for part in _chunks(hidden, weight):
            z = _scaled_logits(hidden[part], weight, bias, ctx.temperature, ctx.cap)
            slope = None if ctx.cap is None else 1 - (z * (ctx.temperature / ctx.cap)) ** 2
            g = gradient[part, None] / ctx.temperature
            d = z.sub_(normalizer[part, None]).exp_().mul_(-g).scatter_add_(1, targets[part, None], g)
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
    return [slice(first, min(first + rows, len(hidden))) for first in range(0, len(hidden), rows)]


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, cap: float | None) -> Tensor:
    """What `policy.head` gives, divided by the temperature."""
    z = torch.nn.functional.linear(hidden, weight, bias).float()
    return z.div_(temperature) if cap is None else z.div_(cap).tanh_().mul_(cap / temperature)


def micro_batches(rollouts: Rollouts, rows: list[int], budget: int) -> list[tuple[list[int], list[list[int]]]]:
    """[(prompts, [rows, rows, ...]), ...]: each list of rows at most `budget` padded tokens, so each list of prompts.

    At least one rollout and one prompt each; 0: all at once. Rows of like length come together. Each row holds a copy of its
    prompt's keys and values, so it counts for a quarter of its prompt at least.
    """
    G, budget = rollouts.group_size, budget or math.inf
    by_prompt: dict[int, list[int]] = {}
    for row in rows:
        by_prompt.setdefault(row // G, []).append(row)
    result = []
    for prompts in _fill(list(by_prompt), rollouts.prompt_lengths, budget):
        ordered = sorted((row for p in prompts for row in by_prompt[p]), key=lambda row: -rollouts.lengths[row])
        sizes = {row: max(rollouts.lengths[row], rollouts.prompt_lengths[row // G] // 4) for row in ordered}
        result.append((prompts, _fill(ordered, sizes, budget)))
    return result


def _fill(items: list[int], lengths: list[int] | dict[int, int], budget: float) -> list[list[int]]:
    """Cut a list where the longest of a part times their number would exceed the budget."""
    parts: list[list[int]] = []
    for item in items:
        if parts and max(lengths[i] for i in (*parts[-1], item)) * (len(parts[-1]) + 1) <= budget:
            parts[-1].append(item)
        else:
            parts.append([item])
    return parts


def backward(model: PreTrainedModel, reference: PreTrainedModel | None, rollouts: Rollouts, advantages: list[float], *,
             kl: float = 0.0, temperature: float = 1.0, micro_batch_tokens: int = 0) -> dict[str, Tensor]:
    """Add the gradient of the whole batch to the model's; advantages, one a rollout. Returns the metrics, means over tokens,
    of the entropy over those that were computed.

    The reference may be the model itself, if it trains an adapter. A prompt's part of the gradient gathers in `leaves`
    until all its rollouts are through, and then takes the way through the prompt once.
    """
    rows = [row for row, A in enumerate(advantages) if A != 0 or (reference is not None and kl > 0)]
    n_tokens, mask = sum(rollouts.lengths), rollouts.mask
    n_computed = max(1, sum(rollouts.lengths[row] for row in rows))
    A = torch.tensor(advantages, device=mask.device)
    totals = dict.fromkeys(("loss", "policy_loss", "clip_fraction", "entropy"), torch.zeros((), device=mask.device))
    for prompts, batches in micro_batches(rollouts, rows, micro_batch_tokens):
        ref_shared = ref_logprobs = None
        if reference is not None:
            with torch.no_grad(), adapter_off(reference):
                ref_shared = share_prompts(reference, rollouts, prompts)
        shared = share_prompts(model, rollouts, prompts)
        leaves = [x.detach().requires_grad_() for x in shared]
        for batch in batches:
            if reference is not None:
                with torch.no_grad(), adapter_off(reference):
                    ref_logprobs, _ = token_logprobs(reference, rollouts, batch, temperature=temperature, prompts=prompts,
                                                     shared=ref_shared)
            logprobs, entropy = token_logprobs(model, rollouts, batch, temperature=temperature, prompts=prompts, shared=leaves)
            part = torch.tensor(batch, device=mask.device)
            T = logprobs.shape[1]
            loss, metrics = policy_loss(logprobs, rollouts.logprobs[part, :T], A[part], mask[part, :T], n_tokens,
                                        ref_logprobs=ref_logprobs, kl_coef=kl)
            loss.backward()
            metrics |= {"loss": loss.detach(), "entropy": entropy.sum() / n_computed}
            totals = {key: totals.get(key, 0.0) + value for key, value in metrics.items()}
        used = [(x, leaf.grad) for x, leaf in zip(shared, leaves, strict=True) if leaf.grad is not None]
        torch.autograd.backward(*zip(*used, strict=True))
        del used, shared, leaves, ref_shared  # before the next prompts are there
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:  # nothing was computed: the gradient is zero, not missing
            parameter.grad = torch.zeros_like(parameter)
    return totals


class AdamW:
    """AdamW (arXiv 1711.05101) that moves bfloat16 weights as if they were float32.

    At a learning rate of 1e-6 a step is far below the spacing of bfloat16 numbers (1/256 of a weight), so rounded weights
    would never move. The optimizer therefore keeps what rounding cuts off, the lower 16 bits of a float32, beside each
    weight, and its moments in float32: with weight and gradient 14 bytes a weight, and no second copy of the weights.
    Given the same gradients the float32 weights are those of torch.optim.AdamW.
    """

    def __init__(self, model: torch.nn.Module, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.01):
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.betas, self.eps, self.weight_decay, self.steps = betas, eps, weight_decay, 0
        self.moments = [torch.zeros(2, x.numel(), device=x.device) for x in self.parameters]
        self.lower = [torch.zeros(x.numel(), dtype=torch.int16, device=x.device) if x.dtype == torch.bfloat16 else None
                      for x in self.parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every weight by its gradient."""
        self.steps += 1
        beta1, beta2 = self.betas
        size, scale = lr / (1 - beta1 ** self.steps), 1 / (1 - beta2 ** self.steps)
        for parameter, moments, lower in zip(self.parameters, self.moments, self.lower, strict=True):
            weights, gradient = parameter.view(-1), parameter.grad.reshape(-1)
            for first in range(0, parameter.numel(), CHUNK_WEIGHTS):  # or the largest matrix would exist several times
                part = slice(first, first + CHUNK_WEIGHTS)
                (m, v), g = moments[:, part], gradient[part].float()
                w = weights[part] if lower is None else join(weights[part], lower[part])
                m.lerp_(g, 1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                w.mul_(1 - lr * self.weight_decay).addcdiv_(m, (v * scale).sqrt_().add_(self.eps), value=-size)
                if lower is not None:
                    weights[part], lower[part] = split(w)

    def state_dict(self) -> dict:
        """What a resumed run needs beside the weights."""
        return {"steps": self.steps, "moments": self.moments, "lower": self.lower}

    def load_state_dict(self, state: dict) -> None:
        """Take over the state of a run with the same weights."""
        self.steps = state["steps"]
        for mine, saved in ((self.moments, state["moments"]), (self.lower, state["lower"])):
            for x, value in zip(mine, saved, strict=True):
                if x is not None:
                    x.copy_(value)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> (nearest bfloat16, int16 that `join` needs to get the float32 back, bit for bit)."""
    bits = x.view(torch.int32) + 2**15  # ties go away from zero: rounded to even, the rest would not always be an int16
    return (bits >> 16).short().view(torch.bfloat16), ((bits & 0xFFFF) - 2**15).short()


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The float32 that `split` took apart."""
    return ((upper.view(torch.int16).int() << 16) + lower.int()).view(torch.float32)
