"""Optional feature of pretraining: the estimates of --plan, and the choice of a format for --zero-weight-delta auto."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from megazpp.base.flags import spelling
from megazpp.planner.config import PlanConfig
from megazpp.run.arguments import ParsedRun, RunConfig
from megazpp.run.feature import Feature
from megazpp.topology.cluster import Cluster

if TYPE_CHECKING:
    from megazpp.zero.plan import WeightDelta

# Vocabulary size, in tokens, that the choice of --zero-weight-delta auto assumes if the size becomes known only when
# the tokenizer is opened. The ratio of the size of a lossless delta to the size of the weights in int8 blocks does not
# depend on the number of weights. So the assumed size hardly matters for the choice between the two formats.
ASSUMED_VOCABULARY = 50304


class Planner(Feature):
    """Feature that prints estimates of memory, communication and time instead of training (--plan)."""

    config = PlanConfig

    def choose_weight_delta(
        self, config: RunConfig, cluster: Cluster, *, device_type: str, gigabytes: float | None
    ) -> WeightDelta | None:
        """Choose the format of weights between nodes by estimated times (`Estimator.choose_weight_delta`).

        The estimate needs a vocabulary size. If no flag gives the size, it is ASSUMED_VOCABULARY. For arguments and
        result see `Feature.choose_weight_delta`.
        """
        from megazpp.planner.estimate import Estimator
        from megazpp.planner.variants import changed

        size = config.tokenizer.known_vocab_size or ASSUMED_VOCABULARY
        config = changed(config, tokenizer={"vocab_size": size})
        return Estimator(cluster, device_type=device_type).choose_weight_delta(config, gigabytes=gigabytes)

    def command(self, parsed: ParsedRun) -> int | None:
        """Print the report of estimates and return exit status 0 if --plan is set; otherwise return None, to train.

        Raises:
            ValueError: --plan-expert-load is given, but the model has no experts.
        """
        flags = parsed.config.section(PlanConfig)
        if not flags.plan:
            return None
        from megazpp.parallel.launch import device_type
        from megazpp.planner.report import print_report, report_parts
        from megazpp.run.start import planned_cluster

        cluster, load = planned_cluster(parsed.config), flags.plan_expert_load
        if load is not None and parsed.config.model.num_experts is None:
            raise ValueError(
                f"{spelling(flags, 'plan_expert_load')} {load:g} is about mixtures of experts, and this model has no "
                "experts: add --num-experts, or leave the flag out"
            )
        parts = report_parts(parsed.config, cluster, device_type=device_type(), expert_load=load)
        print(parsed.notes(), end="")
        gc.freeze()  # searches for garbage then skip the objects of torch, which saves a twentieth of a plan's time
        try:
            print_report(parts)
        finally:
            gc.unfreeze()
        return 0


FEATURE = Planner()
