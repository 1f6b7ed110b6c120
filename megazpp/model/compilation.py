"""Whether layers are compiled, and why: torch.compile needs a compiler of its own on each kind of device.

On CUDA, layers of small models spend more time on the host, launching kernels, than on the device; compiled layers
launch fewer, so there --compile is the default. On a CPU it mostly costs the time to compile.

All layers of all models in a process share one code object, of which torch keeps a graph for each kind of layer, and
gives up on code with too many. Pretraining has few kinds and one shape, to which its graphs are cut. Where batches and
sequences vary, these dimensions are marked, so that one graph of a kind serves every size above 1.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from kernels.c_library import CLibraryError, find_compiler
from megazpp.model.attention_kernels import capability
from megazpp.model.config import GPTConfig

FIRST_CAPABILITY = (7, 0)  # of CUDA devices that Triton compiles for
# of layers in one process: four models (policy, reference, reward, value), with gradients or without, in training or
# not, of one row or several, and decoding; torch's own limit of 8 is less than two models may have
MOST_GRAPHS = 64


def compile_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` with room for all kinds of layers that a process may have."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    return torch.compile(function)


def mark_varying(tensor: torch.Tensor | None, *dims: int) -> None:
    """Have one graph take `tensor` with any size above 1 in `dims`."""
    if tensor is not None:
        torch._dynamo.maybe_mark_dynamic(tensor, dims)


def compiles_layers(config: GPTConfig, device_type: str) -> tuple[bool, str]:
    """Whether layers are compiled on such a device, and why, for the table of back ends.

    Raises:
        ValueError: --compile asks for what cannot be.
    """
    if config.compile is False:
        return False, "--no-compile"
    if config.compile is None and device_type != "cuda":
        return False, "the default on a CPU: see --compile"
    missing = missing_compiler(device_type)
    if config.compile is None:
        return (False, f"cannot be compiled: {missing}") if missing else (True, "the default on CUDA: see --no-compile")
    if missing:
        raise ValueError(f"--compile: {missing}; without it layers are eager")
    return True, "--compile"


def missing_compiler(device_type: str) -> str | None:
    """What torch.compile does not find here and needs; None where it can generate code."""
    if device_type != "cuda":
        compiler = os.environ.get("CXX", "g++")
        return None if shutil.which(compiler) else f"there is no C++ compiler ({compiler})"
    if importlib.util.find_spec("triton") is None:
        return "there is no Triton (pip install triton)"
    found = capability(torch.device(device_type))
    if found is not None and found < FIRST_CAPABILITY:
        return f"Triton needs compute capability 7.0, not {found[0]}.{found[1]}"
    try:
        find_compiler()  # of the code that launches Triton's kernels
    except CLibraryError as error:
        return str(error)
    return None
