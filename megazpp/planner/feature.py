"""Optional feature of pretraining: the flag --plan, and the estimate for --zero-weight-delta auto."""

from __future__ import annotations

from dataclasses import dataclass

from megazpp.base.flags import flag, spelling
from megazpp.parallel.launch import device_type
from megazpp.planner.estimate import Estimator
from megazpp.planner.report import print_report, report_parts
from megazpp.planner.variants import changed
from megazpp.run.arguments import FeatureConfig, ParsedRun, RunConfig
from megazpp.run.feature import Feature
from megazpp.run.start import planned_cluster
from megazpp.topology.cluster import Cluster
from megazpp.zero.plan import WeightDelta

# Tokens of a vocabulary whose size becomes known only when the tokenizer is opened. The wire formats differ by the same
# factor for all weights, so this number hardly matters for the choice between them.
ASSUMED_VOCABULARY = 50304


@dataclass(frozen=True, kw_only=True)
class PlanConfig(FeatureConfig):
    """Planning.

    Flags that estimate a run instead of starting it.
    """

    plan: bool = flag(False, "print estimates of memory, communication and time, and exit", common=True)
    plan_expert_load: float | None = flag(
        None,
        "load of the busiest expert, relative to the mean, at which --plan also prints memory and chooses the fastest "
        "settings; the largest max_expert_load in metrics.jsonl of a similar run (default: only an even load)",
        needs="--plan",
        metavar="X",
    )

    def __post_init__(self) -> None:
        """Raise ValueError for a load of the busiest expert below the mean."""
        if self.plan_expert_load is not None and not self.plan_expert_load >= 1.0:
            given = f"{spelling(self, 'plan_expert_load')} {self.plan_expert_load:g}"
            raise ValueError(f"{given}: the busiest expert has at least the mean load, which is 1")


class Planner(Feature):
    """Feature that prints estimates instead of training."""

    config = PlanConfig

    def choose_weight_delta(
        self, config: RunConfig, cluster: Cluster, *, device_type: str, gigabytes: float | None
    ) -> WeightDelta | None:
        """Choose by `Estimator.choose_weight_delta`, with an assumed vocabulary if no flag gives its size."""
        size = config.tokenizer.vocab_size or config.tokenizer.model_vocab_size or ASSUMED_VOCABULARY
        config = changed(config, tokenizer={"vocab_size": size})
        return Estimator(cluster, device_type=device_type).choose_weight_delta(config, gigabytes=gigabytes)

    def command(self, parsed: ParsedRun) -> int | None:
        """Print the estimates and return 0 with --plan; return None, to train, without it."""
        flags = parsed.config.section(PlanConfig)
        if not flags.plan:
            return None
        cluster, load = planned_cluster(parsed.config), flags.plan_expert_load
        if load is not None and parsed.config.model.num_experts is None:
            raise ValueError(f"{spelling(flags, 'plan_expert_load')} {load:g} needs --num-experts")
        parts = report_parts(parsed.config, cluster, device_type=device_type(), expert_load=load)
        print(parsed.notes(), end="")
        print_report(parts)
        return 0


FEATURE = Planner()
