"""Copies of a few numbers from the device to the host that do not stall either of them."""

from __future__ import annotations

from typing import Any

import torch


class HostCopy:
    """Copies a few numbers from the device to the host without waiting for the device.

    On the CPU it keeps `values` itself, which must not be changed afterwards.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._arrived = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[Any]:
        """Wait until the copy is complete, and return the values as Python numbers, in lists like `Tensor.tolist`."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()
