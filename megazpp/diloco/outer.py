"""DiLoCo: local steps on islands, which synchronize every H steps, on the hops that cross nodes.

One file of more than 300 lines: one synchronization is read from sending to merging without leaving the page.

An island is a part of the cluster with a model of its own in shards: inside it every step is FSDP2's (or ZeRO++'s),
between islands nothing travels. R is their common copy of the outer weights: fp32, the same bits on all. A sharding
unit of fragment p, at a step of its own in every H:

    delta  = R - inner                            on the island's shard
    D      = mean of delta over islands           4-bit blocks with error feedback, to the owner of an outer shard
    m      = mu m + D;  outer -= eta (D + mu m)   Nesterov, fp32, on the owner
    R     += outer - R                            4-bit blocks, gathered over islands (secondary.py's differences)
    inner  = alpha inner + (1 - alpha) R          `delay` steps later; inner moments are kept

What crosses is started at the step of the synchronization and runs under the next `delay` steps. The mean is weighted
by the tokens that each island has seen. Outer weights and momentum are spread over ALL ranks: each owns the part of its
shard that its island's index names, so that the two hops of a unit are the cross hops of gather.py and reduce.py:

    delta [I, S] --pack--> all-to-all, sum over I --> D [S] --> outer [S] --pack--> all-gather --> R [I, S]

I islands, S elements of the part of a rank's shard that one island owns. This is another algorithm than data-parallel
training, not another way to compute it. Sources: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512; its
algorithm 2, fragments, delay, 4 bits). Outer states in shards, differences for R: ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megazpp.diloco.config import DilocoPlan
from megazpp.kernels.formats import BlockFormat, MessageLayout
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import Work
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.config import PrecisionConfig
from megazpp.zero.secondary import Resident
from megazpp.zero.sharding import Sharding
from megazpp.zero.units import Unit
from megazpp.zero.wire import Codec, own_rows, plan_message, plan_segments


class OuterUnit:
    """A sharding unit's outer weights and momentum on this rank, and R.

    Args:
        shapes: of this rank's shard of each of its parameters.
        axis: the islands.
        precision: of what is not quantized.
        device: of the buffers; R is whatever was there.
        codec: makes the codec that packs messages.
    Attributes:
        common: holds R.
        outer: [S] fp32.
        momentum: [S] fp32; None where mu is 0.
        errors: of rounding outer gradients; None where none is kept.
        sent_bytes: of the outer gradients' messages, which are kept from `send` until the result is waited for.
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
        self.unit, self._axis, self._plan = unit, axis, plan
        named = [(p.name, shape) for p, shape in zip(unit.parameters, shapes, strict=True)]
        self.segments = plan_segments(named, axis.size)

        def made(fmt: BlockFormat | None, dtype: torch.dtype) -> Codec:
            return codec(plan_message(self.segments, fmt, exact_itemsize=dtype.itemsize), dtype)

        self._gradients = made(plan.gradients, precision.reduce_dtype)
        differences = made(plan.weights, precision.param_dtype)
        self.common = Resident(made(None, torch.float32), axis, of=unit.name, differences=differences)
        self.common.allocate(device)
        size = self._gradients.layout.size
        self.outer = torch.zeros(size, device=device)
        self.momentum = torch.zeros(size, device=device) if plan.outer_momentum else None
        self.errors = self._gradients.new_errors(axis.size, device=device) if plan.feedback else None
        self.sent_bytes = axis.size * self._gradients.layout.message_bytes
        self._work: Work[None] | None = None
        self._sent: torch.Tensor | None = None  # lives until the work was waited for

    @property
    def rows(self) -> torch.Tensor:
        """[I, S] R, complete."""
        self.wait()
        assert self.common.weights is not None
        return self.common.weights

    def wait(self) -> None:
        """Wait for the messages under way."""
        if self._work is not None:
            self._work.wait()
        self._work = self._sent = None

    def begin(self) -> None:
        """Take R and the outer weights from the inner weights, which are the same on all islands."""
        self.outer.copy_(self.fill_(self.rows)[self._axis.rank])

    def fill_(self, rows: torch.Tensor, shards: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Write the shards (None: the model's) into rows [I, S], and zeros where they are padded."""
        rows.zero_()
        for row, shard in self.pairs(rows, shards):
            row.copy_(shard)
        return rows

    def spread(self) -> None:
        """Make R anew of all islands' outer weights; call on all ranks."""
        self.wait()
        messages = self.common.messages
        assert messages is not None
        self._work = self._axis.queue.submit(lambda: self.common.take_in(messages, self.outer, keyframe=True))
        self.wait()

    def send(self, weight: torch.Tensor, correction: Work[torch.Tensor]) -> None:
        """Start the synchronization: what has changed since R goes to the other islands, and their new R comes back.

        Args:
            weight: of this island's change in the mean, a scalar.
            correction: factor of the sum over islands, because weights do not add up to 1; a scalar.
        """
        rows = self.rows
        delta = self.fill_(torch.empty_like(rows))
        torch.sub(rows, delta, out=delta).mul_(weight)
        self._sent = self._gradients.empty(self._axis.size, device=rows.device)
        self._gradients.pack(delta, self._sent, errors=self.errors)
        self._work = self._axis.queue.submit(functools.partial(self._cross, self._sent, correction))

    def merge(self, alpha: float) -> None:
        """inner = alpha inner + (1 - alpha) R."""
        for row, shard in self.pairs(self.rows):
            shard.lerp_(row, 1.0 - alpha) if alpha else shard.copy_(row)

    def swap(self) -> None:
        """Exchange the inner weights and R."""
        for row, shard in self.pairs(self.rows):
            inner = shard.clone()
            shard.copy_(row)
            row.copy_(inner)

    def pairs(
        self, rows: torch.Tensor, shards: Sequence[torch.Tensor] | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of equal shape that together are rows [I, S], without padding, and the shards (None: the model's)."""
        for segment, shard in zip(self.segments, self.unit.shards() if shards is None else shards, strict=True):
            flat, size = shard.view(-1), segment.size
            if size == 0:
                continue
            full = flat.numel() // size
            if full:
                yield rows[:full, segment.start : segment.stop], flat[: full * size].view(full, size)
            if rest := flat.numel() - full * size:
                yield rows[full, segment.start : segment.start + rest], flat[full * size :]

    def warm_up(self, device: torch.device) -> None:
        """Pack and unpack zeros as a synchronization does, to compile the kernels; nothing is sent."""
        codec, rows = self._gradients, torch.zeros_like(self.rows)
        sent = codec.empty(self._axis.size, device=device)
        codec.pack(rows, sent, errors=codec.new_errors(self._axis.size, device=device) if self.errors else None)
        codec.unpack_sum(sent.unsqueeze(1), rows[:1], accumulate=False)
        self.common.warm_up(rows[0])

    def _cross(self, sent: torch.Tensor, correction: Work[torch.Tensor]) -> None:
        """The hops, and the outer step between them."""
        received = self._axis.all_to_all(sent, of=self.unit.name)
        mean = torch.empty_like(self.outer)
        self._gradients.unpack_sum(received.unsqueeze(1), mean.unsqueeze(0), accumulate=False)
        mean *= correction.join()
        lr, mu = self._plan.outer_lr, self._plan.outer_momentum
        self.outer.add_(mean, alpha=-lr)
        if self.momentum is not None:
            self.momentum.mul_(mu).add_(mean)
            self.outer.add_(self.momentum, alpha=-lr * mu)
        assert self.common.messages is not None
        self.common.take_in(self.common.messages, self.outer, keyframe=False)


def send_fragment(units: Sequence[OuterUnit], axis: MeshAxis, plan: DilocoPlan, tokens: torch.Tensor) -> None:
    """Start the messages of a fragment, whose units these are.

    Args:
        tokens: that this island has seen since the fragment was last sent, its weight in the mean: a scalar, which the
            sum over islands replaces, and which lives until that is over.
    """
    nominal = plan.tokens * axis.size
    weight = (tokens / nominal).float()
    correction = axis.queue.submit(lambda: (nominal / axis.all_reduce_(tokens).clamp(min=1.0)).float())
    with torch.no_grad():
        for unit in units:
            unit.send(weight, correction)


class Islands:
    """The islands' side of a sharded model. Every rank of every island calls every method, at the same iterations.

    Args:
        sharding: the model, which the outer weights start from.
        dims: its axes, with two islands at least.
    Attributes:
        units: in the order of `Sharding.units`.
        fragments: the units of each.
        merge_at: of each fragment the iteration at which its messages have arrived; 0 where none are under way.
    """

    def __init__(self, sharding: Sharding, dims: ParallelDims, plan: DilocoPlan, precision: PrecisionConfig) -> None:
        self.plan, self.sharding, self._dims, self.axis = plan, sharding, dims, dims.island
        sharding.reshard()
        device = next(sharding.model.parameters()).device
        self.units = []
        for unit in sharding.units:
            shapes = [tuple(shard.shape) for shard in unit.shards()]
            outer = OuterUnit(unit, shapes, dims.island, plan=plan, precision=precision, device=device)
            outer.begin()
            self.units.append(outer)
        self.fragments = plan.in_fragments(self.units)
        self.merge_at = [0] * plan.fragments
        self._tokens = torch.zeros(plan.fragments, dtype=torch.float64, device=device)  # since each last sent
        self._told: dict[int, torch.Tensor] = {}  # those that were sent last, which live until that is over

    def meets_at(self, iteration: int) -> bool:
        """True if islands wait for each other after `iteration`: a merge is due then."""
        return bool(self._due(iteration)) or (self.plan.delay == 0 and self.plan.sends_at(iteration) is not None)

    def count(self, tokens: torch.Tensor) -> None:
        """Count the tokens that this island has just taken a step on, a scalar."""
        self._tokens += tokens

    def after_step(self, iteration: int) -> None:
        """Merge what is due and send what is due; call after the optimizer's step, unless it was the last."""
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
        """Synchronize everything, and have every island go on from R; call after the last step, not `after_step`."""
        self.sharding.reshard()
        self._merge_due(math.inf)
        for fragment in range(self.plan.fragments):
            self._send(fragment)
        for fragment in range(self.plan.fragments):
            self._merge(fragment, 0.0)

    def wait(self) -> None:
        """Wait for the messages under way; before a program ends, because other islands' ranks need them."""
        for unit in self.units:
            unit.wait()

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """The model computes with R inside, the same on all islands."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def compile_kernels(self, device: torch.device) -> None:
        """Compile the kernels of the messages for `device` now, and not at the first synchronization."""
        with torch.no_grad():
            for unit in self.units:
                unit.warm_up(device)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """The outer weights themselves by parameter, DTensors over all ranks; call while the parameters are shards."""
        return {name: weight for unit in self.units for name, weight in self._as_owned(unit, unit.outer)}

    def common(self) -> dict[str, torch.Tensor]:
        """A copy of R by parameter, sharded like it, the same on all islands."""
        found: dict[str, torch.Tensor] = {}
        for unit in self.units:
            shards = [torch.empty_like(shard) for shard in unit.unit.shards()]
            with torch.no_grad():
                for row, shard in unit.pairs(unit.rows, shards):
                    shard.copy_(row)
            found |= unit.unit.as_dtensors(shards)
        return found

    def momentum(self) -> dict[str, torch.Tensor]:
        """The outer momentum by parameter, like `weights`; {} where there is none."""
        held = [(unit, unit.momentum) for unit in self.units if unit.momentum is not None]
        return {name: moment for unit, momentum in held for name, moment in self._as_owned(unit, momentum)}

    def counts(self) -> torch.Tensor:
        """[2, F] fp64: of each fragment when it merges, and the tokens of this island since it was last sent."""
        return torch.stack((torch.tensor(self.merge_at, dtype=torch.float64), self._tokens.cpu()))

    def error_feedback(self) -> dict[str, torch.Tensor]:
        """This rank's buffers of error feedback, by name."""
        found = {}
        for unit in self.units:
            unit.wait()
            if unit.errors is not None:
                found[f"outer.{unit.unit.key}"] = unit.errors.messages
        return found

    def restore(self, common: Mapping[str, Any], counts: torch.Tensor) -> None:
        """Go on from what was saved as `common` and `counts`; weights and momentum are loaded already."""
        self.sharding.reshard()
        merge_at, tokens = counts
        self.merge_at = list(map(int, merge_at.tolist()))
        self._tokens.copy_(tokens)
        with torch.no_grad():
            for unit in self.units:
                unit.fill_(unit.rows, [common[p.name].to_local() for p in unit.unit.parameters])

    def begin_at_outer_weights(self) -> None:
        """Have R and the inner weights be the outer weights, which are loaded; call on all ranks of all islands."""
        self.sharding.reshard()
        self.merge_at = [0] * self.plan.fragments
        self._tokens.zero_()
        with torch.no_grad(), self._dims.counter.paused():
            for unit in self.units:
                unit.spread()
                unit.merge(0.0)

    def _due(self, iteration: float) -> list[int]:
        """Fragments whose messages are under way and have arrived by `iteration`."""
        return [fragment for fragment, due in enumerate(self.merge_at) if 0 < due <= iteration]

    def _merge_due(self, iteration: float) -> None:
        for fragment in self._due(iteration):
            self._merge(fragment, self.plan.merge_alpha)

    def _send(self, fragment: int) -> None:
        tokens = self._told[fragment] = self._tokens[fragment].clone()
        send_fragment(self.fragments[fragment], self.axis, self.plan, tokens)
        self._tokens[fragment] = 0.0

    def _merge(self, fragment: int, alpha: float) -> None:
        with torch.no_grad():
            for unit in self.fragments[fragment]:
                unit.merge(alpha)
        self.merge_at[fragment] = 0

    def _swap(self) -> None:
        self.sharding.reshard()
        with torch.no_grad():
            for unit in self.units:
                unit.swap()

    def _as_owned(self, unit: OuterUnit, owned: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of [S] as DTensors, each parameter's rows on this rank split once more, over islands."""
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
    def _mesh(self) -> DeviceMesh:  # a dry run's fake tensors cannot make one
        """[tp, shard, island]: the order in which the rows of a parameter are split, so that each rank's are a run."""
        mesh, names = self._dims.mesh, (self._dims.mesh.mesh_dim_names or ())[::-1]
        ranks, groups = mesh.mesh.permute(*reversed(range(mesh.ndim))), [mesh.get_group(name) for name in names]
        return DeviceMesh.from_group(groups, mesh.device_type, ranks.contiguous(), mesh_dim_names=names)
