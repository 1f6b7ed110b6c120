"""Register --optimizer-cpu-offload, training states in host memory, as an optional feature of a run.

`ZeroConfig` has the flags of this feature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazpp.base.program import GIGA
from megazpp.run.arguments import RunConfig
from megazpp.run.feature import Attached, Feature

if TYPE_CHECKING:
    from megazpp.host_states.states import HostStates
    from megazpp.run.checks import RunPlan
    from megazpp.run.trainer import Trainer


class HostStatesFeature(Feature):
    """The feature that keeps fp32 weights, moments and gradients in host memory with --optimizer-cpu-offload."""

    def check(self, config: RunConfig, plan: RunPlan) -> None:
        """Raise a ValueError if --optimizer-cpu-offload is set together with flags that it does not support."""
        refused = {
            f"--optimizer {config.optimizer.optimizer}": config.optimizer.optimizer != "adam",
            f"--optimizer-backend {config.optimizer.optimizer_backend}": config.optimizer.optimizer_backend != "torch",
            "--async-save": config.checkpoint.async_save,
            "--log-num-zeros-in-grad": config.tracking.log_num_zeros_in_grad,
        }
        given = [name for name, refuses in refused.items() if refuses]
        if config.zero.optimizer_cpu_offload and given:
            raise ValueError(f"--optimizer-cpu-offload does not support {', '.join(given)}: leave one of them out")

    def states(self, config: RunConfig) -> type[HostStates] | None:
        """Return the class that keeps a run's training states in host memory; None without --optimizer-cpu-offload."""
        if not config.zero.optimizer_cpu_offload:
            return None
        from megazpp.host_states.states import HostStates

        return HostStates

    def attach(self, trainer: Trainer) -> Attached:
        """Log how much host memory each rank uses with --optimizer-cpu-offload; the returned functions do nothing."""
        if trainer.run.config.zero.optimizer_cpu_offload:
            from megazpp.host_states.memory import HostMemory

            states = trainer.parts.built.sharding.states
            assert isinstance(states, HostMemory)
            trainer.run.context.log(f"states in host memory: {states.num_bytes / GIGA:.3g} GB per rank")
        return Attached()


FEATURE = HostStatesFeature()
