"""AdamW of parameters whose states are in host memory (--optimizer-cpu-offload, memory.py).

The sharding units pass through the device one after the other, where torch's fused kernel updates them. The results are
bit-identical to `ShardedAdamW`, and the checkpoints are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from megazpp.host_states.memory import HostMemory, HostShard, Staged
from megazpp.optim.optimizer import ShardedAdamW, fused_adamw_
from megazpp.tensor_parallel.parameters import local


class HostedAdamW(ShardedAdamW):
    """AdamW that queues the updates of the units, which run beside the next forward.

    Args:
        groups: parameter groups.
        host: the states of the parameters.
        settings: arguments of `torch.optim.AdamW`.
    """

    def __init__(self, groups: list[dict[str, Any]], host: HostMemory, **settings: Any) -> None:
        super().__init__(groups, **settings)
        numbers = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        # per unit: its shard, the places of its trained parameters by the number of their group, and their states
        self._units = list[tuple[HostShard, dict[int, list[int]], list[dict[str, Any]]]]()
        for shard in host.shards:
            if parameters := shard.parameters:
                steps = [torch.zeros((), dtype=torch.float32, device=host.device) for _ in parameters]
                moments = zip(steps, *map(shard.views, shard.moments), strict=True)
                states = [dict(zip(("step", "exp_avg", "exp_avg_sq"), of, strict=True)) for of in moments]
                places = defaultdict[int, list[int]](list)
                for place, parameter in enumerate(parameters):
                    places[numbers[id(parameter)]].append(place)
                self._units.append((shard, places, states))
        self._adopt()

    def load_state_dict(self, state_dict: Any) -> None:
        """Copy the states into host memory. A parameter without a state gets zeros."""
        super().load_state_dict(state_dict)
        self._adopt()

    @torch.no_grad()
    def _adopt(self) -> None:
        """Copy the states in `self.state` to host memory, and make them views of it."""
        for shard, _, states in self._units:
            for parameter, own in zip(shard.parameters, states, strict=True):
                given = self.state.get(parameter)
                for name, value in own.items():
                    if given:
                        local(value).copy_(local(given[name]))
                    else:
                        local(value).zero_()
                self.state[parameter] = own

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        iteration: int = 1,
    ) -> None:
        """Queue the update of every unit that has gradients; see `DeviceOptimizer.step`."""
        assert closure is None, "a closure is not supported"
        groups = [dict(group) for group in self.param_groups]  # the next step sets rates while these updates run
        for shard, places_of, states in self._units:
            if not shard.has_sum:
                continue

            def apply(
                staged: Staged,
                places_of: dict[int, list[int]] = places_of,
                states: list[dict[str, Any]] = states,
            ) -> None:
                """Update the parameters of each group."""
                for scalar in (grad_scale, found_inf):
                    if scalar is not None and scalar.is_cuda:  # the compute stream frees it while this stream reads it
                        scalar.record_stream(torch.cuda.current_stream())
                for number, places in places_of.items():
                    chosen = Staged(*([tensors[place] for place in places] for tensors in staged))
                    steps = [states[place]["step"] for place in places]
                    fused_adamw_(groups[number], *chosen, steps, grad_scale=grad_scale, found_inf=found_inf)

            shard.update(apply)
