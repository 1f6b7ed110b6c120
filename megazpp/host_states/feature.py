"""Registers training states in host memory as an optional feature; `ZeroConfig` has its flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazpp.run.arguments import RunConfig
from megazpp.run.feature import Feature

if TYPE_CHECKING:
    from megazpp.host_states.states import HostStates
    from megazpp.run.checks import RunPlan


class HostStatesFeature(Feature):
    """Keeps fp32 weights, moments and gradients in host memory with --optimizer-cpu-offload."""

    def check(self, config: RunConfig, plan: RunPlan) -> None:
        """Raise a ValueError that names the flags that --optimizer-cpu-offload does not support."""
        refused = {
            f"--optimizer {config.optimizer.optimizer}": config.optimizer.optimizer != "adam",
            f"--optimizer-backend {config.optimizer.optimizer_backend}": config.optimizer.optimizer_backend != "torch",
            "--async-save": config.checkpoint.async_save,
            "--log-num-zeros-in-grad": config.tracking.log_num_zeros_in_grad,
        }
        given = [name for name, refuses in refused.items() if refuses]
        if config.zero.optimizer_cpu_offload and given:
            raise ValueError(f"--optimizer-cpu-offload does not support {', '.join(given)}")

    def states(self, config: RunConfig) -> type[HostStates] | None:
        """Return the class of the states in host memory; None without --optimizer-cpu-offload."""
        if not config.zero.optimizer_cpu_offload:
            return None
        from megazpp.host_states.states import HostStates

        return HostStates


FEATURE = HostStatesFeature()
