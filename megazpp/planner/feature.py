"""`--plan` and `--dry-run` as an optional feature of pretraining."""

from __future__ import annotations

from dataclasses import dataclass

from megazpp.base.flags import check_not_negative, flag
from megazpp.base.program import EXIT_ERROR
from megazpp.parallel.launch import device_type
from megazpp.planner.dry_run import dry_run
from megazpp.planner.report import plan_report
from megazpp.run.arguments import FeatureConfig, ParsedRun
from megazpp.run.feature import Feature
from megazpp.run.ranks import planned_cluster


@dataclass(frozen=True, kw_only=True)
class PlanConfig(FeatureConfig):
    """Planning.

    Estimate a run instead of starting it.
    """

    plan: bool = flag(False, "print estimates of memory, traffic and time, and stop", common=True)
    dry_run: bool = flag(
        False,
        "simulate one step of one rank with fake tensors, compare its traffic with the plan, and stop",
    )
    dry_run_rank: int = flag(0, "rank that --dry-run simulates")

    def __post_init__(self) -> None:
        check_not_negative(self, "dry_run_rank")


class Planner(Feature):
    """Print estimates instead of training."""

    config = PlanConfig

    def command(self, parsed: ParsedRun) -> int | None:
        flags = parsed.config.section(PlanConfig)
        if flags.plan:
            print(plan_report(parsed.config, planned_cluster(parsed.config), device_type=device_type()))
            return 0
        if not flags.dry_run:
            return None
        dry = dry_run(parsed.config, planned_cluster(parsed.config), rank=flags.dry_run_rank)
        print(dry.describe())
        return 0 if dry.agrees else EXIT_ERROR


FEATURE = Planner()
