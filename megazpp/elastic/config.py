"""Flags of elastic DiLoCo."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megazpp.base.flags import check_not_negative, check_positive, check_words, flag
from megazpp.diloco.config import DilocoConfig
from megazpp.elastic.rounds import Rules
from megazpp.elastic.wire import LOOPBACK, parse_address, read_secret
from megazpp.run.arguments import FeatureConfig, RunConfig

if TYPE_CHECKING:
    from megazpp.run.checks import RunPlan


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(FeatureConfig):
    """Elastic DiLoCo.

    Each replica group is a job of its own. Groups may start, end and fall behind, and the others continue. A small
    program, tools/coordinate.py, decides which groups take part and distributes the samples. --diloco-replica-groups is
    the nominal number of groups. It divides the global batch.
    """

    diloco_coordinator: str | None = flag(
        None, "HOST:PORT of tools/coordinate.py; this job is then one of the replica groups", metavar="HOST:PORT"
    )
    diloco_group: str | None = flag(
        None, "name of this job's replica group (default: host name of rank 0)", needs="--diloco-coordinator"
    )
    diloco_secret_file: str | None = flag(
        None,
        "file with the secret of the run, readable only by its owner (default: none, if the coordinator is on "
        "127.0.0.1)",
        needs="--diloco-coordinator",
    )
    diloco_quorum: int | None = flag(
        None,
        "whole intervals that must have arrived before --diloco-grace begins (default: half of the live groups)",
        needs="--diloco-coordinator",
    )
    diloco_grace: float | None = flag(
        None,
        "seconds to wait for the other groups after the quorum (default: 3 % of an interval, at least 1)",
        needs="--diloco-coordinator",
    )
    diloco_wait_for_all: bool = flag(
        False,
        "wait for all live groups at every synchronization, as DiLoCo without --diloco-coordinator does; results are "
        "then reproducible",
        needs="--diloco-coordinator",
    )
    diloco_min_groups: int = flag(
        1, "number of live groups below which the others wait instead of training on", needs="--diloco-coordinator"
    )
    diloco_late_factor: float = flag(
        0.5, "weight of a contribution for each version that it is late", needs="--diloco-coordinator"
    )
    diloco_listen: str | None = flag(
        None,
        "host on which ranks serve messages to other groups (default: this side of the connection to the coordinator)",
        needs="--diloco-coordinator",
    )
    diloco_advertise: str | None = flag(
        None, "host at which other groups reach this one (default: --diloco-listen)", needs="--diloco-coordinator"
    )

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "diloco_quorum", "diloco_min_groups")
        check_not_negative(self, "diloco_grace", "diloco_late_factor")
        if self.diloco_wait_for_all and self.diloco_grace is not None:
            raise ValueError(f"--diloco-wait-for-all and --diloco-grace {self.diloco_grace:g}: give only one")
        if self.diloco_late_factor > 1:
            raise ValueError(f"--diloco-late-factor {self.diloco_late_factor:g} is more than 1")
        if self.diloco_coordinator is None:
            return
        host = parse_address(self.diloco_coordinator, "--diloco-coordinator").host
        if self.diloco_secret_file is None and host not in LOOPBACK:
            raise ValueError(
                f"--diloco-coordinator {self.diloco_coordinator} is not on this machine, and needs --diloco-secret-file"
            )

    @property
    def secret(self) -> bytes:
        """The secret of the run, which all of its groups and the coordinator share, read from its file."""
        return read_secret(self.diloco_secret_file, "--diloco-secret-file")


class ElasticPlan(NamedTuple):
    """The part of elastic DiLoCo's flags that a run plans with."""

    rules: Rules
    notices: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return one line that describes the plan, for the log."""
        rules = self.rules
        grace = "3 % of an interval" if rules.grace is None else f"{rules.grace:g} s"
        quorum = "half of the live groups" if rules.quorum is None else f"{rules.quorum} groups"
        return f"elastic: one of nominally {rules.groups} groups; a version waits {grace} for more than {quorum}"


def count_jobs(config: RunConfig) -> int:
    """Return the nominal number of replica groups, which are jobs; 1 without --diloco-coordinator.

    Raises:
        ValueError: a flag that --diloco-coordinator needs is missing.
    """
    flags, diloco = config.section(ElasticConfig), config.section(DilocoConfig)
    if flags.diloco_coordinator is None:
        return 1
    needed = {"--diloco-steps": diloco.diloco_steps, "--diloco-replica-groups": diloco.diloco_replica_groups}
    if missing := [name for name, value in needed.items() if value is None]:
        raise ValueError(f"--diloco-coordinator {flags.diloco_coordinator} needs {' and '.join(missing)}")
    assert diloco.diloco_replica_groups is not None
    return diloco.diloco_replica_groups


def plan_elastic(config: RunConfig, plan: RunPlan) -> ElasticPlan | None:
    """Check the flags against all others, and return the plan; None without --diloco-coordinator.

    Raises:
        ValueError: a flag is not supported together with --diloco-coordinator.
    """
    flags, diloco = config.section(ElasticConfig), config.section(DilocoConfig)
    if flags.diloco_coordinator is None:
        return None
    asked = f"--diloco-coordinator {flags.diloco_coordinator}"
    assert diloco.diloco_steps is not None  # see `count_jobs`
    minutes = config.stop.exit_duration_in_mins
    refused: Mapping[str, object] = {
        f"--exit-interval {config.stop.exit_interval} (send SIGTERM to a group to end it)": config.stop.exit_interval,
        f"--exit-duration-in-mins {minutes} (send SIGTERM to a group to end it)": minutes,
        "--train-samples (use --train-iters)": config.batches.train_samples,
        "--rampup-batch-size": config.batches.rampup_batch_size,
        "--loss-spike-action rewind": config.anomalies.loss_spike_action == "rewind",
        "--async-save": config.checkpoint.async_save,
        "--hsdp": config.parallel.hsdp,
        "--zero-stage 0": config.zero.stage == 0,
        "--expert-model-parallel-size above 1": plan.layout.ep > 1,
        "--moe-router-enable-expert-bias": config.model.moe_router_enable_expert_bias,
    }
    if found := [name for name, given in refused.items() if given]:
        raise ValueError(f"{asked} does not support {', '.join(found)}")
    _ = flags.secret  # raises ValueError if the file cannot be used
    rules = Rules(
        groups=count_jobs(config),
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
