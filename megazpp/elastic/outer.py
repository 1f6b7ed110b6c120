"""The outer state of elastic DiLoCo, whole in every group: each rank takes the outer step of all rows of its shard.

In diloco/outer.py each group owns one row of a shard. Here every group holds all rows, and applies the same messages in
the same order. All operations are rounded alone (diloco/rows.py), so all groups compute the same bits, and those of
the exchange in diloco/outer.py if all groups contribute. The outer state is then a function of the initial weights and
of the commits: a slow group can apply them later, and a new one fetches the state of any version and applies the rest.

    D      = sum over contributions of tokens x age factor x delta / sum of tokens x age factor
    m      = mu m + D;  outer -= eta (D + mu m);  R += outer - R    as in diloco/outer.py, 4-bit blocks

A contribution to an older version is late; its age factor is F^age, and 1 for the others.

Legend: G nominal number of groups (rows), S elements of a row, M bytes of a row's message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any

import torch

from megazpp.diloco.config import DilocoPlan
from megazpp.diloco.rows import WholeRows, computing_with_rows
from megazpp.zero.config import PrecisionConfig
from megazpp.zero.sharding import Sharding


class WholeOuter:
    """The whole outer state of a model's shards on this rank.

    Args:
        sharding: handle of the model, whose weights are the outer weights of version 0.
        plan: the DiLoCo plan; its tokens are those of one group between two synchronizations.
        precision: dtypes of values that are sent without quantization.
        num_groups: nominal number of groups.
        late_factor: F, the weight of a contribution per version that it is late; 0 drops it.
    Attributes:
        plan: the DiLoCo plan.
        fragments: the units of each fragment; version v + 1 changes fragment v modulo their number.
        lock: held while the state or its version changes, so that another thread can copy them between changes.
    """

    def __init__(
        self, sharding: Sharding, plan: DilocoPlan, precision: PrecisionConfig, *, num_groups: int, late_factor: float
    ) -> None:
        self.sharding, self.plan, self._late_factor = sharding, plan, late_factor
        self._nominal = plan.tokens * num_groups
        self.lock = Lock()
        sharding.reshard()
        self._device = sharding.device
        with torch.no_grad():
            self.units = [
                WholeRows(
                    unit,
                    [tuple(shard.shape) for shard in unit.shards()],
                    num_groups,
                    plan=plan,
                    precision=precision,
                    device=self._device,
                )
                for unit in sharding.units
            ]

        self.fragments = plan.in_fragments(self.units)

    @property
    def most_bytes(self) -> int:
        """The size of a snapshot in bytes, which is more than the size of a contribution."""
        return sum(unit.snapshot_bytes for unit in self.units)

    @torch.no_grad()
    def pack(self, tokens: float, version: int = 0) -> bytes:
        """Return this group's contribution to the fragment after `version`, which is weighted by its tokens."""
        self.sharding.reshard()
        weight = (torch.tensor(tokens, dtype=torch.float64, device=self._device) / self._nominal).float()
        return b"".join(_as_bytes(unit.pack(weight)) for unit in self.fragment_after(version))

    def fragment_after(self, version: int) -> list[WholeRows]:
        """Return the units that the outer step after `version` changes."""
        return self.fragments[version % len(self.fragments)]

    @torch.no_grad()
    def apply(self, entries: Sequence[Mapping[str, Any]], contributions: Sequence[bytes], version: int) -> None:
        """Take the outer step from `version` to the next one; the caller holds `lock`.

        Args:
            entries: the contributions of the commit: base version and tokens of each.
            contributions: results of `pack`, in the same order.
            version: version of the state before the step.
        """
        if not entries:
            return
        ages = [(version - entry["base"]) // len(self.fragments) for entry in entries]
        factors = [self._late_factor**age for age in ages]
        tokens = sum(entry["tokens"] * factor for entry, factor in zip(entries, factors, strict=True))
        correction = (
            self._nominal / torch.tensor(tokens, dtype=torch.float64, device=self._device).clamp(min=1.0)
        ).float()
        start = 0
        for unit in self.fragment_after(version):
            stop = start + unit.message_bytes
            parts = [torch.frombuffer(bytearray(data[start:stop]), dtype=torch.uint8) for data in contributions]
            unit.apply(torch.stack(parts).to(self._device), factors, correction)
            start = stop

    @torch.no_grad()
    def merge(self, alpha: float, units: Sequence[WholeRows] | None = None) -> None:
        """Merge R into the inner weights of `units`, or of all if None: inner = alpha inner + (1 - alpha) R."""
        self.sharding.reshard()
        for unit in self.units if units is None else units:
            unit.merge(alpha)

    @torch.no_grad()
    def shift(self, units: Sequence[WholeRows], before: Sequence[torch.Tensor]) -> None:
        """Add the change of R since `before` to the inner weights of `units`."""
        self.sharding.reshard()
        for unit, rows in zip(units, before, strict=True):
            for change, shard in unit.pairs(unit.rows - rows):
                shard.add_(change)

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Let the model compute with R inside this context."""
        return computing_with_rows(self.sharding, self.units, self.lock)

    def dump(self) -> bytes:
        """Return a snapshot of the state; the caller holds `lock`."""
        return b"".join(_as_bytes(tensor) for unit in self.units for tensor in unit.tensors)

    def load(self, snapshot: bytearray) -> None:
        """Replace this rank's outer state by a snapshot of the rank with the same index in another group."""
        assert len(snapshot) == self.most_bytes, (len(snapshot), self.most_bytes)
        start = 0
        with self.lock, torch.no_grad():
            for tensor in (tensor for unit in self.units for tensor in unit.tensors):
                stop = start + tensor.nbytes
                tensor.copy_(torch.frombuffer(snapshot[start:stop], dtype=torch.float32).view(tensor.shape))
                start = stop

    def fingerprint(self) -> int:
        """Return a number that differs if one element of the state differs in its bits."""
        words = (tensor.view(torch.int32) for unit in self.units for tensor in unit.tensors)
        return sum(int(word.sum(dtype=torch.int64)) for word in words)

    def values(self, name: str) -> dict[str, torch.Tensor]:
        """Return copies of "rows" (R), "outer" or "momentum" by parameter, as DTensors that are sharded like it."""
        found: dict[str, torch.Tensor] = {}
        for unit in self.units:
            rows, shards = getattr(unit, name), [torch.zeros_like(shard) for shard in unit.unit.shards()]
            if rows is None:
                continue
            for row, shard in unit.pairs(rows, shards):
                shard.copy_(row)
            found |= unit.unit.as_dtensors(shards)
        return found

    @torch.no_grad()
    def set_values(self, name: str, values: Mapping[str, Any]) -> None:
        """Replace "rows" (R), "outer" or "momentum" by DTensors, by parameter."""
        for unit in self.units:
            if (rows := getattr(unit, name)) is not None:
                unit.fill_(rows, [values[parameter.name].to_local() for parameter in unit.unit.parameters])


def _as_bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().cpu().numpy().tobytes()
