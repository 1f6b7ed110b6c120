"""Replace a CUDA graph on a CPU: record a step's operators and replay them on the same tensors.

Like a CUDA graph, a recording keeps the addresses and host numbers of its capture, and a capture changes no tensor.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazpp.inference import decoding
from megazpp.model.kv_cache import KVCache

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}


class RecordedGraph:
    """The recorded operators of `step`."""

    def __init__(self, step: Callable[[], None]) -> None:
        recorder = _Recorder()
        with recorder:
            step()
        self._calls = recorder.calls
        for tensor, before in reversed(recorder.changed):
            tensor.copy_(before)

    def replay(self) -> None:
        for operator, args, kwargs, outputs in self._calls:
            for output, found in zip(outputs, tree_leaves(operator(*args, **kwargs)), strict=True):
                if output is not None:
                    output.copy_(found)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor | None]]] = []
        self.changed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        assert func._schema.name not in WAITS, f"{func} waits for the device, which a capture does not allow"
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.changed.append((value, value.clone()))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        outputs = func(*args, **kwargs)
        new = [  # neither views nor tensors changed in place
            x if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given else None
            for x in tree_leaves(outputs)
        ]
        self.calls.append((func, args, kwargs, new))
        return outputs


def record_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture decoding steps without CUDA; mask lengths are multiples of 16."""
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(decoding, "capture_graph", lambda step, stream, *, memory_of: RecordedGraph(step))
    monkeypatch.setattr(decoding, "KVCache", functools.partial(KVCache, mask_multiple=16))
