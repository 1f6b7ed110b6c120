"""Shard a model's parameters, gradients and optimizer state over the data ranks with FSDP2.

| stage | parameters                        | gradients                             | moments |
|-------|-----------------------------------|---------------------------------------|---------|
| 0     | whole on every rank               | all-reduced once per optimizer step   | whole   |
| 1     | gathered once per optimizer step  | whole, reduced once per optimizer step| sharded |
| 2     | gathered once per optimizer step  | sharded, reduced every micro-batch    | sharded |
| 3     | gathered for each use             | sharded, reduced every micro-batch    | sharded |

All four stages are `fully_shard` with different settings; stage 0 uses a mesh of replicas with one rank per shard. So
mixed precision, parameter types and checkpoints are the same in all of them. If a shard has only one rank, stage 3
becomes stage 2 (`ZeroConfig.stage_over`). ZeRO++ is stage 3 with other collectives (gather.py, reduce.py).

Collectives only sum gradients: the caller divides the loss by the global number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

from megazpp.kernels.block_quant import rescale_
from megazpp.parallel.axis import MeshAxis, TrafficCounter
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.comms import CommContext, CountedGather, CountedReduce, SummingReduce
from megazpp.zero.config import CommPlan, PrecisionConfig, ZeroConfig
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.secondary import Resident
from megazpp.zero.units import Unit, find_units
from megazpp.zero.wire import LosslessCodec


class WeightHandle(Protocol):
    """The interface of a handle to a model that only runs forwards: `Sharding`, or a handle to frozen weights."""

    keeps_gathered: bool  # True if forwards inside `keep_unsharded` need no communication after the first one

    def keep_unsharded(self) -> Any: ...

    def reshard(self) -> None: ...


class DeviceStates:
    """The place of fp32 weights, moments and gradients: the device, where FSDP2 keeps them.

    A feature may keep them elsewhere by a subclass, which `Feature.states` returns (run/feature.py).

    Attributes:
        unit: class of the sharding units.
        offload: policy that FSDP2 is given.
        reduce: class of the reduce-scatter in one hop.
        two_hop_reduce: class of the reduce-scatter in two hops.
        lone_reduce: class that handles the gradients of a unit on one rank; None for FSDP2's own handling.
        adamw: constructor of AdamW from parameter groups and settings; None for `ShardedAdamW`.
        device: device that computes; None for the device of the parameters.
        partial: names of the parameters of which each tensor-parallel rank has only a part of the gradient.
    """

    unit: type[Unit] = Unit
    offload = OffloadPolicy()
    reduce: type[CountedReduce] = CountedReduce
    two_hop_reduce: type[TwoHopReduce] = TwoHopReduce
    lone_reduce: type[SummingReduce] | None = None
    adamw: Callable[..., torch.optim.Optimizer] | None = None
    device: torch.device | None = None
    partial: Collection[str] = frozenset()

    def connect(self, units: Sequence[Any], context: CommContext, dims: ParallelDims) -> None:
        """Receive the sharded model's units, what their collectives share, and the mesh axes; nothing is allocated."""

    def allocate(self, model: nn.Module, device: torch.device, world: MeshAxis) -> None:
        """Allocate the model's tensors on all ranks of `world`, without values."""
        model.to_empty(device=device)

    def begin_step(self) -> None:
        """Begin a training step; see `Sharding.begin_step`."""

    def norms(self, tp: MeshAxis) -> dict[str, torch.Tensor] | None:
        """Complete the step's gradients, and return the L2 norm of this rank's shard of each, fp32 scalars by name.

        Returns None if the gradients are in `.grad`; those in `partial` are then not summed over `tp` yet.
        """
        return None

    def settle(self) -> None:
        """Wait until weights and optimizer states are complete; see `Sharding.settle`."""

    def refresh(self) -> None:
        """Update copies of the weights after a write to the weights."""


class Sharding:
    """The handle to a sharded model, with methods to call around micro-batches, evaluations and writes to weights.

    Args:
        model: the model that FSDP2 has wrapped.
        units: the model's sharding units, which are FSDP2's parameter groups.
        zero: the configuration; the intervals of keyframes and of error feedback resets are read from it.
        comms: the all-gather and the reduce-scatter of each unit; empty if FSDP2's own are used.
        counter: counts the bytes that this rank sends.
        states: the place of weights, moments and gradients; None for the device.
    Attributes:
        residents: the gathers of the units whose weights cross nodes as differences.
    """

    keeps_gathered = True

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        zero: ZeroConfig,
        comms: Sequence[tuple[TwoHopGather | CountedGather | None, SummingReduce]],
        counter: TrafficCounter,
        states: DeviceStates | None = None,
    ) -> None:
        self.model, self.units, self.counter, self._zero = model, units, counter, zero
        self.states = states or DeviceStates()
        self._iteration: int | None = None
        self._modules = [(module, zero.stage_over(unit.num_shards)) for unit in units for module in unit.modules]
        self._gathers = [gather for gather, _ in comms if isinstance(gather, TwoHopGather)]
        self._reduces = [reduce for _, reduce in comms if isinstance(reduce, TwoHopReduce)]
        self._watchable = [reduce for _, reduce in comms]
        self.residents = [gather for gather in self._gathers if gather.secondary.sends_differences]

    def begin_step(self, iteration: int) -> None:
        """Begin a training step; call it before the first micro-batch.

        Only --zero-weight-keyframe-interval and --optimizer-cpu-offload need it.

        Args:
            iteration: number of the step, from 1.
        """
        self._iteration = iteration
        self.states.begin_step()

    def begin_micro_batch(self, *, last: bool) -> None:
        """Prepare FSDP2 for one micro-batch; call it before each forward of a training step.

        Args:
            last: whether this is the last micro-batch of its step, after which gradients are complete.
        """
        for module, stage in self._modules:
            if stage <= 1:
                module.set_requires_gradient_sync(last, recurse=False)
            else:  # HSDP: replicas are all-reduced in the last micro-batch, and FSDP2 accumulates shards until then
                module.set_requires_all_reduce(last, recurse=False)
            if stage <= 2:
                module.set_reshard_after_backward(last, recurse=False)
        for reduce in self._watchable:
            reduce.begin_micro_batch(last=last)

    def end_step(self, factor: torch.Tensor | float, *, iteration: int) -> None:
        """Scale the error feedback like the gradients of this step; call it after the optimizer's step or its skipping.

        Error feedback keeps the quantization errors of gradients and adds them to the next step's gradients. So both
        must have the same scale. The host does not wait for the device.

        Args:
            factor: clip factor times the ratio of the next step's loss scale to this step's; 0 if the step was skipped.
                A scalar tensor on the model's device, or a number.
            iteration: number of the step, from 1. Error feedback is reset at multiples of its reset interval.
        """
        reset = self._zero.zero_error_feedback_reset
        if reset is not None and iteration % reset == 0:
            factor = 0.0
        self.rescale_feedback(factor)

    def rescale_feedback(self, factor: torch.Tensor | float) -> None:
        """Multiply the error feedback of all units, the stored quantization errors of gradients, by `factor`.

        `end_step` calls it for a training step.
        """
        rescale_([errors for reduce in self._reduces if (errors := reduce.kept_errors) is not None], factor)

    def compile_kernels(self, device: torch.device) -> None:
        """Compile the quantization kernels for `device` now instead of in the first step; nothing is communicated."""
        with torch.no_grad():
            for gather in self._gathers:
                gather.warm_up(device)
            for reduce in self._reduces:
                reduce.warm_up(device)

    def reshard(self) -> None:
        """Free the gathered parameters, so that the next forward gathers them again; call it after an evaluation."""
        for module, _ in self._modules:
            module.reshard()

    @contextmanager
    def keep_unsharded(self) -> Iterator[None]:
        """Keep each parameter gathered after its first use, and free all of them at the end.

        Inside, the forwards use the memory of the whole model.
        """
        for module, _ in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module, stage in self._modules:
                module.set_reshard_after_forward(stage == 3, recurse=False)
            self.reshard()

    def invalidate_weights(self) -> None:
        """Make the next use of each unit gather whole weights again.

        Call it on all ranks after a write that moves no version counter, such as one through `parameter.data` or
        `torch._foreach_*`.
        """
        for gather in self._gathers:
            gather.drop()
        self.states.refresh()

    def settle(self) -> None:
        """Wait until weights and optimizer states are complete; call it before anything but the model reads them.

        Only with --optimizer-cpu-offload, where updates run beside the next forward, there is something to wait for.
        """
        self.states.settle()

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Return a context for an optimizer step, which makes the gathered weights outdated; use it on all ranks.

        Fused and foreach optimizer steps on DTensors move no version counter, so nothing else shows the change.

        Raises:
            RuntimeError: --zero-weight-keyframe-interval is set, but `begin_step` was never called.
        """
        keyframe = self._sends_keyframe()
        for gather in self.residents:
            gather.before_step()
        yield
        for gather in self._gathers:
            gather.after_step(keyframe=keyframe)

    def _sends_keyframe(self) -> bool:
        """Return True if whole weights are sent after this step, as --zero-weight-keyframe-interval says."""
        interval = self._zero.zero_weight_keyframe_interval
        if interval is None:
            return False
        if self._iteration is None:
            raise RuntimeError(f"--zero-weight-keyframe-interval {interval} needs Sharding.begin_step(iteration)")
        return self._iteration % interval == 0

    def metrics(self) -> dict[str, float]:
        """Return counters of the steps since the last call; empty unless weights cross nodes as lossless deltas.

        weights_left_out: changed weights for which messages had no room, summed over the ranks of this rank's cross
        axis (one per node). The last step's are included in the next call, because their number has not reached the
        host yet.
        """
        if not self.residents:
            return {}
        codecs = [gather.secondary.differences for gather in self.residents if isinstance(gather.secondary, Resident)]
        found = sum(codec.take_left_out() for codec in codecs if isinstance(codec, LosslessCodec))
        return {"weights_left_out": float(found)}

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Return the buffers that belong to this rank alone, by name.

        These are its error feedback, and the sizes of its last lossless deltas. A checkpoint is loaded into these
        tensors in place. With another layout they start from zeros.
        """
        sizes = {f"{gather.unit.key}.recent": gather.lossless().recent for gather in self.residents}
        return sizes | self.feedback_state()

    def feedback_state(self) -> dict[str, torch.Tensor]:
        """Return this rank's own tensors of error feedback by name, not copies of them."""
        buffers: dict[str, torch.Tensor] = {}
        for reduce in self._reduces:
            errors = reduce.errors(self.device)
            for index, (payload, scales) in enumerate(() if errors is None else errors.segments()):
                name = f"{reduce.unit.key}.{index}"
                buffers |= {f"{name}.payload": payload, f"{name}.scales": scales}
        return buffers

    def watch_gradients(self) -> None:
        """Start to sum this rank's gradients before they are reduced; call it once per step.

        The sum shows which rank a NaN or Inf comes from. It costs one pass over the gradients.
        """
        for reduce in self._watchable:
            reduce.watch()

    def own_gradients(self) -> dict[str, torch.Tensor] | None:
        """Return the sum of this rank's gradients since `watch_gradients`, a scalar tensor by parameter name.

        All parameters of a unit share the sum of their unit. Returns None for stage 0, where FSDP2 all-reduces the
        gradients itself.
        """
        if not self._watchable:
            return None
        return {p.name: r.total for r in self._watchable if r.total is not None for p in r.unit.parameters}

    @property
    def shard_elements(self) -> int:
        """The number of elements of all parameters on one data rank, with FSDP2's padding."""
        return sum(unit.segments[-1].stop for unit in self.units)

    @property
    def device(self) -> torch.device:
        """The device that computes. The shards are there too, or in host memory with --optimizer-cpu-offload."""
        return self.states.device or next(self.model.parameters()).device


def shard_model(
    model: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    dims: ParallelDims,
    *,
    zero: ZeroConfig | None = None,
    precision: PrecisionConfig | None = None,
    wire: CommPlan,
    experts: Sequence[nn.Module] = (),
    states: DeviceStates | None = None,
) -> Sharding:
    """Shard `model` in place with FSDP2, and install ZeRO++'s collectives where `zero` asks for them.

    Args:
        model: the model. Its parameters may be on the meta device. With tensor parallelism they are DTensors on the tp
            mesh.
        units: groups of modules in the order of use; the parameters of a group are gathered and reduced together. The
            model's remaining parameters form one more unit.
        dims: the mesh axes to shard and replicate over. With stage 0, every data rank is a replica.
        zero: stage and message formats; the default is ZeRO-3.
        precision: compute and reduction dtypes; the default computes in fp32. Shards are always fp32.
        wire: the plan that `plan_comm` makes from `zero` and the layout of `dims`.
        experts: modules inside `units` that are separate sharding units, sharded along `dims.experts`.
        states: the place of weights, moments and gradients; None for the device.
    Returns:
        The handle to the sharded model.
    """
    # ---- FSDP2
    zero, precision, states = zero or ZeroConfig(), precision or PrecisionConfig(), states or DeviceStates()
    assert zero.stage > 0 or dims.shard.size == 1, "stage 0 replicates: dims must have shards of one rank"
    policy = MixedPrecisionPolicy(
        param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False
    )
    policies: dict[str, Any] = {"mp_policy": policy, "offload_policy": states.offload}
    for unit_of_experts in experts:
        stage = zero.stage_over(dims.experts.shard.size)
        fully_shard(unit_of_experts, mesh=dims.experts.data_mesh, reshard_after_forward=stage == 3, **policies)
    stage = zero.stage_over(dims.shard.size)
    for group in [*units, [model]]:
        target = group[0] if len(group) == 1 else list(group)
        fully_shard(target, mesh=dims.data_mesh, reshard_after_forward=stage == 3, **policies)

    # ---- the collectives of each unit
    replicate = dims.replicate

    def count_all_reduce(reduced: torch.Tensor) -> None:
        """Count the bytes of FSDP2's own all-reduce over replicas."""
        replicate.count("all_reduce", 2 * replicate.ring_bytes(reduced))

    sharded = find_units(model, unit_class=states.unit, data_dims=dims.data_mesh.ndim)
    context = CommContext(*_axes_of_hops(dims, wire), plan=wire, zero=zero, precision=precision)
    of_experts = context.over(*_axes_of_hops(dims.experts, wire)) if experts else context
    comms: list[tuple[TwoHopGather | CountedGather | None, SummingReduce]] = []
    for unit in sharded:
        for module in unit.modules:  # gradients are sums
            if unit.num_shards * replicate.size > 1:  # with one rank FSDP2 does not divide
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if replicate.size > 1:
                module.set_all_reduce_hook(count_all_reduce)
        if unit.num_shards > 1:  # with one rank FSDP2 calls no collectives
            gather, reduce = make_comms(unit, of_experts if unit.modules[0] in experts else context, states)
            for module in unit.modules:
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce)
            reduce.attach()
            comms.append((gather, reduce))
        elif states.lone_reduce is not None:
            lone = states.lone_reduce(unit, context)
            lone.attach()
            comms.append((None, lone))
    states.connect(sharded, context, dims)
    return Sharding(model, sharded, zero, comms, dims.counter, states)


def _axes_of_hops(dims: ParallelDims, wire: CommPlan) -> tuple[MeshAxis, MeshAxis, MeshAxis]:
    """Return the axes cross, local and shard; without hops only shard, because the others would create groups."""
    two_hops = wire.gather or wire.reduce
    return (dims.cross, dims.local, dims.shard) if two_hops else (dims.shard, dims.shard, dims.shard)


def make_comms(
    unit: Unit, context: CommContext, states: DeviceStates | None = None
) -> tuple[TwoHopGather | CountedGather, TwoHopReduce | CountedReduce]:
    """Make the all-gather and the reduce-scatter of one unit as the plan in `context` says."""
    plan, states = context.plan, states or DeviceStates()
    return (
        CountedGather(unit, context) if plan.gather is None else TwoHopGather(unit, context),
        states.reduce(unit, context) if plan.reduce is None else states.two_hop_reduce(unit, context),
    )
