"""Run an example script on CPUs as on GPUs: `python on_cpu.py {default,exact,off} FILE`.

accelerate and torchtitan support FSDP2 only on accelerators, and torchtitan's attention has no backward on CPUs. The
mode `default` leaves the example's ZeRO++ as it is, `exact` disables quantization, and `off` disables ZeRO++.
"""

import functools
import runpy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from megazpp import drop_in
from megazpp.drop_in import api, callback
from megazpp.zero.config import ZeroConfig

_first = PartialState.__init__


def _as_on_gpus(self: Any, *args: Any, **kwargs: Any) -> None:
    _first(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


def _attention(q: Any, k: Any, v: Any, *, enable_gqa: bool, **others: Any) -> tuple[torch.Tensor, None]:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa), None


def _without(model: torch.nn.Module, **arguments: Any) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that divides


def accelerate_as_on_gpus() -> None:
    """Make accelerate use FSDP2 on CPUs: it then takes a job on CPUs for a job on several GPUs."""
    PartialState.__init__ = _as_on_gpus


def torchtitan_on_cpu() -> None:
    """Make torchtitan run on CPUs, with torch's attention in place of flex attention.

    Masks are made by eager code, because compiling that code in C++ takes seconds on each rank. Call this before any
    other import of torchtitan.
    """
    from torchtitan.tools import utils

    # set these before other modules of torchtitan copy them by an import
    utils.device_type, utils.device_module = "cpu", torch.cpu
    from torchtitan.models.common import attention

    attention.FlexAttention._compiled_flex_attn = staticmethod(_attention)
    attention._compiled_create_block_mask = attention.create_block_mask


def main(mode: str, path: str) -> None:
    """Run the example script `path` in this process, which is one rank; `mode` is "default", "exact" or "off"."""
    accelerate_as_on_gpus()
    if "torchtitan" in path:
        torchtitan_on_cpu()
    if mode != "default":
        config = ZeroConfig(zeropp=True, zero_weight_bits=16, zero_gradient_bits=(16, 16))
        exact = functools.partial(api.zeropp, config=config)
        api.zeropp = callback.zeropp = drop_in.zeropp = exact if mode == "exact" else _without
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
