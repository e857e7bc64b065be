"""GRPO's KL term in two other forms, those of the cells grpo-kl-clamped and grpo-kl-k2.

    clamped   k3 whose value is at most 10, as veRL's low_var_kl: no gradient where log(ref / policy) > 2.61 or < -11
    k2        half of the squared log-ratio, whose gradient is on average that of KL(policy || reference)

All else is the loss of the program. The paper's goal-conditioned policy is left out: weights in the
prompt need words of their own in the tiny model, and so another start model than all other rows have.
"""

import contextlib
from collections.abc import Callable, Iterator
from unittest.mock import patch

from torch import Tensor

import vpo


def clamped(log_x: Tensor) -> Tensor:
    """x - log x - 1 of log x = log(reference / policy), as veRL clamps it."""
    log_x = log_x.clamp(-20, 20)
    return (log_x.exp() - log_x - 1).clamp(-10, 10)


def k2(log_x: Tensor) -> Tensor:
    return log_x.square() / 2


TERMS = {"clamped": clamped, "k2": k2}


def loss_with(term: Callable[[Tensor], Tensor]) -> Callable:
    """`vpo.policy_loss` with another estimate of KL per token, of log(reference / policy) (B, T)."""

    def policy_loss(
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        token_mask: Tensor,
        n_tokens: int,
        **options: object,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ref_logprobs = options.pop("ref_logprobs")
        kl_coef = options.pop("kl_coef")
        batch = (logprobs, old_logprobs, advantages, token_mask, n_tokens)
        loss, metrics = vpo.policy_loss(*batch, **options)
        log_x = (ref_logprobs - logprobs).masked_fill(~token_mask, 0.0)
        kl = term(log_x).sum() / n_tokens
        metrics["kl"] = kl.detach()
        return loss + kl_coef * kl, metrics

    return policy_loss


@contextlib.contextmanager
def kl_term(name: str) -> Iterator[None]:
    """Train with a KL term of TERMS inside the block; with an empty name with that of the program."""
    policy_loss = loss_with(TERMS[name]) if name else vpo.policy_loss
    with patch("train.policy_loss", policy_loss), patch("fast.update.policy_loss", policy_loss):
        yield
