"""AdamW whose steps on bfloat16 weights are as exact as on float32 weights."""

import torch
from torch import Tensor

CHUNK_WEIGHTS = 2**22  # weights that exist in float32 at a time


class AdamW:
    """AdamW (arXiv 1711.05101) with torch's formulas, and exact steps of bfloat16 weights.

    A bfloat16 number is the upper half of a float32. The optimizer keeps the lower half of every
    bfloat16 weight, so that steps too small for bfloat16 add up (docs/hardware.md). The moments
    are float32.
    """

    betas = (0.9, 0.999)
    eps = 1e-8
    weight_decay = 0.01

    def __init__(self, model: torch.nn.Module):
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.steps = 0
        self.moments = []  # per parameter (2, n): means of the gradient and of its square
        self.lower: list[Tensor | None] = []  # per bfloat16 parameter (n), else None
        for parameter in self.parameters:
            n = parameter.numel()
            device = parameter.device
            self.moments.append(torch.zeros(2, n, device=device))
            lower = None
            if parameter.dtype == torch.bfloat16:
                lower = torch.zeros(n, dtype=torch.int16, device=device)
            self.lower.append(lower)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every weight once, with this learning rate."""
        self.steps += 1
        for parameter, moments, lower in zip(
            self.parameters, self.moments, self.lower, strict=True
        ):
            weights = parameter.view(-1)
            gradient = parameter.grad.reshape(-1)
            # In chunks, because the float32 copies of a large matrix would not fit beside it.
            for first in range(0, parameter.numel(), CHUNK_WEIGHTS):
                chunk = slice(first, first + CHUNK_WEIGHTS)
                g = gradient[chunk].float()
                if lower is None:
                    self._move(weights[chunk], g, moments[:, chunk], lr)
                else:
                    exact = join(weights[chunk], lower[chunk])
                    self._move(exact, g, moments[:, chunk], lr)
                    weights[chunk], lower[chunk] = split(exact)

    def _move(self, weights: Tensor, gradient: Tensor, moments: Tensor, lr: float) -> None:
        """Move float32 weights (n) and their moments (2, n) in place."""
        beta1, beta2 = self.betas
        step_size = lr / (1 - beta1**self.steps)
        square_scale = 1 / (1 - beta2**self.steps)
        mean, square = moments
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (square * square_scale).sqrt_().add_(self.eps)
        weights.mul_(1 - lr * self.weight_decay).addcdiv_(mean, denominator, value=-step_size)

    def state_dict(self) -> dict:
        """All that a resumed run needs."""
        return {"steps": self.steps, "moments": self.moments, "lower": self.lower}

    def load_state_dict(self, state: dict) -> None:
        """Take over a state_dict of the same model."""
        self.steps = state["steps"]
        own = self.moments + self.lower
        saved = state["moments"] + state["lower"]
        for tensor, saved_tensor in zip(own, saved, strict=True):
            if tensor is not None:
                tensor.copy_(saved_tensor)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Take float32 numbers apart.

    Returns:
        The nearest bfloat16 numbers, and int16 numbers from which `join` restores the float32
        numbers bit for bit. A NaN stays a NaN.
    """
    # One bit pattern for every NaN: with some others the addition below would overflow.
    bits = torch.where(x.isnan(), torch.nan, x).view(torch.int32)
    # Rounding ties away from zero, not to even, makes the rest always fit an int16.
    bits = bits + 2**15
    upper = (bits >> 16).short().view(torch.bfloat16)
    lower = ((bits & 0xFFFF) - 2**15).short()
    return upper, lower


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The float32 numbers that `split` took apart."""
    bits = (upper.view(torch.int16).int() << 16) + lower.int()
    return bits.view(torch.float32)
