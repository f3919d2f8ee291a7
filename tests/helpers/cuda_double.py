"""A GPU that computes nothing: benchmarks for GPUs run from end to end on a CPU.

Tensors that a benchmark makes on "cuda" are in host memory. Triton is a stand-in whose kernels
accept a launch with the right arguments and do nothing, torch's scaled GEMMs return zeros of the
right shape, and every measured time is a millisecond. So names, signatures, shapes and the report
are tested; figures are not.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion"}
CPU = torch.device("cpu")


class Kernel:
    """What `triton.jit` makes of a function: `kernel[grid](...)` checks the arguments' names."""

    def __init__(self, body: Callable[..., object]) -> None:
        self._signature = inspect.signature(body)
        self.launches = 0

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: object, **options: object) -> None:
            given = {name: v for name, v in options.items() if name not in LAUNCH_OPTIONS}
            self._signature.bind(*args, **given)
            self.launches += 1

        return launch


class TensorDescriptor:
    """`triton.tools.tensor_descriptor.TensorDescriptor`, as far as it is used."""

    def __init__(
        self, base: torch.Tensor, shape: object, strides: object, block_shape: object
    ) -> None: ...

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, block_shape: list[int]) -> TensorDescriptor:
        assert len(block_shape) == tensor.dim()
        return cls(tensor, tensor.shape, tensor.stride(), block_shape)


class Language(ModuleType):
    """`triton.language`, of which modules use `constexpr` and names of types when imported."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda value=None, *args, **options: value


def triton_modules() -> dict[str, ModuleType]:
    """Stand-ins by name."""
    triton, testing = ModuleType("triton"), ModuleType("triton.testing")
    language = Language("triton.language")
    triton.jit = lambda body=None, **options: Kernel(body) if body else Kernel  # type: ignore
    triton.cdiv = lambda x, y: -(-x // y)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
    triton.__version__ = "double"  # type: ignore[attr-defined]
    triton.language, triton.testing = language, testing  # type: ignore[attr-defined]

    def do_bench(call: Callable[[], object], **options: object) -> float:
        call()
        return 1.0

    testing.do_bench = do_bench  # type: ignore[attr-defined]
    tools, descriptor = ModuleType("triton.tools"), ModuleType("triton.tools.tensor_descriptor")
    descriptor.TensorDescriptor = TensorDescriptor  # type: ignore[attr-defined]
    found = {module.__name__: module for module in (triton, language, testing, tools, descriptor)}
    for name, module in found.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return found


class OnHost(TorchFunctionMode):
    """Every torch call gets "cpu" where it names "cuda", and no page-locked memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = {name: _on_host(value) for name, value in (kwargs or {}).items()}
        named.pop("pin_memory", None)
        return func(*map(_on_host, args), **named)


class HostThread(threading.Thread):
    """A thread to which the same applies: a mode is that of one thread."""

    def run(self) -> None:
        with OnHost():
            super().run()


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
        return CPU if torch.device(value).type == "cuda" else value
    return value


class Event:
    """Two of them are always a millisecond apart."""

    def __init__(self, **options: object) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class Graph:
    def replay(self) -> None: ...


class Stream:
    def synchronize(self) -> None: ...


def scaled_mm(a: torch.Tensor, b: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
    assert a.shape[1] == b.shape[0]
    return torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)


def grouped_mm(a: torch.Tensor, b: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
    assert a.shape[1] == b.shape[1]
    return torch.zeros(a.shape[0], b.shape[2], dtype=torch.bfloat16)


REPLACED: dict[str, object] = {
    "Event": Event,
    "CUDAGraph": Graph,
    "Stream": Stream,
    "graph": lambda graph: nullcontext(),
    "stream": lambda stream: nullcontext(),
    "synchronize": lambda: None,
    "empty_cache": lambda: None,
    "reset_peak_memory_stats": lambda: None,
    "memory_allocated": lambda: 0,
    "max_memory_allocated": lambda: 0,
    "get_device_name": lambda: "double",
    "get_device_capability": lambda: (9, 0),
    "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=4),
}


@contextmanager
def cuda_double(needing_triton: Sequence[str]) -> Iterator[None]:
    """Replace the GPU; modules whose names begin with `needing_triton` are imported anew.

    They are forgotten again at the end, so that other tests find them as they were.
    """

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith(tuple(needing_triton))]:
            parent, _, child = name.rpartition(".")
            del sys.modules[name]
            vars(sys.modules[parent]).pop(child, None)

    with pytest.MonkeyPatch.context() as patch:
        for name, module in triton_modules().items():
            patch.setitem(sys.modules, name, module)
        for name, double in REPLACED.items():
            patch.setattr(torch.cuda, name, double)
        patch.setattr(threading, "Thread", HostThread)
        patch.setattr(F, "scaled_mm", scaled_mm)
        patch.setattr(F, "scaled_grouped_mm", grouped_mm)
        patch.setattr(F, "grouped_mm", grouped_mm)
        forget()
        try:
            gpu = importlib.import_module("beamq.formats.kernels.gpu")
            patch.setattr(gpu, "_check", lambda w: None)  # it is on a GPU
            with OnHost():
                yield
        finally:
            forget()
