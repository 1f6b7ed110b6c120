"""DiLoCo: local steps in replica groups, which synchronize every H steps over the hops between nodes.

A replica group is a part of the cluster with its own sharded copy of the model. Inside it every step is an FSDP2 or
ZeRO++ step. Between groups there is no communication, except for synchronizations. R is the common copy of the outer
weights in fp32, bit-identical in all groups. A sharding unit of fragment p synchronizes once in every H steps:

    delta  = R - inner                            on the group's shard
    D      = mean of delta over groups            4-bit blocks with error feedback, sent to the owner of an outer shard
    m      = mu m + D;  outer -= eta (D + mu m)   Nesterov, fp32, on the owner
    R     += outer - R                            4-bit blocks, gathered over groups (differences of zero/secondary.py)
    inner  = alpha inner + (1 - alpha) R          `delay` steps later; inner moments are kept

The communication starts after the step of the synchronization and overlaps the next `delay` steps. The mean is weighted
by the tokens that each group has processed. Outer weights and momentum are sharded over all ranks of all groups. Each
rank owns the part of its shard that its group's index selects, so the communication of a unit is one reduction and one
gather, as in the cross hops of gather.py and reduce.py:

    delta [G, S] --pack--> all-to-all, sum over G --> D [S] --> outer [S] --pack--> all-gather --> R [G, S]

G is the number of replica groups, S the elements of a rank's shard that one group owns. DiLoCo is another algorithm
than data-parallel training, with other losses. Sources: DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv
2501.18512: its algorithm 2, fragments, delay, 4 bits). Sharded outer states and differences for R are our additions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megazpp.diloco.config import DilocoPlan
from megazpp.diloco.rows import OuterRows, computing_with_rows, outer_step_
from megazpp.kernels.formats import MessageLayout
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import Work
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.config import PrecisionConfig
from megazpp.zero.secondary import Resident
from megazpp.zero.sharding import Sharding
from megazpp.zero.units import Unit
from megazpp.zero.wire import Codec, own_rows


class OuterUnit(OuterRows):
    """The rows of a sharding unit whose outer weights and momentum are split over the replica groups.

    Args:
        unit: the sharding unit.
        shapes: shapes of this rank's shards, by parameter.
        axis: the mesh axis over replica groups.
        plan: the DiLoCo plan.
        precision: dtypes of values that are sent without quantization.
        device: device of the buffers. R starts uninitialized; `begin` or `spread` fills it.
        codec: class of the codecs that pack messages.
    Attributes:
        common: holds R.
        outer: [S] fp32, the part of the outer weights that this rank owns.
        momentum: [S] fp32; None if mu is 0.
        sent_bytes: bytes of the outer gradients' messages, which are kept from `send` until the result has arrived.
    """

    def __init__(
        self,
        unit: Unit,
        shapes: Sequence[tuple[int, ...]],
        axis: MeshAxis,
        *,
        plan: DilocoPlan,
        precision: PrecisionConfig,
        device: torch.device,
        codec: Callable[[MessageLayout, torch.dtype], Codec] = Codec,
    ) -> None:
        super().__init__(unit, shapes, axis.size, plan=plan, precision=precision, device=device, codec=codec)
        self._axis = axis
        self.common = Resident(self.whole, axis, of=unit.name, differences=self.differences)
        self.common.allocate(device)
        self.outer = torch.zeros(self.gradients.layout.size, device=device)
        self.momentum = torch.zeros_like(self.outer) if plan.outer_momentum else None
        self.sent_bytes = axis.size * self.gradients.layout.message_bytes
        self._work = Work(None)
        self._sent: torch.Tensor | None = None  # kept until the communication is complete

    @property
    def rows(self) -> torch.Tensor:
        """R, the common copy of the outer weights, as rows [G, S]; waits for a synchronization in flight."""
        self.wait()
        return self.common.weights

    def wait(self) -> None:
        """Wait for the messages in flight."""
        self._work.wait()
        self._work, self._sent = Work(None), None

    def begin(self) -> None:
        """Initialize R (the common outer weights) and the outer weights from the inner weights, equal in all groups."""
        self.outer.copy_(self.fill_(self.rows)[self._axis.rank])

    def spread(self) -> None:
        """Rebuild R, the common copy, from the outer weights of all replica groups by an all-gather on all ranks."""
        self.wait()
        messages = self.common.messages
        assert messages is not None
        self._work = self._axis.queue.submit(lambda: self.common.take_in(messages, self.outer, keyframe=True))
        self.wait()

    def send(self, weight: torch.Tensor, correction: Work[torch.Tensor]) -> None:
        """Start a synchronization: send the changes since the last one to their owners, and gather the new R.

        R is the common copy of the outer weights.

        Args:
            weight: weight of this group's change in the mean, a scalar.
            correction: factor for the sum over groups, a scalar. It is needed because the weights do not add up to 1.
        """
        self._sent = self.pack(weight)
        self._work = self._axis.queue.submit(functools.partial(self._cross, self._sent, correction))

    def warm_up(self, device: torch.device) -> None:
        """Pack and unpack zeros as in a synchronization, to compile the kernels; nothing is sent."""
        codec, rows = self.gradients, torch.zeros_like(self.rows)
        sent = codec.empty(self._axis.size, device=device)
        codec.pack(rows, sent, errors=codec.new_errors(self._axis.size, device=device) if self.errors else None)
        codec.unpack_sum(sent.unsqueeze(1), rows[:1], accumulate=False)
        self.common.warm_up(rows[0])

    def _cross(self, sent: torch.Tensor, correction: Work[torch.Tensor]) -> None:
        """Run the communication of a synchronization, with the outer optimizer step between its two hops."""
        received = self._axis.all_to_all(sent, of=self.unit.name)
        mean = torch.empty_like(self.outer)
        self.gradients.unpack_sum(received.unsqueeze(1), mean.unsqueeze(0), accumulate=False)
        mean *= correction.join()
        outer_step_(self.outer, self.momentum, mean, self._plan)
        assert self.common.messages is not None
        self.common.take_in(self.common.messages, self.outer, keyframe=False)


def send_fragment(units: Sequence[OuterUnit], axis: MeshAxis, plan: DilocoPlan, tokens: torch.Tensor) -> None:
    """Start the synchronization of a fragment.

    Args:
        units: the fragment's units.
        axis: the mesh axis over replica groups.
        plan: the DiLoCo plan.
        tokens: tokens that this group has processed since the fragment was last sent, a scalar. They are this group's
            weight in the mean. The sum over groups replaces them in place, so the tensor must be kept until then.
    """
    nominal = plan.tokens * axis.size
    weight = (tokens / nominal).float()
    correction = axis.queue.submit(lambda: (nominal / axis.all_reduce_(tokens).clamp(min=1.0)).float())
    with torch.no_grad():
        for unit in units:
            unit.send(weight, correction)


class ReplicaGroups:
    """Outer weights and synchronizations of a sharded model in replica groups.

    Every rank of every group calls every method, at the same iterations.

    Args:
        sharding: handle of the model, whose weights are the first outer weights.
        dims: mesh axes of the job, with at least two replica groups.
        plan: the DiLoCo plan.
        precision: dtypes of values that are sent without quantization.
    Attributes:
        units: outer units, in the order of `Sharding.units`.
        fragments: outer units of each fragment.
        merge_at: iteration at which each fragment is merged; 0 if it has no messages in flight.
    """

    def __init__(self, sharding: Sharding, dims: ParallelDims, plan: DilocoPlan, precision: PrecisionConfig) -> None:
        self.plan, self.sharding, self._dims, self.axis = plan, sharding, dims, dims.replica_group
        sharding.reshard()
        device = sharding.device
        self.units = []
        for unit in sharding.units:
            shapes = [tuple(shard.shape) for shard in unit.shards()]
            outer = OuterUnit(unit, shapes, dims.replica_group, plan=plan, precision=precision, device=device)
            outer.begin()
            self.units.append(outer)
        self.fragments = plan.in_fragments(self.units)
        self.merge_at = [0] * plan.fragments
        self._tokens = torch.zeros(plan.fragments, dtype=torch.float64, device=device)  # since each fragment was sent
        self._told: dict[int, torch.Tensor] = {}  # tokens in flight by fragment, kept until they are summed

    def meets_at(self, iteration: int) -> bool:
        """Return True if the replica groups wait for each other after `iteration`, because a merge is due then."""
        return bool(self._due(iteration)) or (self.plan.delay == 0 and self.plan.sends_at(iteration) is not None)

    def count(self, tokens: torch.Tensor) -> None:
        """Add the tokens of the step that this group has just taken, a scalar."""
        self._tokens += tokens

    def after_step(self, iteration: int) -> None:
        """Merge and start the synchronizations that are due.

        Call it after the optimizer's step. After the run's last step, call `finish` instead.
        """
        plan, sends = self.plan, self.plan.sends_at(iteration)
        if self._due(iteration) or sends is not None:
            self.sharding.reshard()
        self._merge_due(iteration)
        if sends is not None:
            self._send(sends)
            self.merge_at[sends] = iteration + plan.delay
            if plan.delay == 0:
                self._merge(sends, plan.merge_alpha)

    def finish(self) -> None:
        """Synchronize all fragments, and set the inner weights of all groups to the common outer weights.

        Call it after the run's last step.
        """
        self.sharding.reshard()
        self._merge_due(math.inf)
        for fragment in range(self.plan.fragments):
            self._send(fragment)
        for fragment in range(self.plan.fragments):
            self._merge(fragment, 0.0)

    def wait(self) -> None:
        """Wait for the messages in flight.

        A program must call it before it ends, because ranks of other groups wait for the same messages.
        """
        for unit in self.units:
            unit.wait()

    def outer_weights(self) -> AbstractContextManager[None]:
        """Let the model compute with R, the common outer weights, inside this context."""
        return computing_with_rows(self.sharding, self.units)

    def compile_kernels(self, device: torch.device) -> None:
        """Compile the kernels of the messages for `device`, so that the first synchronization does not have to."""
        with torch.no_grad():
            for unit in self.units:
                unit.warm_up(device)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the outer weights by parameter as DTensors over all ranks, which share memory with them.

        Call it while the parameters are shards.
        """
        return {name: weight for unit in self.units for name, weight in self._as_owned(unit, unit.outer)}

    def common(self) -> dict[str, torch.Tensor]:
        """Return a copy of R, the common outer weights, by parameter; sharded like it and equal in all groups."""
        found: dict[str, torch.Tensor] = {}
        for unit in self.units:
            shards = [torch.empty_like(shard) for shard in unit.unit.shards()]
            with torch.no_grad():
                for row, shard in unit.pairs(unit.rows, shards):
                    shard.copy_(row)
            found |= unit.unit.as_dtensors(shards)
        return found

    def momentum(self) -> dict[str, torch.Tensor]:
        """Return the outer momentum by parameter, sharded like `weights`; {} without momentum."""
        held = [(unit, unit.momentum) for unit in self.units if unit.momentum is not None]
        return {name: moment for unit, momentum in held for name, moment in self._as_owned(unit, momentum)}

    def counts(self) -> torch.Tensor:
        """Return the counts for a checkpoint, [2, F] fp64 for F fragments.

        Row 0 is the iteration at which each fragment merges, row 1 this group's tokens since each was last sent.
        """
        return torch.stack((torch.tensor(self.merge_at, dtype=torch.float64), self._tokens.cpu()))

    def error_feedback(self) -> dict[str, torch.Tensor]:
        """Return this rank's buffers of error feedback, by name."""
        found = {}
        for unit in self.units:
            unit.wait()
            if unit.errors is not None:
                found[f"outer.{unit.unit.key}"] = unit.errors.messages
        return found

    def restore(self, common: Mapping[str, Any], counts: torch.Tensor) -> None:
        """Restore R (the common outer weights) and the counts; outer weights and momentum are already loaded.

        Args:
            common: R by parameter, as `common` returned it.
            counts: [2, F] fp64, as `counts` returned them.
        """
        self.sharding.reshard()
        merge_at, tokens = counts
        self.merge_at = list(map(int, merge_at.tolist()))
        self._tokens.copy_(tokens)
        with torch.no_grad():
            for unit in self.units:
                unit.fill_(unit.rows, [common[p.name].to_local() for p in unit.unit.parameters])

    def begin_at_outer_weights(self) -> None:
        """Set R (the common copy) and the inner weights to the outer weights, which are already loaded.

        All ranks of all replica groups call it.
        """
        self.sharding.reshard()
        self.merge_at = [0] * self.plan.fragments
        self._tokens.zero_()
        with torch.no_grad(), self._dims.counter.paused():
            for unit in self.units:
                unit.spread()
                unit.merge(0.0)

    def _due(self, iteration: float) -> list[int]:
        """Return the fragments whose messages in flight are to be merged by `iteration`."""
        return [fragment for fragment, due in enumerate(self.merge_at) if 0 < due <= iteration]

    def _merge_due(self, iteration: float) -> None:
        """Merge the fragments that are due."""
        for fragment in self._due(iteration):
            self._merge(fragment, self.plan.merge_alpha)

    def _send(self, fragment: int) -> None:
        """Start the synchronization of a fragment, and set its count of tokens to 0."""
        tokens = self._told[fragment] = self._tokens[fragment].clone()
        send_fragment(self.fragments[fragment], self.axis, self.plan, tokens)
        self._tokens[fragment] = 0.0

    def _merge(self, fragment: int, alpha: float) -> None:
        """Merge the common outer weights into the inner weights of a fragment."""
        with torch.no_grad():
            for unit in self.fragments[fragment]:
                unit.merge(alpha)
        self.merge_at[fragment] = 0

    def _as_owned(self, unit: OuterUnit, owned: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield [S] outer values as DTensors by parameter name, as views.

        A parameter's rows on this rank are split once more, over the replica groups.
        """
        unit.wait()
        names, shards = self._mesh.mesh_dim_names or (), unit.unit.shards()
        parameters = unit.unit.as_dtensors(shards).values()
        for segment, shard, parameter in zip(unit.segments, shards, parameters, strict=True):
            own = own_rows(shard.shape[0], self.axis.size, self.axis.rank)
            part = owned[segment.start : segment.start + own * math.prod(shard.shape[1:])].view(own, *shard.shape[1:])
            of_tp = parameter.placements[-1]
            placements = [of_tp if name == "tp" else Shard(0) for name in names]
            shape, stride = parameter.shape, parameter.stride()
            owned_part = DTensor.from_local(part, self._mesh, placements, run_check=False, shape=shape, stride=stride)
            yield segment.name, owned_part

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:  # not created in __init__, because fake process groups cannot make a mesh
        """The mesh [tp, shard, replica_group], created at first use.

        Rows of a parameter are split in the order of its axes, so that each rank owns consecutive rows.
        """
        mesh, names = self._dims.mesh, (self._dims.mesh.mesh_dim_names or ())[::-1]
        ranks, groups = mesh.mesh.permute(*reversed(range(mesh.ndim))), [mesh.get_group(name) for name in names]
        return DeviceMesh.from_group(groups, mesh.device_type, ranks.contiguous(), mesh_dim_names=names)
