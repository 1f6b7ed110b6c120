"""Keys and values of the tokens a model has seen, so that the next token costs one position instead of all.

Rows of a batch begin at position 0 and may differ in length: row b's token i is at place i. Padding of a shorter row
goes to places that its later tokens overwrite before any query may look there. B rows, S tokens of one forward, C
places, G groups and D channels of keys and values on this tp rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class KVCache:
    """Keys and values of all layers of a model, for `batch` rows of `capacity` tokens; each row has `lengths` of them.

    With `on_host` they are in the host's memory; those of one layer at a time are copied to where it computes.
    """

    def __init__(self, num_layers: int, batch: int, capacity: int, *, on_host: bool = False) -> None:
        self.lengths = [0] * batch
        self.layers = [LayerCache(capacity, on_host=on_host) for _ in range(num_layers)]

    def positions(self, seq: int, device: torch.device) -> torch.Tensor:
        """[B, S]: the places of the next `seq` tokens of each row."""
        return (torch.tensor(self.lengths).unsqueeze(1) + torch.arange(seq)).to(device)

    def mask(self, positions: torch.Tensor) -> torch.Tensor | None:
        """[B, 1, S, longest row]: True where tokens at `positions` may look; None while there is nothing but them."""
        if not any(self.lengths):
            return None
        places = torch.arange(max(self.lengths) + positions.shape[1], device=positions.device)
        return (places <= positions.unsqueeze(-1)).unsqueeze(1)

    def add(self, counts: Sequence[int]) -> None:
        """After a forward: so many of its tokens were each row's own."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows [n] alone, in this order."""
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        for layer in self.layers:
            layer.keep(rows)


class LayerCache:
    """Keys and values of one layer: `kept` is [C, B, G, D] twice, allocated when the first keys come."""

    def __init__(self, capacity: int, *, on_host: bool = False) -> None:
        self._capacity, self.on_host = capacity, on_host
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def keep(self, rows: torch.Tensor) -> None:
        if self.kept is not None:
            keys, values = (x.index_select(1, rows.to(x.device)) for x in self.kept)
            self.kept = keys, values

    def extend(
        self, new: tuple[torch.Tensor, torch.Tensor], places: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep keys and values [S, B, G, D] at `places` [B, S]; returns all that `mask` is about."""
        if self.kept is None:
            on_host: dict[str, Any] = {"device": "cpu", "pin_memory": new[0].is_cuda} if self.on_host else {}
            keys, values = (x.new_zeros((self._capacity, *x.shape[1:]), **on_host) for x in new)
            self.kept = keys, values
        at = places.to(self.kept[0].device)
        rows = torch.arange(len(at), device=at.device)
        for kept, x in zip(self.kept, new, strict=True):
            kept[at.t(), rows] = x.to(at.device)
        if mask is None:
            return new
        keys, values = (kept[: mask.shape[-1]].to(places.device, non_blocking=True) for kept in self.kept)
        return keys, values
