"""Hooks through which optional features extend a run.

The core imports no optional feature. A feature is a folder whose feature.py defines `FEATURE`, an instance of a
subclass of `Feature`, and megazpp/features.py lists these folders. If a folder and its line in that list are removed,
the rest of the program still works.

A feature.py imports the modules that import torch inside its hooks, so that the flags of all features can be checked
before torch is imported, which takes seconds, and so that a feature that is not used costs no import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megazpp.run.arguments import FeatureConfig, ParsedRun, RunConfig

if TYPE_CHECKING:
    from megazpp.checkpoint.state import RunValues, StatePart
    from megazpp.checkpoint.weights import WeightOpener
    from megazpp.data.tokenizer import Tokenizer
    from megazpp.optim.schedule import TrainingProgress
    from megazpp.run.checks import RunPlan
    from megazpp.topology.cluster import Cluster
    from megazpp.training.anomalies import Guard
    from megazpp.training.context import RunContext
    from megazpp.training.loop import AfterStep, Loader, Synchronize
    from megazpp.training.objective import Objective
    from megazpp.training.setup import ShardedModel
    from megazpp.zero.plan import WeightDelta
    from megazpp.zero.sharding import DeviceStates


class FeaturePlan(Protocol):
    """The plan that a feature derives from the flags before workers start; the run logs its notices and description."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines to show the user when the run starts."""
        ...

    def describe(self) -> str:
        """Return one line that describes the plan, for the log."""


@dataclass(kw_only=True)
class TrainerParts:
    """The parts of a trainer that `Feature.attach` receives. A feature may change only `states` and `flags`.

    Attributes:
        config: configuration of the run.
        plan: plan of the run.
        run: process groups, device, log and run folder.
        built: model and its sharding.
        tokenizer: tokenizer of the model.
        objective: loss of the run.
        guard: decides for each step whether the optimizer may update the weights.
        values: state that is not stored in tensors, such as the loss scale.
        states: tensors of a checkpoint, in parts. A feature may add, wrap or replace parts of this list. Parts that the
            program adds to it are not in the list.
        flags: flag values that checkpoints record, by field name. A feature may add to them.
        samples: description of the training and held-out samples, see data/identity.py.
        stopped: function that returns True once this rank has caught a stop signal.
        save, validate: functions of the progress that save a checkpoint and evaluate the validation data, for a feature
            with `Attached.schedules_actions`.
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
    samples: Mapping[str, Any] = field(default_factory=dict)
    stopped: Callable[[], bool] = lambda: False
    save: Callable[[TrainingProgress], None] = lambda progress: None
    validate: Callable[[TrainingProgress], None] = lambda progress: None


@dataclass(kw_only=True)
class Attached:
    """Functions of a feature that the trainer calls. The defaults do nothing.

    Attributes:
        after_step: actions after steps, run after the trainer's checkpoints. A checkpoint therefore does not have what
            these actions change after its step.
        synchronize: function that synchronizes DiLoCo's replica groups; see `Synchronize` in training/loop.py. The
            trainer uses the first feature that provides it.
        begin: called before the first step with the progress; returns the progress with which the training starts.
        loader: function that wraps the loader of training samples.
        schedules_actions: True if the feature calls `TrainerParts.save` and `validate` itself, and the trainer does not
            call them by iterations.
        evaluation_weights: returns a context in which the model has the weights to evaluate, for a feature that
            evaluates other weights than it trains.
        wait: called after the last step; waits for the feature's background work.
        finish: called after the last evaluation with two arguments. The first is a function that returns a context in
            which the model has the weights to evaluate. The second is the last iteration.
    """

    after_step: Sequence[AfterStep] = ()
    synchronize: Synchronize | None = None
    begin: Callable[[TrainingProgress], TrainingProgress] = lambda progress: progress
    loader: Callable[[Loader], Loader] = lambda loader: loader
    schedules_actions: bool = False
    evaluation_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    wait: Callable[[], None] = field(default=lambda: None)
    finish: Callable[[Callable[[], AbstractContextManager[None]], int], None] = field(
        default=lambda weights, step: None
    )


class Feature:
    """Base class of optional features. Each method is a hook that does nothing by default.

    Attributes:
        config: class of the feature's flags, which become a section of `RunConfig`; None if it has no flags.
        opens_weights: whether the feature saves weights in a form that only its `weight_opener` can open.
    """

    config: type[FeatureConfig] | None = None
    opens_weights: bool = False

    def weight_opener(self, sections: Sequence[Any]) -> WeightOpener:
        """Return the opener of weights of checkpoints, if `opens_weights`; `sections` has the feature's config."""
        raise NotImplementedError

    def num_replica_groups(self, config: RunConfig, cluster: Cluster) -> int:
        """Return the number of groups of nodes that each train a separate copy of the model.

        Raises:
            ValueError: the nodes do not divide into the groups that the flags request.
        """
        return 1

    def num_jobs(self, config: RunConfig) -> int:
        """Return the number of jobs, each with its own process groups, that train the run's model together."""
        return 1

    def as_one_job(self, config: RunConfig) -> RunConfig:
        """Return the run of all jobs together as one job on the nodes of all of them, for estimates."""
        return config

    def choose_weight_delta(
        self, config: RunConfig, cluster: Cluster, *, device_type: str, gigabytes: float | None
    ) -> WeightDelta | None:
        """Choose the format of the weights that cross nodes, for --zero-weight-delta auto and 16-bit compute.

        Only rank 0 calls this, after all flags were checked.

        Args:
            config: configuration of the run.
            cluster: cluster, with the measured links if --measure-links is set.
            device_type: "cuda" or "cpu".
            gigabytes: memory of a rank's device in 1e9 bytes; None if it is unknown.
        Returns:
            the choice; None if the feature cannot estimate it.
        """
        return None

    def states(self, config: RunConfig) -> type[DeviceStates] | None:
        """Return the class that keeps weights, moments and gradients in another place than the device, or None."""
        return None

    def check(self, config: RunConfig, plan: RunPlan) -> FeaturePlan | None:
        """Check the feature's flags against all other flags and the run's plan.

        Returns:
            the plan of the feature; None if its flags are not used.

        Raises:
            ValueError: flags contradict each other. The message names them and their values.
        """
        return None

    def attach(self, parts: TrainerParts) -> Attached:
        """Connect the feature to a trainer. Every rank calls this, before a checkpoint is loaded."""
        return Attached()

    def command(self, parsed: ParsedRun) -> int | None:
        """Run a command that replaces training, such as --plan; return its exit status, or None to train."""
        return None


def weight_opener(features: Sequence[Feature], sections: Sequence[Any]) -> WeightOpener:
    """Return the opener of weights of the first feature that has one, otherwise the opener of whole weights.

    Args:
        features: optional features of the program.
        sections: configs of the features that have flags.
    """
    from megazpp.checkpoint.weights import WHOLE_WEIGHTS

    openers = (feature.weight_opener(sections) for feature in features if feature.opens_weights)
    return next(openers, WHOLE_WEIGHTS)
