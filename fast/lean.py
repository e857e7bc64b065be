"""The same numbers by fewer kernels: norms by `F.rms_norm`, and RoPE of queries and keys at once."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

Swap = tuple[object, str, Callable]  # who owns a function, its name there, and ours in its place
swaps: WeakKeyDictionary[PreTrainedModel, list[Swap]] = WeakKeyDictionary()
random = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def lean(model: PreTrainedModel) -> Iterator[None]:
    """A context in which a model runs fewer kernels. Afterwards its functions are its own again."""
    if model not in swaps:
        swaps[model] = [*find_norms(model), *find_rope(model)]
    with contextlib.ExitStack() as stack:
        for swap in swaps[model]:
            stack.enter_context(patch.object(*swap))
        yield


def find_norms(model: PreTrainedModel) -> Iterator[Swap]:
    """Norms that a trial proves to be F.rms_norm, one kernel in place of eight."""
    for part in model.modules():
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):  # it is no such norm
            eps = part.variance_epsilon
            weight = random(part.weight.shape)
            x = random(2, *weight.shape) * torch.tensor([[1.0], [eps**0.5]])  # small ones show eps
            theirs = torch.func.functional_call(part, {"weight": weight}, (x,))
            if torch.allclose(F.rms_norm(x, weight.shape, weight, eps), theirs, atol=1e-5):
                yield part, "forward", functools.partial(rms_norm, part, eps)


def rms_norm(part: nn.Module, eps: float, x: Tensor) -> Tensor:
    return F.rms_norm(x, part.weight.shape, part.weight, eps)


def find_rope(model: PreTrainedModel) -> Iterator[Swap]:
    """RoPE, where a trial proves that it turns halves."""
    module = sys.modules[type(model.base_model).__module__]
    theirs = vars(module).get("apply_rotary_pos_emb")
    inputs = [*random(2, 2, 4, 3, 16), *random(2, 2, 3, 8).repeat(1, 1, 1, 2)]
    with contextlib.suppress(RuntimeError, TypeError):  # there is none, or it takes other numbers
        if torch.equal(torch.cat(rope(theirs, *inputs)), torch.cat(theirs(*inputs))):
            yield module, "apply_rotary_pos_emb", functools.partial(rope, theirs)


def rope(theirs: Callable, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args, **options):
    """Turned queries and keys (B, heads, T, d), in one tensor. cos and sin are (B, T, d)."""
    if args or options or cos.shape[-1] != q.shape[-1]:
        return theirs(q, k, cos, sin, *args, **options)
    both = torch.cat([q, k], 1)
    swapped = both.roll(q.shape[-1] // 2, -1)  # the second half, then the first
    turned = both * cos[:, None] + swapped * signed(sin)[:, None]
    return turned.split([q.shape[1], k.shape[1]], 1)


@functools.lru_cache(2)  # the layers of a model share one sine, those with a window another
def signed(sin: Tensor) -> Tensor:
    """The sine with the first half negated."""
    first, second = sin.chunk(2, -1)
    return torch.cat([-first, second], -1)
