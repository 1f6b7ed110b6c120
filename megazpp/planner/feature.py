"""Optional feature of pretraining: the flag --plan, and the estimate for --zero-weight-delta auto."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazpp.base.flags import spelling
from megazpp.planner.config import PlanConfig
from megazpp.run.arguments import ParsedRun, RunConfig
from megazpp.run.feature import Feature
from megazpp.topology.cluster import Cluster

if TYPE_CHECKING:
    from megazpp.zero.plan import WeightDelta

# Tokens of a vocabulary whose size becomes known only when the tokenizer is opened. The wire formats differ by the same
# factor for all weights, so this number hardly matters for the choice between them.
ASSUMED_VOCABULARY = 50304


class Planner(Feature):
    """Feature that prints estimates instead of training."""

    config = PlanConfig

    def choose_weight_delta(
        self, config: RunConfig, cluster: Cluster, *, device_type: str, gigabytes: float | None
    ) -> WeightDelta | None:
        """Choose by `Estimator.choose_weight_delta`, with an assumed vocabulary if no flag gives its size."""
        from megazpp.planner.estimate import Estimator
        from megazpp.planner.variants import changed

        size = config.tokenizer.vocab_size or config.tokenizer.model_vocab_size or ASSUMED_VOCABULARY
        config = changed(config, tokenizer={"vocab_size": size})
        return Estimator(cluster, device_type=device_type).choose_weight_delta(config, gigabytes=gigabytes)

    def command(self, parsed: ParsedRun) -> int | None:
        """Print the estimates and return 0 with --plan; return None, to train, without it."""
        flags = parsed.config.section(PlanConfig)
        if not flags.plan:
            return None
        from megazpp.parallel.launch import device_type
        from megazpp.planner.report import print_report, report_parts
        from megazpp.run.start import planned_cluster

        cluster, load = planned_cluster(parsed.config), flags.plan_expert_load
        if load is not None and parsed.config.model.num_experts is None:
            raise ValueError(f"{spelling(flags, 'plan_expert_load')} {load:g} needs --num-experts")
        parts = report_parts(parsed.config, cluster, device_type=device_type(), expert_load=load)
        print(parsed.notes(), end="")
        print_report(parts)
        return 0


FEATURE = Planner()
