"""`HostStates`: training states in host memory, with the reduce-scatters and the optimizer that use this memory."""

from __future__ import annotations

from typing import Any

from megazpp.host_states.adamw import HostedAdamW
from megazpp.host_states.memory import HostedUnit, HostMemory
from megazpp.host_states.reduce import HostedRingReduce, HostedSum, HostedTwoHopReduce


class HostStates(HostMemory):
    """The fp32 weights, moments and gradients of a run in host memory (--optimizer-cpu-offload); see memory.py."""

    unit, reduce, two_hop_reduce, lone_reduce = HostedUnit, HostedRingReduce, HostedTwoHopReduce, HostedSum

    def adamw(self, groups: list[dict[str, Any]], **settings: Any) -> HostedAdamW:
        """Return an AdamW optimizer for `groups`, with moments in host memory; see `DeviceStates.adamw`."""
        return HostedAdamW(groups, self, **settings)
