"""Keys and values of the tokens a model has seen, so that the next token costs one position instead of all.

Rows of a batch begin at position 0 and may differ in length: row b's token i is at place i. Padding of a shorter row
goes to places that its later tokens overwrite before any query may look there. B rows, S tokens of one forward, C
places, G groups and D channels of keys and values on this tp rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# On CUDA the length of the mask is a multiple of this, so that shapes are the same for so many tokens. It is also a
# multiple of 16, below which torch copies the mask of each layer into aligned memory.
CUDA_MASK_MULTIPLE = 128


class KVCache:
    """Keys and values of all layers of a model, for `batch` rows of `capacity` tokens; each row has `lengths` of them.

    With `on_host` they are in the host's memory; those of one layer at a time are copied to where it computes.

    Args:
        device: device on which the model computes.
        mask_multiple: the keys that attention reads are a multiple of this, up to the capacity, which is rounded up;
            None for CUDA_MASK_MULTIPLE on CUDA, unless `on_host`, and 1 elsewhere.
    Attributes:
        lengths: tokens of each row, as the host knows them.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        on_host: bool = False,
        mask_multiple: int | None = None,
    ) -> None:
        if mask_multiple is None:
            mask_multiple = CUDA_MASK_MULTIPLE if torch.device(device).type == "cuda" and not on_host else 1
        self._multiple = mask_multiple
        self.lengths = [0] * batch
        self._next = torch.zeros(batch, dtype=torch.int64, device=device)  # the lengths, for forwards
        capacity = self._rounded(capacity)
        self.layers = [LayerCache(capacity, on_host=on_host) for _ in range(num_layers)]

    def positions(self, seq: int) -> torch.Tensor:
        """[B, S]: the places of the next `seq` tokens of each row."""
        start = self._next.unsqueeze(1)
        return start if seq == 1 else start + torch.arange(seq, device=start.device)

    def mask_length(self, seq: int) -> int:
        """Return the number of keys that a forward of `seq` further tokens attends to."""
        return self._rounded(max(self.lengths) + seq)

    def mask(self, positions: torch.Tensor, window: int | None = None) -> torch.Tensor | None:
        """[B, 1, S, mask length]: True where tokens at `positions` may look; None while they see one another alone.

        Args:
            window: tokens that a token may look at, its own and those before it; None for all.
        """
        seq = positions.shape[1]
        if not any(self.lengths) and (window is None or seq <= window):
            return None
        places, own = torch.arange(self.mask_length(seq), device=positions.device), positions.unsqueeze(-1)
        mask = places <= own
        return (mask if window is None else mask & (places > own - window)).unsqueeze(1)

    def add(self, counts: Sequence[int]) -> None:
        """After a forward: so many of its tokens were each row's own."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if len(set(counts)) == 1:  # no copy from the host
            self._next += counts[0]
        else:
            self._next += torch.tensor(counts).to(self._next.device)

    def add_one_on_device_(self) -> None:
        """Add a token to each row for the next forward; `add_one_on_host` does it for the host.

        The two are apart because a replayed CUDA graph changes only the device's numbers.
        """
        self._next += 1

    def add_one_on_host(self) -> None:
        """Add a token to each row of `lengths`; see `add_one_on_device_`."""
        self.lengths = [length + 1 for length in self.lengths]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(rows).to(self._next.device)
        self._next = self._next[index]
        for layer in self.layers:
            layer.keep(index)

    def _rounded(self, length: int) -> int:
        return -(-length // self._multiple) * self._multiple


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
