"""How long the pieces of a step take: nothing, for counting, or what a cluster's file says."""

from __future__ import annotations

from typing import Protocol

from megazpp.planner.recorder import Operation
from megazpp.topology.cost import AxisCost, DeviceCost
from megazpp.topology.layout import AXES, Layout
from megazpp.topology.shares import Shares


class Costs(Protocol):
    """How long things take; `taken` is what a collective beside the compute takes from it, in seconds."""

    def operation(self, operation: Operation) -> float: ...

    def memory(self, touched_bytes: int) -> float: ...

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float: ...

    def taken(self, axis: str, collective: str, sent_bytes: int) -> float: ...


class NoCosts:
    """Nothing takes any time: for counting."""

    def operation(self, operation: Operation) -> float:
        return 0.0

    def memory(self, touched_bytes: int) -> float:
        return 0.0

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        return 0.0

    def taken(self, axis: str, collective: str, sent_bytes: int) -> float:
        return 0.0


class ClusterCosts:
    """The costs of a step on a cluster whose file names links and device.

    Args:
        free: axes whose wires take no time, to see what they cost.
    Raises:
        ValueError: a figure that is needed is not in the cluster file.
    """

    def __init__(self, layout: Layout, shares: Shares, *, free: tuple[str, ...] = ()) -> None:
        device = layout.cluster.device
        if device is None:
            raise ValueError("--cluster-file: device is not given (name, teraflops, gigabytes, gigabytes_per_second)")
        self._beside = shares.beside
        self._device = DeviceCost(device=device, shares=shares)
        self._axes = {axis: AxisCost(layout, axis, shares) for axis in AXES if axis not in free}

    def operation(self, operation: Operation) -> float:
        if operation.kind == "memory":
            return self._device.memory_seconds(operation.bytes)
        return self._device.matrix_seconds(operation.m, operation.n, operation.k, operation.batch, operation.bytes)

    def memory(self, touched_bytes: int) -> float:
        return self._device.memory_seconds(touched_bytes)

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        return self._axes[axis].seconds(collective, sent_bytes) if axis in self._axes else 0.0

    def taken(self, axis: str, collective: str, sent_bytes: int) -> float:
        return self._beside * self.collective(axis, collective, sent_bytes)
