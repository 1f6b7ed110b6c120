"""Work on the host beside the device: threads, and copies of a few numbers that stall neither of the two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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


def threads_on(device: torch.device, num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return an executor whose threads have `device` as their current CUDA device.

    CUDA's current device is per thread, and a new thread starts with the first GPU.

    Args:
        device: CUDA device or CPU.
        num_threads: largest number of threads.
        name: prefix of the threads' names.
    """
    if device.type != "cuda":
        return ThreadPoolExecutor(num_threads, name)
    return ThreadPoolExecutor(num_threads, name, initializer=torch.cuda.set_device, initargs=(device,))
