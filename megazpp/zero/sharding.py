"""Shard a model's parameters, gradients and optimizer state over the data ranks with FSDP2.

| stage | parameters                        | gradients                                  | moments   |
|-------|-----------------------------------|--------------------------------------------|-----------|
| 0     | unsharded on every rank           | all-reduced once per optimizer step        | unsharded |
| 1     | gathered once per optimizer step  | unsharded, reduced once per optimizer step | sharded   |
| 2     | gathered once per optimizer step  | sharded, reduced every micro-batch         | sharded   |
| 3     | gathered for each use             | sharded, reduced every micro-batch         | sharded   |

All four stages call `fully_shard`, with different settings. So mixed precision, parameter types and checkpoints are the
same in all stages. In stage 0 each rank is a replica that holds all shards. If parameters are sharded over only one
rank, stage 3 becomes stage 2 (`ZeroConfig.stage_over`). ZeRO++ is stage 3 with other collectives (gather.py,
reduce.py).

Collectives only sum gradients. The mean comes from the loss, which training/objective.py divides by a denominator of
the global batch, such as its number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

from megazpp.kernels.block_quant import rescale_
from megazpp.parallel.axis import MeshAxis, TrafficCounter
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.comms import CommContext
from megazpp.zero.config import CommPlan, PrecisionConfig, ZeroConfig
from megazpp.zero.gather import CountedGather, Resident, TwoHopGather
from megazpp.zero.reduce import CountedReduce, SummingReduce, TwoHopReduce
from megazpp.zero.units import Unit, find_units
from megazpp.zero.wire import LosslessCodec


class WeightHandle(Protocol):
    """The interface through which an evaluation keeps a model's gathered weights, and frees them when it ends.

    `Sharding` implements this interface for trained models. The handles in packed_weights/ implement it for frozen
    models, such as a reference model.
    """

    keeps_gathered: bool  # True if only the first forward inside `keep_unsharded` needs communication

    def keep_unsharded(self) -> Any: ...

    def reshard(self) -> None: ...


class DeviceStates:
    """The memory that holds fp32 weights, moments and gradients: for this class the device's memory, as in FSDP2.

    An optional feature may choose other memory by a subclass, which `Feature.states` returns (run/feature.py). The
    feature --optimizer-cpu-offload chooses host memory.

    Attributes:
        unit: class of the sharding units.
        offload: offload policy that is passed to `fully_shard`.
        reduce: class of the reduce-scatter in one hop.
        two_hop_reduce: class of the reduce-scatter in two hops.
        lone_reduce: class that handles the gradients of a unit that is not sharded, because its mesh has one rank; None
            leaves them to FSDP2.
        adamw: constructor of AdamW from parameter groups and settings; None for `ShardedAdamW`.
        device: device that computes; None for the device of the parameters.
        partial: names of the parameters whose gradients are partial on each tensor-parallel rank, so that they must be
            summed over these ranks (`ParameterSpec.partial`). `TrainStep` sets this attribute if there are several
            tensor-parallel ranks.
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
        """Do nothing; a subclass stores the arguments for later use. `shard_model` calls this method once.

        Args:
            units: sharding units of the model.
            context: axes, schedules and formats that the collectives of all units share.
            dims: mesh axes of the run.
        """

    def allocate(self, model: nn.Module, device: torch.device, world: MeshAxis) -> None:
        """Allocate the model's tensors without initial values; call this method on all ranks.

        Args:
            model: sharded model whose tensors are on the meta device.
            device: device on which the tensors are allocated.
            world: axis of all ranks of the run. This class ignores it. A subclass uses it to raise an error on all
                ranks if one rank lacks memory.
        """
        model.to_empty(device=device)

    def begin_step(self) -> None:
        """Do nothing; a subclass marks the gradients of the last training step as outdated here.

        `Sharding.begin_step` calls this method at the start of each training step.
        """

    def norms(self, tp: MeshAxis) -> dict[str, torch.Tensor] | None:
        """Complete the step's gradients, and return the L2 norm of this rank's shard of each gradient.

        Args:
            tp: tensor-parallel axis. The gradients of the parameters in the attribute `partial` must be summed over it.
        Returns:
            fp32 scalars by parameter name. None if all gradients are in `.grad`, as in this class. `TrainStep` then
            sums the gradients of the parameters in `partial` itself, and computes the norms from `.grad`.
        """
        return None

    def settle(self) -> None:
        """Do nothing; a subclass waits until its weights and optimizer states are complete, see `Sharding.settle`."""

    def refresh(self) -> None:
        """Do nothing; a subclass updates its copies of the weights after a write by code other than the optimizer.

        With --optimizer-cpu-offload, the copies are the 16-bit working shards on the device.
        """


class Sharding:
    """The handle to a sharded model, with methods to call around micro-batches, evaluations and writes to weights.

    Args:
        model: model that FSDP2 has wrapped.
        units: sharding units of the model, which are FSDP2's parameter groups.
        zero: flags of ZeRO; this class reads the interval of error feedback resets.
        comms: a pair (all-gather, reduce-scatter) for each unit whose collectives replace FSDP2's. The all-gather is
            None for a unit that is not sharded, because its mesh has one rank.
        counter: counter of the bytes that this rank sends.
        states: memory of fp32 weights, moments and gradients; None for the device.
    Attributes:
        residents: all-gathers of the units whose weights cross nodes as weight deltas.
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
        self._modules = [(module, zero.stage_over(unit.num_shards)) for unit in units for module in unit.modules]
        self._gathers = [gather for gather, _ in comms if isinstance(gather, TwoHopGather)]
        self._reduces = [reduce for _, reduce in comms if isinstance(reduce, TwoHopReduce)]
        self._watchable = [reduce for _, reduce in comms]
        self.residents = [gather for gather in self._gathers if gather.secondary.sends_differences]

    def begin_step(self) -> None:
        """Begin a training step; call this method before the step's first micro-batch.

        Only --optimizer-cpu-offload needs this call.
        """
        self.states.begin_step()

    def begin_micro_batch(self, *, last: bool) -> None:
        """Tell FSDP2 and the reduce-scatters whether the next micro-batch is the last one of its training step.

        Only the last micro-batch reduces gradients over ranks in stages 0 and 1, and over replicas with HSDP. In stages
        0 to 2, only the last micro-batch frees the gathered parameters. Call this method before each forward of a
        training step.

        Args:
            last: True for the last micro-batch of a training step, after which the gradients are complete.
        """
        for module, stage in self._modules:
            if stage <= 1:
                module.set_requires_gradient_sync(last, recurse=False)
            else:  # stages 2 and 3: reduce-scatter in each micro-batch, all-reduce over HSDP's replicas in the last one
                module.set_requires_all_reduce(last, recurse=False)
            if stage <= 2:
                module.set_reshard_after_backward(last, recurse=False)
        for reduce in self._watchable:
            reduce.begin_micro_batch(last=last)

    def end_step(self, factor: torch.Tensor | float, *, iteration: int) -> None:
        """Scale the error feedback of qgZ like the gradients of this training step.

        Error feedback keeps the quantization errors of this step's gradients, and adds them to the next step's
        gradients. The errors must have the scale of the gradients to which they are added. Call this method after the
        optimizer's step, or after the optimizer has skipped the step. The host does not wait for the device.

        Args:
            factor: clip factor of this step, times the ratio of the next step's loss scale to this step's; 0 if the
                optimizer has skipped the step. A scalar tensor on the model's device, or a number.
            iteration: number of the training step, from 1. At multiples of --zero-error-feedback-reset, the error
                feedback is set to zero instead.
        """
        reset = self._zero.zero_error_feedback_reset
        if reset is not None and iteration % reset == 0:
            factor = 0.0
        self.rescale_feedback(factor)

    def rescale_feedback(self, factor: torch.Tensor | float) -> None:
        """Multiply the error feedback of all units, the stored quantization errors of gradients, by `factor`.

        `end_step` calls this method in each training step. Other code calls this method if the loss scale changes
        outside of a step, for example when a checkpoint is loaded.
        """
        rescale_([errors for reduce in self._reduces if (errors := reduce.kept_errors) is not None], factor)

    def compile_kernels(self, device: torch.device) -> None:
        """Compile the quantization kernels of all units for `device` now instead of in the first training step.

        No rank communicates.
        """
        with torch.no_grad():
            for gather in self._gathers:
                gather.warm_up(device)
            for reduce in self._reduces:
                reduce.warm_up(device)

    def reshard(self) -> None:
        """Free the gathered parameters of all units, so that the next forward gathers them again.

        Call this method after an evaluation, which has no backward. In stages 0 to 2, FSDP2 frees gathered parameters
        only after a backward.
        """
        for module, _ in self._modules:
            module.reshard()

    @contextmanager
    def keep_unsharded(self) -> Iterator[None]:
        """Return a context that keeps each parameter gathered from its first use on, and frees all of them at its end.

        An evaluation of several forwards then gathers each parameter only once. Inside the context, a rank needs memory
        for all gathered parameters.
        """
        try:
            with ExitStack() as stack:
                for unit in self.units:
                    stack.enter_context(unit.keep_unsharded())
                yield
        finally:
            self.reshard()

    def invalidate_weights(self) -> None:
        """Make each unit send its whole weights between nodes at its next use, because the program has changed them.

        Call this method on all ranks after a write that moves no version counter, for example a write through
        `parameter.data` or `torch._foreach_*`. ZeRO++ detects other writes itself.
        """
        for gather in self._gathers:
            gather.drop()
        self.states.refresh()

    def settle(self) -> None:
        """Wait until weights and optimizer states are complete.

        Call this method before code outside the model reads them, such as the code that saves a checkpoint. It waits
        only with --optimizer-cpu-offload, where the optimizer's update overlaps with the next forward.
        """
        self.states.settle()

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Return a context in which the optimizer changes the weights; use it on all ranks.

        At the end of the context, ZeRO++ marks the weights that nodes have exchanged as outdated. Fused and foreach
        optimizer steps on DTensors move no version counter, so ZeRO++ cannot detect the change by itself.
        """
        for gather in self.residents:
            gather.before_step()
        yield
        for gather in self._gathers:
            gather.after_step()

    def metrics(self) -> dict[str, float]:
        """Return counters of the training steps since the last call, for the metrics of the run.

        If weights cross nodes as lossless deltas, the dict has the entry `weights_left_out`: the number of changed
        weights for which messages had no room, summed over the ranks of this rank's cross axis (one rank per node). The
        number of the last step has not reached the host yet, so the next call includes it. Otherwise the dict is empty.
        """
        if not self.residents:
            return {}
        codecs = [gather.secondary.differences for gather in self.residents if isinstance(gather.secondary, Resident)]
        found = sum(codec.take_left_out() for codec in codecs if isinstance(codec, LosslessCodec))
        return {"weights_left_out": float(found)}

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Return ZeRO++'s tensors that differ on each rank, by name, for the checkpoint code to save and load.

        They are the error feedback of this rank's gradients, and the sizes of its last lossless deltas. Loading a
        checkpoint overwrites these tensors in place. If the layout of ranks has changed since the checkpoint was saved,
        the tensors start from zeros.
        """
        sizes = {f"{gather.unit.key}.recent": gather.lossless().recent for gather in self.residents}
        return sizes | self.feedback_state()

    def feedback_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of this rank's error feedback by name: quantized errors and their scales, not copied."""
        buffers: dict[str, torch.Tensor] = {}
        for reduce in self._reduces:
            errors = reduce.errors(self.device)
            for index, (payload, scales) in enumerate(() if errors is None else errors.segments()):
                name = f"{reduce.unit.key}.{index}"
                buffers |= {f"{name}.payload": payload, f"{name}.scales": scales}
        return buffers

    def watch_gradients(self) -> None:
        """Start to add up all elements of this rank's gradients before they are reduced; call this once per step.

        `own_gradients` returns the sums. They show on which rank a NaN or Inf arises, and cost one pass over the
        gradients.
        """
        for reduce in self._watchable:
            reduce.watch()

    def own_gradients(self) -> dict[str, torch.Tensor] | None:
        """Return sums over the elements of this rank's unreduced gradients since `watch_gradients`.

        The result maps a parameter's name to a scalar tensor, which is the sum over all gradients of the parameter's
        sharding unit. Returns None if no unit is sharded, as in stage 0 or with one data rank: this class then has no
        reduce-scatter through which the gradients pass.
        """
        if not self._watchable:
            return None
        return {p.name: r.total for r in self._watchable if r.total is not None for p in r.unit.parameters}

    @property
    def shard_elements(self) -> int:
        """The number of elements of the flat shards of all units on one data rank, with FSDP2's padding."""
        return sum(unit.segments[-1].stop for unit in self.units)

    @property
    def device(self) -> torch.device:
        """The device on which the model computes.

        The shards of parameters are on this device too, except with --optimizer-cpu-offload: then they are in host
        memory.
        """
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
    """Shard `model` in place with FSDP2, and replace FSDP2's collectives where the plan `wire` asks for it.

    Args:
        model: model to shard. Its parameters may be on the meta device. With tensor parallelism they are DTensors on
            the tp mesh.
        units: groups of modules in the order of use; the parameters of a group are gathered and reduced together. The
            model's remaining parameters form one more unit.
        dims: mesh axes to shard and replicate over. With stage 0, every data rank is a replica.
        zero: flags of ZeRO and ZeRO++; the default is ZeRO-3.
        precision: compute and reduction dtypes; the default computes in fp32. Shards are always fp32.
        wire: plan of collectives that `plan_comm` makes from `zero` and the layout of `dims`.
        experts: modules inside `units` that are separate sharding units, sharded along `dims.experts`.
        states: memory of fp32 weights, moments and gradients; None for the device.
    Returns:
        The handle to the sharded model.
    """
    # ---- wrap the modules with FSDP2
    zero, precision, states = zero or ZeroConfig(), precision or PrecisionConfig(), states or DeviceStates()
    assert zero.stage > 0 or dims.shard.size == 1, f"stage 0 replicates, but axis `shard` has size {dims.shard.size}"
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

    # ---- install the collectives of each unit
    replicate = dims.replicate

    def count_all_reduce(reduced: torch.Tensor) -> None:
        """Count the bytes that FSDP2's all-reduce of `reduced` over replicas sends, in HSDP and in stage 0."""
        replicate.count("all_reduce", 2 * replicate.ring_bytes(reduced))

    sharded = find_units(model, unit_class=states.unit, data_dims=dims.data_mesh.ndim)
    context = CommContext(*axes_of_hops(dims, wire), plan=wire, zero=zero, precision=precision)
    of_experts = context.over(*axes_of_hops(dims.experts, wire)) if experts else context
    comms: list[tuple[TwoHopGather | CountedGather | None, SummingReduce]] = []
    for unit in sharded:
        for module in unit.modules:
            # Make FSDP2 sum gradients over ranks without a division, because the loss is already divided by a
            # denominator of the global batch. With one rank FSDP2 does not divide.
            if unit.num_shards * replicate.size > 1:
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if replicate.size > 1:
                module.set_all_reduce_hook(count_all_reduce)
        if unit.num_shards > 1:  # for a unit on one rank FSDP2 calls no collectives, so there are none to replace
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


def axes_of_hops(dims: ParallelDims, wire: CommPlan) -> tuple[MeshAxis, MeshAxis, MeshAxis]:
    """Return the axes cross, local and shard that the collectives of the plan `wire` use.

        gather and reduction in two hops    dims.cross, dims.local, dims.shard
        only one of them in two hops        dims.cross, dims.local, dims.own_shard: the other runs along `own_shard`
        neither in two hops                 dims.own_shard three times

    In the last case, access to `dims.cross` and `dims.local` would create process groups that nothing uses.
    """
    shard = dims.shard if wire.gather and wire.reduce else dims.own_shard
    return (dims.cross, dims.local, shard) if wire.gather or wire.reduce else (shard, shard, shard)


def make_comms(
    unit: Unit, context: CommContext, states: DeviceStates | None = None
) -> tuple[TwoHopGather | CountedGather, TwoHopReduce | CountedReduce]:
    """Return the all-gather and the reduce-scatter of one sharding unit, in one hop or two as `context.plan` says.

    Args:
        unit: the sharding unit.
        context: plan, axes, schedules and formats that all units share.
        states: memory of fp32 weights, moments and gradients, which sets the classes of the reduce-scatter.
    """
    plan, states = context.plan, states or DeviceStates()
    return (
        CountedGather(unit, context) if plan.gather is None else TwoHopGather(unit, context),
        states.reduce(unit, context) if plan.reduce is None else states.two_hop_reduce(unit, context),
    )
