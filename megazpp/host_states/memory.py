"""Training states in host memory (--optimizer-cpu-offload): fp32 weights, moments and the gradients of a step.

The weights, the gradients and each moment of a sharding unit are flat host buffers [S] in the layout of the unit's flat
shard, so that one copy moves one unit. S: elements of a flat shard. FSDP2 is configured to offload to the CPU
(`CPUOffloadPolicy`), and its sharded parameters are views of the flat weights. This folder replaces what the policy
would do:

    input of a gather    `HostedParameter`: FSDP2 would upload the fp32 shard at each use. Instead FSDP2 gets the
                         working shard, a copy of the weights in the compute dtype on the device. With a secondary
                         partition (hpZ), from which gathers read, FSDP2 gets a placeholder, and the hop across nodes
                         uploads the weights once per step
    reduced gradients    reduce.py: FSDP2 would download the reduced gradients of each micro-batch. Instead FSDP2's
                         output tensor is the host buffer of the unit's gradients. The queue that reduces the gradients
                         also downloads them to this buffer
    partial sums         reduce.py: with --zero-offload-partial-sums the partial sums that wait for the hop across
                         nodes are in host memory between micro-batches
    update               `HostShard.update`: the units' states are uploaded in turn into two slots of device memory.
                         The optimizer uses the same kernel on the device as without offloading, so results are
                         bit-identical

An update runs during the next forward. A gather of a unit waits only for the update of this unit. An update writes
through tensors with separate version counters, so that `Unit.fingerprint` changes only if other code than the optimizer
writes to the weights. Call `HostMemory.settle` before other code reads weights, moments or gradients.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from megazpp.base.launcher import env_number
from megazpp.base.memory import host_memory
from megazpp.parallel.agreement import raise_on_all_ranks
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import CommQueue, StreamQueue, ThreadQueue, Work
from megazpp.parallel.dims import ParallelDims
from megazpp.topology.layout import DOWNLOAD, HOST, PCIE, UPLOAD
from megazpp.zero.comms import CommContext
from megazpp.zero.sharding import DeviceStates
from megazpp.zero.units import Unit

STATES = 4  # fp32 numbers in host memory per trained weight: gradient, weight and two moments
NUM_SLOTS = 2  # largest number of units in an update at the same time: one is uploaded while another is downloaded


class Staged(NamedTuple):
    """The states of a unit's trained parameters that are uploaded to the device during an optimizer update.

    Each list has one 1-D tensor per trained parameter, without padding.
    """

    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    exp_avg: list[torch.Tensor]
    exp_avg_sq: list[torch.Tensor]


@dataclass
class SumSlot:
    """Device memory for the partial sums of one unit's gradients, while the hop across nodes sends them.

    Attributes:
        buffer: 1-D tensor with room for the partial sums of the largest unit.
        used_by: task of the last hop across nodes that reads `buffer`. `HostedTwoHopReduce` (reduce.py) waits for this
            task before it writes to `buffer` again.
    """

    buffer: torch.Tensor
    used_by: Work[Any]


class HostMemory(DeviceStates):
    """The fp32 weights, gradients and moments of all sharding units in host memory, and their copies to the device.

    Attributes:
        device: device that computes; the CPU until `allocate_states`.
        shards: states of each sharding unit.
        dtype: dtype in which weights are gathered.
        num_sums: number of nodes, N, of the partial sums [N, S] that each unit keeps in host memory; 0 without
            --zero-offload-partial-sums.
        sum_dtype: dtype of the partial sums.
        timeline: timeline in which each update records a span.
    """

    # pin_memory is False, because with pinned memory FSDP2 would make the host wait for each reduced gradient
    offload = CPUOffloadPolicy(pin_memory=False)
    device: torch.device = torch.device("cpu")

    def connect(self, units: Sequence[HostedUnit], context: CommContext, dims: ParallelDims) -> None:
        """Store the facts about the sharded model that the copies between host and device need.

        These are the units' states, the dtypes of compute and of partial sums, the number of partial sums, whether
        updates overlap on a CPU, the timeline, and the traffic counter. `shard_model` calls this method; see
        `DeviceStates.connect` for the arguments.
        """
        wire, zero = context.plan, context.zero
        self.num_sums = context.cross.size if wire.reduce is not None and zero.zero_offload_partial_sums else 0
        self.sum_dtype = torch.bfloat16 if zero.zero_accumulate_in_bf16 else torch.float32
        self.shards, self.dtype = [unit.states for unit in units], context.precision.param_dtype
        self.timeline, self._counter = dims.timeline, dims.counter
        self._overlap = context.overlap_gather  # True if updates on a CPU run in a thread; on CUDA they always overlap
        for shard in self.shards:
            shard.keeps_copy = wire.gather is not None and wire.gather.keep and shard.unit.num_shards > 1

    @property
    def num_bytes(self) -> int:
        """The bytes of host memory that this rank needs for weights, gradients, moments and partial sums."""
        per_element = 4 * STATES + self.num_sums * self.sum_dtype.itemsize
        return sum(shard.size * (per_element if shard.unit.trained else 4) for shard in self.shards)

    def allocate(self, model: nn.Module, device: torch.device, world: MeshAxis) -> None:
        """Allocate the training states in host memory, and the model's buffers on `device`.

        The fp32 shards never are on the device. See `DeviceStates.allocate` for the arguments.
        """
        num_local = env_number("LOCAL_WORLD_SIZE", os.environ, default=1, least=1)
        raise_on_all_ranks(world, functools.partial(self.allocate_states, device, num_local=num_local))
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device=device)

    def allocate_states(self, device: torch.device, *, num_local: int = 1) -> None:
        """Allocate weights, gradients and moments as zeros in host memory, and make parameters views of the weights.

        Args:
            device: device that computes.
            num_local: number of ranks on this machine. Each of them needs about as much memory as this rank.

        Raises:
            ValueError: the machine has too little available memory for all its ranks.
            OSError: the memory cannot be allocated, or CUDA cannot register it for asynchronous copies.
        """
        wanted, available = num_local * self.num_bytes, host_memory().available
        if wanted > available:
            raise ValueError(
                f"--optimizer-cpu-offload needs {wanted / 1e9:.1f} GB of host memory for {num_local} ranks on this "
                f"machine, but only {available / 1e9:.1f} GB are available: use more machines, or free memory"
            )
        self.device = device
        largest = max([shard.size for shard in self.shards if shard.unit.trained], default=0)
        slots = [torch.empty(STATES, largest, dtype=torch.float32, device=device) for _ in range(NUM_SLOTS)]
        self._slots = [(rows, self._new_queue()) for rows in slots]
        sums = [torch.empty(self.num_sums * largest, dtype=self.sum_dtype, device=device) for _ in range(NUM_SLOTS)]
        self._sum_slots = [SumSlot(buffer, Work(None)) for buffer in sums]
        for shard in self.shards:
            shard.allocate(self)

    def _new_queue(self) -> CommQueue:
        """Return the queue that runs the optimizer updates which use one of the slots of device memory.

        On CUDA the queue is a stream. On the CPU the queue is a thread if gathers overlap with the compute. On the CPU
        without overlap, the queue runs each update inside the call of `submit`.
        """
        if self.device.type == "cuda":
            return StreamQueue()
        return ThreadQueue(HOST, self.timeline) if self._overlap else CommQueue()

    def new_buffers(self, count: int, size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """Return `count` tensors [size] of zeros in host memory, which CUDA can copy asynchronously.

        On CUDA this function registers ordinary memory, because torch's allocator of pinned memory would round each
        size up to a power of two.

        Raises:
            OSError: CUDA cannot register the memory.
        """
        if self.device.type != "cuda":
            return [torch.zeros(size, dtype=dtype, device="cpu") for _ in range(count)]
        num_bytes = dtype.itemsize * size
        mapping = mmap.mmap(-1, count * num_bytes)
        buffers = [torch.frombuffer(mapping, dtype=dtype, count=size, offset=i * num_bytes) for i in range(count)]
        for buffer in buffers:
            buffer.zero_()  # the first write by this rank makes Linux place the pages near the rank's cores
        error = torch.cuda.cudart().cudaHostRegister(buffers[0].data_ptr(), count * num_bytes, 0)
        if int(error) != 0:
            raise OSError(
                f"--optimizer-cpu-offload: CUDA cannot register {count * num_bytes} bytes of host memory for copies to "
                f"the device (CUDA error {int(error)}): raise the limit of locked memory, or free memory"
            )
        return buffers

    def upload(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the host tensor `x` to the device, and return the copy; count the bytes.

        Args:
            x: tensor in host memory.
            onto: tensor on the device for the copy; None allocates the copy. If the device is the CPU, None may return
                `x` itself without a copy.
        """
        self._counter.add(PCIE, HOST, UPLOAD, x.nbytes)
        return x.to(self.device, non_blocking=True) if onto is None else onto.copy_(x, non_blocking=True)

    def download(self, x: torch.Tensor, onto: torch.Tensor) -> None:
        """Copy the device tensor `x` into the host tensor `onto`, asynchronously on CUDA, and count the bytes."""
        self._counter.add(PCIE, HOST, DOWNLOAD, x.nbytes)
        onto.copy_(x, non_blocking=True)

    def submit(self, task: Callable[[torch.Tensor], None]) -> Work[None]:
        """Queue `task`, the optimizer update of a unit, which is called with a slot of device memory.

        The slot is an fp32 tensor with 4 rows, for weights, gradients and two moments. Successive updates use the two
        slots in turn. Each slot has a separate queue, so that the updates of two units overlap.
        """
        self._slots.append(self._slots.pop(0))
        rows, queue = self._slots[-1]
        return queue.submit(functools.partial(task, rows))

    def take_sum_slot(self) -> SumSlot:
        """Return the least recently used of the slots for partial sums of gradients.

        Before `HostedTwoHopReduce._hop_inside` writes to the slot, it must wait for the slot's `used_by`.
        """
        self._sum_slots.append(self._sum_slots.pop(0))
        return self._sum_slots[-1]

    def begin_step(self) -> None:
        """Mark the gradients of the last training step as outdated; the first `HostShard.take` then overwrites them."""
        for shard in self.shards:
            shard.has_sum = False

    def norms(self, tp: MeshAxis) -> dict[str, torch.Tensor]:
        """Complete the step's gradients, and return the L2 norm of this rank's shard of each gradient.

        Call this method on all ranks after the last backward of a step. For the parameters in `DeviceStates.partial`,
        each tensor-parallel rank has only a partial sum of the gradients, so the method sums them over `tp`.

        The result has fp32 scalars on the device, by parameter name.
        """
        found, late = dict[str, torch.Tensor](), list[tuple[str, torch.Tensor, torch.Tensor]]()
        for shard in self.shards:
            if shard.has_sum:
                found |= shard.norms
                late += shard.late
        if late:
            flat = tp.all_reduce_(torch.cat([part for _, part, _ in late]))
            totals = list(flat.split([len(part) for _, part, _ in late]))
            for (_, _, buffer), total in zip(late, totals, strict=True):
                self.download(total, buffer)
            names = [name for name, _, _ in late]
            found |= dict(zip(names, torch._foreach_norm(totals, 2, dtype=torch.float32), strict=True))
        return found

    def settle(self) -> None:
        """Wait until all optimizer updates are complete and in host memory. On CUDA the host waits for the device."""
        for shard in self.shards:
            shard.updated.wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights from host memory to the working shards on the device.

        Call this method after code other than the optimizer has written to the weights.
        """
        for shard in self.shards:
            if shard.working is not None:
                shard.working.copy_(shard.read())


class HostShard:
    """The fp32 weights, gradients and moments of one sharding unit in host memory (--optimizer-cpu-offload).

    Attributes:
        unit: the sharding unit.
        size: number of elements of the unit's flat shard, S.
        keeps_copy: True if gathers read a secondary partition (hpZ) instead of the shard.
        working: [S] working shard: the weights in the dtype of gathers, on the device; None if `keeps_copy`.
        updated: task of the last optimizer update of the unit; a finished task before the first update.
        has_sum: True if `gradients` has gradients of the current training step.
        norms: L2 norm of each gradient of the current step, by parameter name; set at the end of the last backward.
        late: gradients of the parameters in `HostMemory.partial`, which `HostMemory.norms` sums over tensor-parallel
            ranks. Each entry is (parameter name, this rank's partial gradient on the device, view of `gradients` for
            the sum).
        gradients: [S] fp32 buffer in host memory. It begins with the current step's gradients of the trained parameters
            only; the rest is unused.
        partial_sums: [N * S] partial sums of gradients in host memory, S elements for each of N nodes; only with
            --zero-offload-partial-sums.
    """

    gradients: torch.Tensor
    partial_sums: torch.Tensor

    def __init__(self, unit: HostedUnit) -> None:
        self.unit, self.size = unit, unit.segments[-1].stop
        self.keeps_copy = False
        self.working: torch.Tensor | None = None
        self.updated: Work[Any] = Work(None)
        self.has_sum = False
        self.norms: dict[str, torch.Tensor] = {}
        self.late: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def allocate(self, memory: HostMemory) -> None:
        """Allocate the unit's fp32 weights, moments, gradients and partial sums in host memory.

        FSDP2's sharded parameters are replaced by views of these fp32 weights, so that an update of the weights also
        updates the parameters.
        """
        self.memory, self._trained = memory, self.unit.trained
        if self._trained:
            self.gradients, weights, *self.moments = memory.new_buffers(STATES, self.size)
        else:
            (weights,) = memory.new_buffers(1, self.size)
        if self._trained and memory.num_sums:
            (self.partial_sums,) = memory.new_buffers(1, memory.num_sums * self.size, memory.sum_dtype)
        # Updates write through `_weights`, which shares the parameters' memory but not their version counters. So
        # `Unit.fingerprint` changes only if other code writes to the parameters.
        self._weights = weights.data
        if not self.keeps_copy:
            self.working = torch.zeros(self.size, dtype=memory.dtype, device=memory.device)
        self._placeholder = torch.zeros(1, dtype=memory.dtype, device=memory.device)
        for index, p in enumerate(self.unit.fsdp_parameters):
            local, segment = p.sharded_param._local_tensor, self.unit.segments[index]
            p._sharded_param_data = weights[segment.start : segment.stop]
            shard = p._sharded_param_data[: local.numel()].view(local.shape)
            p.sharded_param = nn.Parameter(p.to_sharded_dtensor(shard), requires_grad=p.sharded_param.requires_grad)
            p._setattr_on_modules(p.sharded_param)
            p.__class__ = HostedParameter
            p.read_input = functools.partial(self._input_of, index)

    def _input_of(self, index: int) -> torch.Tensor:
        """Return the tensor that FSDP2 concatenates as its all-gather's input for the unit's parameter `index`.

        With a secondary partition (hpZ) the tensor is a placeholder, which is never read.
        """
        segment = self.unit.segments[index]
        if self.working is None:
            return self._placeholder.expand(segment.size)
        self.updated.wait()
        return self.working[segment.start : segment.stop]

    def read(self) -> torch.Tensor:
        """Upload the weights, and return them as a flat shard [S] in the dtype of gathers; any queue may call this.

        The method waits for the last update of the weights.
        """
        self.updated.join()
        return self.memory.upload(self._weights).to(self.memory.dtype)

    @property
    def parameters(self) -> list[Any]:
        """The unit's trained parameters, as sharded DTensors that share memory with the fp32 weights in host memory."""
        return [self.unit.fsdp_parameters[index].sharded_param for index in self._trained]

    def views(self, flat: torch.Tensor) -> list[DTensor]:
        """Return views of `flat`, a flat shard [S] in host memory, as DTensors, one per trained parameter."""
        trained = [self.unit.fsdp_parameters[index] for index in self._trained]
        parts = zip(trained, self._split(flat), strict=True)
        return [p.to_sharded_dtensor(part.view(p.sharded_param._local_tensor.shape)) for p, part in parts]

    # ---- gradients: accumulate them in host memory, and compute their norms ------------------------------------------

    def take(self, total: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Add reduced gradients to the current training step's gradients in host memory.

        The task that has summed the gradients over ranks calls this method, in the task's queue.

        Args:
            total: [S'] flat shard on the device with the reduced gradients of the trained parameters.
            last: True if the step's gradients are complete with `total`.
        Returns:
            A 1-D tensor with the norm of each trained parameter's gradient, followed by the gradients that are partial
            on each tensor-parallel rank (`HostMemory.partial`). The tensor is empty if `last` is False.
        """
        memory, buffer = self.memory, self.gradients[: len(total)]
        self.updated.join()  # the last update reads `buffer`, so it must end before this method writes to `buffer`
        total = total.float()
        if self.has_sum:
            # The earlier gradients are the first operand, as in FSDP2's addition to `.grad`.
            total = memory.upload(buffer).add_(total)
        self.has_sum = True
        memory.download(total, buffer)
        if not last:
            return total.new_empty(0)  # not a view of `total`, which would keep the memory of `total` allocated
        parts = self._split(total, of_gradients=True)
        norms = torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32))
        return torch.cat([norms, *[parts[place] for place in self._partial_places]])

    def finish(self, taken: Work[torch.Tensor]) -> None:
        """Store the norms and partial gradients that `take` has returned.

        `ReduceSchedule` calls this method at the end of the backward.

        Args:
            taken: task of a call of `take`. If that call did not complete the step's gradients, nothing is stored.
        """
        results, names = taken.join(), [self.unit.parameters[index].name for index in self._trained]
        if not len(results):
            return
        self.norms = dict(zip(names, results, strict=False))
        buffers, rest = self._split(self.gradients, of_gradients=True), results[len(names) :]
        self.late = []
        for place in self._partial_places:
            size = len(buffers[place])
            self.late.append((names[place], rest[:size], buffers[place]))
            rest = rest[size:]

    @property
    def _partial_places(self) -> list[int]:
        """The positions of parameters whose gradients tensor-parallel ranks must sum (`HostMemory.partial`).

        A position is an index in the list of the unit's trained parameters.
        """
        partial, parameters = self.memory.partial, self.unit.parameters
        return [place for place, index in enumerate(self._trained) if parameters[index].name in partial]

    def _split(self, flat: torch.Tensor, *, of_gradients: bool = False) -> list[torch.Tensor]:
        """Split a flat shard into one view per trained parameter, without padding.

        Args:
            flat: [S] flat shard of weights or moments, with the S elements of all parameters; or [S'] flat shard of
                gradients, with the S' elements of the trained parameters only.
            of_gradients: True if `flat` has gradients.
        """
        unit, trained = self.unit, self._trained
        segments = unit.segments_of(trained) if of_gradients else [unit.segments[index] for index in trained]
        sizes = [parameter._local_tensor.numel() for parameter in self.parameters]
        return [flat[segment.start : segment.start + size] for segment, size in zip(segments, sizes, strict=True)]

    # ---- optimizer update ------------------------------------------------------------------------------------------

    def update(self, apply: Callable[[Staged], None]) -> None:
        """Queue an optimizer update of the unit's trained parameters, whose states are in host memory.

        The queued work copies weights, gradients and moments to the device, calls `apply`, and copies weights and
        moments back. On CUDA it runs on a separate stream.

        Args:
            apply: function that updates the copies of weights and moments on the device in place.
        """

        def run(slot: torch.Tensor) -> None:
            """Upload the unit's states to the device, update them there, and download weights and moments.

            Args:
                slot: [4, n] fp32 tensor on the device, whose rows are for weights, gradients and the two moments. The
                    unit's flat shard has at most n elements.
            """
            memory, states = self.memory, (self._weights, self.gradients, *self.moments)
            with memory.timeline.span(HOST, f"update {self.unit.name}"):
                rows = [memory.upload(state, row[: self.size]) for state, row in zip(states, slot, strict=True)]
                apply(Staged(*(self._split(row, of_gradients=row is rows[1]) for row in rows)))
                for row, state in zip(rows, states, strict=True):
                    if state is not self.gradients:
                        memory.download(row, state)
                if self.working is not None:
                    self.working.copy_(rows[0])

        self.updated = self.memory.submit(run)


@dataclass(frozen=True, kw_only=True)
class HostedUnit(Unit):
    """A sharding unit whose weights, gradients and moments are in host memory (--optimizer-cpu-offload)."""

    @functools.cached_property
    def states(self) -> HostShard:
        """The unit's fp32 weights, gradients and moments in host memory, created at the first access."""
        return HostShard(self)

    @property
    def fsdp_parameters(self) -> list[Any]:
        """FSDP2's private objects (`FSDPParam`), one per parameter of the unit, in FSDP2's flat order."""
        return self._group.fsdp_params

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Return a context in which FSDP2 accumulates the unit's gradients in the reduction dtype, without reducing."""
        before, self._group.reduce_grads = self._group.reduce_grads, False
        try:
            yield
        finally:
            self._group.reduce_grads = before

    def pop_gradients(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return the unreduced, unsharded gradients of the unit's parameters `indices`, in this order.

        FSDP2's references to these gradients are set to None, so that the next backward creates new gradients.
        """
        found = []
        for p in [self.fsdp_parameters[index] for index in indices]:
            # In torch 2.15 `unsharded_accumulated_grad` is a property, and accumulated gradients are in `.grad`.
            in_grad = isinstance(getattr(type(p), "unsharded_accumulated_grad", None), property)
            if not in_grad and p.unsharded_accumulated_grad is not None:
                found.append(p.unsharded_accumulated_grad_data)
                p.unsharded_accumulated_grad = None
            else:
                found.append(p.unsharded_grad_data)
                p.unsharded_param.grad = None
        return found

    def shard_reader(self, dtype: torch.dtype) -> Callable[[], torch.Tensor] | None:
        """Return a function that uploads this rank's flat shard [S] to the device; see `Unit.shard_reader`.

        Return None while the unit's parameters are gathered.
        """
        return self.states.read if self.is_sharded else None

    def input_reader(self, given: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that returns this rank's flat shard [S]; see `Unit.input_reader`.

        With a secondary partition, `given` is a placeholder, so the function uploads the weights instead.
        """
        return self.states.read if self.states.keeps_copy else super().input_reader(given)

    def check_shard_reader(self, expected: torch.Tensor) -> None:
        """Check that `shard_reader` returns the input of FSDP2's all-gather; see `Unit.check_shard_reader`.

        With a secondary partition (hpZ) do nothing, because the all-gather's input is then a placeholder.
        """
        if not self.states.keeps_copy:
            super().check_shard_reader(expected)


class HostedParameter(FSDPParam):
    """FSDP2's private object of a parameter, with an all-gather input on the device and a shard in host memory."""

    read_input: Callable[[], torch.Tensor]

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        return [self.read_input()]
