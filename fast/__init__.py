"""A faster gradient than that of train.py: the same numbers."""

from fast.update import backward, token_logprobs

__all__ = ["backward", "token_logprobs"]
