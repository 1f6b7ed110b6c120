"""Registration of elastic DiLoCo as an optional feature of pretraining."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from megazpp.base.address import parse_address
from megazpp.diloco.config import DilocoPlan
from megazpp.elastic.agent import Agent
from megazpp.elastic.config import ElasticConfig, ElasticPlan, count_jobs, plan_elastic
from megazpp.elastic.rounds import Record
from megazpp.run.arguments import RunConfig
from megazpp.run.feature import Attached, Feature, TrainerParts

if TYPE_CHECKING:
    from megazpp.run.checks import RunPlan

# Flags that may differ between the groups of a run
OF_THE_GROUP = ("--diloco-coordinator", "--diloco-group", "--diloco-listen", "--diloco-advertise", "--master-port")


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
        plan, diloco, run = parts.plan.of(ElasticPlan), parts.plan.of(DilocoPlan), parts.run
        if plan is None:
            return Attached()
        from megazpp.elastic.loop import ElasticLoop
        from megazpp.elastic.outer import WholeOuter
        from megazpp.elastic.state import elastic_parts
        from megazpp.parallel.dims import open_axis
        from megazpp.parallel.worker import seed_everything
        from megazpp.training.objective import LanguageModelLoss

        assert diloco is not None
        assert isinstance(parts.objective, LanguageModelLoss), "check_post_training refuses other objectives"
        flags, axis, dims = parts.config.section(ElasticConfig), open_axis(run.dims), run.dims
        outer = WholeOuter(
            parts.built.sharding,
            diloco,
            parts.config.precision,
            num_groups=plan.rules.groups,
            late_factor=flags.diloco_late_factor,
        )
        name, incarnation = axis.share_object((flags.diloco_group or socket.gethostname(), secrets.token_hex(8)))
        assert flags.diloco_coordinator is not None
        coordinator = parse_address(flags.diloco_coordinator, "--diloco-coordinator")

        def connect(version: int, commit_id: str, snapshot: Callable[[], tuple[Record, bytes]]) -> Agent:
            """Start the agent of this rank, which connects to the coordinator.

            Args:
                version: version of this rank's outer weights.
                commit_id: id of this version.
                snapshot: function that makes a snapshot of the outer weights for other groups.
            """
            about: Record = {"incarnation": incarnation, "facts": _facts(parts), "rules": list(plan.rules)}
            return Agent(
                coordinator,
                flags.secret,
                group=name,
                rank=axis.rank,
                hello=about | {"version": version, "id": commit_id, "saves": parts.folder_id},
                listen=flags.host("diloco_listen"),
                advertise=flags.host("diloco_advertise"),
                most_bytes=outer.most_bytes,
                snapshot=snapshot,
                stopped=parts.stopped,
                say=run.log,
            )

        def seed(slot: int) -> None:
            """Seed dropout with the seeds that replica group `slot` has in DiLoCo within one job."""
            given, rank = parts.config.launch.seed, slot * dims.data_size * dims.cp.size + dims.dropout_rank
            seed_everything(given, data_rank=rank, tp_rank=dims.tp.rank)
            if (generator := parts.built.model.settings.generator) is not None:
                generator.seed(given, data_rank=rank)

        loop = ElasticLoop(
            outer,
            plan.rules,
            parts.plan.batches,
            parts.objective,
            axis,
            dims.counter,
            connect=connect,
            save=parts.save,
            validate=parts.validate,
            seed=seed,
            stopped=parts.stopped,
            say=run.log,
        )
        parts.states = elastic_parts(parts.states, outer, loop, parts.built.model)
        parts.flags |= {"diloco_outer_lr": diloco.outer_lr, "diloco_outer_momentum": diloco.outer_momentum}
        return Attached(
            synchronize=loop.after_step,
            begin=loop.begin,
            loader=loop.loader,
            schedules_actions=True,
            evaluation_weights=outer.evaluation_weights,
            wait=loop.close,
        )


def _facts(parts: TrainerParts) -> dict[str, str]:
    """Return what must be equal in all groups of an elastic run, by flag or description.

    These are the flags that are not in OF_THE_GROUP, the tokenizer, the data, and the layout of a group's ranks.
    """
    from megazpp.run.start import facts_of_data, facts_of_flags

    facts = facts_of_flags(parts.config.parts) | facts_of_data(parts.tokenizer, parts.samples)
    layout = parts.plan.layout
    facts["the layout of the ranks"] = str({name: layout.axis_size(name) for name in layout.coordinates})
    return {name: value for name, value in facts.items() if name not in OF_THE_GROUP}


FEATURE = Elastic()
