"""Command-line flags of elastic DiLoCo, their checks, and the rules of a run that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megazpp.base.address import is_loopback, parse_address, parse_host
from megazpp.base.flags import flag, spelling
from megazpp.diloco.config import DilocoConfig
from megazpp.elastic.rounds import Rules
from megazpp.elastic.wire import read_secret
from megazpp.run.arguments import FeatureConfig, RunConfig

if TYPE_CHECKING:
    from megazpp.run.checks import RunPlan


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(FeatureConfig):
    """Elastic DiLoCo.

    Each replica group is a separate job. A group may start, end or fall behind while the other groups continue. A small
    program, tools/coordinate.py, decides which groups take part and assigns training samples to them.
    --diloco-replica-groups gives the nominal number of groups, G: each group trains 1 / G of the global batch.

    Attributes:
        diloco_coordinator: HOST:PORT of tools/coordinate.py; this job is then one of the run's replica groups.
        diloco_group: name of this job's replica group (default: host name of rank 0).
        diloco_secret_file: file with the secret of the run, readable only by its owner (default: none, if the
            coordinator is on 127.0.0.1).
        diloco_quorum: number of groups whose whole intervals must have arrived before --diloco-grace begins (default:
            half of the live groups).
        diloco_grace: seconds that a synchronization waits for more groups after --diloco-quorum (default: 3 % of an
            interval, at least 1).
        diloco_wait_for_all: wait for all live groups at every synchronization, as DiLoCo without --diloco-coordinator
            does; results are then reproducible.
        diloco_min_groups: number of live groups below which the others wait instead of training on.
        diloco_late_factor: factor for the weight of a group's contribution for each synchronization that it is late.
        diloco_listen: host on which ranks serve messages to other groups (default: local address of the coordinator's
            connection).
        diloco_advertise: host at which other groups reach this one (default: --diloco-listen).
    """

    diloco_coordinator: str | None = flag(None, metavar="HOST:PORT")
    diloco_group: str | None = flag(None, needs="--diloco-coordinator")
    diloco_secret_file: str | None = flag(None, needs="--diloco-coordinator")
    diloco_quorum: int | None = flag(None, needs="--diloco-coordinator", must_be="positive")
    diloco_grace: float | None = flag(None, needs="--diloco-coordinator", must_be="not negative")
    diloco_wait_for_all: bool = flag(False, needs="--diloco-coordinator")
    diloco_min_groups: int = flag(1, needs="--diloco-coordinator", must_be="positive")
    diloco_late_factor: float = flag(0.5, needs="--diloco-coordinator", must_be="not negative")
    diloco_listen: str | None = flag(None, needs="--diloco-coordinator")
    diloco_advertise: str | None = flag(None, needs="--diloco-coordinator")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.diloco_wait_for_all and self.diloco_grace is not None:
            raise ValueError(
                f"--diloco-wait-for-all waits without a limit, and --diloco-grace {self.diloco_grace:g} is a limit in "
                "seconds: give only one"
            )
        if self.diloco_late_factor > 1:
            raise ValueError(
                f"--diloco-late-factor {self.diloco_late_factor:g} is more than 1: give a factor from 0 (late "
                "contributions count nothing) to 1 (they count fully)"
            )
        for name in ("diloco_listen", "diloco_advertise"):
            self.host(name)  # called for its ValueError
        if self.diloco_coordinator is None:
            return
        host, port = parse_address(self.diloco_coordinator, "--diloco-coordinator")
        if port == 0:
            raise ValueError(
                f"--diloco-coordinator {self.diloco_coordinator}: 0 is no port of a coordinator; give the port that "
                "tools/coordinate.py prints"
            )
        if self.diloco_secret_file is None and not is_loopback(host):
            raise ValueError(
                f"--diloco-coordinator {self.diloco_coordinator} is not on this machine, and needs "
                "--diloco-secret-file: give the file with the secret with which tools/coordinate.py was started"
            )

    def host(self, name: str) -> str | None:
        """Return the host that the flag of the field `name` gives, without the brackets of an IPv6 address."""
        value = getattr(self, name)
        return None if value is None else parse_host(value, spelling(self, name))

    @property
    def secret(self) -> bytes:
        """The secret of the run, which all of its groups and the coordinator share, read from its file."""
        return read_secret(self.diloco_secret_file, "--diloco-secret-file")


class ElasticPlan(NamedTuple):
    """The plan of elastic DiLoCo for a run, derived from the flags before workers start."""

    rules: Rules  # the settings that all groups of the run have in common
    notices: tuple[str, ...] = ()  # lines to show the user when the run starts; elastic DiLoCo has none

    def describe(self) -> str:
        """Return a log line: the nominal number of groups, and how long a synchronization waits for slow groups."""
        rules = self.rules
        grace = "3 % of an interval" if rules.grace is None else f"{rules.grace:g} s"
        quorum = "half of the live groups" if rules.quorum is None else f"{rules.quorum} groups"
        return (
            f"elastic: this job is one of nominally {rules.groups} groups; after {quorum} have arrived, a "
            f"synchronization waits {grace} for more"
        )


def count_jobs(config: RunConfig) -> int:
    """Return the nominal number of elastic DiLoCo's replica groups, each of which is a job.

    Without --diloco-coordinator the run has 1 job.

    Raises:
        ValueError: --diloco-coordinator is given without --diloco-steps or without --diloco-replica-groups.
    """
    flags, diloco = config.section(ElasticConfig), config.section(DilocoConfig)
    if flags.diloco_coordinator is None:
        return 1
    needed = {"--diloco-steps": diloco.diloco_steps, "--diloco-replica-groups": diloco.diloco_replica_groups}
    if missing := [name for name, value in needed.items() if value is None]:
        raise ValueError(
            f"--diloco-coordinator {flags.diloco_coordinator} needs {' and '.join(missing)}: give all groups the same "
            "number of steps between synchronizations, and the same nominal number of groups"
        )
    assert diloco.diloco_replica_groups is not None
    return diloco.diloco_replica_groups


def plan_elastic(config: RunConfig, plan: RunPlan) -> ElasticPlan | None:
    """Check the flags of elastic DiLoCo against all other flags of the run, and return its plan.

    Args:
        config: all flags of the run.
        plan: the run's layout and batch sizes.

    Returns:
        the rules of the run; None without --diloco-coordinator.

    Raises:
        ValueError: a flag is not supported together with --diloco-coordinator, or the secret file cannot be used.
    """
    flags, diloco = config.section(ElasticConfig), config.section(DilocoConfig)
    if flags.diloco_coordinator is None:
        return None
    asked = f"--diloco-coordinator {flags.diloco_coordinator}"
    assert diloco.diloco_steps is not None  # `count_jobs` has refused a run without it
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
        raise ValueError(f"{asked} does not support {', '.join(found)}: leave this out, or train as one job")
    _ = flags.secret  # raises a ValueError before workers start if the file with the secret cannot be used
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
