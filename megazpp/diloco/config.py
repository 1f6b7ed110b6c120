"""Flags of DiLoCo (local steps in replica groups), and the plan that a run derives from them.

A replica group is one or several nodes with their own copy of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from megazpp.base.flags import check_below_one, check_not_negative, check_positive, check_words, flag
from megazpp.kernels.formats import BlockFormat
from megazpp.run.arguments import FeatureConfig
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import local_domains
from megazpp.topology.plan import numbers
from megazpp.zero.config import ZeroConfig
from megazpp.zero.plan import DIFFERENCE_BLOCK, GRADIENT_BLOCK, block_format

T = TypeVar("T")

RUN_DEPENDENT = ("diloco_outer_lr", "diloco_outer_momentum")  # flags whose defaults depend on the run
# The default is outer momentum if a run has at least FEWEST synchronizations, and at least SHORTEST steps between two.
FEWEST, SHORTEST = 200, 10


@dataclass(frozen=True, kw_only=True)
class DilocoConfig(FeatureConfig):
    """DiLoCo.

    Local steps in replica groups, for links that are too slow for a synchronization per step. This is another
    algorithm than data-parallel training.

    A replica group is one or several nodes that train as usual. Every --diloco-steps steps the groups synchronize their
    weights, of which checkpoints consist. Validation uses the copy of them that each group has received.
    """

    diloco_steps: int | None = flag(None, "steps between two synchronizations of the replica groups; enables DiLoCo")
    diloco_replica_groups: int | None = flag(
        None,
        "number of replica groups, each with the same number of nodes (default: one group per node)",
    )
    diloco_outer_lr: float | None = flag(
        None,
        f"outer learning rate (default: 0.4; 1 with fewer than {FEWEST} planned synchronizations or --diloco-steps "
        f"below {SHORTEST})",
    )
    diloco_outer_momentum: float | None = flag(
        None, "outer Nesterov momentum (default: 0.9; 0 in the cases where the default outer learning rate is 1)"
    )
    diloco_fragments: int = flag(
        1, "number of parts of the model that synchronize in turn within --diloco-steps; 1 is plain DiLoCo"
    )
    diloco_fragment_sync_delay: int = flag(
        0, "training steps that overlap a synchronization, before its result is merged"
    )
    diloco_fragment_update_alpha: float | None = flag(
        None,
        "share of a replica group's own weights in a merge (default: 0, or 0.5 with --diloco-fragment-sync-delay)",
    )
    diloco_weight_bits: Literal[16, 8, 4] = flag(
        4, "bits per element of the changes of outer weights between replica groups; 16: compute dtype, not quantized"
    )
    diloco_gradient_bits: Literal[16, 8, 4] = flag(
        4, "bits per element of outer gradients between replica groups; 16: gradient dtype, not quantized"
    )

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "diloco_steps", "diloco_outer_lr", "diloco_fragments")
        check_not_negative(self, "diloco_fragment_sync_delay")
        check_below_one(self, "diloco_outer_momentum", "diloco_fragment_update_alpha")
        if self.diloco_replica_groups is not None and self.diloco_replica_groups < 2:
            raise ValueError(
                f"--diloco-replica-groups {self.diloco_replica_groups}: at least 2 replica groups are needed"
            )
        steps = self.diloco_steps
        if steps is None:
            return
        delay = self.diloco_fragment_sync_delay
        if delay >= steps:
            raise ValueError(f"--diloco-fragment-sync-delay {delay} is not less than --diloco-steps {steps}")
        if steps % self.diloco_fragments:
            raise ValueError(f"--diloco-steps {steps} is not divisible by --diloco-fragments {self.diloco_fragments}")

    @property
    def asked(self) -> str:
        """The flag that enables DiLoCo, with its value; "" without DiLoCo."""
        return "" if self.diloco_steps is None else f"--diloco-steps {self.diloco_steps}"

    @property
    def distinguishes_nodes(self) -> bool:
        """True if the flags treat ranks of different nodes differently, as DiLoCo does."""
        return bool(self.asked)

    @property
    def resumed_fields(self) -> tuple[str, ...]:
        """The fields that a resumed run keeps: outer learning rate and momentum, if DiLoCo is enabled.

        Their defaults depend on the number of planned synchronizations, which may differ in the resumed run.
        """
        return RUN_DEPENDENT if self.asked else ()

    def number(self, cluster: Cluster) -> int:
        """Return the number of replica groups on a cluster; 1 without DiLoCo."""
        return (self.diloco_replica_groups or cluster.num_local_domains) if self.asked else 1


def diloco_every(steps: int) -> DilocoConfig:
    """Return the flags of DiLoCo with a synchronization every `steps` steps and defaults otherwise."""
    return DilocoConfig(diloco_steps=steps)


class DilocoPlan(NamedTuple):
    """The flags with all defaults resolved, and the block formats of messages (None: not quantized)."""

    steps: int  # H: steps between two synchronizations of a fragment
    fragments: int  # parts of the model that synchronize in turn
    delay: int  # steps between sending a fragment and merging the result
    merge_alpha: float  # alpha: share of a group's own weights in a merge
    outer_lr: float  # eta
    outer_momentum: float  # mu
    gradients: BlockFormat | None  # block format of outer gradients
    weights: BlockFormat | None  # block format of the differences of outer weights
    feedback: bool  # whether rounding errors of outer gradients are fed back
    tokens: float  # tokens of one replica group between two synchronizations, if the loss mask excludes none
    notices: tuple[str, ...] = ()  # notes for the log

    def sends_at(self, iteration: int) -> int | None:
        """Return the fragment whose synchronization starts after `iteration`, or None."""
        turn, rest = divmod(iteration, self.steps // self.fragments)
        return None if rest else (turn - 1) % self.fragments

    def in_fragments(self, units: Sequence[T]) -> list[list[T]]:
        """Distribute sharding units, in the model's order, round robin over the fragments."""
        return [list(units[part :: self.fragments]) for part in range(self.fragments)]

    @property
    def hiding_steps(self) -> int:
        """Number of steps that can hide a fragment's messages.

        It is the delay, or the steps until the next fragment's messages if these are fewer.
        """
        return min(self.delay, self.steps // self.fragments)

    def describe(self) -> str:
        """Return one line that describes the plan, for the log."""
        gradients, weights = (f"int{fmt.bits}" if fmt else "not quantized" for fmt in (self.gradients, self.weights))
        parts = f" in {self.fragments} fragments" if self.fragments > 1 else ""
        late = f", merged {self.delay} steps later with alpha {self.merge_alpha:g}" if self.delay else ""
        return (
            f"replica groups synchronize every {self.steps} steps{parts}{late}: outer lr {self.outer_lr:g}, momentum "
            f"{self.outer_momentum:g}, gradients {gradients}, weights {weights}"
        )


def count_replica_groups(config: DilocoConfig, cluster: Cluster, *, verify_interval: int | None) -> int:
    """Check the flags against the cluster, and return the number of replica groups.

    Args:
        config: the flags.
        cluster: nodes and ranks of the job.
        verify_interval: value of --zero-verify-interval.
    Raises:
        ValueError: the cluster has one node, the groups do not divide the nodes, or --zero-verify-interval is given.
    """
    if config.asked and cluster.num_local_domains == 1:
        raise ValueError(
            f"{config.asked} needs at least 2 nodes, and there is 1. To try it on one machine: --emulate-nodes 2"
        )
    if config.asked and verify_interval is not None:
        raise ValueError(
            f"--zero-verify-interval {verify_interval} compares weights over all ranks, but with --diloco-steps the "
            "weights of replica groups differ"
        )
    groups, domains = config.number(cluster), cluster.num_local_domains
    if domains % groups:
        fitting = [count for count in range(2, domains + 1) if not domains % count]
        raise ValueError(
            f"--diloco-replica-groups {groups} does not divide the {domains} {local_domains(cluster)}; "
            f"{numbers(fitting)} would fit"
        )
    return groups


def plan_diloco(
    config: DilocoConfig, zero: ZeroConfig, *, iterations: int, num_layers: int, tokens_per_step: float
) -> DilocoPlan | None:
    """Resolve the flags for a run; None without --diloco-steps.

    Args:
        config: the flags of DiLoCo.
        zero: the ZeRO flags; --zero-error-feedback also applies to outer gradients.
        iterations: optimizer steps of the run.
        num_layers: layers of the model.
        tokens_per_step: tokens per step of one replica group.
    Raises:
        ValueError: there are more fragments than layers, or the states are in host memory.
    """
    steps = config.diloco_steps
    if steps is None:
        return None
    if zero.optimizer_cpu_offload:
        raise ValueError(f"--optimizer-cpu-offload does not support --diloco-steps {steps}")
    if config.diloco_fragments > num_layers:
        raise ValueError(f"--diloco-fragments {config.diloco_fragments} is more than --num-layers {num_layers}")
    # defaults of the outer optimizer
    few, short = iterations // steps < FEWEST, steps < SHORTEST
    plain = few or short  # outer momentum then increased the loss of small models
    lr, momentum = config.diloco_outer_lr, config.diloco_outer_momentum
    notices = []
    if plain and momentum is None:
        why = f"fewer than {FEWEST} synchronizations are planned ({iterations // steps})"
        if not few:
            why = f"replica groups synchronize after fewer than {SHORTEST} steps (--diloco-steps {steps})"
        notices.append(f"{why}: outer momentum is 0" + (" and the outer learning rate 1" if lr is None else ""))
    alpha = config.diloco_fragment_update_alpha
    return DilocoPlan(
        steps=steps,
        fragments=config.diloco_fragments,
        delay=config.diloco_fragment_sync_delay,
        merge_alpha=(0.5 if config.diloco_fragment_sync_delay else 0.0) if alpha is None else alpha,
        outer_lr=(1.0 if plain else 0.4) if lr is None else lr,
        outer_momentum=(0.0 if plain else 0.9) if momentum is None else momentum,
        gradients=block_format(config.diloco_gradient_bits, GRADIENT_BLOCK),
        weights=block_format(config.diloco_weight_bits, DIFFERENCE_BLOCK),
        feedback=zero.zero_error_feedback,
        tokens=tokens_per_step * steps,
        notices=tuple(notices),
    )
