"""Bytes of the tensors that live, as the operations that make them are seen."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class LiveBytes:
    """Storages that have been seen, while they live.

    Attributes:
        now: their bytes.
    """

    def __init__(self) -> None:
        self.now = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor`, once."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        self.now += storage.nbytes()
        weakref.finalize(storage, self._died, storage.nbytes())

    def _died(self, size: int) -> None:
        self.now -= size
