"""AdamW for weights of any number format."""

import torch


class MasterWeightAdamW:
    """torch's AdamW over float32 master weights: steps too small for bfloat16 weights add up."""

    def __init__(self, model: torch.nn.Module, may_fuse: bool = True):
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.masters = self.weights
        if any(weight.dtype != torch.float32 for weight in self.weights):
            self.masters = [weight.detach().float().clone() for weight in self.weights]
            for weight in self.weights:  # a sum of many in bfloat16 would stop growing
                weight.grad_dtype = torch.float32
        can_fuse = self.weights[0].device.type in ("cpu", "cuda")
        fused = can_fuse if may_fuse else None  # None: torch decides
        self.adamw = torch.optim.AdamW(self.masters, weight_decay=0.01, fused=fused)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every weight once, with this learning rate.

        A weight whose gradient is 0 moves, too: by its momentum and by the weight decay.
        """
        for weight in self.weights:
            if weight.grad is None:  # as of an expert that no token chose
                weight.grad = torch.zeros_like(weight, dtype=torch.float32)
        self.adamw.param_groups[0]["lr"] = lr
        if self.masters is self.weights:
            self.adamw.step()
            return
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad
        self.adamw.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None
            weight.copy_(master)

    def state_dict(self) -> dict:
        """All that a resumed run needs."""
        masters = [] if self.masters is self.weights else self.masters
        return {"adamw": self.adamw.state_dict(), "masters": masters}

    def load_state_dict(self, state: dict) -> None:
        """Take over a state_dict of the same model."""
        self.adamw.load_state_dict(state["adamw"])
        if self.masters is not self.weights:
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)
