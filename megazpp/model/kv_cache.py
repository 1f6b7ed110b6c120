"""Key-value cache for generation: a forward computes only new tokens, and reads earlier keys and values from the cache.

Letters: B rows of the batch, S new tokens per row in one forward, C the cache's capacity in tokens per row, G key and
value heads and D channels per head on this tensor-parallel rank.

The keys and values of token i of a row are stored at place i, from 0 to C - 1. Rows may differ in length. In a forward,
a shorter row has padding tokens, which are stored after its last token. The row's next tokens overwrite this padding
before any query can attend to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# On CUDA the number of keys that attention reads is rounded up to a multiple of this number, for two reasons. Tensor
# shapes then change only once in 128 tokens. And if the length of a mask is no multiple of 16, torch copies the mask in
# each layer into aligned memory.
CUDA_MASK_MULTIPLE = 128


class KVCache:
    """Key-value cache of all layers of a model, for generation.

    Args:
        num_layers: number of layers.
        batch: number of rows of the batch.
        capacity: most tokens per row; rounded up to a multiple of `mask_multiple`.
        device: device on which the model computes.
        on_host: True to store the cache in host memory and copy a layer's keys and values to the device when the layer
            runs.
        mask_multiple: the number of keys that attention reads is rounded up to a multiple of this number. None chooses
            CUDA_MASK_MULTIPLE on CUDA without `on_host`, and otherwise 1.

    Attributes:
        lengths: number of cached tokens of each row, counted on the host.
        layers: cache of each layer.
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
        # `_next` [batch] is a copy of `lengths` on the device, where the positions of the next tokens are computed.
        self._next = torch.zeros(batch, dtype=torch.int64, device=device)
        capacity = self._rounded(capacity)
        self.layers = [LayerCache(capacity, on_host=on_host) for _ in range(num_layers)]

    def positions(self, seq: int) -> torch.Tensor:
        """Return the positions in the cache, [B, S] int64, for the next S = `seq` tokens of each of B rows."""
        start = self._next.unsqueeze(1)
        return start if seq == 1 else start + torch.arange(seq, device=start.device)

    def mask_length(self, seq: int) -> int:
        """Return the number of keys per row that attention reads in a forward of `seq` new tokens.

        The number is rounded up to a multiple of `mask_multiple`.
        """
        return self._rounded(max(self.lengths) + seq)

    def mask(self, positions: torch.Tensor, window: int | None = None) -> torch.Tensor | None:
        """Return the attention mask of a forward, [B, 1, S, keys] bool, True where a token attends to a key.

        There are B rows with S new tokens each. `keys` is the number of cached positions that attention reads. The
        result is None if the cache is empty and the new tokens do not exceed the window. Plain causal attention among
        the new tokens then gives the same result as a mask.

        Args:
            positions: [B, S] positions of the new tokens in the cache.
            window: number of tokens that a token attends to, itself included; None for all earlier tokens.
        """
        seq = positions.shape[1]
        if not any(self.lengths) and (window is None or seq <= window):
            return None
        places, own = torch.arange(self.mask_length(seq), device=positions.device), positions.unsqueeze(-1)
        mask = places <= own
        return (mask if window is None else mask & (places > own - window)).unsqueeze(1)

    def add(self, counts: Sequence[int]) -> None:
        """Record after a forward how many tokens it has added to each row of the cache.

        Args:
            counts: for each row, the number of new tokens. Further tokens of the row in this forward were padding.
        """
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if len(set(counts)) == 1:  # equal counts: adding one Python number needs no copy from host to device
            self._next += counts[0]
        else:
            self._next += torch.tensor(counts).to(self._next.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the rows of the batch with these indices, in this order, and drop all others from the cache."""
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(rows).to(self._next.device)
        self._next = self._next[index]
        for layer in self.layers:
            layer.keep(index)

    def _rounded(self, length: int) -> int:
        """Round a number of keys up to a multiple of `mask_multiple`, so that tensor shapes change rarely."""
        return -(-length // self._multiple) * self._multiple


class LayerCache:
    """Key-value cache of one layer, for generation.

    Args:
        capacity: most tokens C per row.
        on_host: True to store the cache in host memory, False on the device of the keys.

    Attributes:
        kept: cached keys and values, [C, B, G, D] each, for B rows, G key and value heads and D channels per head; None
            until the first call of `extend` allocates them.
    """

    def __init__(self, capacity: int, *, on_host: bool = False) -> None:
        self._capacity, self.on_host = capacity, on_host
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the rows of the batch with these indices, in this order, and drop all others from the cache."""
        if self.kept is not None:
            keys, values = (x.index_select(1, rows.to(x.device)) for x in self.kept)
            self.kept = keys, values

    def extend(
        self, new: tuple[torch.Tensor, torch.Tensor], places: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values of new tokens, and return the keys and values that attention reads.

        Args:
            new: keys and values of S new tokens in each of B rows, [S, B, G, D] each, with G heads of D channels.
            places: [B, S] int64 positions in the cache at which the new keys and values are stored.
            mask: [..., keys] attention mask of this forward; None for causal attention among the new tokens.

        Returns:
            Keys and values [keys, B, G, D] of the first `keys` positions in the cache. Without a mask these are only
            the new tokens' keys and values.
        """
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
