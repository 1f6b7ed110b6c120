"""Registration of elastic DiLoCo as an optional feature of pretraining."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megazpp.diloco.config import DilocoConfig, DilocoPlan
from megazpp.elastic.config import ElasticConfig, ElasticPlan
from megazpp.elastic.rounds import Rules
from megazpp.run.arguments import RunConfig
from megazpp.run.feature import Attached, Feature

if TYPE_CHECKING:
    from megazpp.run.checks import RunPlan
    from megazpp.run.trainer import Trainer


class Elastic(Feature):
    """Elastic DiLoCo: the job is one of several replica groups, which may start, end and fall behind independently."""

    config = ElasticConfig

    def num_jobs(self, config: RunConfig) -> int:
        """Return the nominal number of replica groups, each of which is a job; 1 without --diloco-coordinator.

        Raises:
            ValueError: --diloco-coordinator is given without --diloco-steps or without --diloco-replica-groups.
        """
        flags, diloco = config.section(ElasticConfig), config.section(DilocoConfig)
        if flags.diloco_coordinator is None:
            return 1
        needed = {"--diloco-steps": diloco.diloco_steps, "--diloco-replica-groups": diloco.diloco_replica_groups}
        if missing := [name for name, value in needed.items() if value is None]:
            raise ValueError(
                f"--diloco-coordinator {flags.diloco_coordinator} needs {' and '.join(missing)}: give all groups the "
                "same number of steps between synchronizations, and the same nominal number of groups"
            )
        assert diloco.diloco_replica_groups is not None
        return diloco.diloco_replica_groups

    def check(self, config: RunConfig, plan: RunPlan) -> ElasticPlan | None:
        """Check the flags of elastic DiLoCo against all other flags of the run, and return the plan of elastic DiLoCo.

        Args:
            config: all flags of the run.
            plan: the run's layout and batch sizes.

        Returns:
            the plan, which has the rules of the run; None without --diloco-coordinator.

        Raises:
            ValueError: a flag is not supported together with --diloco-coordinator, or the secret file cannot be used.
        """
        flags, diloco = config.section(ElasticConfig), config.section(DilocoConfig)
        if flags.diloco_coordinator is None:
            return None
        asked = f"--diloco-coordinator {flags.diloco_coordinator}"
        assert diloco.diloco_steps is not None  # `num_jobs` has refused a run without this flag
        steps, minutes = config.stop.exit_interval, config.stop.exit_duration_in_mins
        copies = config.parallel.num_distributed_optimizer_instances
        refused: Mapping[str, object] = {
            f"--exit-interval {steps} (send SIGTERM to a group to end it)": steps,
            f"--exit-duration-in-mins {minutes} (send SIGTERM to a group to end it)": minutes,
            "--train-samples (use --train-iters)": config.batches.train_samples,
            "--rampup-batch-size": config.batches.rampup_batch_size,
            "--async-save": config.checkpoint.async_save,
            "--hsdp": config.parallel.hsdp,
            f"--num-distributed-optimizer-instances {copies}": copies > 1,
            "--zero-stage 0": config.zero.stage == 0,
            "--expert-model-parallel-size above 1": plan.layout.ep > 1,
            "--moe-router-enable-expert-bias": config.model.moe_router_enable_expert_bias,
        }
        if found := [name for name, given in refused.items() if given]:
            raise ValueError(f"{asked} does not support {', '.join(found)}: leave this out, or train as one job")
        _ = flags.secret  # raises a ValueError before workers start if the file with the secret cannot be used
        rules = Rules(
            groups=config.jobs,
            interval=diloco.diloco_steps // diloco.diloco_fragments,
            fragments=diloco.diloco_fragments,
            iterations=plan.batches.total_iterations,
            ranks=plan.layout.cluster.world_size,
            quorum=flags.diloco_quorum,
            grace=math.inf if flags.diloco_wait_for_all else flags.diloco_grace,
            min_groups=flags.diloco_min_groups,
            save_interval=config.checkpoint.save_interval,
            eval_interval=config.evaluation.eval_interval,
        )
        return ElasticPlan(rules)

    def as_one_job(self, config: RunConfig) -> RunConfig:
        """Return the config of the same run as one job that contains all replica groups, without a coordinator."""
        return config.with_section(ElasticConfig())

    def attach(self, trainer: Trainer) -> Attached:
        """Add elastic DiLoCo to a trainer: outer weights, their checkpoint state, and synchronization between groups.

        Without --diloco-coordinator, change nothing.
        """
        plan = trainer.run.plan
        diloco = plan.of(DilocoPlan)
        if plan.of(ElasticPlan) is None or diloco is None:
            return Attached()
        from megazpp.elastic.loop import ElasticLoop
        from megazpp.elastic.state import elastic_parts

        loop = ElasticLoop(trainer)
        trainer.states = elastic_parts(trainer.states, loop.outer, loop, trainer.parts.built.model)
        trainer.flags |= {"diloco_outer_lr": diloco.outer_lr, "diloco_outer_momentum": diloco.outer_momentum}
        return Attached(
            synchronize=loop.after_step,
            begin=loop.begin,
            loader=loop.loader,
            schedules_actions=True,
            evaluation_weights=loop.outer.evaluation_weights,
            wait=loop.close,
        )


FEATURE = Elastic()
