"""The computation of DiLoCo's synchronizations, without communication: packing of messages, and the outer step.

A rank holds R, the common copy of the outer weights, for its shard of a sharding unit. R is stored as rows [G, S], one
row per replica group. Each row is packed into a separate message, because in a run of one job (diloco/outer.py) each
group owns the outer weights of one row.

Every operation of the outer step is rounded separately, so that all kinds of CPUs and GPUs compute the same bits.
Therefore the code has `x.add_(y * a)`, which rounds the product and the sum. `x.add_(y, alpha=a)` may round only once
(with AVX2 or AVX-512 it does).

Legend: G replica groups, S elements of a rank's shard in one row, M bytes of a row's message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """The base class of DiLoCo's state of one sharding unit on this rank: codecs, error feedback and access to R.

    R, the common copy of the outer weights, is a tensor of rows [G, S]; subclasses store R.

    Args:
        unit: the sharding unit.
        shapes: shape of this rank's shard of each parameter.
        num_groups: number of replica groups (G), which is the number of rows.
        plan: DiLoCo plan of the run.
        precision: dtypes in which outer gradients and weights are sent without quantization.
        device: device of the error feedback.
        codec: constructor of the codecs that pack messages, from a layout and a dtype.
    Attributes:
        gradients: codec of outer gradients.
        differences: codec of changes of outer weights.
        whole: codec of whole outer weights in fp32, without quantization.
        errors: quantization errors of outer gradients for error feedback; None if error feedback is off or outer
            gradients are not quantized.
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
        """R, the common copy of the unit's outer weights: [G, S] fp32, one row for each of G replica groups."""
        raise NotImplementedError

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Multiply this group's outer gradient (R minus the inner weights) by `weight`, and pack it into messages.

        Args:
            weight: scalar tensor, the weight of this group in the mean over groups.
        Returns:
            The messages [G, M] uint8, M bytes for each of the G rows of R.
        """
        rows = self.rows
        delta = self.fill_(torch.empty_like(rows))
        torch.sub(rows, delta, out=delta).mul_(weight)
        messages = self.gradients.empty(self._num_groups, device=rows.device)
        self.gradients.pack(delta, messages, errors=self.errors)
        return messages

    def fill_(self, rows: torch.Tensor, shards: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Write this rank's shards of the unit's parameters into `rows`, with zeros as padding, and return `rows`.

        Args:
            rows: [G, S] fp32, S elements for each of G replica groups, which are overwritten.
            shards: one local tensor per parameter; None uses the model's shards, which are the inner weights.
        """
        rows.zero_()
        for row, shard in self.pairs(rows, shards):
            row.copy_(shard)
        return rows

    def as_dtensors(self, rows: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return copies of this unit's outer values, such as weights or momentum, as DTensors by parameter name.

        The DTensors are sharded like the parameters.

        Args:
            rows: [G, S] fp32, this rank's part of the values: S elements for each of G replica groups.
        """
        shards = [torch.empty_like(shard) for shard in self.unit.shards()]
        with torch.no_grad():
            for row, shard in self.pairs(rows, shards):
                shard.copy_(row)
        return self.unit.as_dtensors(shards)

    def merge(self, alpha: float) -> None:
        """Merge R, the common outer weights, into the model's inner weights: inner = alpha inner + (1 - alpha) R.

        Args:
            alpha: fraction of the inner weights that is kept, from 0 to 1.
        """
        for row, shard in self.pairs(self.rows):
            shard.lerp_(row, 1.0 - alpha) if alpha else shard.copy_(row)

    def swap(self) -> None:
        """Exchange the model's inner weights and R, the common outer weights, so that the model computes with R."""
        for row, shard in self.pairs(self.rows):
            inner = shard.clone()
            shard.copy_(row)
            row.copy_(inner)

    def pairs(
        self, rows: torch.Tensor, shards: Sequence[torch.Tensor] | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of views of corresponding elements, without padding: (view of `rows`, view of a shard).

        Both views of a pair have the same shape. Together the pairs cover all elements of the shards.

        Args:
            rows: [G, S] fp32 rows of the unit: S elements for each of G replica groups.
            shards: one local tensor per parameter; None uses the model's shards, which are the inner weights.
        """
        for segment, shard in zip(self.segments, self.unit.shards() if shards is None else shards, strict=True):
            flat, size = shard.view(-1), segment.size
            if size == 0:
                continue
            # The shard fills this segment's columns in the first `full` rows, and then in a part of the next row.
            full = flat.numel() // size
            if full:
                yield rows[:full, segment.start : segment.stop], flat[: full * size].view(full, size)
            if rest := flat.numel() - full * size:
                yield rows[full, segment.start : segment.start + rest], flat[full * size :]


class WholeRows(OuterRows):
    """Elastic DiLoCo's state of one sharding unit, with all outer weights and momentum of this rank's shard.

    In elastic DiLoCo each replica group is a separate job that may leave, so outer states are not split over groups. G
    is the nominal number of groups, also while another number of groups takes part.

    Attributes:
        outer: [G, S] fp32 outer weights, S elements for each of G replica groups.
        momentum: [G, S] fp32 outer momentum; None if the outer momentum mu is 0.
    """

    def __init__(self, *args: Any, device: torch.device, **kwargs: Any) -> None:
        super().__init__(*args, device=device, **kwargs)
        self._rows = torch.zeros(self._num_groups, self.gradients.layout.size, device=device)
        self.fill_(self._rows)
        self.outer = self._rows.clone()
        self.momentum = torch.zeros_like(self.outer) if self._plan.outer_momentum else None

    @property
    def rows(self) -> torch.Tensor:
        """R, the common copy of the unit's outer weights: [G, S] fp32, one row for each of G replica groups."""
        return self._rows

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The state that a joining group fetches: R, the outer weights, and the outer momentum if there is one.

        Each tensor is [G, S] fp32: S elements for each of G replica groups.
        """
        return [x for x in (self._rows, self.outer, self.momentum) if x is not None]

    @property
    def message_bytes(self) -> int:
        """The size in bytes of the G messages of this unit in one contribution (a group's packed outer gradient)."""
        return self._num_groups * self.gradients.message_bytes

    @property
    def snapshot_bytes(self) -> int:
        """The size in bytes of the unit's R, outer weights and outer momentum, which a joining group fetches."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def apply(self, messages: torch.Tensor, factors: Sequence[float], correction: torch.Tensor) -> None:
        """Step the outer optimizer with the contributions of K groups, and update R, the common outer weights.

        All groups call this method with the same arguments, so that their states stay bit-identical.

        Args:
            messages: [K, G * M] uint8 contributions, packed outer gradients, in the same order in all groups. Each has
                G messages of M bytes, one per row of R.
            factors: age factor of each contribution: 1, or less for a contribution to an older version
                (elastic/outer.py).
            correction: scalar tensor, a factor for the sum of the contributions, which makes their weights add up to 1.
        """
        mean, messages = torch.zeros_like(self.outer), messages.view(len(factors), self._num_groups, -1)
        # `unpack_sum` adds up messages without factors. So it adds up all contributions with the factor 1 in one call,
        # and each other contribution is unpacked alone and multiplied by its factor.
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
    """Return a context in which the model computes with R, the common outer weights, for example to evaluate R.

    At the end of the context, the inner weights are back in the model.

    Args:
        sharding: handle to the model.
        units: DiLoCo's states of all sharding units of the model.
        lock: lock that is held while weights are exchanged, if other threads read R; None for no lock.
    """

    def swap() -> None:
        """Exchange the model's inner weights and R in all sharding units; a second call undoes the first."""
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
    """Step DiLoCo's outer optimizer, SGD with Nesterov momentum, in place.

    Every operation is rounded separately, so that all kinds of devices compute the same bits.

    Args:
        outer: fp32 outer weights of any shape, which are updated.
        momentum: outer momentum of the same shape, which is updated; None if the outer momentum mu is 0.
        mean: weighted mean of the outer gradients, of the same shape.
        plan: DiLoCo plan with the outer learning rate and momentum.
    """
    lr, mu = plan.outer_lr, plan.outer_momentum
    outer.sub_(mean * lr)
    if momentum is not None:
        momentum.mul_(mu).add_(mean)
        outer.sub_(momentum * (lr * mu))
