"""Registration of elastic DiLoCo as an optional feature of pretraining."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazpp.diloco.config import DilocoPlan
from megazpp.elastic.config import ElasticConfig, ElasticPlan, count_jobs, plan_elastic
from megazpp.run.arguments import RunConfig
from megazpp.run.feature import Attached, Feature, TrainerParts

if TYPE_CHECKING:
    from megazpp.run.checks import RunPlan


class Elastic(Feature):
    """Elastic DiLoCo: the job is one of several replica groups, which may start, end and fall behind independently."""

    config = ElasticConfig

    def num_jobs(self, config: RunConfig) -> int:
        """Return the nominal number of replica groups, each of which is a job; 1 without --diloco-coordinator."""
        return count_jobs(config)

    def check(self, config: RunConfig, plan: RunPlan) -> ElasticPlan | None:
        """Check the flags, and return the plan of elastic DiLoCo; None without --diloco-coordinator."""
        return plan_elastic(config, plan)

    def as_one_job(self, config: RunConfig) -> RunConfig:
        """Return the config of the same run as one job that contains all replica groups, without a coordinator."""
        return config.with_section(ElasticConfig())

    def attach(self, parts: TrainerParts) -> Attached:
        """Add elastic DiLoCo to a trainer: outer weights, their checkpoint state, and synchronization between groups.

        Without --diloco-coordinator, change nothing.
        """
        diloco = parts.plan.of(DilocoPlan)
        if parts.plan.of(ElasticPlan) is None or diloco is None:
            return Attached()
        from megazpp.elastic.loop import ElasticLoop
        from megazpp.elastic.state import elastic_parts

        loop = ElasticLoop(parts)
        parts.states = elastic_parts(parts.states, loop.outer, loop, parts.built.model)
        parts.flags |= {"diloco_outer_lr": diloco.outer_lr, "diloco_outer_momentum": diloco.outer_momentum}
        return Attached(
            synchronize=loop.after_step,
            begin=loop.begin,
            loader=loop.loader,
            schedules_actions=True,
            evaluation_weights=loop.outer.evaluation_weights,
            wait=loop.close,
        )


FEATURE = Elastic()
