"""Faster functions of the reading path: the same tokens, log-probabilities and gradient."""

from fast.sampling import sample
from fast.update import backward, token_logprobs

__all__ = ["backward", "sample", "token_logprobs"]
