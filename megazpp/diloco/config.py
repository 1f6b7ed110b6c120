"""The flags of DiLoCo, and `DilocoPlan`: these flags with all defaults resolved for a run.

In DiLoCo, replica groups train with local steps, and synchronize their weights every --diloco-steps steps. A replica
group is one or several nodes with their own copy of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from megazpp.base.flags import flag
from megazpp.kernels.formats import BlockFormat
from megazpp.run.arguments import FeatureConfig
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import local_domains
from megazpp.topology.plan import numbers
from megazpp.zero.config import ZeroConfig
from megazpp.zero.plan import DIFFERENCE_BLOCK, GRADIENT_BLOCK, block_format

T = TypeVar("T")

# Fields of `DilocoConfig` whose defaults depend on how often the run synchronizes
RUN_DEPENDENT = ("diloco_outer_lr", "diloco_outer_momentum")
# By default, the outer optimizer has momentum if the run plans at least FEWEST synchronizations, with at least SHORTEST
# training steps between two synchronizations.
FEWEST, SHORTEST = 200, 10


@dataclass(frozen=True, kw_only=True)
class DilocoConfig(FeatureConfig):
    """DiLoCo.

    Local steps in replica groups, for links that are too slow for a synchronization per step. This is another
    algorithm than data-parallel training.

    A replica group is one or several nodes that train a copy of the model, as a run without DiLoCo on these nodes would
    do. Every --diloco-steps steps the groups synchronize: the outer optimizer updates the outer weights. Checkpoints
    store the outer weights. Validation uses the copy of the outer weights that each group has received.

    Attributes:
        diloco_steps: steps between two synchronizations of the replica groups; enables DiLoCo.
        diloco_replica_groups: number of replica groups, each with the same number of nodes (default: one group per
            node).
        diloco_outer_lr: outer learning rate (default: 0.4; 1 with fewer than 200 planned synchronizations or
            --diloco-steps below 10).
        diloco_outer_momentum: outer Nesterov momentum (default: 0.9; 0 in the cases where the default outer learning
            rate is 1).
        diloco_fragments: number of parts of the model that synchronize in turn within --diloco-steps; 1 is plain
            DiLoCo.
        diloco_fragment_sync_delay: training steps that overlap a synchronization, from its start to the merge of its
            result.
        diloco_fragment_update_alpha: fraction of a replica group's own weights in a merge with the outer weights
            (default: 0, or 0.5 with --diloco-fragment-sync-delay).
        diloco_weight_bits: bits per element of the changes of outer weights between replica groups; 16: compute dtype,
            not quantized.
        diloco_gradient_bits: bits per element of outer gradients between replica groups; 16: gradient dtype, not
            quantized.
    """

    diloco_steps: int | None = flag(None, must_be="positive")
    diloco_replica_groups: int | None = flag(None)
    diloco_outer_lr: float | None = flag(None, must_be="positive")
    diloco_outer_momentum: float | None = flag(None, must_be="below one")
    diloco_fragments: int = flag(1, must_be="positive")
    diloco_fragment_sync_delay: int = flag(0, must_be="not negative")
    diloco_fragment_update_alpha: float | None = flag(None, must_be="below one")
    diloco_weight_bits: Literal[16, 8, 4] = flag(4)
    diloco_gradient_bits: Literal[16, 8, 4] = flag(4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.diloco_replica_groups is not None and self.diloco_replica_groups < 2:
            raise ValueError(
                f"--diloco-replica-groups {self.diloco_replica_groups} is too small: DiLoCo requires at least 2 "
                "replica groups; leave the flag out for one group per node"
            )
        steps = self.diloco_steps
        if steps is None:
            return
        delay = self.diloco_fragment_sync_delay
        if delay >= steps:
            raise ValueError(
                f"--diloco-fragment-sync-delay {delay} is not less than --diloco-steps {steps}, but a fragment must "
                f"merge its result before it synchronizes again: set a delay of at most {steps - 1}"
            )
        if steps % self.diloco_fragments:
            raise ValueError(
                f"--diloco-steps {steps} is not divisible by --diloco-fragments {self.diloco_fragments}, but fragments "
                f"must synchronize at equal intervals: set --diloco-steps to a multiple of {self.diloco_fragments}"
            )

    @property
    def asked(self) -> str:
        """The flag --diloco-steps with its value, for messages to the user; "" if DiLoCo is not enabled."""
        return "" if self.diloco_steps is None else f"--diloco-steps {self.diloco_steps}"

    @property
    def distinguishes_nodes(self) -> bool:
        """True if DiLoCo is enabled, so that the run must know which ranks share a node."""
        return bool(self.asked)

    @property
    def resumed_fields(self) -> tuple[str, ...]:
        """The fields whose values a resumed run takes from the checkpoint: outer learning rate and outer momentum.

        Their defaults depend on the number of planned synchronizations, which may differ in the resumed run. The tuple
        is empty if DiLoCo is not enabled.
        """
        return RUN_DEPENDENT if self.asked else ()

    def number(self, cluster: Cluster) -> int:
        """Return the number of replica groups of a run on this cluster; 1 if DiLoCo is not enabled."""
        return (self.diloco_replica_groups or cluster.num_local_domains) if self.asked else 1


class DilocoPlan(NamedTuple):
    """The flags of DiLoCo with all defaults resolved for a run, and the formats of messages between replica groups."""

    steps: int  # H: training steps between two synchronizations of a fragment
    fragments: int  # number of fragments, subsets of the model's sharding units that synchronize in turn
    delay: int  # training steps between sending a fragment's outer gradients and merging the new outer weights
    merge_alpha: float  # alpha: fraction of a group's own weights in a merge with the outer weights
    outer_lr: float  # eta: learning rate of the outer optimizer
    outer_momentum: float  # mu: Nesterov momentum of the outer optimizer; 0 for none
    gradients: BlockFormat | None  # block format of outer gradients in messages; None: not quantized
    weights: BlockFormat | None  # block format of changes of outer weights in messages; None: not quantized
    feedback: bool  # True if quantization errors of outer gradients are added to the next outer gradients
    tokens: float  # tokens that one replica group trains on in `steps` steps, if the loss mask excludes none
    notices: tuple[str, ...] = ()  # lines for the log about defaults that depend on the run

    def sends_at(self, iteration: int) -> int | None:
        """Return the index of the fragment whose synchronization starts after training step `iteration`.

        The result is None if no synchronization starts after this step.
        """
        turn, rest = divmod(iteration, self.steps // self.fragments)
        return None if rest else (turn - 1) % self.fragments

    def in_fragments(self, units: Sequence[T]) -> list[list[T]]:
        """Return the sharding units of each fragment: units in the order of the model are assigned round robin."""
        return [list(units[part :: self.fragments]) for part in range(self.fragments)]

    @property
    def hiding_steps(self) -> int:
        """The number of training steps with which the messages of one fragment can overlap.

        This is the smaller one of two numbers: `delay`, and the steps until the next fragment is sent.
        """
        return min(self.delay, self.steps // self.fragments)

    def describe(self) -> str:
        """Return one line for the log: how often and in which formats replica groups synchronize."""
        gradients, weights = (f"int{fmt.bits}" if fmt else "not quantized" for fmt in (self.gradients, self.weights))
        parts = f" in {self.fragments} fragments" if self.fragments > 1 else ""
        late = f", merged {self.delay} steps later with alpha {self.merge_alpha:g}" if self.delay else ""
        return (
            f"replica groups synchronize every {self.steps} steps{parts}{late}: outer lr {self.outer_lr:g}, momentum "
            f"{self.outer_momentum:g}, gradients {gradients}, weights {weights}"
        )


def count_replica_groups(config: DilocoConfig, cluster: Cluster, *, verify_interval: int | None) -> int:
    """Return the number of replica groups of a run; check that the flags of DiLoCo fit the cluster.

    Args:
        config: flags of DiLoCo.
        cluster: nodes and ranks of the job.
        verify_interval: value of --zero-verify-interval; None if the flag is not set.
    Returns:
        The number of replica groups; 1 if DiLoCo is not enabled.
    Raises:
        ValueError: DiLoCo is enabled on a single node or with --zero-verify-interval, or the number of groups does not
            divide the number of nodes.
    """
    if config.asked and cluster.num_local_domains == 1:
        raise ValueError(
            f"{config.asked} requires at least 2 nodes, but there is 1. To try DiLoCo on one machine: --emulate-nodes 2"
        )
    if config.asked and verify_interval is not None:
        raise ValueError(
            f"--zero-verify-interval {verify_interval} compares weights over all ranks, but with {config.asked} the "
            "weights of replica groups differ: leave one of the two flags out"
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
    """Return the DiLoCo plan of a run, with all defaults resolved; None if DiLoCo is not enabled.

    Args:
        config: flags of DiLoCo.
        zero: flags of ZeRO; --zero-error-feedback also applies to outer gradients.
        iterations: number of optimizer steps of the run.
        num_layers: number of layers of the model.
        tokens_per_step: number of tokens that one replica group trains on per step.
    Raises:
        ValueError: there are more fragments than layers, or --optimizer-cpu-offload is set.
    """
    steps = config.diloco_steps
    if steps is None:
        return None
    if zero.optimizer_cpu_offload:
        raise ValueError(f"--optimizer-cpu-offload does not support --diloco-steps {steps}: leave one of them out")
    if config.diloco_fragments > num_layers:
        raise ValueError(
            f"--diloco-fragments {config.diloco_fragments} is more than --num-layers {num_layers}, but a fragment "
            f"needs at least one layer: use at most {num_layers} fragments"
        )
    # ---- defaults of the outer optimizer
    few, short = iterations // steps < FEWEST, steps < SHORTEST
    plain = few or short  # no outer momentum, because it increased the loss of small models in these cases
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
