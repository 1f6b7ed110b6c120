"""One network device for all of a process's gloo groups.

torch gives every gloo group a device of its own, whose thread wakes up a hundred times a second for as long as the
process lives: with 10 idle groups a process spends 2.4 % of a core on nothing, with one device for all of them 0.4 %
(torch 2.13, measured). A device can serve any number of groups, but `torch.distributed.new_group` takes no gloo
options, so what it calls to make a group is replaced by something that fills them in.
"""

from __future__ import annotations

import abc
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def share_gloo_device() -> None:
    """From here on the gloo groups of this process share a device; without gloo in torch this does nothing."""
    if dist.is_gloo_available():
        distributed_c10d.ProcessGroupGloo = _one_device_groups()  # type: ignore[misc]


def _one_device_groups() -> Any:
    gloo: Any = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")  # as torch reads it
    if interfaces:
        devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]
    else:
        devices = [gloo.create_default_device()]

    class OneDeviceGroup(abc.ABC):  # noqa: B024 (the registry of isinstance is all that is used)
        """Makes gloo groups, and is what they are instances of."""

        def __new__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
            options = gloo._Options()
            options._devices, options._timeout = devices, timeout
            return gloo(store, rank, size, options)

    OneDeviceGroup.register(gloo)
    return OneDeviceGroup
