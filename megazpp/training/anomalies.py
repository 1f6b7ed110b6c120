"""Check every step between backward and update: bad losses, gradients or weights must not reach the optimizer.

    the loss or a gradient is not finite    the job ends and reports where the value came from
    the loss jumps (--loss-spike-sigma)     the step is skipped
    gathered weights differ between ranks   the job ends (--zero-verify-interval, zero/verify.py)

The loss and the gradient norm are already reduced over all ranks, so all ranks make the same decision. With a dynamic
loss scale, a gradient that is not finite only skips the step, as long as the scale can still decrease
(`LossScaler.accepts_overflow`). A loss that is not finite ends the job with any loss scale.

By default only the check for values that are not finite is active. If it finds such a value, the optimizer skips the
update on the device, without the host. The host reads the loss and the norm one step later, before the next update
(step.py). Until then, `Evidence` keeps the values that the error message needs.

A sum over ranks spreads a NaN or Inf to all ranks. Each rank therefore also checks its own gradients before they are
reduced (`Sharding.watch_gradients`: one pass per sharding unit, without a wait for the device). If the gradient norm of
the step is not finite, the ranks exchange which micro-batch and which parameter caused it. The job then ends with the
weights from before the step. not-finite-<iteration>.json in the run folder lists samples, losses and norms.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from megazpp.base.program import JobError
from megazpp.optim.clip import GradNorm, grad_norms
from megazpp.optim.optimizer import LossScaler
from megazpp.training.batches import BatchPlan
from megazpp.training.config import FEWEST, WINDOW, AnomalyConfig
from megazpp.training.context import RunContext
from megazpp.zero.sharding import Sharding

# The error message names at most this many parameters and this many micro-batches whose values are not finite. The file
# not-finite-<iteration>.json lists all of them.
SHOWN = 8


class LossHistory:
    """The last `WINDOW` (100) finite losses, which checkpoints save; empty without --loss-spike-sigma.

    A later loss is a loss spike if it is more than --loss-spike-sigma standard deviations above the mean of these
    losses.
    """

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=WINDOW)


class NotFiniteError(JobError):
    """The error that ends the job because the loss or a gradient of a training step is NaN or Inf."""


class Evidence(NamedTuple):
    """Small tensors of a step that explain a loss or gradient that is not finite.

    A rank keeps them until it knows whether the step is finite. They include no gradients.
    """

    losses: torch.Tensor  # [number of micro-batches] this rank's contributions to the step's loss
    norm: GradNorm  # gradient norm of the step, with the norms of single parameters
    # For each parameter, by name, a scalar: the sum over all elements of this rank's unreduced gradients in the
    # parameter's sharding unit. The sum is NaN or Inf if one of these elements is. None if no unit is sharded, as with
    # ZeRO stage 0 or a single data rank.
    own: Mapping[str, torch.Tensor] | None


@dataclass(frozen=True)
class StepReport:
    """One rank's report on a step whose loss or gradient norm is not finite.

    Attributes:
        data_rank: index of the rank's samples, `ParallelDims.data_rank`.
        iteration: iteration of the step. None if all steps of this rank's replica group were finite; then the other
            fields are empty.
        loss, norm: loss and gradient norm of the global batch.
        losses: this rank's contributions to the loss, one per micro-batch.
        suspects: names of the parameters in the sharding units in which this rank's gradients were not finite before
            their reduction. None if no unit is sharded, as with ZeRO stage 0 or a single data rank. The reduce-scatter,
            which checks the gradients of a single rank, then does not run.
        norms: gradient norm of each parameter, by name.
        scale: loss scale of the step; 1 without loss scaling.
    """

    data_rank: int
    iteration: int | None = None
    loss: float = math.nan
    norm: float = math.nan
    losses: Sequence[float] = ()
    suspects: Sequence[str] | None = ()
    norms: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0


@dataclass
class Guard:
    """The check of every step for bad losses, gradients and weights, before the optimizer may update the weights.

    Args:
        config: flags that select the active checks.
        sharding: handle of the model whose gradients and weights are checked.
        run: process groups, log and run folder.
        plan: batch sizes, from which the samples of an iteration follow.
        history: losses of earlier steps. With --loss-spike-sigma, the guard adds the loss of each step if it is finite.
        scaler: loss scale. As long as a dynamic loss scale can decrease, a gradient that is not finite is no error.
        verify_interval: number of steps between two calls of `verify`; None for no calls.
        verify: function that compares the gathered weights over ranks, and raises CorruptWeightsError if they differ.
        has_replica_groups: True with DiLoCo's replica groups. Each group then decides alone whether to skip a step. If
            a step is not finite, the group skips it and continues to the next synchronization (diloco/loop.py). There
            all groups call `end_job` together.
    Attributes:
        first_sample: function that returns the index of a step's first sample, given the number of samples that all
            earlier steps have consumed. Elastic DiLoCo replaces it, because a group trains the samples that it leases.
    """

    config: AnomalyConfig
    sharding: Sharding
    run: RunContext
    plan: BatchPlan
    history: LossHistory
    _: KW_ONLY
    scaler: LossScaler
    verify_interval: int | None = None
    verify: Callable[[], None] = lambda: None
    has_replica_groups: bool = False

    def __post_init__(self) -> None:
        self._failure: StepReport | None = None  # this rank's report on the first step that was not finite
        self.first_sample: Callable[[int], int] = lambda consumed_samples: consumed_samples

    def begin_step(self) -> None:
        """Request that this step's backward checks the gradients of this rank before they are reduced.

        `TrainStep.launch` calls this before the first forward of a step. Without --check-for-nan-in-loss-and-grad,
        nothing is checked.
        """
        if self.config.check_for_nan_in_loss_and_grad:
            self.sharding.watch_gradients()

    @property
    def can_wait(self) -> bool:
        """True if `allows` may be called after the step's update has been queued, but before the next step's update.

        The host then need not wait for the device before it queues the update. The result is True if the only active
        check is the check for losses and gradients that are not finite. Loss spikes, verification of weights and a
        dynamic loss scale require the decision before the update.
        """
        config = self.config
        others = config.loss_spike_sigma is not None or self.verify_interval is not None or self.scaler.is_dynamic
        return config.check_for_nan_in_loss_and_grad and not others

    def evidence(self, local_losses: torch.Tensor, norm: GradNorm) -> Evidence:
        """Return the values by which `allows` can explain that the step is not finite.

        `TrainStep.launch` calls this after the backward of all micro-batches.
        Args:
            local_losses: [number of micro-batches] this rank's contributions to the step's loss.
            norm: gradient norm of the step.
        """
        return Evidence(local_losses, norm, self.sharding.own_gradients())

    def allows(self, iteration: int, loss: float, norm: float, evidence: Evidence) -> bool:
        """Decide whether the step of `iteration` may update the weights. All ranks decide the same.

        Args:
            iteration: iteration of the step, counted from 1.
            loss: loss of the global batch.
            norm: gradient norm of the global batch.
            evidence: result of the method `evidence` for this step.
        Returns:
            True to update the weights, False to skip the update.
        Raises:
            NotFiniteError: the loss or a gradient is not finite; raised on all ranks.
            CorruptWeightsError: gathered weights differ between ranks; raised on all ranks.
        """
        if self.verify_interval and iteration % self.verify_interval == 0:
            self.verify()  # verify the weights first, because corrupt weights would also explain a bad loss
        finite = math.isfinite(loss) and (math.isfinite(norm) or self.scaler.accepts_overflow)
        if not self.config.check_for_nan_in_loss_and_grad or finite:
            return math.isfinite(norm) and not self._is_spike(iteration, loss)
        if self._failure is None:
            dims, own = self.run.dims, evidence.own
            suspects = None if own is None else [name for name, total in own.items() if not total.isfinite()]
            norms = grad_norms(evidence.norm, dims.tp, dims.shard)
            losses, scale = evidence.losses.tolist(), evidence.norm.divisor
            self._failure = StepReport(dims.data_rank, iteration, loss, norm, losses, suspects, norms, scale)
        if not self.has_replica_groups:
            self.end_job()
        return False

    @property
    def has_failed(self) -> bool:
        """True if a loss or gradient of this rank's DiLoCo replica group was not finite."""
        return self._failure is not None

    def end_job(self) -> NoReturn:
        """End the job because of a step that is not finite: raise a NotFiniteError with the same text on all ranks.

        All ranks call this. With DiLoCo, ranks of all groups call it once one of their groups has failed.

        Rank 0 gathers the reports of all ranks. It selects the step of the first report with a failure, describes this
        step, and writes the reports about it to the run folder. With DiLoCo, replica groups may fail in different
        steps; reports about other steps than the selected one are ignored.
        """
        world, plan = self.run.dims.world, self.plan
        reports = world.gather_objects(self._failure or StepReport(self.run.dims.data_rank))
        # Only rank 0 receives reports; the other ranks have an empty list.
        message = None
        if reports:
            first = next(each for each in reports if each.iteration is not None)
            step = first.iteration
            reports = [each if each.iteration == step else StepReport(each.data_rank) for each in reports]
            consumed = plan.consumed_samples_at(step - 1)
            sample = self.first_sample(consumed)
            message = describe(first, reports, sample, plan.micro_batch_size, plan.data_parallel_size)
            if self.run.folder is not None:
                keys = ("data_rank", "losses", "suspects")
                record = {
                    "iteration": step,
                    "loss": first.loss,
                    "grad_norm": first.norm,
                    "first_sample": sample,
                    "samples": plan.batch_size_at(consumed),
                    "micro_batch_size": plan.micro_batch_size,
                    "grad_norms": first.norms,
                    "ranks": [{key: getattr(each, key) for key in keys} for each in reports],
                }
                with self.run.folder.surviving(name := f"not-finite-{step}.json"):
                    file = self.run.folder.write_json(name, record, indent=2)
                    message += f"\nsamples, losses and norms: {file}"
        raise NotFiniteError(world.share_object(message))

    def _is_spike(self, iteration: int, loss: float) -> bool:
        """Return True if the loss of a step is a spike, log it in that case, and add the loss to the history.

        The loss of a spike is added too. If losses stay high, the standard deviation therefore grows, and the run skips
        only a few steps. A loss that is not finite is no spike, and is not added.
        """
        sigma = self.config.loss_spike_sigma
        if sigma is None or not math.isfinite(loss):
            return False
        before = list(self.history.losses)
        self.history.losses.append(loss)
        if len(before) < FEWEST:
            return False
        mean, deviation = statistics.fmean(before), statistics.stdev(before)
        if loss <= mean + sigma * deviation:
            return False
        self.run.log(
            f"iteration {iteration}: the loss is {loss:.4f}, the earlier mean {mean:.4f} +- {deviation:.4f} over "
            f"{len(before)} steps; the step is skipped"
        )
        return True


def describe(
    first: StepReport, reports: Sequence[StepReport], first_sample: int, micro_batch_size: int, data_size: int
) -> str:
    """Return the error message for a step whose loss or gradient norm is not finite.

    The message names the step, and the micro-batches and parameters whose values are not finite.

    Args:
        first: report of a rank on which the step was not finite. It has the step's loss, its gradient norm, and the
            gradient norms of all parameters.
        reports: reports of all ranks about the step, in the order of ranks.
        first_sample: index of the step's first sample in the run.
        micro_batch_size: samples per micro-batch.
        data_size: number of data-parallel ranks in all jobs of the run.
    """
    assert first.iteration is not None
    scaled = "" if first.scale == 1.0 else f" at the loss scale {first.scale:g} (see --loss-scale, --min-loss-scale)"
    lines = [
        f"iteration {first.iteration}: loss {first.loss:g}, gradient norm {first.norm:g}{scaled}; the job ends before "
        f"the update, with the weights of iteration {first.iteration - 1}"
    ]
    # ---- add a line per micro-batch whose loss is not finite, with its samples
    bad_losses = []
    for rank, each in enumerate(reports):
        for index in (index for index, value in enumerate(each.losses) if not math.isfinite(value)):
            start = first_sample + (index * data_size + each.data_rank) * micro_batch_size
            samples = f"samples {start} to {start + micro_batch_size - 1}"
            bad_losses.append(f"the loss of micro-batch {index} ({samples}) is not finite on rank {rank}")
    lines += bad_losses[:SHOWN]
    # ---- add a line per parameter whose gradient norm is not finite, with the ranks where this began
    bad = {name: value for name, value in first.norms.items() if not math.isfinite(value)}
    for name, value in list(bad.items())[:SHOWN]:
        ranks = [rank for rank, each in enumerate(reports) if name in (each.suspects or ())]
        if len(reports) == 1:
            origin = "from rank 0"
        elif reports[0].suspects is None:
            origin = "from an unknown rank, because FSDP2 sums the gradients of whole copies (ZeRO stage 0)"
        else:
            origin = f"from rank {', '.join(map(str, ranks))}" if ranks else "every rank's own gradient was finite"
        lines.append(f"{name}: the norm of the gradient is {value:g}, {origin}")
    more = len(bad_losses[SHOWN:]) + max(0, len(bad) - SHOWN)
    return "\n".join([*lines, f"and {more} more"] if more else lines)
