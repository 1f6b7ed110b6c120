"""Find the Triton implementation of a package of kernels, and the tensors on which it computes."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def triton_module(package: str) -> ModuleType | None:
    """Return the module `triton` of a package of kernels; None if Triton is not installed."""
    return importlib.import_module(f"{package}.triton") if importlib.util.find_spec("triton") is not None else None


def is_in_gpu_memory(tensor: Tensor) -> bool:
    """Return True for a CUDA tensor with elements in memory, unlike a FakeTensor."""
    return tensor.is_cuda and not isinstance(tensor, FakeTensor) and tensor.numel() > 0
