"""Hooks through which optional features, such as DiLoCo or LoRA, extend a training run.

The core imports no optional feature. A feature is a folder whose feature.py defines `FEATURE`, an instance of a
subclass of `Feature`. megazpp/features.py lists these folders. If a folder and its line in that list are removed, the
rest of the program still works.

A hook imports modules that need torch inside of its function, not at the top of feature.py. So a program can check the
flags of all features before it imports torch, which takes seconds, and an unused feature costs no import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megazpp.run.arguments import FeatureConfig, ParsedRun, RunConfig

if TYPE_CHECKING:
    from megazpp.checkpoint.safe_reader import WeightOpener
    from megazpp.optim.schedule import TrainingProgress
    from megazpp.run.checks import RunPlan
    from megazpp.run.trainer import Trainer
    from megazpp.topology.cluster import Cluster
    from megazpp.training.loop import AfterStep, Loader, Synchronize
    from megazpp.zero.plan import WeightDelta
    from megazpp.zero.sharding import DeviceStates


class FeaturePlan(Protocol):
    """Plan that an optional feature derives from the flags of a run, before anything is allocated."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines about the feature's flags to show the user when the run starts."""
        ...

    def describe(self) -> str:
        """Return one line for the log that describes the feature's work in the run."""


@dataclass(kw_only=True)
class Attached:
    """Functions of an optional feature that the trainer calls during a run. The defaults do nothing.

    Attributes:
        after_step: actions that run after optimizer steps. They run after the trainer has saved a checkpoint of the
            step, so the checkpoint does not contain their changes.
        synchronize: function that synchronizes DiLoCo's replica groups, see `Synchronize` in training/loop.py. The
            trainer uses the function of the first feature that has one.
        begin: function that the trainer calls before the first step with the progress of the loaded checkpoint. It
            returns the progress with which training starts.
        loader: function that wraps the loader of training samples.
        schedules_actions: True if the feature itself saves checkpoints and calls `Trainer.validate`; False if the
            trainer does so at the intervals of --save-interval and --eval-interval.
        evaluation_weights: function that returns a context in which the model has the weights to evaluate, for a
            feature that evaluates other weights than it trains.
        wait: function that the trainer calls after the last step, with the progress of the run. It waits for the
            feature's background work.
        finish: function that the trainer calls after the last evaluation, with two arguments. The first is a function
            that returns a context in which the model has the weights to evaluate. The second is the last iteration.
    """

    after_step: Sequence[AfterStep] = ()
    synchronize: Synchronize | None = None
    begin: Callable[[TrainingProgress], TrainingProgress] = lambda progress: progress
    loader: Callable[[Loader], Loader] = lambda loader: loader
    schedules_actions: bool = False
    evaluation_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    wait: Callable[[TrainingProgress], None] = lambda progress: None
    finish: Callable[[Callable[[], AbstractContextManager[None]], int], None] = lambda weights, step: None


class Feature:
    """Base class of optional features. Each method is a hook, whose default does nothing.

    Attributes:
        config: class of the config with the feature's flags, which becomes a section of `RunConfig`; None for a feature
            without flags.
        opens_weights: True if the feature's checkpoints store weights in a form that only its `weight_opener` can open.
    """

    config: type[FeatureConfig] | None = None
    opens_weights: bool = False

    def weight_opener(self, sections: Sequence[Any]) -> WeightOpener:
        """Return the opener of the weights in the feature's checkpoints. Only called if `opens_weights` is True.

        Args:
            sections: configs of all features that have flags, this feature's included.
        """
        raise NotImplementedError

    def num_replica_groups(self, config: RunConfig, cluster: Cluster) -> int:
        """Return the number of replica groups: groups of nodes that each train a separate copy of the model.

        Raises:
            ValueError: the flags request a number of groups that does not divide the nodes.
        """
        return 1

    def num_jobs(self, config: RunConfig) -> int:
        """Return the number of jobs that train the run's model together, each with separate process groups.

        Only elastic DiLoCo has several jobs; the default is 1.
        """
        return 1

    def as_one_job(self, config: RunConfig) -> RunConfig:
        """Return the flags of one job that trains like all jobs of the run together, for the planner.

        Elastic DiLoCo has one job per replica group. The planner instead estimates a single job on the nodes of all
        groups. The default returns the unchanged flags.
        """
        return config

    def choose_weight_delta(
        self, config: RunConfig, cluster: Cluster, *, device_type: str, gigabytes: float | None
    ) -> WeightDelta | None:
        """Choose the format in which weights cross nodes, for --zero-weight-delta auto and 16-bit compute.

        Only rank 0 calls this, after all flags were checked.

        Args:
            config: flags of the run.
            cluster: nodes and ranks, with links and device from the cluster file or from measurements.
            device_type: "cuda" or "cpu".
            gigabytes: memory of a rank's device in 1e9 bytes; None if it is unknown.

        Returns:
            the chosen format with its reason; None if the feature has no estimate for this choice.
        """
        return None

    def states(self, config: RunConfig) -> type[DeviceStates] | None:
        """Return the class that stores fp32 weights, moments and gradients outside the device, such as in host memory.

        None means that this feature leaves them on the device.
        """
        return None

    def check(self, config: RunConfig, plan: RunPlan) -> FeaturePlan | None:
        """Check the feature's flags against all other flags and the run's plan.

        Args:
            config: flags of the run.
            plan: plan of the run, still without the plans of features.

        Returns:
            the plan of the feature; None if the flags do not enable the feature.

        Raises:
            ValueError: flags contradict each other. The message names them and their values.
        """
        return None

    def attach(self, trainer: Trainer) -> Attached:
        """Prepare the feature for training, and return the functions that the trainer will call.

        Every rank calls this before a checkpoint is loaded.

        Args:
            trainer: the trainer with the attributes `run`, `parts`, `guard`, `values`, `states` and `flags`. The
                feature may change only `states` and `flags`, to store more in checkpoints. The trainer creates its
                other attributes after this call, so only the returned functions may use them.
        """
        return Attached()

    def command(self, parsed: ParsedRun) -> int | None:
        """Run the command of a flag that replaces training, such as --plan, and return its exit status.

        The result is None if no such flag is set, so that the program trains.
        """
        return None


def weight_opener(features: Sequence[Feature], sections: Sequence[Any]) -> WeightOpener:
    """Return the object that opens the weights of checkpoints.

    The first feature with `opens_weights` provides the opener. Without such a feature, the result is the default
    opener, which reads only checkpoints that store every weight, as pretraining writes them.

    Args:
        features: optional features of the program.
        sections: configs of the features that have flags.
    """
    from megazpp.checkpoint.safe_reader import WHOLE_WEIGHTS

    openers = (feature.weight_opener(sections) for feature in features if feature.opens_weights)
    return next(openers, WHOLE_WEIGHTS)
