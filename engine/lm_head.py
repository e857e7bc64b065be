"""Log-probabilities of given tokens from the LM head, without all logits in memory at once."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.forward import soft_cap

CHUNK_BYTES = 2**27  # of the float32 logits that exist at a time


def head_logprobs(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens after hidden states, with gradient.

    Args:
        hidden: last hidden states (N, H).
        targets: token ids (N).
        temperature: what the logits are divided by.

    Returns:
        Log-probabilities (N) in nats, and the entropies (N) in nats, without gradient.
    """
    layer = model.get_output_embeddings()
    scale = LogitScale(temperature, soft_cap(model))
    return HeadLogProbs.apply(hidden, layer.weight, layer.bias, targets, scale)


@dataclass(frozen=True)
class LogitScale:
    """What is done to the logits behind the LM head."""

    temperature: float
    soft_cap: float | None


class HeadLogProbs(torch.autograd.Function):
    """The LM head and the softmax after it, in chunks of rows.

    Of a row with hidden state h, target y and logits z = (W h + b) / temperature,

        log p(y) = z_y - log Z                      with Z = sum_j exp(z_j)
        entropy  = log Z - sum_j p_j z_j            with p_j = exp(z_j) / Z
        d log p(y) / d z_j = [j = y] - p_j

    The forward pass keeps log Z alone. The backward pass computes the logits again.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: LogitScale,
    ) -> tuple[Tensor, Tensor]:
        N = len(hidden)
        logprobs = torch.empty(N, device=hidden.device)
        entropy = torch.empty(N, device=hidden.device)
        log_Z = torch.empty(N, device=hidden.device)
        for part in chunks(hidden, weight):
            z = scaled_logits(hidden[part], weight, bias, scale)  # (n, V)
            # All of this is done with z - max z, so that no exponential overflows.
            largest = z.amax(-1, keepdim=True)
            exp_z = z.sub_(largest).exp()
            log_sum = exp_z.sum(-1).log()  # (n)
            log_Z[part] = log_sum + largest[:, 0]
            logprobs[part] = z.gather(1, targets[part, None])[:, 0] - log_sum
            weighted_sum = torch.bmm(exp_z[:, None], z[..., None])[:, 0, 0]  # sum_j exp(z_j) z_j
            entropy[part] = log_sum - weighted_sum / log_sum.exp()
            del z, exp_z  # before the logits of the next chunk are allocated
        ctx.save_for_backward(hidden, weight, bias, targets, log_Z)
        ctx.scale = scale
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, _) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_Z = ctx.saved_tensors
        temperature = ctx.scale.temperature
        cap = ctx.scale.soft_cap
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if needs_weight else None
        d_bias = torch.zeros_like(bias) if needs_bias else None
        gradient = grad_logprobs[:, None] / temperature  # (N, 1)
        for part in chunks(hidden, weight):
            z = scaled_logits(hidden[part], weight, bias, ctx.scale)  # (n, V)
            if cap is not None:
                # The derivative of cap * tanh(x / cap) is 1 - tanh(x / cap)^2.
                slope = 1 - (z * (temperature / cap)) ** 2
            # Gradient times [j = y] - p_j: first -p_j everywhere, then 1 added at the target.
            d_logits = z.sub_(log_Z[part, None]).exp_().mul_(-gradient[part])
            d_logits.scatter_add_(1, targets[part, None], gradient[part])
            if cap is not None:
                d_logits = d_logits * slope
            d_logits = d_logits.to(weight.dtype)
            d_hidden[part] = d_logits @ weight
            if needs_weight:
                d_weight.addmm_(d_logits.T, hidden[part])
            if needs_bias:
                d_bias += d_logits.sum(0)
            del z, d_logits  # before the logits of the next chunk are allocated
        return d_hidden, d_weight, d_bias, None, None


def chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Slices of the rows (N) of hidden states whose logits take at most CHUNK_BYTES each."""
    rows = max(1, CHUNK_BYTES // (4 * len(weight)))
    return [slice(first, first + rows) for first in range(0, len(hidden), rows)]


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: LogitScale) -> Tensor:
    """Logits (n, V) in float32 as of forward.lm_logits, divided by the temperature."""
    z = torch.nn.functional.linear(hidden, weight, bias).float()
    if scale.soft_cap is None:
        return z.div_(scale.temperature)
    return z.div_(scale.soft_cap).tanh_().mul_(scale.soft_cap / scale.temperature)
