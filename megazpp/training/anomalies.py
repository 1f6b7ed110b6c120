"""The guard of the weights: looks for what must not get into them, between the backward and the update of every step.

    the loss or a gradient is not finite    the job ends, and says where it came from
    the loss jumps (--loss-spike-sigma)     the step is skipped, or the weights go back to the last checkpoint
    gathered weights differ between ranks   the job ends (--zero-verify-interval, zero/verify.py)

All ranks see the same numbers and decide the same. With a dynamic loss scale a gradient that is not finite is the
scale's business and the step is skipped; a loss that is not finite is an error there too.

Where only the first line is asked for, as by default, the device decides: it leaves the weights alone, and the host
hears of it one step later, before the next update (step.py). `Evidence` keeps what the message needs until then.

A sum over ranks spreads a NaN or Inf over all of them. So each rank looks at its own gradients before they are summed
(`Sharding.watch_gradients`: per sharding unit, one pass, no wait for the device), and only when the norm of the step is
not finite are ranks asked which micro-batch and which parameter it was. The job then ends with the weights as they were
before the step, and not-finite-<iteration>.json in the run folder holds what is needed to look: samples, losses, norms.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from megazpp.base.flags import check_positive, check_words, flag
from megazpp.base.program import JobError
from megazpp.optim.clip import GradNorm, grad_norms
from megazpp.training.batches import BatchPlan
from megazpp.training.context import RunContext
from megazpp.zero.sharding import Sharding
from megazpp.zero.verify import verify_weights

WINDOW, FEWEST = 100, 20  # losses that a loss is compared with
SHOWN = 8  # parameters and micro-batches that the message names; the file has all


@dataclass(frozen=True, kw_only=True)
class AnomalyConfig:
    """NaN and loss spikes.

    How the run reacts to losses and gradients that must not reach the weights.
    """

    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "when the loss or a gradient is not finite, leave the weights alone and end the job (in the next step at the "
        "latest), and say which parameter on which rank; without it such a step is skipped",
    )
    loss_spike_sigma: float | None = flag(
        None,
        f"skip the update of a step whose loss is more than this many standard deviations above the mean of the last "
        f"{WINDOW} (after the first {FEWEST} steps)",
    )
    loss_spike_action: Literal["skip", "rewind"] = flag(
        "skip",
        "what to do then: also rewind takes weights and moments back to the last checkpoint, and goes on with the next "
        "samples",
    )

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "loss_spike_sigma")
        if self.loss_spike_action == "rewind" and self.loss_spike_sigma is None:
            raise ValueError("--loss-spike-action rewind needs --loss-spike-sigma")


class LossHistory:
    """The last losses, which the next one is compared with; checkpoints keep them."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=WINDOW)


class NotFiniteError(JobError):
    """The loss or a gradient is NaN or Inf."""


class Evidence(NamedTuple):
    """The values that this rank keeps of a step until it is known to be finite: small tensors, no gradients."""

    losses: torch.Tensor  # [number of micro-batches] its share of the loss
    norm: GradNorm
    own: Mapping[str, torch.Tensor] | None  # sums of its own gradients by parameter; None where nobody can look


@dataclass(frozen=True)
class StepReport:
    """The knowledge of one rank of a step whose loss or gradient norm is not finite.

    Attributes:
        data_rank: which samples it had.
        iteration: None where the steps of its island were finite; then the rest is empty.
        loss, norm: of the global batch.
        losses: its share of the loss, by micro-batch.
        suspects: parameters of the units in which its own gradients were not finite; None where nobody can look.
        norms: of each parameter's gradient.
    """

    data_rank: int
    iteration: int | None = None
    loss: float = math.nan
    norm: float = math.nan
    losses: Sequence[float] = ()
    suspects: Sequence[str] | None = ()
    norms: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Guard:
    """Decides whether a step is taken.

    Args:
        sharding: of the model whose gradients and weights are in question.
        run: asks the ranks, logs, and keeps the report.
        plan: knows which samples an iteration has.
        history: the losses so far; the guard adds each step's.
        dynamic_scale: gradients that are not finite are the loss scale's business.
        verify_interval: steps between two comparisons of the gathered weights; None: never.
        rewind: takes weights and moments back to the last checkpoint and returns its iteration; called on all ranks.
            None: a spike is only skipped.
        islands: each decides for itself whether it takes a step; what ends the job or goes back waits for `resolve`.
    """

    config: AnomalyConfig
    sharding: Sharding
    run: RunContext
    plan: BatchPlan
    history: LossHistory
    _: KW_ONLY
    dynamic_scale: bool
    verify_interval: int | None = None
    rewind: Callable[[], int] | None = None
    islands: bool = False

    def __post_init__(self) -> None:
        self._failure: StepReport | None = None
        self._wants_back = False

    def begin_step(self) -> None:
        """Before the forward: look at gradients before they are summed."""
        if self.config.check_for_nan_in_loss_and_grad:
            self.sharding.watch_gradients()

    @property
    def can_wait(self) -> bool:
        """True if all it looks for is what is not finite, and ends the job: then `allows` may come a step later."""
        config = self.config
        others = config.loss_spike_sigma is not None or self.verify_interval is not None or self.dynamic_scale
        return config.check_for_nan_in_loss_and_grad and not others

    def evidence(self, local_losses: torch.Tensor, norm: GradNorm) -> Evidence:
        """Return what a later `allows` needs to know of the step; call after its backward."""
        return Evidence(local_losses, norm, self.sharding.own_gradients())

    def allows(self, iteration: int, loss: float, norm: float, evidence: Evidence) -> bool:
        """Decide whether to update the weights; `loss` and `norm` are those of the global batch of `iteration`.

        Raises:
            NotFiniteError, CorruptWeightsError: on all ranks.
        """
        if self.verify_interval and iteration % self.verify_interval == 0:
            verify_weights(self.sharding, self.run.dims)  # first, because it would explain what else is wrong
        finite = math.isfinite(loss) and (math.isfinite(norm) or self.dynamic_scale)
        if not self.config.check_for_nan_in_loss_and_grad or finite:
            return math.isfinite(norm) and not self._is_spike(iteration, loss)
        if self._failure is None:
            dims, own = self.run.dims, evidence.own
            suspects = None if own is None else [name for name, total in own.items() if not total.isfinite()]
            norms = grad_norms(evidence.norm, dims.tp, dims.shard)
            losses = evidence.losses.tolist()
            self._failure = StepReport(dims.data_rank, iteration, loss, norm, losses, suspects, norms)
        if not self.islands:
            self._end_job()
        return False

    @property
    def found(self) -> tuple[bool, bool]:
        """Tell whether this island has seen what is not finite, and whether it wants to go back, since `resolve`."""
        return self._failure is not None, self._wants_back

    def resolve(self, *, failed: bool, back: bool) -> bool:
        """End the job, or go back, because some island has to; called on all ranks of all islands. Returns `back`.

        Raises:
            NotFiniteError: some island has `failed`.
        """
        if failed:
            self._end_job()
        self._wants_back = False
        if back:
            self.run.log(f"the loss of an island has jumped{self._go_back()}")
        return back

    def _end_job(self) -> NoReturn:
        """Gather the ranks' reports, write them down, and raise the same message, about the first that has failed."""
        world, plan = self.run.dims.world, self.plan
        reports = world.gather_objects(self._failure or StepReport(self.run.dims.data_rank))
        message = None
        if reports:
            first = next(each for each in reports if each.iteration is not None)
            step = first.iteration
            reports = [each if each.iteration == step else StepReport(each.data_rank) for each in reports]
            sample = plan.consumed_samples_at(step - 1)
            message = describe(first, reports, sample, plan.micro_batch_size)
            if self.run.folder is not None:
                keys = ("data_rank", "losses", "suspects")
                record = {
                    "iteration": step,
                    "loss": first.loss,
                    "grad_norm": first.norm,
                    "first_sample": sample,
                    "samples": plan.batch_size_at(sample),
                    "micro_batch_size": plan.micro_batch_size,
                    "grad_norms": first.norms,
                    "ranks": [{key: getattr(each, key) for key in keys} for each in reports],
                }
                file = self.run.folder.write_json(f"not-finite-{step}.json", record, indent=2)
                message += f"\nsamples, losses and norms: {file}"
        raise NotFiniteError(world.share_object(message))

    def _go_back(self) -> str:
        """Go back, and say what became of it, as the end of a sentence."""
        assert self.rewind is not None
        losses = self.history.state_dict()  # a checkpoint's would not know the latest
        try:
            return f", and the weights go back to those of iteration {self.rewind()}"
        except ValueError as error:  # no checkpoint yet
            return f" ({error})"
        finally:
            self.history.load_state_dict(losses)

    def _is_spike(self, iteration: int, loss: float) -> bool:
        """Also counts the loss among those that the next one is compared with.

        Spikes too: where losses stay high the window widens, and after a few skipped steps training goes on.
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
        what = "the step is skipped"
        if self.rewind is not None and self.islands:
            self._wants_back = True
            what += ", and the weights of all islands go back when they synchronize"
        elif self.rewind is not None:
            what += self._go_back()
        self.run.log(
            f"iteration {iteration}: the loss is {loss:.4f}, after {mean:.4f} +- {deviation:.4f} over {len(before)} "
            f"steps; {what}"
        )
        return True


def describe(first: StepReport, reports: Sequence[StepReport], first_sample: int, micro_batch_size: int) -> str:
    """The message for the user, of a step's `first` report and those of all ranks."""
    assert first.iteration is not None
    lines = [
        f"iteration {first.iteration}: loss {first.loss:g}, gradient norm {first.norm:g}; the job ends before the "
        f"update, the weights are those of iteration {first.iteration - 1}"
    ]
    data_size = 1 + max(each.data_rank for each in reports)
    bad_losses = []
    for rank, each in enumerate(reports):
        for index in (index for index, value in enumerate(each.losses) if not math.isfinite(value)):
            start = first_sample + (index * data_size + each.data_rank) * micro_batch_size
            samples = f"samples {start} to {start + micro_batch_size - 1}"
            bad_losses.append(f"the loss of micro-batch {index} ({samples}) is not finite on rank {rank}")
    lines += bad_losses[:SHOWN]
    bad = {name: value for name, value in first.norms.items() if not math.isfinite(value)}
    for name, value in list(bad.items())[:SHOWN]:
        ranks = [rank for rank, each in enumerate(reports) if name in (each.suspects or ())]
        if reports[0].suspects is None:
            origin = "from a rank that is not known, because whole copies are summed inside FSDP2"
        else:
            origin = f"from rank {', '.join(map(str, ranks))}" if ranks else "every rank's own gradient was finite"
        lines.append(f"{name}: the norm of the gradient is {value:g}, {origin}")
    more = len(bad_losses[SHOWN:]) + max(0, len(bad) - SHOWN)
    return "\n".join([*lines, f"and {more} more"] if more else lines)
