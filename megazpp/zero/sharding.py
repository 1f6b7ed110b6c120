"""Shard any model's parameters, gradients and optimizer state over the data ranks: the only file that drives FSDP2.

One file of more than 300 lines: all that is asked of FSDP2 is read in one place.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megazpp.kernels.block_quant import rescale_
from megazpp.parallel.axis import TrafficCounter
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.comms import CommContext, CountedGather, CountedReduce
from megazpp.zero.config import CommPlan, Dtypes, PrecisionConfig, ZeroConfig, plan_comm
from megazpp.zero.gather import InterNodeMessage, TwoHopGather
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.secondary import Resident
from megazpp.zero.units import Unit, find_units
from megazpp.zero.wire import LosslessCodec
from megazpp.zero.writes import WatchedGather, WriteWatch


class WeightHandle(Protocol):
    """A handle on weights that are only used: `Sharding`, or another."""

    keeps_gathered: bool  # whether `keep_unsharded` keeps them, so that later forwards need no other data rank

    def keep_unsharded(self) -> Any: ...

    def reshard(self) -> None: ...


class Sharding:
    """The handle on a sharded model: its methods belong around micro-batches, evaluations and writes to weights.

    Args:
        units: its sharding units, FSDP2's parameter groups.
        stage: the ZeRO stage.
        zero: intervals of whole weights and of error feedback.
        comms: each unit's all-gather and reduce-scatter, where they are ours.
        counter: of the bytes that this rank sends.
    """

    keeps_gathered = True

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        stage: int,
        zero: ZeroConfig,
        comms: Sequence[tuple[TwoHopGather | CountedGather, TwoHopReduce | CountedReduce]],
        counter: TrafficCounter,
    ) -> None:
        self.model, self.units, self.stage, self.counter, self._zero = model, units, stage, counter, zero
        self._iteration: int | None = None
        self._modules = [module for unit in units for module in unit.modules]
        self._gathers = [gather for gather, _ in comms if isinstance(gather, TwoHopGather)]
        self._reduces = [reduce for _, reduce in comms if isinstance(reduce, TwoHopReduce)]
        self._watchable = [reduce for _, reduce in comms]
        self._residents = [gather for gather in self._gathers if gather.secondary.sends_differences]
        if self._gathers:
            _on_steps(self, Sharding.before_optimizer_step, Sharding.after_optimizer_step)
        if any(reduce.restores_none for reduce in self._reduces):
            _on_steps(self, Sharding.refuse_early_step, Sharding.keep_errors)

    def begin_step(self, iteration: int) -> None:
        """Call before the first micro-batch of a training step; only --zero-weight-keyframe-interval needs it."""
        self._iteration = iteration

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
        """Multiply the error feedback like a step's gradients; call after the optimizer's step, or its skipping.

        So the next step adds it to gradients of the same unit. No host synchronization.

        Args:
            factor: the clip factor times the next step's loss scale over this step's; 0 if the step was skipped. A
                scalar on the model's device, or a number.
            iteration: number of the step, from 1; error feedback is forgotten at multiples of its reset interval.
        """
        reset = self._zero.zero_error_feedback_reset
        if reset is not None and iteration % reset == 0:
            factor = 0.0
        self.rescale_feedback(factor)

    def rescale_feedback(self, factor: torch.Tensor | float) -> None:
        """Multiply the error feedback by `factor`; `end_step` does it for whole steps."""
        rescale_([errors for reduce in self._reduces if (errors := reduce.kept_errors) is not None], factor)
        for reduce in self._reduces:
            reduce.settle_errors()

    def compile_kernels(self, device: torch.device) -> None:
        """Compile the kernels of quantized messages for `device` now, and not in the first step; nothing is sent."""
        with torch.no_grad():
            for gather in self._gathers:
                gather.warm_up(device)
            for reduce in self._reduces:
                reduce.warm_up(device)

    def reshard(self) -> None:
        """Free gathered parameters, so that the next forward gathers the shards anew; call after an evaluation."""
        for module in self._modules:
            module.reshard()

    @contextmanager
    def keep_unsharded(self) -> Iterator[None]:
        """Keep each weight after its first gather, as stage 2 does (the whole model's memory); afterwards free all."""
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in self._modules:
                module.set_reshard_after_forward(self.stage == 3, recurse=False)
            self.reshard()

    def invalidate_weights(self) -> None:
        """Have the next use of each weight gather it anew, whole.

        Needed only after writes that move no version counter (`parameter.data`, `torch._foreach_*`). With `zeropp`
        these are noticed, except on CUDA inside a step, and a call on one rank is enough.
        """
        for gather in self._gathers:
            gather.drop()

    weights_changed = invalidate_weights  # the method's former name, for code that uses it

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Call before the step of an optimizer that is not one of torch's; for those it is done."""
        held = _held_by(optimizer)
        for gather in self._residents:
            gather.before_step(held)

    def refuse_early_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if gradients that `optimizer` is about to use wait for the step's last backward."""
        waiting = [reduce for reduce in self._reduces if reduce.waits]
        held = _ids_of(optimizer) if waiting else set()
        for reduce in waiting:
            if (name := reduce.waits_for(held)) is not None:
                raise RuntimeError(
                    f"the optimizer steps while the gradients of {name} wait to cross nodes: call "
                    "model.set_is_last_backward(True) before the last backward of each step"
                )

    def keep_errors(self, optimizer: torch.optim.Optimizer) -> None:
        """Know after a step of `optimizer` that the gradients of the model's last backward were not given up."""
        unsettled = [reduce for reduce in self._reduces if reduce.kept_errors is not None]
        held = _ids_of(optimizer) if unsettled else set()
        for reduce in unsettled:
            if any(reduce.unit.shard_id(index) in held for index in range(len(reduce.unit.parameters))):
                reduce.settle_errors()

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Call after such a step: the next use of the weights sends what it has changed.

        Args:
            optimizer: the one that has made the step; None: one that holds all parameters.
        Raises:
            RuntimeError: --zero-weight-keyframe-interval is set, and `begin_step` was never called.
        """
        interval, keyframe = self._zero.zero_weight_keyframe_interval, False
        if interval is not None:
            if self._iteration is None:
                raise RuntimeError(f"--zero-weight-keyframe-interval {interval} needs Sharding.begin_step(iteration)")
            keyframe = self._iteration % interval == 0
        held = _held_by(optimizer)
        for gather in self._gathers:
            gather.after_step(keyframe=keyframe, held=held)

    def secondary_state(self) -> dict[str, torch.Tensor]:
        """The state to continue with bit for bit where weights cross nodes as differences; {} where they do not.

        {parameter}: a copy of the weights that the nodes keep, a DTensor sharded like the parameter; none where the
        next use sends whole weights. {unit's first parameter}.crossing: what the next use sends, a scalar, the same on
        all ranks. Call while the parameters are shards, as after `reshard`.
        """
        state: dict[str, torch.Tensor] = {}
        for gather in self._residents:
            crossing, resident = gather.next_crossing(), gather.resident()
            state[gather.crossing_key] = torch.tensor(crossing, dtype=torch.uint8)
            if crossing != InterNodeMessage.KEYFRAME:
                assert resident is not None
                assert resident.weights is not None
                own = gather.unit.as_parameters(resident.weights[resident.cross.rank])
                state |= {name: weight.clone() for name, weight in own.items()}  # --async-save takes no views
        return state

    def secondary_targets(self) -> dict[str, torch.Tensor]:
        """Zeros of all that `secondary_state` may hold, to read a saved one into, of any layout and world size."""
        targets: dict[str, torch.Tensor] = {}
        for gather in self._residents:
            targets[gather.crossing_key] = torch.zeros((), dtype=torch.uint8)
            targets |= gather.unit.as_parameters(gather.new_row(self._device))
        return targets

    def load_secondary_state(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Go on from what `secondary_state` was, once the weights are loaded; call on all ranks with the same keys.

        Returns:
            Whether it was complete; a unit of which something is missing begins with whole weights.
        """
        complete = True
        for gather in self._residents:
            gather.drop()
            sent = state.get(gather.crossing_key)
            crossing = InterNodeMessage.KEYFRAME if sent is None else InterNodeMessage(int(sent))
            if crossing == InterNodeMessage.KEYFRAME or any(p.name not in state for p in gather.unit.parameters):
                complete = complete and crossing == InterNodeMessage.KEYFRAME and sent is not None
                continue
            row = gather.new_row(self._device)
            for name, part in gather.unit.as_parameters(row).items():
                part.copy_(state[name])
            with gather.secondary.cross.counter.paused():
                gather.restore(row, crossing)
        return complete

    def metrics(self) -> dict[str, float]:
        """Numbers of the steps since the last call; {} where weights do not cross nodes as lossless differences.

        weights_left_out: changed weights that messages had no room for, of the ranks of this rank's cross axis, as far
        as the host knows: the last step's come with the next one.
        """
        if not self._residents:
            return {}
        codecs = [gather.secondary.differences for gather in self._residents if isinstance(gather.secondary, Resident)]
        found = sum(codec.take_left_out() for codec in codecs if isinstance(codec, LosslessCodec))
        return {"weights_left_out": float(found)}

    @property
    def keeps_state(self) -> bool:
        """True if there is a `secondary_state` or a `rank_state`."""
        return bool(self._residents) or any(reduce.feeds_back for reduce in self._reduces)

    def rank_state(self) -> dict[str, torch.Tensor]:
        """The buffers that this rank alone keeps between steps, by name, to load into; other layouts begin with zeros.

        That is its error feedback, and the sizes that lossless differences had.
        """
        buffers: dict[str, torch.Tensor] = {}
        for gather in self._residents:
            buffers[f"{gather.unit.key}.recent"] = gather.lossless().recent
        for reduce in self._reduces:
            errors = reduce.errors(self._device)
            for index, (payload, scales) in enumerate(() if errors is None else errors.segments()):
                name = f"{reduce.unit.key}.{index}"
                buffers |= {f"{name}.payload": payload, f"{name}.scales": scales}
        return buffers

    def watch_gradients(self) -> None:
        """Begin to watch this rank's gradients: one pass over them before they are summed. Call once per step."""
        for reduce in self._watchable:
            reduce.watch()

    def own_gradients(self) -> dict[str, torch.Tensor] | None:
        """By parameter the sum of its unit's gradients on this rank since `watch_gradients`, a scalar on the device.

        None with stage 0, where FSDP2 itself sums the gradients of whole copies.
        """
        if not self._watchable:
            return None
        return {p.name: r.total for r in self._watchable if r.total is not None for p in r.unit.parameters}

    @property
    def shard_elements(self) -> int:
        """Elements of all parameters on one data rank, padded as FSDP2 shards them."""
        return sum(unit.segments[-1].stop for unit in self.units)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def shard_model(
    model: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    dims: ParallelDims,
    *,
    zero: ZeroConfig | None = None,
    precision: PrecisionConfig | None = None,
    wire: CommPlan | None = None,
) -> Sharding:
    """Shard `model` in place.

    Args:
        model: parameters may be on the meta device; with tensor parallelism all of them are DTensors on the tp mesh.
        units: modules whose parameters travel together, in the order of use; `model` takes what is left.
        dims: the axes to shard and replicate over; with stage 0 one replica per data rank.
        zero: stage and wire formats; the default is ZeRO-3.
        precision: compute and reduction formats; the shards stay fp32. The default computes in fp32.
        wire: what `plan_comm` makes of `zero` on the layout of `dims`.
    Raises:
        ValueError: `zero` asks for what `dims` cannot do.
    """
    zero, precision = zero or ZeroConfig(), precision or PrecisionConfig()
    assert zero.stage > 0 or dims.shard.size == 1, "stage 0 replicates: dims must have shards of one rank"
    if wire is None:
        wire = plan_comm(zero, dims.layout, precision.param_dtype)  # refuses before anything is changed
    policy = MixedPrecisionPolicy(
        param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False
    )
    stage = zero.stage_over(dims.shard.size)
    for unit in [*units, [model]]:
        target = unit[0] if len(unit) == 1 else list(unit)
        fully_shard(target, mesh=dims.data_mesh, reshard_after_forward=stage == 3, mp_policy=policy)
    found = find_units(model, dims.shard.size, data_dims=dims.data_mesh.ndim)
    return install_comms(model, found, dims, wire, zero, precision, stage=stage)


def install_comms(
    model: nn.Module,
    units: Sequence[Unit],
    dims: ParallelDims,
    wire: CommPlan,
    zero: ZeroConfig,
    precision: PrecisionConfig | Dtypes,
    *,
    stage: int,
    means: bool = False,
    watch: bool = False,
) -> Sharding:
    """Have FSDP2 call our collectives in a model that `fully_shard` has wrapped over `dims.data_mesh`.

    Args:
        means: whether gradients are FSDP2's: divided (`set_gradient_divide_factor`), None where no rank had one, and
            dropped when the program clears them. Else they are sums, zeros where nobody had one.
        watch: whether ranks vote before each forward on what was written to the weights.
    """
    replicate = dims.replicate

    def count_all_reduce(reduced: torch.Tensor) -> None:
        """Count FSDP2's own all-reduce between replicas."""
        replicate.count("all_reduce", 2 * replicate.ring_bytes(reduced))

    hops = (dims.cross, dims.local) if wire.gather or wire.reduce else (dims.shard, dims.shard)  # these make no groups
    context = CommContext(*hops, dims.shard, plan=wire, zero=zero, precision=precision, restores_none=means)
    # FSDP2 calls no collectives for one rank
    comms = [make_comms(unit, context, watch=watch) for unit in units] if dims.shard.size > 1 else []
    if watched := [gather for gather, _ in comms if isinstance(gather, WatchedGather)]:
        WriteWatch(watched, model, *dims.host_axes("local", "cross"))
    for index, unit in enumerate(units):
        for module in unit.modules:
            if dims.shard.size * replicate.size > 1 and not means:  # for one rank FSDP2 divides by nothing
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if replicate.size > 1:
                module.set_all_reduce_hook(count_all_reduce)
            if not comms:
                continue
            gather, reduce = comms[index]
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
        if comms:
            comms[index][1].attach()
    return Sharding(model, units, stage, zero, comms, dims.counter)


def make_comms(
    unit: Unit, context: CommContext, *, watch: bool = False
) -> tuple[TwoHopGather | CountedGather, TwoHopReduce | CountedReduce]:
    """Make the unit's all-gather of parameters, which may `watch` writes to them, and its reduce-scatter."""
    plan = context.plan
    two_hops = WatchedGather if watch and plan.gather is not None and plan.gather.keep else TwoHopGather
    gather = CountedGather(unit, context) if plan.gather is None else two_hops(unit, context)
    if plan.reduce is None:
        return gather, CountedReduce(unit, context)
    return gather, TwoHopReduce(unit, context, lambda: gather.num_uses)


def _held_by(optimizer: torch.optim.Optimizer | None) -> set[int] | None:
    """The `id`s of the tensors that an optimizer holds; None without one."""
    return None if optimizer is None else _ids_of(optimizer)


def _on_steps(sharding: Sharding, before: _StepHook, after: _StepHook) -> None:
    """Call two methods of `Sharding` before and after every step of any torch optimizer.

    Hooks on all optimizers, because fused and foreach steps on DTensors move no version counter. They outlive the model
    and then do nothing: taking them away could happen while torch goes through its hooks.
    """
    reference = weakref.ref(sharding)

    def hook(method: _StepHook) -> Callable[..., None]:
        def call(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (alive := reference()) is not None:
                method(alive, optimizer)

        return call

    register_optimizer_step_pre_hook(hook(before))
    register_optimizer_step_post_hook(hook(after))


_StepHook = Callable[[Sharding, torch.optim.Optimizer], None]


def _ids_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
