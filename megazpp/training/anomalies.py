"""The guard of the weights: looks for what must not get into them, between the backward and the update of every step.

One file of more than 300 lines: the guard, the losses it compares with and the search for the origin share what a
step has shown.

    the loss or a gradient is not finite    the job ends, and says where it came from
    the loss jumps (--loss-spike-sigma)     the step is skipped, or the weights go back to the last checkpoint
    gathered weights differ between ranks   the job ends (--zero-verify-interval, zero/verify.py)

All ranks see the same numbers and decide the same. With a dynamic loss scale a gradient that is not finite is the
scale's business and the step is skipped; a loss that is not finite is an error there too.

Where only the first line is asked for, as by default, the device decides: it leaves the weights alone, and the host
hears of it one step later, before the next update (step.py). What the message needs is kept until then: `Evidence`.

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
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple

import torch

from megazpp.base.flags import check_positive, check_words, flag
from megazpp.base.program import JobError
from megazpp.optim.clip import GradNorm, grad_norms
from megazpp.parallel.dims import ParallelDims
from megazpp.training.batches import BatchPlan
from megazpp.training.run_folder import RunFolder
from megazpp.zero.sharding import Sharding

WINDOW, FEWEST = 100, 20  # losses that a loss is compared with
SHOWN = 8  # parameters and micro-batches that the message names; the file has all


@dataclass(frozen=True, kw_only=True)
class AnomalyConfig:
    """NaN, Inf and loss spikes: what must not get into the weights."""

    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "when the loss or a gradient is not finite, leave the weights alone and end the job (in the next step at the "
        "latest), and say which parameter on which rank; without it such a step is skipped",
    )
    loss_spike_sigma: float | None = flag(
        None,
        f"skip the update of a step whose loss is more than this many standard deviations above the mean of the last "
        f"{WINDOW} (from the {FEWEST + 1}th step on)",
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


@dataclass
class Guard:
    """Decides whether a step is taken.

    Args:
        config: what to look for.
        not_finite: ends the job with a report.
        history: the losses so far; the guard adds each step's.
        dynamic_scale: gradients that are not finite are the loss scale's business.
        log: prints on rank 0.
        rewind: takes weights and moments back to the last checkpoint and returns its iteration; called on all ranks.
            None: a spike is only skipped.
        verify: raises if ranks have gathered different weights.
        verify_interval: steps between two calls of it; None: never.
        islands: each decides for itself whether it takes a step; what ends the job or goes back waits for `settle`.
    """

    config: AnomalyConfig
    not_finite: NotFinite
    history: LossHistory
    _: KW_ONLY
    dynamic_scale: bool
    log: Callable[[str], None]
    rewind: Callable[[], int] | None = None
    verify: Callable[[], None] | None = None
    verify_interval: int | None = None
    islands: bool = False

    def __post_init__(self) -> None:
        self._failure: Failure | None = None
        self._wants_back = False

    def begin_step(self) -> None:
        """Before the forward."""
        if self.config.check_for_nan_in_loss_and_grad:
            self.not_finite.watch()

    @property
    def can_wait(self) -> bool:
        """True if all it looks for is what is not finite, and ends the job: then `allows` may come a step later."""
        config = self.config
        others = config.loss_spike_sigma is not None or self.verify_interval is not None or self.dynamic_scale
        return config.check_for_nan_in_loss_and_grad and not others

    def evidence(self, local_losses: torch.Tensor, norm: GradNorm) -> Evidence:
        """Return what a later `allows` needs to know of the step; call after its backward."""
        return Evidence(local_losses, norm, self.not_finite.own_gradients())

    def allows(self, iteration: int, loss: float, norm: float, evidence: Evidence) -> bool:
        """Decide whether to update the weights with the gradients that `iteration` has come to.

        Args:
            loss, norm: of the global batch.
            evidence: of the same step.
        Raises:
            NotFiniteError, CorruptWeightsError: on all ranks.
        """
        if self.verify is not None and self.verify_interval and iteration % self.verify_interval == 0:
            self.verify()  # first, because it would explain what else is wrong
        finite = math.isfinite(loss) and (math.isfinite(norm) or self.dynamic_scale)
        if self.config.check_for_nan_in_loss_and_grad and not finite:
            failure = Failure(iteration, loss, norm, evidence)
            if not self.islands:
                self.not_finite.report(failure)
            self._failure = self._failure or failure
            return False
        return math.isfinite(norm) and not self._is_spike(iteration, loss)

    @property
    def found(self) -> tuple[bool, bool]:
        """Tell whether this island has seen what is not finite, and whether it wants to go back, since `settle`."""
        return self._failure is not None, self._wants_back

    def settle(self, *, failed: bool, back: bool) -> bool:
        """End the job, or go back, because some island has to; called on all ranks of all islands.

        Returns:
            Whether all have gone back to a checkpoint.
        Raises:
            NotFiniteError: some island has `failed`.
        """
        if failed:
            self.not_finite.report(self._failure)
        self._wants_back = False
        if back:
            self.log(f"the loss of an island has jumped{self._go_back()}")
        return back

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
        self.log(
            f"iteration {iteration}: the loss is {loss:.4f}, after {mean:.4f} +- {deviation:.4f} over {len(before)} "
            f"steps; {what}"
        )
        return True


class NotFiniteError(JobError):
    """The loss or a gradient is NaN or Inf."""


class Evidence(NamedTuple):
    """The values that this rank keeps of a step until it is known to be finite; small tensors, no gradient among them.

    Attributes:
        losses: [number of micro-batches] its share of the loss.
        norm: of the step's gradients.
        own: by parameter the sum of its own gradients, before the sum over ranks; None where nobody can look.
    """

    losses: torch.Tensor
    norm: GradNorm
    own: Mapping[str, torch.Tensor] | None


class StepReport(NamedTuple):
    """The knowledge of one rank of a step whose loss or gradient norm is not finite; none where its own were.

    Attributes:
        data_rank: which samples it had.
        losses: its share of the loss, by micro-batch.
        suspects: parameters of the units in which its own gradients were not finite; None where nobody can look.
    """

    data_rank: int
    losses: list[float]
    suspects: list[str] | None


class Failure(NamedTuple):
    """A step whose loss or gradient norm is not finite."""

    iteration: int
    loss: float
    norm: float
    evidence: Evidence


@dataclass
class NotFinite:
    """Gathers what the ranks know of a step that is not finite, and ends the job.

    Args:
        sharding: the model whose gradients are in question.
        dims: for asking.
        plan: which samples an iteration has.
        folder: where rank 0 writes; None on the others.
    """

    sharding: Sharding
    dims: ParallelDims
    plan: BatchPlan
    folder: RunFolder | None

    def watch(self) -> None:
        """Before each step: look at its gradients before they are summed."""
        self.sharding.watch_gradients()

    def own_gradients(self) -> Mapping[str, torch.Tensor] | None:
        """Return what was seen since `watch`."""
        return self.sharding.own_gradients()

    def report(self, failure: Failure | None) -> None:
        """Gather, write and raise; called on all ranks.

        Args:
            failure: the same on all ranks of an island; None on one whose steps were finite.
        Raises:
            NotFiniteError: the same message on all ranks, about the first island that has failed.
        """
        norms, mine = dict[str, float](), StepReport(self.dims.data_rank, [], [])
        if failure is not None:
            evidence = failure.evidence
            norms = grad_norms(evidence.norm, self.dims.tp, self.dims.shard)
            own = evidence.own
            suspects = None if own is None else [name for name, total in own.items() if not total.isfinite()]
            mine = StepReport(self.dims.data_rank, evidence.losses.tolist(), suspects)
        told = self.dims.world.gather_objects((mine, failure and failure[:3], norms))
        message = None
        if told:
            (iteration, loss, norm), norms = next((step, norms) for _, step, norms in told if step is not None)
            found = [
                each if step is not None and step[0] == iteration else StepReport(each.data_rank, [], [])
                for each, step, _ in told
            ]
            first, size = self.plan.consumed_samples_at(iteration - 1), self.plan.micro_batch_size
            message = describe(found, norms, iteration, loss, norm, first, size)
            if self.folder is not None:
                record = {
                    "iteration": iteration,
                    "loss": loss,
                    "grad_norm": norm,
                    "first_sample": first,
                    "samples": self.plan.batch_size_at(first),
                    "micro_batch_size": size,
                    "grad_norms": norms,
                    "ranks": [each._asdict() for each in found],
                }
                file = self.folder.write_json(f"not-finite-{iteration}.json", record, indent=2)
                message += f"\nsamples, losses and norms: {file}"
        raise NotFiniteError(self.dims.world.share_object(message))


def describe(
    found: Sequence[StepReport],
    norms: Mapping[str, float],
    iteration: int,
    loss: float,
    norm: float,
    first_sample: int,
    micro_batch_size: int,
) -> str:
    """The message for the user.

    Args:
        found: by rank.
        norms: of each parameter's gradient.
        first_sample: of the iteration.
    """
    lines = [
        f"iteration {iteration}: loss {loss:g}, gradient norm {norm:g}; the job ends before the update, the weights "
        f"are those of iteration {iteration - 1}"
    ]
    data_size = 1 + max(each.data_rank for each in found)
    bad_losses = [
        (rank, index, each.data_rank)
        for rank, each in enumerate(found)
        for index, value in enumerate(each.losses)
        if not math.isfinite(value)
    ]
    for rank, index, data_rank in bad_losses[:SHOWN]:
        start = first_sample + (index * data_size + data_rank) * micro_batch_size
        lines.append(
            f"the loss of micro-batch {index} (samples {start} to {start + micro_batch_size - 1}) is not finite on "
            f"rank {rank}"
        )
    bad = {name: value for name, value in norms.items() if not math.isfinite(value)}
    for name, value in list(bad.items())[:SHOWN]:
        ranks = [rank for rank, each in enumerate(found) if name in (each.suspects or ())]
        if found[0].suspects is None:
            origin = "from a rank that is not known, because whole copies are summed inside FSDP2"
        else:
            origin = f"from rank {', '.join(map(str, ranks))}" if ranks else "every rank's own gradient was finite"
        lines.append(f"{name}: the norm of the gradient is {value:g}, {origin}")
    more = len(bad_losses[SHOWN:]) + max(0, len(bad) - SHOWN)
    return "\n".join([*lines, f"and {more} more"] if more else lines)
