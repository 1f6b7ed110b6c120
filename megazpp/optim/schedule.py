"""Schedule of learning rate and weight decay, as pure functions of the number of samples consumed so far.

The formulas, and the unit of samples, are Megatron-LM's. Lengths in iterations are converted to samples by the global
batch size, so the schedule does not depend on the number of ranks. If a run with --train-iters resumes with another
global batch size, its position in the schedule is converted as well (`schedule_ratio` in checkpoint/metadata.py). A
step uses the values for the samples consumed before the step, so the first step of a warm-up has the learning rate
--lr-warmup-init.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from megazpp.base.flags import spelling
from megazpp.optim.config import ScheduleConfig


class TrainingProgress(NamedTuple):
    """The progress of training, which a checkpoint stores and from which a resumed run continues.

    Attributes:
        iteration: number of completed training steps, including skipped ones.
        consumed_samples: number of samples in the completed steps.
        scheduled_samples: position in the learning-rate schedule, in samples. Skipped steps do not advance it. A run
            with --train-iters that resumes with another global batch size rescales it (`schedule_ratio`).
        micro_batches: number of micro-batches that one rank has processed in all steps.
        stop_reason: reason why the training loop ended before its last iteration, for the log; None if it reached its
            last iteration or still runs.
        token_offset: number of tokens in the consumed samples, minus `consumed_samples` x --seq-length. It is not 0 if
            an earlier part of the run had another --seq-length.
    """

    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0
    micro_batches: int = 0
    stop_reason: str | None = None
    token_offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedule of learning rate and weight decay, built from flags by `build_schedule`.

    Attributes:
        max_lr: peak learning rate.
        min_lr: learning rate after the decay.
        init_lr: learning rate at the start of the warm-up.
        warmup_samples: length of the warm-up in samples.
        decay_samples: length of warm-up and decay together in samples.
        decay_style: shape of the decay, a value of --lr-decay-style.
        anneal_samples: length in samples of the final decay of --lr-decay-style WSD; None for other styles.
        anneal_style: shape of the final decay of WSD, a value of --lr-wsd-decay-style.
        start_weight_decay: weight decay of the first step.
        end_weight_decay: weight decay after `ramp_samples` samples.
        ramp_samples: length in samples of the increase of the weight decay, which is the length of the run.
        ramp_style: shape of this increase, a value of --weight-decay-incr-style; "constant" for no increase.
    """

    max_lr: float
    min_lr: float
    init_lr: float
    warmup_samples: float
    decay_samples: int
    decay_style: str
    anneal_samples: int | None
    anneal_style: str
    start_weight_decay: float
    end_weight_decay: float
    ramp_samples: int
    ramp_style: str

    def learning_rate(self, consumed_samples: int) -> float:
        """Return the learning rate of the next training step after `consumed_samples` samples of the schedule."""
        if self.warmup_samples > 0 and consumed_samples <= self.warmup_samples:
            return self.init_lr + (self.max_lr - self.init_lr) * consumed_samples / self.warmup_samples
        if self.decay_style == "constant":
            return self.max_lr
        if consumed_samples > self.decay_samples:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            peak = self.max_lr * max(self.warmup_samples, 1) ** 0.5
            return max(self.min_lr, peak / max(consumed_samples, 1) ** 0.5)
        if self.decay_style == "WSD":
            assert self.anneal_samples is not None
            annealed = consumed_samples - (self.decay_samples - self.anneal_samples)
            height = 1.0 if annealed <= 0 else _fall(self.anneal_style, annealed / self.anneal_samples)
        else:
            progress = (consumed_samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
            height = _fall(self.decay_style, progress)
        return self.min_lr + height * (self.max_lr - self.min_lr)

    def weight_decay(self, consumed_samples: int) -> float:
        """Return the weight decay of the next training step after `consumed_samples` samples of the schedule.

        `set_rates_` multiplies the result by each parameter group's "wd_mult", which is 0 for biases and norms.
        """
        if self.ramp_style == "constant" or consumed_samples > self.ramp_samples:
            return self.end_weight_decay
        progress = consumed_samples / self.ramp_samples
        if self.ramp_style == "cosine":
            progress = 0.5 * (math.cos(math.pi * (1.0 - progress)) + 1.0)
        return self.start_weight_decay + progress * (self.end_weight_decay - self.start_weight_decay)

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes of the schedule by name, for a checkpoint."""
        return dataclasses.asdict(self)

    def stretched(self, ratio: Fraction) -> Schedule:
        """Return the schedule with every length in samples multiplied by `ratio`.

        A run with --train-iters that resumes with another global batch size needs this. Lengths that are integers are
        rounded down; the warm-up may be fractional.
        """
        if ratio == 1:
            return self
        whole = {"decay_samples": self.decay_samples, "ramp_samples": self.ramp_samples}
        if self.anneal_samples is not None:
            whole["anneal_samples"] = self.anneal_samples
        lengths: dict[str, Any] = {name: math.floor(samples * ratio) for name, samples in whole.items()}
        return dataclasses.replace(self, warmup_samples=float(self.warmup_samples * ratio), **lengths)


def _fall(style: str, progress: float) -> float:
    """Return (learning rate - min_lr) / (max_lr - min_lr) during a decay of the learning rate.

    The result falls from 1 at the start of the decay to 0 at its end. `progress` is the fraction of the decay's length
    that has passed, and `style` the shape: "linear", "cosine", "minus_sqrt" or, for any other word, exponential.
    """
    if style == "linear":
        return 1.0 - progress
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * progress) + 1.0)
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(progress)
    return 2.0 * 0.5**progress - 1.0


def build_schedule(
    config: ScheduleConfig,
    *,
    weight_decay: float,
    train_iters: int | None,
    train_samples: int | None,
    global_batch_size: int,
) -> Schedule:
    """Build the schedule of a run's learning rate and weight decay.

    Args:
        config: flags of the schedule.
        weight_decay: constant weight decay, used unless --weight-decay-incr-style increases it.
        train_iters: length of the run in training steps; None if `train_samples` is given.
        train_samples: length of the run in samples; None if `train_iters` is given.
        global_batch_size: samples per step, after any batch-size ramp-up; it converts iterations into samples.

    Raises:
        ValueError: flags are missing, mix iterations with samples, or do not fit the length of the run.
    """
    # ---- determine the unit of the flags' lengths: samples with --train-samples, iterations with --train-iters
    if config.lr is None:
        raise ValueError("--lr is required: set the peak learning rate")
    unit, other = ("samples", "iters") if train_iters is None else ("iters", "samples")
    train = train_samples if train_iters is None else train_iters
    assert train is not None
    for name in (f"lr_decay_{other}", f"lr_warmup_{other}", f"lr_wsd_decay_{other}"):
        if value := getattr(config, name):
            raise ValueError(
                f"{spelling(config, name)} {value} cannot be combined with --train-{unit} {train}: use the flag"
                f" whose name ends with -{unit} instead, and convert the value"
            )

    # ---- read and check the lengths of warm-up, decay and final decay, in iterations or samples
    decay, fraction = getattr(config, f"lr_decay_{unit}"), config.lr_warmup_fraction
    decay_flag = f"--train-{unit} {train}" if decay is None else f"--lr-decay-{unit} {decay}"
    decay = train if decay is None else decay
    warmup = getattr(config, f"lr_warmup_{unit}") if fraction is None else fraction * decay
    warmup_flag = f"--lr-warmup-{unit} {warmup}" if fraction is None else f"--lr-warmup-fraction {fraction}"
    if not warmup < decay:
        raise ValueError(
            f"{warmup_flag}: the warm-up must be shorter than the decay, {decay_flag}, which includes the warm-up:"
            " shorten the warm-up, or lengthen the decay"
        )
    anneal = getattr(config, f"lr_wsd_decay_{unit}")
    if config.lr_decay_style == "WSD":
        if anneal is None:
            raise ValueError(f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, the length of the final decay: set it")
        if not 0 < anneal <= decay - warmup:
            raise ValueError(
                f"--lr-wsd-decay-{unit} {anneal} does not fit between {warmup_flag} and {decay_flag}: shorten the final"
                " decay"
            )

    # ---- convert all lengths to samples, and build the schedule
    samples = 1 if train_iters is None else global_batch_size
    constant = config.weight_decay_incr_style == "constant"
    return Schedule(
        max_lr=config.lr,
        min_lr=config.min_lr,
        init_lr=config.lr_warmup_init,
        warmup_samples=warmup * samples,
        decay_samples=decay * samples,
        decay_style=config.lr_decay_style,
        anneal_samples=None if anneal is None else anneal * samples,
        anneal_style=config.lr_wsd_decay_style,
        start_weight_decay=weight_decay if constant else config.start_weight_decay or 0.0,
        end_weight_decay=weight_decay if constant else config.end_weight_decay or 0.0,
        ramp_samples=train * samples,
        ramp_style=config.weight_decay_incr_style,
    )
