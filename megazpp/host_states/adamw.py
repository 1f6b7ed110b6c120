"""AdamW for parameters whose fp32 weights and moments are in host memory (--optimizer-cpu-offload, memory.py).

Each sharding unit's weights, gradients and moments are uploaded to the device in turn, where torch's fused kernel
updates them. The results are bit-identical to the results of `ShardedAdamW`, and the checkpoints have the same format.
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
    """AdamW with --optimizer-cpu-offload: `step` queues one update per sharding unit, which overlaps the next forward.

    Args:
        groups: parameter groups, as for `torch.optim.AdamW`.
        host: fp32 weights, gradients and moments of the parameters in host memory.
        settings: further arguments of `torch.optim.AdamW`, such as `lr` and `betas`.
    """

    def __init__(self, groups: list[dict[str, Any]], host: HostMemory, **settings: Any) -> None:
        super().__init__(groups, **settings)
        numbers = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        # For each unit with trained parameters: its states in host memory; the indices of its trained parameters, by
        # the index of their parameter group; and for each trained parameter its dict of `step` and two moments
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
        """Load AdamW's state, the moments into host memory; a parameter without an entry in `state_dict` gets zeros."""
        super().load_state_dict(state_dict)
        self._adopt()

    @torch.no_grad()
    def _adopt(self) -> None:
        """Copy the moments in `self.state` to host memory, and make `self.state` refer to that memory.

        The step counts are copied to this optimizer's tensors on the device. Parameters without an entry in
        `self.state` get zeros.
        """
        for shard, _, states in self._units:
            for parameter, hosted in zip(shard.parameters, states, strict=True):
                given = self.state.get(parameter)
                for name, value in hosted.items():
                    if given:
                        local(value).copy_(local(given[name]))
                    else:
                        local(value).zero_()
                self.state[parameter] = hosted

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        iteration: int = 1,
    ) -> None:
        """Queue the update of every sharding unit that has gradients; see `DeviceOptimizer.step` for the arguments.

        The updates run during the next forward, in which a unit's gather waits for this unit's update.
        """
        assert closure is None, "HostedAdamW.step does not support a closure: call backward before the step"
        # Copy the groups: the next training step sets their learning rates, possibly before these updates have run.
        groups = [dict(group) for group in self.param_groups]
        for shard, places_of, states in self._units:
            if not shard.has_sum:
                continue

            def apply(
                staged: Staged,
                places_of: dict[int, list[int]] = places_of,
                states: list[dict[str, Any]] = states,
            ) -> None:
                """Update the device copies of a unit's weights and moments by AdamW, one parameter group at a time."""
                for scalar in (grad_scale, found_inf):
                    # The memory of `scalar` belongs to the compute stream, which must not reuse this memory before this
                    # update, on another stream, has read `scalar`.
                    if scalar is not None and scalar.is_cuda:
                        scalar.record_stream(torch.cuda.current_stream())
                for number, places in places_of.items():
                    chosen = Staged(*([tensors[place] for place in places] for tensors in staged))
                    steps = [states[place]["step"] for place in places]
                    fused_adamw_(groups[number], *chosen, steps, grad_scale=grad_scale, found_inf=found_inf)

            shard.update(apply)
