"""The flags of the optimizer; optim/muon.py has the update rule of Muon."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megazpp.base.flags import check_below_one, check_not_negative, check_positive, check_words, flag

ADAM, MUON = "--optimizer adam muon", "--optimizer muon"


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Flags of Muon; see the top of this file for the update rule. `OptimizerConfig` checks their values."""

    muon_momentum: float = flag(0.95, "decay rate of Muon's running average of the gradient", needs=MUON)
    muon_use_nesterov: bool = flag(
        True,
        "orthogonalize a mean of the gradient and its running average, instead of the running average alone",
        aliases=("--muon-nesterov",),
        needs=MUON,
    )
    muon_num_ns_steps: int = flag(5, "number of Newton-Schulz iterations; each takes three matrix products", needs=MUON)
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag(
        "spectral",
        "scale of the update of an r x c matrix: sqrt(max(r, c)) for spectral, sqrt(r / c) for unit_rms_norm, "
        "sqrt(max(1, r / c)) for shape_scaling",
        needs=MUON,
    )
    muon_extra_scale_factor: float = flag(
        0.2,
        "additional factor of Muon's updates; with spectral, 0.2 gives updates of about the size of AdamW's",
        needs=MUON,
    )
    muon_adam_lr_multiple: float = flag(
        1.0,
        "ratio to --lr of the learning rate of the parameters that AdamW trains with --optimizer muon (embeddings, "
        "output layer, biases, norms)",
        needs=MUON,
    )
    muon_full_interval: int = flag(
        0,
        "number of steps from one full step to the next, if matrices span nodes. A full step gathers each matrix over "
        "nodes in 8 bits. In other steps each node orthogonalizes its own rows, without inter-node communication. "
        "0 for no full steps",
        needs=MUON,
    )

    def scale(self, rows: int, columns: int) -> float:
        """Return the factor of the orthogonalized matrix, for a matrix of the given size."""
        ratio = rows / columns
        scales = {"spectral": max(rows, columns), "unit_rms_norm": ratio, "shape_scaling": max(1.0, ratio)}
        return self.muon_extra_scale_factor * math.sqrt(scales[self.muon_scale_mode])


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(MuonConfig):
    """Optimizer.

    Kind of optimizer, its implementation and parameters, and gradient clipping.
    """

    optimizer: Literal["adam", "sgd", "muon"] = flag(
        "adam",
        "kind of optimizer: adam (AdamW, with decoupled weight decay), sgd (with momentum), or muon (Muon for the "
        "matrices of the layers, AdamW for all other parameters)",
    )
    optimizer_backend: Literal["torch", "apex"] = flag(
        "torch", "library whose fused kernels the optimizer uses: torch, or apex (NVIDIA apex with its CUDA extensions)"
    )
    weight_decay: float = flag(
        0.01, "coefficient of weight decay, which does not apply to biases and one-dimensional parameters"
    )
    adam_beta1: float = flag(0.9, "decay rate of Adam's running average of the gradient", needs=ADAM)
    adam_beta2: float = flag(0.999, "decay rate of Adam's running average of the squared gradient", needs=ADAM)
    adam_eps: float = flag(1e-8, "constant that Adam adds to the denominator of its update", needs=ADAM)
    sgd_momentum: float = flag(0.9, "momentum of SGD", needs="--optimizer sgd")
    clip_grad: float = flag(
        1.0, "largest global L2 norm of the gradients, to which they are scaled down; 0 for no limit"
    )

    def __post_init__(self) -> None:
        """Raise ValueError for values out of their range, and for apex with an optimizer that it does not support."""
        check_words(self)
        check_below_one(self, "adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum")
        check_positive(self, "adam_eps")  # with 0, elements whose gradients are all 0 (unused tokens) would become NaN
        check_positive(self, "muon_num_ns_steps", "muon_extra_scale_factor", "muon_adam_lr_multiple")
        check_not_negative(self, "weight_decay", "clip_grad", "muon_full_interval")
        if self.optimizer_backend == "apex" and self.optimizer != "adam":
            raise ValueError(f"--optimizer-backend apex supports only --optimizer adam, not {self.optimizer}")
