"""The hooks through which optional features enter a run; megazpp/features.py lists the features.

The core names no feature. A feature is a folder whose feature.py defines `FEATURE`, an instance of a subclass of
`Feature`. Without its folder and its line in megazpp/features.py, everything else works as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from megazpp.checkpoint.state import RunValues, StatePart
from megazpp.data.tokenizer import Tokenizer
from megazpp.run.arguments import FeatureConfig, ParsedRun, RunConfig
from megazpp.run.checks import RunPlan
from megazpp.topology.cluster import Cluster
from megazpp.training.anomalies import Guard
from megazpp.training.context import RunContext
from megazpp.training.loop import AfterStep
from megazpp.training.objective import Objective
from megazpp.training.setup import ShardedModel
from megazpp.training.step import LaunchedStep


class FeaturePlan(Protocol):
    """The plan that a feature makes from the flags before workers start; the run prints its notices and description."""

    @property
    def notices(self) -> tuple[str, ...]: ...

    def describe(self) -> str:
        """Return one line for the log."""


@dataclass(kw_only=True)
class TrainerParts:
    """The parts of a trainer that a feature may read, and two that it may replace.

    Attributes:
        states: parts of the checkpoint's state; a feature may add to them, wrap or replace them.
        flags: flag values that the checkpoint records; a feature may add to them.
    """

    config: RunConfig
    plan: RunPlan
    run: RunContext
    built: ShardedModel
    tokenizer: Tokenizer
    objective: Objective
    guard: Guard
    values: RunValues
    states: list[StatePart]
    flags: dict[str, Any]


@dataclass(kw_only=True)
class Attached:
    """Additions of a feature to a trainer.

    Attributes:
        after_step: called after steps, beside the checkpoints.
        synchronize: synchronizes models that train apart, see `train` of training/loop.py.
        evaluation_weights: returns a context in which the model has the weights to evaluate, if they are not those
            that are trained.
        wait: called after the last step.
        finish: called after the last evaluation, with a function that returns the context of the weights to evaluate.
    """

    after_step: Sequence[AfterStep] = ()
    synchronize: Callable[[LaunchedStep, int, bool], bool] | None = None
    evaluation_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    wait: Callable[[], None] = field(default=lambda: None)
    finish: Callable[[Callable[[], AbstractContextManager[None]]], None] = field(default=lambda weights: None)


class Feature:
    """An optional part of the program; each hook does nothing by default.

    Attributes:
        config: the class of the feature's flags, a section of `RunConfig`.
    """

    config: type[FeatureConfig] | None = None

    def num_islands(self, config: RunConfig, cluster: Cluster) -> int:
        """Return the number of groups of nodes that each train a model of their own.

        Raises:
            ValueError: the flags do not fit the cluster.
        """
        return 1

    def check(self, config: RunConfig, plan: RunPlan) -> FeaturePlan | None:
        """Check the flags against the others and the plan; return the feature's own plan, if it has one.

        Raises:
            ValueError: flags that contradict each other, by name and value.
        """
        return None

    def attach(self, parts: TrainerParts) -> Attached:
        """Enter a trainer; called on every rank, before anything is loaded."""
        return Attached()

    def command(self, parsed: ParsedRun) -> int | None:
        """Do the work that a flag asks for instead of training; return the exit status, or None to train."""
        return None
