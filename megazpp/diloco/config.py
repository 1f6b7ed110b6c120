"""The flags of local steps between islands (DiLoCo), and the plan that follows from them for a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from megazpp.base.flags import check_not_negative, check_positive, check_words, flag, spelling
from megazpp.kernels.formats import BlockFormat
from megazpp.run.arguments import FeatureConfig
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import local_domains, numbers
from megazpp.zero.config import DIFFERENCE_BLOCK, GRADIENT_BLOCK, ZeroConfig, block_format

T = TypeVar("T")

RUN_DEPENDENT = ("diloco_outer_lr", "diloco_outer_momentum")  # flags whose defaults depend on the run
FEWEST, SHORTEST = 200, 10  # synchronizations, and steps between two, from which on outer momentum is chosen


@dataclass(frozen=True, kw_only=True)
class DilocoConfig(FeatureConfig):
    """DiLoCo.

    Local steps between islands: another algorithm, for links that are too slow for a synchronization per step.

    An island is a node or several; inside it training is as ever, between islands weights meet every --diloco-steps
    steps. Evaluation, conversion and generation use the outer weights.
    """

    diloco_steps: int | None = flag(None, "synchronize the islands every N steps; enables DiLoCo")
    diloco_islands: int | None = flag(None, "islands, of equally many nodes (default: every node is one)")
    diloco_outer_lr: float | None = flag(
        None,
        f"outer learning rate (default: 0.4; 1 where fewer than {FEWEST} synchronizations are planned, or after fewer "
        f"than {SHORTEST} steps)",
    )
    diloco_outer_momentum: float | None = flag(
        None, "outer Nesterov momentum (default: 0.9; 0 where the outer learning rate would be 1)"
    )
    diloco_fragments: int = flag(
        1, "parts of the model that synchronize one after the other within --diloco-steps; 1 is plain DiLoCo"
    )
    diloco_fragment_sync_delay: int = flag(
        0, "steps that overlap a synchronization before its result is merged", aliases=("--diloco-delay",)
    )
    diloco_fragment_update_alpha: float | None = flag(
        None,
        "share of an island's own weights in the merge (default: 0; with --diloco-fragment-sync-delay 0.5)",
        aliases=("--diloco-merge-alpha",),
    )
    diloco_weight_bits: Literal[16, 8, 4] = flag(
        4, "bits of what outer weights have changed by, between islands; 16 is the compute format"
    )
    diloco_gradient_bits: Literal[16, 8, 4] = flag(
        4, "bits of an outer gradient between islands; 16 is the reduction format"
    )

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "diloco_steps", "diloco_outer_lr", "diloco_fragments")
        check_not_negative(self, "diloco_fragment_sync_delay")
        for name in ("diloco_outer_momentum", "diloco_fragment_update_alpha"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"{spelling(self, name)} {value} is not in [0, 1)")
        if self.diloco_islands is not None and self.diloco_islands < 2:
            raise ValueError(f"--diloco-islands {self.diloco_islands}: it takes two to synchronize")
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
        """The flag that asks for islands, with its value; "" where every step is synchronized."""
        return "" if self.diloco_steps is None else f"--diloco-steps {self.diloco_steps}"

    @property
    def distinguishes_nodes(self) -> bool:
        return bool(self.asked)

    @property
    def resumed_fields(self) -> tuple[str, ...]:
        """The outer learning rate and momentum, whose defaults depend on the number of planned synchronizations."""
        return RUN_DEPENDENT if self.asked else ()

    def number(self, cluster: Cluster) -> int:
        """The islands of a cluster; 1 where every step is synchronized."""
        return (self.diloco_islands or cluster.num_local_domains) if self.asked else 1


def islands_every(steps: int) -> DilocoConfig:
    """Islands that synchronize every so many steps, and else by the defaults."""
    return DilocoConfig(diloco_steps=steps)


class DilocoPlan(NamedTuple):
    """The flags, with what the run decides filled in, and the block formats of messages; None: not quantized."""

    steps: int  # H
    fragments: int
    delay: int
    merge_alpha: float
    outer_lr: float  # eta
    outer_momentum: float  # mu
    gradients: BlockFormat | None  # of outer gradients
    weights: BlockFormat | None  # of differences of outer weights
    feedback: bool  # of errors, for outer gradients
    tokens: float  # of an island, from one synchronization to the next, where none is masked
    notices: tuple[str, ...] = ()

    def sends_at(self, iteration: int) -> int | None:
        """The fragment whose messages start after `iteration`, if it is one's turn."""
        turn, rest = divmod(iteration, self.steps // self.fragments)
        return None if rest else (turn - 1) % self.fragments

    def in_fragments(self, units: Sequence[T]) -> list[list[T]]:
        """Units, in the order of the model's, by fragment: strided."""
        return [list(units[part :: self.fragments]) for part in range(self.fragments)]

    @property
    def hiding_steps(self) -> int:
        """Steps under which the messages of a fragment travel, before those of the next one do."""
        return min(self.delay, self.steps // self.fragments)

    def chosen_flags(self) -> dict[str, float]:
        """The values of RUN_DEPENDENT."""
        return dict(zip(RUN_DEPENDENT, (self.outer_lr, self.outer_momentum), strict=True))

    def describe(self) -> str:
        """One line for the log."""
        gradients, weights = (f"int{fmt.bits}" if fmt else "not quantized" for fmt in (self.gradients, self.weights))
        parts = f" in {self.fragments} fragments" if self.fragments > 1 else ""
        late = f", merged {self.delay} steps later with alpha {self.merge_alpha:g}" if self.delay else ""
        return (
            f"islands synchronize every {self.steps} steps{parts}{late}: outer lr {self.outer_lr:g}, momentum "
            f"{self.outer_momentum:g}, gradients {gradients}, weights {weights}"
        )


def count_islands(config: DilocoConfig, cluster: Cluster, *, verify_interval: int | None) -> int:
    """Check the flags against the cluster and --zero-verify-interval; return `config.number`.

    Raises:
        ValueError: there is one node, weights are to be compared over all ranks, or islands are not whole nodes.
    """
    if config.asked and cluster.num_local_domains == 1:
        raise ValueError(
            f"{config.asked} needs at least 2 nodes, and there is 1. To try it on one machine: --emulate-nodes 2"
        )
    if config.asked and verify_interval is not None:
        raise ValueError(
            f"--zero-verify-interval {verify_interval} compares weights over all ranks, and with --diloco-steps "
            "islands have different ones"
        )
    islands, domains = config.number(cluster), cluster.num_local_domains
    if domains % islands:
        fitting = [count for count in range(2, domains + 1) if not domains % count]
        raise ValueError(
            f"--diloco-islands {islands} does not divide the {domains} {local_domains(cluster)}; {numbers(fitting)} "
            "would fit"
        )
    return islands


def plan_islands(
    config: DilocoConfig, zero: ZeroConfig, *, iterations: int, num_layers: int, tokens_per_step: float
) -> DilocoPlan | None:
    """Plan what the flags ask for; None without --diloco-steps.

    Args:
        tokens_per_step: of an island.
    Raises:
        ValueError: flags that do not fit the run.
    """
    steps = config.diloco_steps
    if steps is None:
        return None
    if config.diloco_fragments > num_layers:
        raise ValueError(f"--diloco-fragments {config.diloco_fragments} is more than --num-layers {num_layers}")
    few, short = iterations // steps < FEWEST, steps < SHORTEST
    plain = few or short  # where momentum loses: docs/benchmarks.md
    lr, momentum = config.diloco_outer_lr, config.diloco_outer_momentum
    notices = []
    if plain and momentum is None:
        why = f"fewer than {FEWEST} synchronizations are planned ({iterations // steps})"
        if not few:
            why = f"islands synchronize after fewer than {SHORTEST} steps (--diloco-steps {steps})"
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
