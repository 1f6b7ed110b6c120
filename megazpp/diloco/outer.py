"""DiLoCo: replica groups train with local steps, and synchronize their weights every H steps between nodes.

A replica group is one or several nodes with their own sharded copy of the model. Inside a group every step is an FSDP2
or ZeRO++ step. Groups communicate only in synchronizations. R is the common copy of the outer weights in fp32,
bit-identical in all groups. "inner" are the weights that a group trains. A sharding unit synchronizes once in every H
steps:

    delta  = R - inner                            on the group's shard
    D      = mean of delta over groups            4-bit blocks with error feedback, sent to the owner of an outer shard
    m      = mu m + D;  outer -= eta (D + mu m)   Nesterov, fp32, on the owner
    R     += outer - R                            4-bit blocks, gathered over groups (weight deltas, zero/gather.py)
    inner  = alpha inner + (1 - alpha) R          `delay` steps later; moments of the inner optimizer do not change

mu is the outer momentum, eta the outer learning rate, and alpha the fraction of its inner weights that a group keeps.
The communication starts after the step of the synchronization and overlaps the next `delay` steps. The mean is weighted
by the tokens that each group has trained on. Outer weights and momentum are sharded over all ranks of all groups. Each
rank owns one of G ranges of its shard; the index of its group selects the range. So a unit needs one reduction and one
gather between groups, as in the cross-node hops of zero/gather.py and zero/reduce.py:

    delta [G, S] --pack--> all-to-all, sum over G --> D [S] --> outer [S] --pack--> all-gather --> R [G, S]

G is the number of replica groups, S the number of elements of a rank's shard that one group owns. DiLoCo is another
algorithm than data-parallel training, with other losses. Sources: DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv
2501.18512: its algorithm 2, fragments, delay, 4 bits). Sharded outer states and weight deltas for R are additions of
this project.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megazpp.diloco.config import DilocoPlan
from megazpp.diloco.rows import OuterRows, computing_with_rows, outer_step_
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import Work
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.config import PrecisionConfig
from megazpp.zero.gather import Resident
from megazpp.zero.sharding import Sharding
from megazpp.zero.units import Unit
from megazpp.zero.wire import own_rows


class OuterUnit(OuterRows):
    """DiLoCo's state of one sharding unit, with outer weights and momentum split over the replica groups of one job.

    Args:
        unit: the sharding unit.
        shapes: shape of this rank's shard of each parameter.
        axis: mesh axis over replica groups.
        device: device of the state. R, the common copy of the outer weights, starts as zeros; `begin` or `spread` fills
            R.
        **given: further arguments of `OuterRows`.
    Attributes:
        common: resident weights that hold R, the common copy of the outer weights.
        outer: [S] fp32 outer weights that this rank owns.
        momentum: [S] fp32 outer momentum that this rank owns; None if the outer momentum mu is 0.
        sent_bytes: bytes of the messages with this group's outer gradients, which stay in memory from `send` until the
            new R has arrived.
    """

    def __init__(
        self, unit: Unit, shapes: Sequence[tuple[int, ...]], axis: MeshAxis, *, device: torch.device, **given: Any
    ) -> None:
        super().__init__(unit, shapes, axis.size, device=device, **given)
        self._axis = axis
        self.common = Resident(self.whole, axis, of=unit.name, differences=self.differences)
        self.common.allocate(device)
        self.outer = torch.zeros(self.gradients.layout.size, device=device)
        self.momentum = torch.zeros_like(self.outer) if self._plan.outer_momentum else None
        self.sent_bytes = axis.size * self.gradients.layout.message_bytes
        self._work = Work(None)  # task of the synchronization in flight; a finished task if there is none
        # This group's messages in the synchronization in flight, which must not be freed while the task `_work` runs
        self._sent: torch.Tensor | None = None

    @property
    def rows(self) -> torch.Tensor:
        """R, the common copy of the outer weights, [G, S] fp32, one row per replica group.

        Reading this property waits until the synchronization in flight is complete.
        """
        self.wait()
        return self.common.weights

    def wait(self) -> None:
        """Wait until the unit's synchronization in flight is complete, and free its messages."""
        self._work.wait()
        self._work, self._sent = Work(None), None

    def begin(self) -> None:
        """Set R (the common outer weights) and the outer weights to the inner weights, which are equal in all groups.

        This starts a DiLoCo run. No rank communicates.
        """
        self.outer.copy_(self.fill_(self.rows)[self._axis.rank])

    def spread(self) -> None:
        """Gather R, the common outer weights, from the ranks that own the outer weights; all ranks call this."""
        self.wait()
        messages = self.common.messages
        assert messages is not None
        self._work = self._axis.queue.submit(lambda: self.common.take_in(messages, self.outer, keyframe=True))
        self.wait()

    def send(self, weight: torch.Tensor, correction: Work[torch.Tensor]) -> None:
        """Start a synchronization of the unit: reduce outer gradients, step the outer optimizer, and gather the new R.

        R is the common copy of the outer weights.

        Args:
            weight: scalar tensor, the weight of this group's outer gradient in the mean over groups.
            correction: task that returns a scalar factor, by which the sum over groups is multiplied, so that the
                weights of all groups add up to 1. `weight` alone does not achieve this: a group packs its messages
                before the numbers of tokens of all groups are summed, so `weight` is relative to a planned sum.
        """
        self._sent = self.pack(weight)
        self._work = self._axis.queue.submit(functools.partial(self._cross, self._sent, correction))

    def _cross(self, sent: torch.Tensor, correction: Work[torch.Tensor]) -> None:
        """Run a synchronization: reduce outer gradients, step the outer optimizer, and gather changes of outer weights.

        The communication queue of the axis over replica groups calls this method.

        Args:
            sent: [G, M] uint8 messages of M bytes with this group's outer gradients, one to each of G groups.
            correction: task that returns a scalar factor for the sum over groups.
        """
        received = self._axis.all_to_all(sent, of=self.unit.name)
        mean = torch.empty_like(self.outer)
        self.gradients.unpack_sum(received.unsqueeze(1), mean.unsqueeze(0), accumulate=False)
        mean *= correction.join()
        outer_step_(self.outer, self.momentum, mean, self._plan)
        assert self.common.messages is not None
        self.common.take_in(self.common.messages, self.outer, keyframe=False)


def send_fragment(units: Sequence[OuterUnit], axis: MeshAxis, plan: DilocoPlan, tokens: torch.Tensor) -> None:
    """Start the synchronization of all sharding units of a fragment.

    Args:
        units: DiLoCo's states of the fragment's units.
        axis: mesh axis over replica groups.
        plan: DiLoCo plan of the run.
        tokens: scalar tensor, the number of tokens on which this group has trained since the fragment was last sent. It
            is this group's weight in the mean. An asynchronous all-reduce replaces it by the sum over groups, so this
            tensor must be neither freed nor changed until the synchronization is complete (`ReplicaGroups._told`).
    """
    nominal = plan.tokens * axis.size  # planned number of tokens of all groups between two synchronizations
    weight = (tokens / nominal).float()
    # The sum is 0 if no group has trained since the fragment was last sent. Dividing by 1 instead avoids an Inf.
    correction = axis.queue.submit(lambda: (nominal / axis.all_reduce_(tokens).clamp(min=1.0)).float())
    with torch.no_grad():
        for unit in units:
            unit.send(weight, correction)


class ReplicaGroups:
    """The outer weights of a sharded model in DiLoCo's replica groups, and their synchronizations.

    Every rank of every group must call every method, at the same iterations.

    Args:
        sharding: handle to the sharded model, whose weights are the first outer weights.
        dims: mesh axes of the job, with at least two replica groups.
        plan: DiLoCo plan of the run.
        precision: dtypes in which outer gradients and weights are sent without quantization.
    Attributes:
        units: DiLoCo's state of each sharding unit, in the order of `Sharding.units`.
        fragments: states of the sharding units of each fragment.
        merge_at: iteration after which each fragment's new outer weights are merged into the inner weights; 0 for a
            fragment without a synchronization in flight.
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
        # For each fragment, the number of tokens on which this group has trained since the fragment was last sent
        self._tokens = torch.zeros(plan.fragments, dtype=torch.float64, device=device)
        # By fragment, the tensor with this group's number of tokens that the fragment's last synchronization sums over
        # groups. It must stay in memory until this asynchronous all-reduce is complete.
        self._told: dict[int, torch.Tensor] = {}

    def meets_at(self, iteration: int) -> bool:
        """Return True if outer weights are merged after step `iteration`, so that all groups wait for each other."""
        return bool(self._due(iteration)) or (self.plan.delay == 0 and self.plan.sends_at(iteration) is not None)

    def count(self, tokens: torch.Tensor) -> None:
        """Add the tokens of a training step to this group's number of tokens for each fragment.

        These numbers are the weights of the groups in the mean of their outer gradients.

        Args:
            tokens: scalar tensor, the number of tokens of the step that this group has just taken.
        """
        self._tokens += tokens

    def after_step(self, iteration: int) -> None:
        """Merge outer weights and start synchronizations, for the fragments that are due after step `iteration`.

        Call this method after the optimizer's step. After the run's last step, call `finish` instead.
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

        Call this method after the run's last step.
        """
        self.sharding.reshard()
        self._merge_due(math.inf)
        for fragment in range(self.plan.fragments):
            self._send(fragment)
        for fragment in range(self.plan.fragments):
            self._merge(fragment, 0.0)

    def wait(self) -> None:
        """Wait until all synchronizations in flight are complete.

        A program must call this method before it ends, because ranks of other groups wait for messages of this rank.
        """
        for unit in self.units:
            unit.wait()

    def outer_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes with R, the common outer weights, for example to evaluate R."""
        return computing_with_rows(self.sharding, self.units)

    # ---- checkpoints: outer weights, momentum, R and counts to save and to restore ----------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the outer weights as DTensors over all ranks of all groups, by parameter name.

        The DTensors share memory with the outer weights, so that a checkpoint can be loaded into the outer weights in
        place. Call this method while the model is sharded.
        """
        return {name: weight for unit in self.units for name, weight in self._as_owned(unit, unit.outer)}

    def common(self) -> dict[str, torch.Tensor]:
        """Return a copy of R, the common outer weights, as DTensors by parameter name.

        The DTensors are sharded like the model's parameters inside a group, and are equal in all groups.
        """
        return {name: weight for unit in self.units for name, weight in unit.as_dtensors(unit.rows).items()}

    def momentum(self) -> dict[str, torch.Tensor]:
        """Return the outer momentum by parameter name, as DTensors over all ranks of all groups; {} without momentum.

        The DTensors share memory with the outer momentum.
        """
        held = [(unit, unit.momentum) for unit in self.units if unit.momentum is not None]
        return {name: moment for unit, momentum in held for name, moment in self._as_owned(unit, momentum)}

    def counts(self) -> torch.Tensor:
        """Return two numbers of this group for each of F fragments, [2, F] fp64, for a checkpoint.

        Row 0 is the iteration after which the fragment's outer weights are merged, 0 if no merge is due. Row 1 is the
        number of tokens on which this group has trained since the fragment was last sent.
        """
        return torch.stack((torch.tensor(self.merge_at, dtype=torch.float64), self._tokens.cpu()))

    def error_feedback(self) -> dict[str, torch.Tensor]:
        """Return the tensors of this rank's error feedback of outer gradients, by name; they are not copies."""
        found = {}
        for unit in self.units:
            unit.wait()
            if unit.errors is not None:
                found[f"outer.{unit.unit.key}"] = unit.errors.messages
        return found

    def restore(self, common: Mapping[str, Any], counts: torch.Tensor) -> None:
        """Restore R, the common copy of the outer weights, and two numbers per fragment from a checkpoint.

        The exact outer weights and their momentum are loaded separately, into the tensors that `weights` and
        `momentum` return.

        Args:
            common: R as DTensors by parameter name, as the method `common` returned them for the checkpoint.
            counts: [2, F] fp64: for each of F fragments, the iteration of its next merge and its tokens; see `counts`.
        """
        self.sharding.reshard()
        merge_at, tokens = counts
        self.merge_at = list(map(int, merge_at.tolist()))
        self._tokens.copy_(tokens)
        with torch.no_grad():
            for unit in self.units:
                unit.fill_(unit.rows, [common[p.name].to_local() for p in unit.unit.parameters])

    def begin_at_outer_weights(self) -> None:
        """Set R (the common outer weights) and the inner weights to the outer weights, which were loaded before.

        All ranks of all replica groups must call this method.
        """
        self.sharding.reshard()
        self.merge_at = [0] * self.plan.fragments
        self._tokens.zero_()
        with torch.no_grad(), self._dims.counter.paused():
            for unit in self.units:
                unit.spread()
                unit.merge(0.0)

    def _due(self, iteration: float) -> list[int]:
        """Return the indices of the fragments whose new outer weights must be merged by training step `iteration`."""
        return [fragment for fragment, due in enumerate(self.merge_at) if 0 < due <= iteration]

    def _merge_due(self, iteration: float) -> None:
        """Merge R into the inner weights, for all fragments whose merge is due by training step `iteration`."""
        for fragment in self._due(iteration):
            self._merge(fragment, self.plan.merge_alpha)

    def _send(self, fragment: int) -> None:
        """Start the synchronization of a fragment, and begin to count its tokens again from 0."""
        tokens = self._told[fragment] = self._tokens[fragment].clone()
        send_fragment(self.fragments[fragment], self.axis, self.plan, tokens)
        self._tokens[fragment] = 0.0

    def _merge(self, fragment: int, alpha: float) -> None:
        """Merge R, the common outer weights, of a fragment into its inner weights: inner = alpha inner + (1 - alpha) R.

        The method first waits until the fragment's synchronization is complete.

        Args:
            fragment: index of the fragment.
            alpha: fraction of the inner weights that is kept, from 0 to 1.
        """
        with torch.no_grad():
            for unit in self.fragments[fragment]:
                unit.merge(alpha)
        self.merge_at[fragment] = 0

    def _as_owned(self, unit: OuterUnit, owned: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (parameter name, DTensor) for each parameter of a unit, as views of outer weights or momentum.

        A parameter is sharded by rows over the ranks of a group. For outer weights and momentum, the rows of each shard
        are split once more, over the replica groups.

        Args:
            unit: DiLoCo's state of the sharding unit.
            owned: [S] outer weights or outer momentum that this rank owns.
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
    def _mesh(self) -> DeviceMesh:
        """The device mesh [tp, shard, replica_group] of outer weights and momentum in checkpoints.

        DTensor splits the rows of a parameter in the order of the mesh's dims, so that each rank owns consecutive rows.
        The mesh is created at its first use, because the planner's fake process groups cannot make a mesh.
        """
        mesh, names = self._dims.mesh, (self._dims.mesh.mesh_dim_names or ())[::-1]
        ranks, groups = mesh.mesh.permute(*reversed(range(mesh.ndim))), [mesh.get_group(name) for name in names]
        return DeviceMesh.from_group(groups, mesh.device_type, ranks.contiguous(), mesh_dim_names=names)
