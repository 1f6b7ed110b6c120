"""Register DiLoCo as an optional feature of pretraining, by the hooks that `run/feature.py` defines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazpp.diloco.config import DilocoConfig, DilocoPlan, count_replica_groups, plan_diloco
from megazpp.run.arguments import RunConfig
from megazpp.run.feature import Attached, Feature
from megazpp.topology.cluster import Cluster

if TYPE_CHECKING:
    from megazpp.run.checks import RunPlan
    from megazpp.run.trainer import Trainer


class Diloco(Feature):
    """The feature DiLoCo: replica groups of nodes train independently and synchronize every --diloco-steps steps."""

    config = DilocoConfig

    def num_replica_groups(self, config: RunConfig, cluster: Cluster) -> int:
        """Return the number of replica groups in this job; see `count_replica_groups` for the checks."""
        flags = config.section(DilocoConfig)
        if config.jobs > 1:
            return 1  # elastic DiLoCo: each replica group is a separate job
        return count_replica_groups(flags, cluster, verify_interval=config.zero.zero_verify_interval)

    def check(self, config: RunConfig, plan: RunPlan) -> DilocoPlan | None:
        """Return the DiLoCo plan of the run, after checks of the flags; None without --diloco-steps."""
        flags, batches, layout = config.section(DilocoConfig), plan.batches, plan.layout
        assert config.model.num_layers is not None
        assert config.data.seq_length is not None
        return plan_diloco(
            flags,
            config.zero,
            iterations=batches.total_iterations,
            num_layers=config.model.num_layers,
            tokens_per_step=batches.global_batch_size * config.data.seq_length / layout.replica_group / config.jobs,
        )

    def attach(self, trainer: Trainer) -> Attached:
        """Prepare a DiLoCo run, and return the functions that the trainer calls during the run.

        The functions synchronize replica groups after steps, evaluate the outer weights, and wait at the end for
        synchronizations in flight. This method replaces the checkpoint parts in `trainer.states` by the parts of a
        DiLoCo run. Without DiLoCo, and for elastic DiLoCo, it changes nothing, and the returned functions do nothing.
        """
        config, plan, context = trainer.run.config, trainer.run.plan.of(DilocoPlan), trainer.run.context
        if plan is None or config.jobs > 1:
            return Attached()
        from megazpp.diloco.loop import EarlyStop, LocalSteps
        from megazpp.diloco.outer import ReplicaGroups
        from megazpp.diloco.state import replica_group_parts

        (model, sharding), dims = trainer.parts.built, context.dims
        replica_groups = ReplicaGroups(sharding, dims, plan, config.precision)
        trainer.states = replica_group_parts(trainer.states, replica_groups, model, trainer.values)
        trainer.flags |= {"diloco_outer_lr": plan.outer_lr, "diloco_outer_momentum": plan.outer_momentum}
        trainer.guard.has_replica_groups = True
        early = EarlyStop(trainer.run.stops, trainer.run.worker)
        return Attached(
            synchronize=LocalSteps(replica_groups, trainer.parts.objective, trainer.guard, dims, early).after_step,
            begin=early.begin,
            evaluation_weights=replica_groups.outer_weights,
            wait=lambda progress: replica_groups.wait(),
        )


FEATURE = Diloco()
