"""The outer state of elastic DiLoCo: every group holds it completely and takes every outer step by itself.

A rank's shard of a sharding unit is divided into G rows, one per nominal group. In DiLoCo within one job
(diloco/outer.py) each group owns the outer state of one row. Here every group holds all rows, and applies the same
messages in the same order. Every operation is rounded alone (diloco/rows.py), so all groups compute the same bits. If
all groups contribute, these are also the bits of diloco/outer.py. The outer state therefore follows from the initial
weights and the commits. A slow group can apply commits later. A new group fetches the state of any version and applies
the later commits.

    D      = sum(tokens x age factor x delta) / sum(tokens x age factor), both sums over all contributions
    m      = mu m + D;  outer -= eta (D + mu m);  R += quantized(outer - R)

D is the weighted mean of the contributions (each is a delta), m the outer momentum with the coefficient mu, and eta the
outer learning rate. R is the copy of the outer weights from which inner weights start. diloco/outer.py sends the change
of R in blocks of 4 bits by default. Here nothing is sent, but every group rounds the change in the same way. So R
differs from the outer weights by the last rounding errors, which the next change includes.

A contribution to an older version is late; its age factor is F^age, with F from --diloco-late-factor. The age is the
number of outer steps of its fragment that the contribution has missed. The age factor of other contributions is 1.

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
    """The complete outer state of DiLoCo for this rank's shards of the model: R, outer weights and outer momentum.

    Args:
        sharding: sharding handle of the model, whose weights are the outer weights of version 0.
        plan: the DiLoCo plan; `plan.tokens` counts the tokens of one group between two synchronizations.
        precision: dtypes of values that are sent without quantization.
        num_groups: nominal number of groups (G).
        late_factor: F, by which a contribution's weight is multiplied for each outer step of its fragment that it has
            missed; with 0 a late contribution counts nothing.
    Attributes:
        plan: the DiLoCo plan.
        units: the outer state of each sharding unit.
        fragments: the elements of `units` in each of P fragments; the step to version v + 1 changes fragment v modulo
            P.
        lock: held while the outer state or its version changes, so that another thread can copy both between changes.
    """

    def __init__(
        self, sharding: Sharding, plan: DilocoPlan, precision: PrecisionConfig, *, num_groups: int, late_factor: float
    ) -> None:
        self.sharding, self.plan, self._late_factor = sharding, plan, late_factor
        # Planned number of tokens of all groups between two synchronizations. `pack` divides a group's tokens by this
        # number, and `apply` corrects the sum by the groups' true numbers of tokens.
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
        """The size in bytes of a snapshot of this outer state. Other data that two groups exchange is smaller."""
        return sum(unit.snapshot_bytes for unit in self.units)

    @torch.no_grad()
    def pack(self, tokens: float, version: int = 0) -> bytes:
        """Return this rank's message of its group's contribution to the outer step after `version`.

        Args:
            tokens: tokens that the group has trained since its last contribution to this fragment, as its weight.
            version: version of the outer weights; it decides which fragment the message is about.

        Returns:
            the packed outer gradient, R minus inner weights, of all units of the fragment.
        """
        self.sharding.reshard()
        weight = (torch.tensor(tokens, dtype=torch.float64, device=self._device) / self._nominal).float()
        return b"".join(_as_bytes(unit.pack(weight)) for unit in self.fragment_after(version))

    def fragment_after(self, version: int) -> list[WholeRows]:
        """Return the outer state of the units that the outer step after `version` changes."""
        return self.fragments[version % len(self.fragments)]

    @torch.no_grad()
    def apply(self, entries: Sequence[Mapping[str, Any]], contributions: Sequence[bytes], version: int) -> None:
        """Take the outer step from `version` to the next version. Hold `lock` during the call.

        Args:
            entries: the contributions of the commit: base version ("base") and tokens ("tokens") of each. Without a
                contribution the step changes nothing.
            contributions: messages of these contributions, as `pack` returns them, in the same order.
            version: version of the outer state before the step.
        """
        if not entries:
            return
        ages = [(version - entry["base"]) // len(self.fragments) for entry in entries]
        factors = [self._late_factor**age for age in ages]
        tokens = sum(entry["tokens"] * factor for entry, factor in zip(entries, factors, strict=True))
        # `tokens` is 0 if all contributions are late and --diloco-late-factor is 0. Dividing by 1 then avoids an Inf.
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
        """Merge R, the common outer weights, into the inner weights: inner = alpha inner + (1 - alpha) R.

        Args:
            alpha: weight of the inner weights; 0 replaces them by R.
            units: the units to merge; None for all units.
        """
        self.sharding.reshard()
        for unit in self.units if units is None else units:
            unit.merge(alpha)

    @torch.no_grad()
    def shift(self, units: Sequence[WholeRows], before: Sequence[torch.Tensor]) -> None:
        """Add the last change of R, the common outer weights, to the inner weights.

        Unlike with `merge`, the inner weights thus keep this group's training steps that are not published yet.

        Args:
            units: the sharding units whose outer weights an outer step has changed.
            before: [G, S] R of each of these units before the outer step: G rows of S elements.
        """
        self.sharding.reshard()
        for unit, rows in zip(units, before, strict=True):
            for change, shard in unit.pairs(unit.rows - rows):
                shard.add_(change)

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Let the model compute with R, the common outer weights, inside the returned context."""
        return computing_with_rows(self.sharding, self.units, self.lock)

    def dump(self) -> bytes:
        """Return a snapshot, the bytes of this rank's complete outer state. Hold `lock` during the call."""
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
        """Return the sum of the bit patterns of all elements of the outer state, each read as an int32.

        If exactly one element of two outer states differs, their sums differ.

        The coordinator compares this number between groups, to find a group that has computed other bits.
        """
        words = (tensor.view(torch.int32) for unit in self.units for tensor in unit.tensors)
        return sum(int(word.sum(dtype=torch.int64)) for word in words)

    def values(self, name: str) -> dict[str, torch.Tensor]:
        """Return copies of one part of the outer state, by parameter name, as DTensors sharded like the parameters.

        Args:
            name: "rows" for R (the common copy of the outer weights), "outer" for the outer weights, or "momentum" for
                the outer momentum. Without outer momentum the result for "momentum" is empty.
        """
        held = [(unit, rows) for unit in self.units if (rows := getattr(unit, name)) is not None]
        return {key: value for unit, rows in held for key, value in unit.as_dtensors(rows).items()}

    @torch.no_grad()
    def set_values(self, name: str, values: Mapping[str, Any]) -> None:
        """Replace one part of the outer state by the values of a checkpoint.

        Args:
            name: "rows" for R (the common copy of the outer weights), "outer" for the outer weights, or "momentum" for
                the outer momentum.
            values: DTensors by parameter name, sharded like the parameters.
        """
        for unit in self.units:
            if (rows := getattr(unit, name)) is not None:
                unit.fill_(rows, [values[parameter.name].to_local() for parameter in unit.unit.parameters])


def _as_bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().cpu().numpy().tobytes()
