"""Flags of the planner, which estimates a run: --plan and --plan-expert-load."""

from __future__ import annotations

from dataclasses import dataclass

from megazpp.base.flags import flag, spelling
from megazpp.run.arguments import FeatureConfig


@dataclass(frozen=True, kw_only=True)
class PlanConfig(FeatureConfig):
    """Planning.

    Flags that estimate a run instead of starting it.

    Attributes:
        plan: print estimates of memory, communication and time, and exit.
        plan_expert_load: load of the busiest expert, relative to the mean, at which --plan also prints memory and
            chooses the fastest settings; a good value is the largest max_expert_load in metrics.jsonl of a similar run
            (default: only an even load).
    """

    plan: bool = flag(False, common=True)
    plan_expert_load: float | None = flag(None, needs="--plan", metavar="X")

    @property
    def replaces_training(self) -> bool:
        """True if the program prints estimates instead of training, because --plan is set."""
        return self.plan

    def __post_init__(self) -> None:
        """Raise ValueError if --plan-expert-load is below 1, which is the mean load of an expert."""
        super().__post_init__()
        if self.plan_expert_load is not None and not self.plan_expert_load >= 1.0:
            given = f"{spelling(self, 'plan_expert_load')} {self.plan_expert_load:g}"
            raise ValueError(f"{given}: the busiest expert has at least the mean load, so the value must be 1 or more")
