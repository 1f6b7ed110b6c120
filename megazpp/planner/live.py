"""Bytes of the tensors that live, as the operations that make and use them are seen."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes:
    """Storages that have been seen, while they live; their sizes do not change.

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


class PeakBytes(TorchDispatchMode):
    """The most bytes that lived at once, of the tensors that operations of this thread touched.

    FSDP2 empties storages by resizing them, of which no operation tells. So what is known only grows, until it would
    be a new peak: then all sizes are read anew.

    Attributes:
        peak: since `mark`.
        fullest: bytes of each storage at that moment, by its `_cdata`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._at_most = 0
        self.fullest: dict[int, int] = {}
        self._sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def mark(self) -> None:
        """Forget the peak."""
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            # the device of a fake tensor is a slow question
            if isinstance(tensor, FakeTensor) or (isinstance(tensor, torch.Tensor) and tensor.device.type != "meta"):
                storage = tensor.untyped_storage()
                grown = storage.nbytes() - self._sizes.get(storage, 0)
                if grown > 0:
                    self._sizes[storage] = storage.nbytes()
                    self._at_most += grown
        if self._at_most > self.peak:
            self._read_anew()
        return result

    def _read_anew(self) -> None:
        sizes = [(storage, storage.nbytes()) for storage in list(self._sizes)]
        self._sizes.update(sizes)
        self._at_most = sum(size for _, size in sizes)
        if self._at_most > self.peak:
            self.peak, self.fullest = self._at_most, {storage._cdata: size for storage, size in sizes}
