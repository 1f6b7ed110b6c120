"""Find the Triton implementation of a package of kernels, and decide which tensors it can compute on."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def triton_module(package: str) -> ModuleType | None:
    """Import and return the module `triton` of a package of kernels; None if Triton is not installed.

    Args:
        package: full name of the package, such as "megazpp.kernels.router".
    """
    return importlib.import_module(f"{package}.triton") if importlib.util.find_spec("triton") is not None else None


def is_in_gpu_memory(tensor: Tensor) -> bool:
    """Return True for a CUDA tensor that has elements in memory; False for an empty tensor and for a FakeTensor."""
    return tensor.is_cuda and not isinstance(tensor, FakeTensor) and tensor.numel() > 0
