"""Flags of the optimizer, of the learning-rate schedule and of the loss scale; muon.py has the update rule of Muon."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megazpp.base.flags import Config, flag, spelling

ADAM, MUON = "--optimizer adam muon", "--optimizer muon"


@dataclass(frozen=True, kw_only=True)
class MuonConfig(Config):
    """Flags of --optimizer muon; optim/muon.py has the update rule.

    Attributes:
        muon_momentum: decay rate of Muon's running average of the gradient.
        muon_use_nesterov: orthogonalize a mean of the gradient and its running average, instead of the running average
            alone.
        muon_num_ns_steps: number of Newton-Schulz iterations; each takes three matrix products.
        muon_scale_mode: scale of the update of an r x c matrix: sqrt(max(r, c)) for spectral, sqrt(r / c) for
            unit_rms_norm, sqrt(max(1, r / c)) for shape_scaling.
        muon_extra_scale_factor: number by which Muon's updates are multiplied in addition; with --muon-scale-mode
            spectral, 0.2 gives updates of about the size of AdamW's.
        muon_adam_lr_multiple: ratio to --lr of the learning rate of the parameters that AdamW trains with --optimizer
            muon (embeddings, output layer, biases, norms).
        muon_full_interval: number of steps from one full step to the next, if matrices span nodes. A full step gathers
            each matrix over nodes in 8 bits. In other steps each node orthogonalizes its own rows, without inter-node
            communication. 0 for no full steps.
    """

    muon_momentum: float = flag(0.95, needs=MUON, must_be="below one")
    muon_use_nesterov: bool = flag(True, aliases=("--muon-nesterov",), needs=MUON)
    muon_num_ns_steps: int = flag(5, needs=MUON, must_be="positive")
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag("spectral", needs=MUON)
    muon_extra_scale_factor: float = flag(0.2, needs=MUON, must_be="positive")
    muon_adam_lr_multiple: float = flag(1.0, needs=MUON, must_be="positive")
    muon_full_interval: int = flag(0, needs=MUON, must_be="not negative")

    def scale(self, rows: int, columns: int) -> float:
        """Return the number by which Muon multiplies an orthogonalized matrix of this size to get the weight update."""
        ratio = rows / columns
        scales = {"spectral": max(rows, columns), "unit_rms_norm": ratio, "shape_scaling": max(1.0, ratio)}
        return self.muon_extra_scale_factor * math.sqrt(scales[self.muon_scale_mode])


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(MuonConfig):
    """Optimizer.

    Kind of optimizer, its implementation and parameters, and gradient clipping.

    Attributes:
        optimizer: kind of optimizer: adam (AdamW, with decoupled weight decay), sgd (with momentum), or muon (Muon for
            the matrices of the layers, AdamW for all other parameters).
        optimizer_backend: library whose fused kernels the optimizer uses: torch, or apex (NVIDIA apex with its CUDA
            extensions).
        weight_decay: coefficient of weight decay, which does not apply to biases and one-dimensional parameters.
        adam_beta1: decay rate of Adam's running average of the gradient.
        adam_beta2: decay rate of Adam's running average of the squared gradient.
        adam_eps: constant that Adam adds to the denominator of its update.
        sgd_momentum: momentum of SGD.
        clip_grad: largest global L2 norm of the gradients, to which they are scaled down; 0 for no limit.
    """

    optimizer: Literal["adam", "sgd", "muon"] = flag("adam")
    optimizer_backend: Literal["torch", "apex"] = flag("torch")
    weight_decay: float = flag(0.01, must_be="not negative")
    adam_beta1: float = flag(0.9, needs=ADAM, must_be="below one")
    adam_beta2: float = flag(0.999, needs=ADAM, must_be="below one")
    # With --adam-eps 0, weights whose gradients have always been 0 would become NaN (0 / 0).
    adam_eps: float = flag(1e-8, needs=ADAM, must_be="positive")
    sgd_momentum: float = flag(0.9, needs="--optimizer sgd", must_be="below one")
    clip_grad: float = flag(1.0, must_be="not negative")

    def __post_init__(self) -> None:
        """Raise ValueError for optimizer flags out of their range, and for apex with another optimizer than adam."""
        super().__post_init__()
        if self.optimizer_backend == "apex" and self.optimizer != "adam":
            raise ValueError(
                f"--optimizer-backend apex supports only --optimizer adam, not {self.optimizer}: use"
                " --optimizer-backend torch"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """Learning rate schedule.

    Warm-up, peak, decay and minimum of the learning rate, and the increase of the weight decay.

    Attributes:
        lr: peak learning rate.
        min_lr: learning rate at the end of the decay; a lower bound with inverse-square-root.
        lr_decay_style: shape of the learning rate after the warm-up; WSD (warm-up, stable, decay) holds the peak until
            a final decay.
        lr_decay_iters: length of warm-up and decay together, in iterations (default: --train-iters).
        lr_decay_samples: length of warm-up and decay together, in samples (default: --train-samples).
        lr_warmup_fraction: length of the linear warm-up, as a fraction of --lr-decay-iters or --lr-decay-samples.
        lr_warmup_iters: length of the linear warm-up, in iterations.
        lr_warmup_samples: length of the linear warm-up, in samples.
        lr_warmup_init: learning rate at the start of the warm-up.
        lr_wsd_decay_style: shape of the final decay.
        lr_wsd_decay_iters: length of the final decay, in iterations.
        lr_wsd_decay_samples: length of the final decay, in samples.
        start_weight_decay: weight decay of the first step.
        end_weight_decay: weight decay of the last step.
        weight_decay_incr_style: shape of the weight decay from --start-weight-decay to --end-weight-decay; constant:
            --weight-decay.
    """

    lr: float | None = flag(None, common=True, must_be="not negative")
    min_lr: float = flag(0.0, must_be="not negative")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag("linear")
    lr_decay_iters: int | None = flag(None, must_be="positive")
    lr_decay_samples: int | None = flag(None, must_be="positive")
    lr_warmup_fraction: float | None = flag(None, must_be="not negative")
    lr_warmup_iters: int = flag(0, must_be="not negative")
    lr_warmup_samples: int = flag(0, must_be="not negative")
    lr_warmup_init: float = flag(0.0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", needs="--lr-decay-style WSD"
    )
    lr_wsd_decay_iters: int | None = flag(None, needs="--lr-decay-style WSD", must_be="positive")
    lr_wsd_decay_samples: int | None = flag(None, needs="--lr-decay-style WSD", must_be="positive")
    start_weight_decay: float | None = flag(None, needs="--weight-decay-incr-style linear cosine")
    end_weight_decay: float | None = flag(None, needs="--weight-decay-incr-style linear cosine")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag("constant")

    def __post_init__(self) -> None:
        """Raise ValueError for flags of the schedule that are out of their range or that conflict."""
        # ---- check the flags of the learning rate
        super().__post_init__()
        if self.lr is not None and self.lr < self.min_lr:
            raise ValueError(f"--min-lr {self.min_lr} is above --lr {self.lr}: lower --min-lr or raise --lr")
        if self.lr is not None and not 0.0 <= self.lr_warmup_init <= self.lr:
            init = f"--lr-warmup-init {self.lr_warmup_init}"
            raise ValueError(
                f"{init} is not between 0 and --lr {self.lr}: the warm-up rises from --lr-warmup-init to --lr, so set a"
                " value in this range"
            )
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            if (value := getattr(self, name)) and self.lr_warmup_fraction is not None:
                fraction = f"--lr-warmup-fraction {self.lr_warmup_fraction}"
                raise ValueError(f"{fraction} and {spelling(self, name)} {value} exclude each other: set only one")
        # ---- check the flags of a weight decay that increases during the run
        start, end, style = self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style
        if style != "constant" and (start is None or end is None):
            needed = f"--start-weight-decay and --end-weight-decay (given: {start}, {end})"
            raise ValueError(f"--weight-decay-incr-style {style} needs {needed}: set both")
        if start is not None and end is not None and not 0.0 <= start <= end:
            raise ValueError(
                f"--start-weight-decay {start} is not between 0 and --end-weight-decay {end}: the weight decay can only"
                " increase, so set values with 0 <= start <= end"
            )


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig(Config):
    """Loss scaling.

    Constant loss scale, or the parameters of the dynamic loss scale that --fp16 uses by default.

    Attributes:
        loss_scale: constant loss scale (default: a dynamic loss scale with --fp16, otherwise none).
        initial_loss_scale: initial value of the dynamic loss scale.
        min_loss_scale: lower bound of the dynamic loss scale.
        loss_scale_window: number of consecutive steps without overflow after which the dynamic loss scale doubles.
        hysteresis: number of overflows, counted since the dynamic loss scale last grew, of which the last one halves
            it; each further overflow halves it again.
    """

    loss_scale: float | None = flag(None, must_be="positive")
    initial_loss_scale: float = flag(float(2**32), must_be="positive")
    min_loss_scale: float = flag(1.0, must_be="positive")
    loss_scale_window: float = flag(1000.0, must_be="positive")
    hysteresis: int = flag(2, must_be="positive")

    def __post_init__(self) -> None:
        """Raise ValueError if a loss scale flag is not positive, or the lower bound is above the initial scale."""
        super().__post_init__()
        low, first = self.min_loss_scale, self.initial_loss_scale
        if low > first:
            raise ValueError(f"--min-loss-scale {low} is above --initial-loss-scale {first}: lower --min-loss-scale")
