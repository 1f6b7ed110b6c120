"""Training states in host memory (--optimizer-cpu-offload): fp32 weights, moments and the gradients of a step.

A unit's states are flat host buffers [S] in the layout of its flat shard, so one copy moves one unit. S: elements of a
flat shard. FSDP2 is told that it offloads to the CPU (`CPUOffloadPolicy`), and its sharded parameters are views of the
flat weights. Three parts replace what this policy would do:

    input of a gather    `HostedParameter`: FSDP2 would upload the fp32 shard at each use. It gets the 16-bit working
                         shard. With a secondary partition (hpZ), from which the gathers read, it gets a placeholder,
                         and the hop across nodes uploads the weights once per step
    reduced gradients    reduce.py: FSDP2 would download each micro-batch's sum. Its output is the host's buffer
                         itself, into which the queue that computes the step's sum also downloads it
    partial sums         reduce.py: with --zero-offload-partial-sums the sums that wait for the hop across
                         nodes are in host memory between micro-batches
    update               `HostShard.update`: the units pass through two slots of device memory one after the other.
                         The optimizer's kernel on the device is the same as without offloading, and so are all bits

An update runs during the next forward: the hop of a unit waits for the update of this unit only. Its writes go through
tensors with separate version counters, so that `Unit.fingerprint` still shows only a program's writes. Call
`HostMemory.settle` before anything else reads the states.
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

from megazpp.base.memory import available_bytes
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import CommQueue, StreamQueue, ThreadQueue, Work
from megazpp.parallel.dims import ParallelDims, raise_on_all_ranks
from megazpp.topology.layout import DOWNLOAD, HOST, PCIE, UPLOAD
from megazpp.zero.comms import CommContext
from megazpp.zero.sharding import DeviceStates
from megazpp.zero.units import Unit

STATES = 4  # fp32 numbers per trained element: gradient, weight and two moments
NUM_SLOTS = 2  # units that are updated at the same time: one is uploaded while another one is downloaded


class Staged(NamedTuple):
    """The states of a unit's trained parameters on the device, each as flat tensors, during an update."""

    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    exp_avg: list[torch.Tensor]
    exp_avg_sq: list[torch.Tensor]


@dataclass
class SumSlot:
    """Device memory for the partial sums of one unit.

    Attributes:
        buffer: flat buffer.
        used_by: the last hop across nodes that reads it.
    """

    buffer: torch.Tensor
    used_by: Work[Any]


class HostMemory(DeviceStates):
    """The states of all units in host memory, and their copies to and from the device.

    Attributes:
        device: device that computes.
        shards: the units' states.
        dtype: dtype in which weights are gathered.
        num_sums: number of nodes whose partial sums are in host memory; 0 without --zero-offload-partial-sums.
        sum_dtype: dtype of the partial sums.
        timeline: recorder of a span for each update.
    """

    # FSDP2's reductions are replaced; with its pinned memory the host would wait for each gradient
    offload = CPUOffloadPolicy(pin_memory=False)
    device: torch.device = torch.device("cpu")

    def connect(self, units: Sequence[HostedUnit], context: CommContext, dims: ParallelDims) -> None:
        """Read the units, dtypes and counters; see `DeviceStates.connect`."""
        wire, zero = context.plan, context.zero
        self.num_sums = context.cross.size if wire.reduce is not None and zero.zero_offload_partial_sums else 0
        self.sum_dtype = torch.bfloat16 if zero.zero_accumulate_in_bf16 else torch.float32
        self.shards, self.dtype = [unit.states for unit in units], context.precision.param_dtype
        self.timeline, self._counter = dims.timeline, dims.counter
        self._overlap = context.overlap_gather  # whether updates on a CPU run during the next forward; on CUDA always
        for shard in self.shards:  # whether gathers read a secondary partition (hpZ) instead of the shards
            shard.keeps_copy = wire.gather is not None and wire.gather.keep and shard.unit.num_shards > 1

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the states take."""
        per_element = 4 * STATES + self.num_sums * self.sum_dtype.itemsize
        return sum(shard.size * (per_element if shard.unit.trained else 4) for shard in self.shards)

    def allocate(self, model: nn.Module, device: torch.device, world: MeshAxis) -> None:
        """Allocate the states in host memory, and the model's buffers on the device, which never holds the shards."""
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        raise_on_all_ranks(world, functools.partial(self.allocate_states, device, num_local=num_local))
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device=device)

    def allocate_states(self, device: torch.device, *, num_local: int = 1) -> None:
        """Allocate all states, as zeros, and make the model's sharded parameters views of them.

        Args:
            device: device that computes.
            num_local: number of ranks on this machine, each of which takes about as much memory.

        Raises:
            ValueError: the machine has too little memory available.
            OSError: the memory cannot be allocated, or not be registered for copies to the device.
        """
        wanted, available = num_local * self.num_bytes, available_bytes()
        if wanted > available:
            raise ValueError(
                f"--optimizer-cpu-offload needs {wanted / 1e9:.1f} GB of host memory for {num_local} ranks on this "
                f"machine, {available / 1e9:.1f} GB are available: use more machines, or free memory"
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
        """Return a queue for updates."""
        if self.device.type == "cuda":
            return StreamQueue()
        return ThreadQueue(HOST, self.timeline) if self._overlap else CommQueue()

    def new_buffers(self, count: int, size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """Return flat buffers [size] of zeros in host memory, which CUDA can copy asynchronously.

        torch's allocator of pinned memory would round sizes up to powers of two.
        """
        if self.device.type != "cuda":
            return [torch.zeros(size, dtype=dtype, device="cpu") for _ in range(count)]
        num_bytes = dtype.itemsize * size
        mapping = mmap.mmap(-1, count * num_bytes)
        buffers = [torch.frombuffer(mapping, dtype=dtype, count=size, offset=i * num_bytes) for i in range(count)]
        for buffer in buffers:
            buffer.zero_()  # this rank touches the pages, so that they are near its cores
        error = torch.cuda.cudart().cudaHostRegister(buffers[0].data_ptr(), count * num_bytes, 0)
        if int(error) != 0:
            raise OSError(f"CUDA cannot register {count * num_bytes} bytes of host memory: error {int(error)}")
        return buffers

    def upload(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """Copy a host tensor to the device, into `onto` if it is given. Without CUDA the result may be `x` itself."""
        self._counter.add(PCIE, HOST, UPLOAD, x.nbytes)
        return x.to(self.device, non_blocking=True) if onto is None else onto.copy_(x, non_blocking=True)

    def download(self, x: torch.Tensor, onto: torch.Tensor) -> None:
        """Copy a device tensor into a host tensor."""
        self._counter.add(PCIE, HOST, DOWNLOAD, x.nbytes)
        onto.copy_(x, non_blocking=True)

    def submit(self, task: Callable[[torch.Tensor], None]) -> Work[None]:
        """Queue a task, which gets a slot [4, n] of device memory that no other task uses meanwhile."""
        self._slots.append(self._slots.pop(0))
        rows, queue = self._slots[-1]
        return queue.submit(functools.partial(task, rows))

    def take_sum_slot(self) -> SumSlot:
        """Return the least recently used slot for partial sums; wait for its `used_by` before writing to it."""
        self._sum_slots.append(self._sum_slots.pop(0))
        return self._sum_slots[-1]

    def begin_step(self) -> None:
        """Forget the gradients of the last step; see `DeviceStates.begin_step`."""
        for shard in self.shards:
            shard.has_sum = False

    def norms(self, tp: MeshAxis) -> dict[str, torch.Tensor]:
        """Complete the step's gradients, and return the L2 norm of this rank's shard of each, fp32 scalars by name.

        Call it after the last backward of a step, on all ranks. It sums the gradients in `partial` over `tp`.
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
        """Wait until the updates are complete; on CUDA the host waits."""
        for shard in self.shards:
            shard.updated.wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the working shards equal to the weights, after a write to the weights."""
        for shard in self.shards:
            if shard.working is not None:
                shard.working.copy_(shard.read())


class HostShard:
    """The states of one unit in host memory.

    Attributes:
        unit: the sharding unit.
        size: number of elements of the flat shard, S.
        keeps_copy: whether gathers read a secondary partition (hpZ) instead of the shard.
        working: [S] the weights in the dtype of gathers, on the device; None if `keeps_copy`.
        updated: the work of the last update.
        has_sum: whether this step has gradients.
        norms: norms of this step's gradients by parameter name.
        late: gradients in `HostMemory.partial` as (name, values on the device, place in host memory).
        gradients: [S] fp32, the gradients of the step in host memory, for the trained parameters.
        partial_sums: [N S] partial sums of gradients in host memory; with --zero-offload-partial-sums only.
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
        """Allocate the states, and replace FSDP2's sharded parameters by views of the weights."""
        self.memory, self._trained = memory, self.unit.trained
        if self._trained:
            self.gradients, weights, *self.moments = memory.new_buffers(STATES, self.size)
        else:
            (weights,) = memory.new_buffers(1, self.size)
        if self._trained and memory.num_sums:
            (self.partial_sums,) = memory.new_buffers(1, memory.num_sums * self.size, memory.sum_dtype)
        self._weights = weights.data  # with a separate version counter
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
        """Return FSDP2's input of the all-gather for a parameter."""
        segment = self.unit.segments[index]
        if self.working is None:
            return self._placeholder.expand(segment.size)
        self.updated.wait()
        return self.working[segment.start : segment.stop]

    def read(self) -> torch.Tensor:
        """Return the flat shard [S] in the dtype of gathers, on the device; any queue may call it."""
        self.updated.join()
        return self.memory.upload(self._weights).to(self.memory.dtype)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, sharded."""
        return [self.unit.fsdp_parameters[index].sharded_param for index in self._trained]

    def views(self, flat: torch.Tensor) -> list[DTensor]:
        """Return views of a host buffer [S] for the trained parameters, sharded like them."""
        found = []
        for index in self._trained:
            p, start = self.unit.fsdp_parameters[index], self.unit.segments[index].start
            local = p.sharded_param._local_tensor
            found.append(p.to_sharded_dtensor(flat[start : start + local.numel()].view(local.shape)))
        return found

    # ---- gradients -------------------------------------------------------------------------------------------------

    def take(self, total: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Add a sum of gradients to the step's; the queue that has computed the sum calls it.

        Args:
            total: [S'] on the device, for the trained parameters.
            last: whether this completes the gradients of the step.
        Returns:
            The norm of each parameter's gradient, followed by the gradients in `HostMemory.partial`; empty unless
            `last`.
        """
        memory, buffer = self.memory, self.gradients[: len(total)]
        self.updated.join()  # the last update reads the buffer
        total = total.float()
        if self.has_sum:
            total = memory.upload(buffer).add_(total)  # as FSDP2 adds to `.grad`
        self.has_sum = True
        memory.download(total, buffer)
        if not last:
            return total.new_empty(0)  # a view would keep the sum
        parts = self._split(total)
        norms = torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32))
        return torch.cat([norms, *[parts[place] for place in self._partial_places]])

    def finish(self, taken: Work[torch.Tensor]) -> None:
        """Store the results of a `take`, if it completed the gradients; the backward calls it at its end."""
        results, names = taken.join(), [self.unit.parameters[index].name for index in self._trained]
        if not len(results):
            return
        self.norms = dict(zip(names, results, strict=False))
        buffers, rest = self._split(self.gradients), results[len(names) :]
        self.late = []
        for place in self._partial_places:
            size = len(buffers[place])
            self.late.append((names[place], rest[:size], buffers[place]))
            rest = rest[size:]

    @property
    def _partial_places(self) -> list[int]:
        """The places in `_trained` of the parameters in `HostMemory.partial`."""
        partial, parameters = self.memory.partial, self.unit.parameters
        return [place for place, index in enumerate(self._trained) if parameters[index].name in partial]

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of each trained parameter in a flat shard [S'] of gradients, without padding."""
        parts = zip(self._trained, self.unit.segments_of(self._trained), strict=True)
        parameters = self.unit.fsdp_parameters
        return [flat[s.start : s.start + parameters[i].sharded_param._local_tensor.numel()] for i, s in parts]

    # ---- update ----------------------------------------------------------------------------------------------------

    def update(self, apply: Callable[[Staged], None]) -> None:
        """Queue an update of the trained parameters.

        Args:
            apply: changes weights and moments in place. It runs in a queue, on CUDA on another stream.
        """

        def run(slot: torch.Tensor) -> None:
            """Upload the states, apply the update, and download the changed ones."""
            memory, states = self.memory, (self._weights, self.gradients, *self.moments)
            with memory.timeline.span(HOST, f"update {self.unit.name}"):
                rows = [memory.upload(state, row[: self.size]) for state, row in zip(states, slot, strict=True)]
                parts = [self._split(row) if row is rows[1] else self._parts(row) for row in rows]
                apply(Staged(*parts))
                for row, state in zip(rows, states, strict=True):
                    if state is not self.gradients:
                        memory.download(row, state)
                if self.working is not None:
                    self.working.copy_(rows[0])

        self.updated = self.memory.submit(run)

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of each trained parameter in a flat shard [S], without padding."""
        parameters, segments = self.unit.fsdp_parameters, self.unit.segments
        sizes = {index: parameters[index].sharded_param._local_tensor.numel() for index in self._trained}
        return [flat[segments[index].start :][:size] for index, size in sizes.items()]


@dataclass(frozen=True, kw_only=True)
class HostedUnit(Unit):
    """A sharding unit whose states are in host memory."""

    @functools.cached_property
    def states(self) -> HostShard:
        """The unit's states."""
        return HostShard(self)

    @property
    def fsdp_parameters(self) -> list[Any]:
        """FSDP2's private objects of the unit's parameters."""
        return self._group.fsdp_params

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Return a context in which FSDP2 only accumulates gradients, in the dtype of reductions."""
        before, self._group.reduce_grads = self._group.reduce_grads, False
        try:
            yield
        finally:
            self._group.reduce_grads = before

    def pop_gradients(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return the whole gradients of the parameters `indices` that are not reduced yet, and clear them."""
        found = []
        for p in [self.fsdp_parameters[index] for index in indices]:
            in_grad = isinstance(getattr(type(p), "unsharded_accumulated_grad", None), property)  # since torch 2.15
            if not in_grad and p.unsharded_accumulated_grad is not None:
                found.append(p.unsharded_accumulated_grad_data)
                p.unsharded_accumulated_grad = None
            else:
                found.append(p.unsharded_grad_data)
                p.unsharded_param.grad = None
        return found

    def shard_reader(self, dtype: torch.dtype) -> Callable[[], torch.Tensor] | None:
        """Return a function that builds this rank's flat shard [S] on the device; see `Unit.shard_reader`."""
        return self.states.read if self.is_sharded else None

    def input_reader(self, given: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that returns the flat shard; see `Unit.input_reader`. FSDP2's may be a placeholder."""
        return self.states.read if self.states.keeps_copy else super().input_reader(given)

    def check_shard_reader(self, expected: torch.Tensor) -> None:
        """Do nothing if FSDP2's input is a placeholder; see `Unit.check_shard_reader`."""
        if not self.states.keeps_copy:
            super().check_shard_reader(expected)


class HostedParameter(FSDPParam):
    """FSDP2's parameter whose input of the all-gather is on the device although its shard is in host memory."""

    read_input: Callable[[], torch.Tensor]

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        return [self.read_input()]
