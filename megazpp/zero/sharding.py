"""Shard any model's parameters, gradients and optimizer state over the data ranks: the only file that drives FSDP2.

| stage | parameters                        | gradients                             | moments |
|-------|-----------------------------------|---------------------------------------|---------|
| 0     | whole on every rank               | all-reduced once per optimizer step   | whole   |
| 1     | gathered once per optimizer step  | whole, reduced once per optimizer step| sharded |
| 2     | gathered once per optimizer step  | sharded, reduced every micro-batch    | sharded |
| 3     | gathered for each use             | sharded, reduced every micro-batch    | sharded |

A shard of one rank has nothing to gather: there stage 3 keeps weights as stage 2 does (`ZeroConfig.stage_over`).
All four are `fully_shard` with other settings (stage 0: a mesh of replicas with shards of one rank), so mixed
precision, parameter types and checkpoints are the same everywhere. ZeRO++ is stage 3 with other comms
(gather.py, reduce.py). Communication only sums: the caller divides the loss by the global number of tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from kernels.block_quant import rescale_
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.comm_factory import CommFactory
from megazpp.zero.comms import SummingReduce, count_all_reduce
from megazpp.zero.config import WirePlan, ZeroConfig, plan_wire
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.precision import PrecisionConfig
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.units import Unit, find_units


class Sharding:
    """The handle on a sharded model: its methods belong around micro-batches, evaluations and writes to weights.

    Args:
        model: the sharded model.
        units: its sharding units, FSDP2's parameter groups.
        stage: the ZeRO stage.
        gathers, reduces: the two-hop comms that were installed.
        watchable: every comm that sums gradients over shards.
        feedback_reset: iterations after which error feedback is forgotten; None: never.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        stage: int,
        gathers: Sequence[TwoHopGather] = (),
        reduces: Sequence[TwoHopReduce] = (),
        watchable: Sequence[SummingReduce] = (),
        feedback_reset: int | None = None,
    ) -> None:
        self.model, self.stage = model, stage
        self._shard_elements = sum(unit.segments[-1].stop for unit in units)
        self._modules = [_as_fsdp(module) for unit in units for module in unit.modules]
        self._gathers, self._reduces, self._watchable = gathers, reduces, watchable
        self._feedback_reset = feedback_reset
        if gathers:
            _drop_after_steps(weakref.ref(self))

    def begin_micro_batch(self, *, last: bool) -> None:
        """Call before each forward of a training step, with `last` before that of its last micro-batch."""
        for module in self._modules:
            if self.stage <= 1:
                module.set_requires_gradient_sync(last, recurse=False)
            else:  # between copies of the model once per step too: their sum waits in the reduced shard
                module.set_requires_all_reduce(last, recurse=False)
            if self.stage <= 2:
                module.set_reshard_after_backward(last, recurse=False)
        for reduce in self._reduces:
            reduce.begin_micro_batch(last=last)

    def end_step(self, factor: torch.Tensor | float, *, iteration: int) -> None:
        """Tell the error feedback what became of a step's gradients; call after the optimizer's step, or its skipping.

        What quantization has lost of this step's gradients is multiplied like the gradients themselves, so that the
        next step adds it to gradients of the same unit. No host synchronization.

        Args:
            factor: the clip factor times the next step's loss scale over this step's; 0 if the step was skipped. A
                scalar on the model's device, or a number.
            iteration: number of the step, from 1; error feedback is forgotten at multiples of its reset interval.
        """
        if self._feedback_reset is not None and iteration % self._feedback_reset == 0:
            factor = 0.0
        self.rescale_feedback(factor)

    def rescale_feedback(self, factor: torch.Tensor | float) -> None:
        """Multiply the error feedback by `factor`; `end_step` does it for whole steps."""
        rescale_([error for reduce in self._reduces for error in reduce.kept_errors], factor)

    def compile_kernels(self, device: torch.device) -> None:
        """Compile the kernels of quantized messages for `device` now, and not in the first step.

        On CUDA each kind of unit needs some that the others do not; elsewhere they are compiled already.
        """
        if device.type == "cuda":
            self.rehearse(device)

    def rehearse(self, device: torch.device) -> None:
        """Pack and unpack zeros once for each kind of unit; no other rank takes part, and no state changes."""
        hops: list[TwoHopGather | TwoHopReduce] = [*self._gathers, *self._reduces]
        one_of_each = {(type(hop), hop.kind): hop for hop in hops}
        with torch.no_grad():
            for hop in one_of_each.values():
                hop.rehearse(device)

    def free_gathered(self) -> None:
        """Free gathered parameters, so that the next forward gathers the shards anew; call after an evaluation."""
        for module in self._modules:
            module.reshard()

    @contextmanager
    def kept_gathered(self) -> Iterator[None]:
        """Keep each weight after its first gather, as stage 2 does, for the forwards inside; afterwards free all.

        For a generation, where every token is a forward. It costs the memory of the whole model in compute precision.
        """
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in self._modules:
                module.set_reshard_after_forward(self.stage == 3, recurse=False)
            self.free_gathered()

    def weights_changed(self) -> None:
        """Have the next use of each weight gather it anew.

        Needed only after writes that move no version counter (`parameter.data`, `torch._foreach_*`): optimizer steps,
        loads and ordinary in-place operations are noticed.
        """
        for gather in self._gathers:
            gather.drop()

    def error_feedback(self) -> dict[str, torch.Tensor]:
        """This rank's buffers of error feedback, by name; {} where none is kept.

        The only state beside the parameters that outlives a step. It belongs to one layout: others begin with zeros.
        """
        buffers: dict[str, torch.Tensor] = {}
        device = next(self.model.parameters()).device
        for reduce in self._reduces:
            for index, errors in enumerate(reduce.errors(device)):
                name = f"{reduce.unit_name}.{index}"
                buffers |= {f"{name}.payload": errors.payload, f"{name}.scales": errors.scales}
        return buffers

    def watch_gradients(self) -> None:
        """Begin to watch this rank's gradients: one pass over them before they are summed. Call once per step."""
        for reduce in self._watchable:
            reduce.watch()

    def not_finite_here(self) -> list[str] | None:
        """Parameters of the units in which this rank's gradients were not finite since `watch_gradients`.

        None with stage 0, where FSDP2 itself sums the gradients of whole copies.
        """
        return [name for reduce in self._watchable for name in reduce.not_finite()] if self._watchable else None

    @property
    def shard_elements(self) -> int:
        """Elements of all parameters on one data rank, padded as FSDP2 shards them."""
        return self._shard_elements


def shard_model(
    model: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    dims: ParallelDims,
    *,
    zero: ZeroConfig | None = None,
    precision: PrecisionConfig | None = None,
    wire: WirePlan | None = None,
) -> Sharding:
    """Shard `model` in place.

    Args:
        model: parameters may be on the meta device; with tensor parallelism all of them are DTensors on the tp mesh.
        units: modules whose parameters travel together, in the order of use; `model` takes what is left.
        dims: the axes to shard and replicate over; with stage 0 one replica per data rank.
        zero: stage and wire formats; the default is ZeRO-3.
        precision: compute and reduction formats; the shards stay fp32. The default computes in fp32.
        wire: what `plan_wire` has made of `zero` on the layout of `dims`; None: it is made here.
    Returns:
        The handle whose `begin_micro_batch` the training step calls.
    Raises:
        ValueError: `zero` asks for what `dims` cannot do.
    """
    zero, precision = zero or ZeroConfig(), precision or PrecisionConfig()
    assert zero.stage > 0 or dims.shard.size == 1, "stage 0 replicates: dims must have shards of one rank"
    if wire is None:
        wire = plan_wire(zero, dims.layout)  # refuses before anything is changed
    policy = MixedPrecisionPolicy(
        param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False
    )
    stage = zero.stage_over(dims.shard.size)
    for unit in [*units, [model]]:
        target = unit[0] if len(unit) == 1 else list(unit)
        fully_shard(target, mesh=dims.data_mesh, reshard_after_forward=stage == 3, mp_policy=policy)
    return _install_comms(model, dims, wire, zero, precision, stage=stage)


def attach_zeropp(
    model: nn.Module, dims: ParallelDims, *, zero: ZeroConfig | None = None, precision: PrecisionConfig | None = None
) -> Sharding:
    """Install our comms in a model that `fully_shard` has wrapped already, over `dims.data_mesh`.

    Args:
        model: the root FSDPModule.
        dims: the axes; its `data_mesh` is the mesh the model was wrapped with.
        zero: stage (3 if the model reshards after forward) and wire formats.
        precision: the policy that the model was wrapped with.
    Raises:
        ValueError: `zero` asks for what `dims` cannot do.
        TypeError: `model` was not wrapped.
    """
    zero, precision = zero or ZeroConfig(zeropp=True), precision or PrecisionConfig()
    return _install_comms(model, dims, plan_wire(zero, dims.layout), zero, precision, stage=zero.stage)


def _install_comms(
    model: nn.Module, dims: ParallelDims, wire: WirePlan, zero: ZeroConfig, precision: PrecisionConfig, *, stage: int
) -> Sharding:
    units = find_units(model, dims)
    factory = CommFactory(
        cross=dims.cross, local=dims.local, shard=dims.shard, plan=wire, zero=zero, precision=precision
    )
    for unit in units:
        for module in map(_as_fsdp, unit.modules):
            if dims.data_size > 1:  # for one rank FSDP2 divides by nothing, unless told by what
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if dims.replicate.size > 1:
                module.set_all_reduce_hook(count_all_reduce(dims.replicate))
        if dims.shard.size > 1:  # FSDP2 calls no collectives for one rank
            factory.install(unit)
    return Sharding(
        model, units, stage, factory.gathers, factory.reduces, factory.all_reduces, zero.zero_error_feedback_reset
    )


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a sharded model on the meta device uninitialised memory for this rank's shards."""
    model.to_empty(device=device)


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _drop_after_steps(sharding: weakref.ref[Sharding]) -> None:
    """Drop the secondary partitions after every step of any torch optimizer.

    A hook on all optimizers, because fused and foreach steps on DTensors move no version counter, and an optimizer
    that somebody forgot to announce would train on stale weights. It outlives the model and then does nothing: taking
    it away could happen while torch goes through its hooks.
    """

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        alive = sharding()
        if alive is not None:
            alive.weights_changed()

    register_optimizer_step_post_hook(after_step)
