"""Shard any model's parameters, gradients and optimizer state over the data ranks: the only file that drives FSDP2.

| stage | parameters                        | gradients                             | moments |
|-------|-----------------------------------|---------------------------------------|---------|
| 0     | whole on every rank               | all-reduced once per optimizer step   | whole   |
| 1     | gathered once per optimizer step  | whole, reduced once per optimizer step| sharded |
| 2     | gathered once per optimizer step  | sharded, reduced every micro-batch    | sharded |
| 3     | gathered for each use             | sharded, reduced every micro-batch    | sharded |

All four are `fully_shard` with other settings (stage 0: a mesh of replicas with shards of one rank), so mixed
precision, parameter types and checkpoints are the same everywhere. Communication only sums: the caller divides the
loss by the global number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megazpp.flags import flag
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.counted import CountedAllGather, CountedReduceScatter, count_all_reduce
from megazpp.zero.precision import PrecisionConfig


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """ZeRO: what is sharded over the data ranks."""

    zero_stage: Literal[0, 1, 2, 3] | None = flag(
        None, "0: nothing, 1: moments, 2: and gradients, 3: and parameters (default 3)"
    )
    use_distributed_optimizer: bool = flag(False, "Megatron's name for --zero-stage 1")

    @property
    def stage(self) -> int:
        if self.zero_stage is not None:
            return self.zero_stage
        return 1 if self.use_distributed_optimizer else 3


class Sharding:
    """The handle on a sharded model: what has to happen around micro-batches and evaluation."""

    def __init__(self, model: nn.Module, modules: Sequence[FSDPModule], stage: int) -> None:
        self.model, self._modules, self.stage = model, modules, stage

    def begin_micro_batch(self, *, last: bool) -> None:
        """Call before each forward of a training step; `last` for the step's last micro-batch."""
        for module in self._modules:
            if self.stage <= 1:
                module.set_requires_gradient_sync(last, recurse=False)
            if self.stage <= 2:
                module.set_reshard_after_backward(last, recurse=False)
            module.set_is_last_backward(last)

    def free_gathered(self) -> None:
        """Drop gathered parameters, so that the next forward reads the shards; call after an evaluation."""
        for module in self._modules:
            module.reshard()


def shard_model(
    model: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    dims: ParallelDims,
    *,
    stage: int,
    precision: PrecisionConfig,
) -> Sharding:
    """Shard `model` in place.

    Args:
        model: parameters may be on the meta device; with tensor parallelism all of them are DTensors on the tp mesh.
        units: modules whose parameters travel together, in the order of use; `model` takes what is left.
        dims: the axes to shard and replicate over.
        stage: 0 to 3, see the module docstring; with 0 `dims` has one replica per data rank.
        precision: compute and reduction formats; the shards stay fp32.
    Returns:
        The handle whose `begin_micro_batch` the training step calls.
    """
    assert stage > 0 or dims.shard.size == 1, "stage 0 replicates: dims must have shards of one rank"
    policy = MixedPrecisionPolicy(
        param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False
    )
    for unit in [*units, [model]]:
        target = unit[0] if len(unit) == 1 else list(unit)
        fully_shard(target, mesh=dims.data_mesh, reshard_after_forward=stage == 3, mp_policy=policy)
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if dims.shard.size > 1:
            module.set_custom_all_gather(CountedAllGather(dims.shard))
            module.set_custom_reduce_scatter(CountedReduceScatter(dims.shard))
        if dims.replicate.size > 1:
            module.set_all_reduce_hook(count_all_reduce(dims.replicate))
    return Sharding(model, modules, stage)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a sharded model on the meta device uninitialised memory for this rank's shards."""
    model.to_empty(device=device)
