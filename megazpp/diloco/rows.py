"""The part of DiLoCo's synchronization that needs no communication: message formats, packing, and the outer step.

A rank holds R, the common copy of the outer weights, as rows [G, S] of its shard of a sharding unit: one row per
replica group. Each row is packed into a message of its own. Every operation of the outer step is rounded alone, so
that all kinds of CPUs and GPUs compute the same bits: `x.add_(y, alpha=a)` may be fused into one rounding
(with AVX2 or AVX-512 it is), `x.add_(y * a)` may not.

Legend: G replica groups, S elements of a rank's shard in one row, M bytes of a row's message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from megazpp.diloco.config import DilocoPlan
from megazpp.kernels.formats import BlockFormat, MessageLayout
from megazpp.zero.config import PrecisionConfig
from megazpp.zero.sharding import Sharding
from megazpp.zero.units import Unit
from megazpp.zero.wire import Codec, plan_message, plan_segments


class OuterRows:
    """A sharding unit's R on this rank as rows, and the formats of the messages about it.

    Args:
        unit: the sharding unit.
        shapes: shapes of this rank's shards, by parameter.
        num_groups: number of replica groups (G), which is the number of rows.
        plan: the DiLoCo plan.
        precision: dtypes of values that are sent without quantization.
        device: device of the buffers.
        codec: class of the codecs that pack messages.
    Attributes:
        gradients: codec of outer gradients.
        differences: codec of the differences of outer weights.
        whole: codec of unquantized outer weights.
        errors: rounding errors of outer gradients for error feedback; None without it.
    """

    def __init__(
        self,
        unit: Unit,
        shapes: Sequence[tuple[int, ...]],
        num_groups: int,
        *,
        plan: DilocoPlan,
        precision: PrecisionConfig,
        device: torch.device,
        codec: Callable[[MessageLayout, torch.dtype], Codec] = Codec,
    ) -> None:
        self.unit, self._num_groups, self._plan = unit, num_groups, plan
        named = [(p.name, shape) for p, shape in zip(unit.parameters, shapes, strict=True)]
        self.segments = plan_segments(named, num_groups)

        def made(fmt: BlockFormat | None, dtype: torch.dtype) -> Codec:
            return codec(plan_message(self.segments, fmt, exact_itemsize=dtype.itemsize), dtype)

        self.gradients = made(plan.gradients, precision.reduce_dtype)
        self.differences = made(plan.weights, precision.param_dtype)
        self.whole = made(None, torch.float32)
        self.errors = self.gradients.new_errors(num_groups, device=device) if plan.feedback else None

    @property
    def rows(self) -> torch.Tensor:
        """R, the common copy of the outer weights, as rows [G, S] fp32."""
        raise NotImplementedError

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the messages [G, M] uint8 of this group's outer gradient, R minus the inner weights, times `weight`.

        Args:
            weight: weight of this group in the mean, a scalar.
        """
        rows = self.rows
        delta = self.fill_(torch.empty_like(rows))
        torch.sub(rows, delta, out=delta).mul_(weight)
        messages = self.gradients.empty(self._num_groups, device=rows.device)
        self.gradients.pack(delta, messages, errors=self.errors)
        return messages

    def fill_(self, rows: torch.Tensor, shards: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Write shards into rows [G, S], with zeros as padding, and return the rows.

        Args:
            rows: [G, S] fp32.
            shards: one tensor per parameter. None: the model's shards.
        """
        rows.zero_()
        for row, shard in self.pairs(rows, shards):
            row.copy_(shard)
        return rows

    def merge(self, alpha: float) -> None:
        """Merge R, the common outer weights, into the inner weights: inner = alpha inner + (1 - alpha) R."""
        for row, shard in self.pairs(self.rows):
            shard.lerp_(row, 1.0 - alpha) if alpha else shard.copy_(row)

    def swap(self) -> None:
        """Exchange the inner weights and R, the common outer weights, so that the model computes with R."""
        for row, shard in self.pairs(self.rows):
            inner = shard.clone()
            shard.copy_(row)
            row.copy_(inner)

    def pairs(
        self, rows: torch.Tensor, shards: Sequence[torch.Tensor] | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of views with equal shapes: a part of rows [G, S], without padding, and the same part of a shard.

        Args:
            rows: [G, S] fp32.
            shards: one tensor per parameter. None: the model's shards.
        """
        for segment, shard in zip(self.segments, self.unit.shards() if shards is None else shards, strict=True):
            flat, size = shard.view(-1), segment.size
            if size == 0:
                continue
            full = flat.numel() // size
            if full:
                yield rows[:full, segment.start : segment.stop], flat[: full * size].view(full, size)
            if rest := flat.numel() - full * size:
                yield rows[full, segment.start : segment.start + rest], flat[full * size :]


class WholeRows(OuterRows):
    """The rows of a sharding unit with their whole outer state on this rank, as in elastic DiLoCo.

    Attributes:
        outer: [G, S] fp32 outer weights.
        momentum: [G, S] fp32; None if mu is 0.
    """

    def __init__(self, *args: Any, device: torch.device, **kwargs: Any) -> None:
        super().__init__(*args, device=device, **kwargs)
        self._rows = torch.zeros(self._num_groups, self.gradients.layout.size, device=device)
        self.fill_(self._rows)
        self.outer = self._rows.clone()
        self.momentum = torch.zeros_like(self.outer) if self._plan.outer_momentum else None

    @property
    def rows(self) -> torch.Tensor:
        """R, the common copy of the outer weights, as rows [G, S] fp32."""
        return self._rows

    @property
    def tensors(self) -> list[torch.Tensor]:
        """R, the outer weights, and the momentum if there is one, each [G, S] fp32."""
        return [x for x in (self._rows, self.outer, self.momentum) if x is not None]

    @property
    def message_bytes(self) -> int:
        """The size of a contribution in bytes."""
        return self._num_groups * self.gradients.message_bytes

    @property
    def snapshot_bytes(self) -> int:
        """The size in bytes of `tensors`, which a new group fetches."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def apply(self, messages: torch.Tensor, factors: Sequence[float], correction: torch.Tensor) -> None:
        """Take an outer step.

        Args:
            messages: [K, G * M] uint8, the contributions of a commit, in its order.
            factors: age factor of each.
            correction: factor for their sum, a scalar.
        """
        mean, messages = torch.zeros_like(self.outer), messages.view(len(factors), self._num_groups, -1)
        fresh = [message for message, factor in zip(messages, factors, strict=True) if factor == 1.0]
        if fresh:
            self.gradients.unpack_sum(torch.stack(fresh), mean, accumulate=False)
        for message, factor in zip(messages, factors, strict=True):
            if factor != 1.0:
                late = torch.empty_like(mean)
                self.gradients.unpack_sum(message.unsqueeze(0), late, accumulate=False)
                mean += late * factor
        mean *= correction
        outer_step_(self.outer, self.momentum, mean, self._plan)
        sent = self.differences.empty(self._num_groups, device=mean.device)
        self.differences.pack(self.outer, sent, base=self._rows)
        self.differences.unpack_onto(sent, self._rows)


@contextmanager
def computing_with_rows(
    sharding: Sharding, units: Sequence[OuterRows], lock: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Let the model compute with R, the common outer weights, inside this context.

    Args:
        sharding: handle of the model.
        units: the rows of all its units.
        lock: held while weights are exchanged, if other threads read the rows.
    """

    def swap() -> None:
        """Exchange the inner weights and R."""
        sharding.reshard()
        with lock or nullcontext(), torch.no_grad():
            for unit in units:
                unit.swap()

    swap()
    try:
        yield
    finally:
        swap()


def outer_step_(outer: torch.Tensor, momentum: torch.Tensor | None, mean: torch.Tensor, plan: DilocoPlan) -> None:
    """Take a step of the outer optimizer, Nesterov, in place; every operation is rounded alone.

    Args:
        outer: outer weights, fp32, of any shape.
        momentum: outer momentum of the same shape; None if mu is 0.
        mean: weighted mean of the outer gradients, of the same shape.
        plan: the DiLoCo plan, with the outer learning rate and momentum.
    """
    lr, mu = plan.outer_lr, plan.outer_momentum
    outer.sub_(mean * lr)
    if momentum is not None:
        momentum.mul_(mu).add_(mean)
        outer.sub_(momentum * (lr * mu))
