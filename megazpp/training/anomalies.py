"""What must not get into the weights: looked for between the backward and the update of every step.

    the loss or a gradient is not finite    the job ends, and says where it came from (not_finite.py)
    the loss jumps (--loss-spike-sigma)     the step is skipped, or the weights go back to the last checkpoint
    gathered weights differ between ranks   the job ends (--zero-verify-interval, zero/verify.py)

All ranks see the same numbers and decide the same. With a dynamic loss scale a gradient that is not finite is the
scale's business and the step is skipped; a loss that is not finite is an error there too.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megazpp.flags import check_positive, flag
from megazpp.training.not_finite import NotFinite

WINDOW, FEWEST = 100, 20  # losses that a loss is compared with


@dataclass(frozen=True, kw_only=True)
class AnomalyConfig:
    """NaN, Inf and loss spikes: what must not get into the weights."""

    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "end the job before the update when the loss or a gradient is not finite, and say which parameter on which "
        "rank; without it such a step is skipped",
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
    """

    def __init__(
        self,
        config: AnomalyConfig,
        not_finite: NotFinite,
        history: LossHistory,
        *,
        dynamic_scale: bool,
        log: Callable[[str], None],
        rewind: Callable[[], int] | None = None,
        verify: Callable[[], None] | None = None,
        verify_interval: int | None = None,
    ) -> None:
        self._config, self._not_finite, self._dynamic_scale = config, not_finite, dynamic_scale
        self._history, self._log, self._rewind = history, log, rewind
        self._verify, self._verify_interval = verify, verify_interval

    def begin_step(self) -> None:
        """Before the forward."""
        if self._config.check_for_nan_in_loss_and_grad:
            self._not_finite.watch()

    def allows(self, iteration: int, loss: float, norm: float, local_losses: torch.Tensor) -> bool:
        """Whether to update the weights with the gradients that `iteration` has come to.

        Args:
            loss, norm: of the global batch.
            local_losses: [number of micro-batches] this rank's share of the loss.
        Raises:
            NotFiniteError, CorruptWeightsError: on all ranks.
        """
        if self._verify is not None and self._verify_interval and iteration % self._verify_interval == 0:
            self._verify()  # first, because it would explain what else is wrong
        finite = math.isfinite(loss) and (math.isfinite(norm) or self._dynamic_scale)
        if self._config.check_for_nan_in_loss_and_grad and not finite:
            self._not_finite.report(iteration, loss, norm, local_losses)
        return math.isfinite(norm) and not self._is_spike(iteration, loss)

    def _is_spike(self, iteration: int, loss: float) -> bool:
        """Also counts the loss among those that the next one is compared with.

        Spikes too: where losses stay high the window widens, and after a few skipped steps training goes on.
        """
        sigma = self._config.loss_spike_sigma
        if sigma is None or not math.isfinite(loss):
            return False
        before = list(self._history.losses)
        self._history.losses.append(loss)
        if len(before) < FEWEST:
            return False
        mean, deviation = statistics.fmean(before), statistics.stdev(before)
        if loss <= mean + sigma * deviation:
            return False
        what = "the step is skipped"
        if self._rewind is not None:
            losses = self._history.state_dict()  # a checkpoint's would not know this one
            try:
                what += f", and the weights go back to those of iteration {self._rewind()}"
            except ValueError as error:  # no checkpoint yet
                what += f" ({error})"
            self._history.load_state_dict(losses)
        self._log(
            f"iteration {iteration}: the loss is {loss:.4f}, after {mean:.4f} +- {deviation:.4f} over {len(before)} "
            f"steps; {what}"
        )
        return True
