"""The states in host memory, with the reductions and the optimizer that use them."""

from __future__ import annotations

from typing import Any

from megazpp.host_states.adamw import HostedAdamW
from megazpp.host_states.memory import HostedUnit, HostMemory
from megazpp.host_states.reduce import HostedRingReduce, HostedSum, HostedTwoHopReduce


class HostStates(HostMemory):
    """Fp32 weights, moments and gradients in host memory; see memory.py."""

    unit, reduce, two_hop_reduce, lone_reduce = HostedUnit, HostedRingReduce, HostedTwoHopReduce, HostedSum

    def adamw(self, groups: list[dict[str, Any]], **settings: Any) -> HostedAdamW:
        """Build AdamW for these parameter groups; see `DeviceStates.adamw`."""
        return HostedAdamW(groups, self, **settings)
