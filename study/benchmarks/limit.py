"""How near a function comes to the machine's limit: the time of its matrix products alone, over its own."""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# The operations behind linear layers, with the positions of the two matrices among their arguments.
PRODUCTS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.bmm.default: (0, 1),
}


@dataclass(frozen=True)
class Layout:
    """What decides how long a matrix takes to read."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, matrix: Tensor) -> "Layout":
        return cls(tuple(matrix.shape), matrix.stride(), matrix.dtype)

    def random(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).normal_()


class RecordProducts(TorchDispatchMode):
    """Counts the matrix products inside the block by the layouts of both matrices."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[tuple[Layout, Layout]] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation in PRODUCTS:
            left, right = (Layout.of(args[i]) for i in PRODUCTS[operation])
            self.counts[left, right] += 1
        return operation(*args, **(kwargs or {}))


def share_of_limit(function: Callable[[], object], repeats: int = 3) -> float:
    """The median over repeats of (seconds of the products alone) / (seconds of the function).

    Attention of the fused kind is no matrix product here, so it counts as overhead.

    Args:
        function: does the same in every call.
    """
    with RecordProducts() as recorded:
        function()
    shares = []
    for _ in range(repeats):
        products = 0.0
        for (left, right), count in recorded.counts.items():
            products += count * seconds_of_product(left.random(), right.random())
        began = time.perf_counter()
        function()
        shares.append(products / (time.perf_counter() - began))
    return statistics.median(shares)


@torch.no_grad()
def seconds_of_product(left: Tensor, right: Tensor) -> float:
    """The mean over three calls, after one that warms up."""
    left @ right
    began = time.perf_counter()
    for _ in range(3):
        left @ right
    return (time.perf_counter() - began) / 3
