"""A pretend GPU: tensors in host memory that say they are on a device, and refuse to meet those of the CPU.

It proves where tensors and random generators are, and that no tensor there is float64, which MPS lacks.
It proves nothing about kernels, speed, memory and numerics.

It is registered with an experimental function of torch, for the rest of the process.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "pretend"
COPIES = {"_to_copy", "copy_", "_copy_from"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
library = torch.library.Library("aten", "IMPL")


def register() -> None:
    """Make the device known to torch."""
    module = backend_registration._DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    backend_registration._setup_privateuseone_for_python_backend(NAME, module)
    library.impl("empty_strided", empty_strided, "PrivateUse1")  # torch.tensor needs these two
    library.impl("_copy_from", copy_from, "PrivateUse1")
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied


@contextlib.contextmanager
def entered() -> Iterator[None]:
    """Tensors may be made on the device."""
    with torch.autograd.set_multithreading_enabled(False), Placement():  # a mode sees one thread
        yield


class Held(Tensor):
    """A tensor of the device, and the tensor of the CPU that holds its numbers."""

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "Held":
        if numbers.dtype == torch.float64:
            raise RuntimeError("float64 on the device")
        self = Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=torch.device(NAME, 0),
        )
        self.numbers = numbers
        return self

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return run(operator, args, kwargs or {})

    def tolist(self) -> list:
        return self.cpu().tolist()


class Placement(TorchDispatchMode):
    """Operators that make tensors."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return run(operator, args, kwargs or {})


def run(operator: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the numbers. Raises RuntimeError where a GPU would."""
    name = operator._schema.name.removeprefix("aten::")
    inputs = flat([*args, *kwargs.values()])
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    held = {id(tensor.numbers): tensor for tensor in tensors if isinstance(tensor, Held)}
    device = kwargs.get("device")
    is_here = bool(held) if device is None else device.type == NAME
    if is_here and any(isinstance(x, torch.Generator) for x in inputs):
        raise RuntimeError(f"{name}: a generator of the CPU draws on the device")
    if name not in COPIES:
        check_places(operator, name, args, tensors)

    kwargs = {key: numbers_of(x) for key, x in kwargs.items()}
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    results = operator(*map(numbers_of, args), **kwargs)
    if name == "copy_":
        return args[0]
    return placed(results, held) if is_here else results


def flat(values: Any) -> list:
    """The values, and those of lists among them."""
    items = []
    for x in values:
        items += x if isinstance(x, list | tuple) else [x]
    return items


def numbers_of(x: Any) -> Any:
    """The tensor of the CPU for one of the device, in lists too."""
    if isinstance(x, list | tuple):
        return [numbers_of(item) for item in x]
    return x.numbers if isinstance(x, Held) else x


def placed(x: Any, held: dict[int, Held]) -> Any:
    """The tensor of the device for one of the CPU, in tuples too; of an input the input itself."""
    if isinstance(x, list | tuple):
        return type(x)(placed(item, held) for item in x)
    if not isinstance(x, Tensor):
        return x
    return held[id(x)] if id(x) in held else Held(x)


def check_places(operator, name: str, args: tuple, tensors: list[Tensor]) -> None:
    """Raise RuntimeError where tensors of the device meet others, but for numbers and indices."""
    others = [tensor for tensor in tensors if not isinstance(tensor, Held)]
    if not others or len(others) == len(tensors):
        return
    are_numbers = torch.Tag.pointwise in operator.tags and not any(x.ndim for x in others)
    are_indices = name in INDEXING
    if args[0] is others[0] or not (are_numbers or are_indices):
        raise RuntimeError(f"{name}: tensors of the device and of the CPU")


def empty_strided(size, stride, *, device=None, pin_memory=None, **options) -> Held:
    return Held(torch.empty_strided(size, stride, **options))


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    numbers_of(target).copy_(numbers_of(source))
    return target
