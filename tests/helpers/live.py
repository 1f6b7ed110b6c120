"""Bytes of all tensors that live, counted on real ones: what a plan of memory is held against."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountLive(TorchDispatchMode):
    """Sees every tensor that an operation of this thread touches; FSDP2 resizes storages, so sizes are read anew.

    Attributes:
        now, peak: bytes after the last operation, and the most since `mark`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def mark(self) -> None:
        """Forget the peak."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, DTensor):
                leaf = leaf._local_tensor
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._known.add(leaf.untyped_storage())
        self.now = sum(storage.nbytes() for storage in self._known)
        self.peak = max(self.peak, self.now)
        return result
