"""Settings and results of the router's kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RouterSettings(NamedTuple):
    """The scores and factors of a router, and the coefficients of its losses.

    Attributes:
        batch: number of samples B.
        top_k: experts of a token K.
        sigmoid: scores are sigmoids, normalized over the chosen experts; otherwise they are a softmax.
        pre_softmax: factors of outputs come from the softmax over all experts, otherwise over the chosen ones.
        scaling: factor of the outputs' factors.
        balance: factor of sum_i c_i p_i in the loss of a sample, where c_i is how often its tokens chose expert i, and
            p_i the sum of their normalized scores of expert i.
        z: factor of the sum over a sample's tokens of logsumexp(logits)^2.
    """

    batch: int
    top_k: int
    sigmoid: bool
    pre_softmax: bool
    scaling: float
    balance: float
    z: float


class Routed(NamedTuple):
    """Results of a router for N tokens.

    Attributes:
        choice: [N, K] int64, experts of each token.
        weight: [N, K] fp32, factors of the experts' outputs.
        chosen: [B, E] fp32, how often the tokens of each sample chose each expert.
        loss: [B] fp32, losses of each sample.
    """

    choice: Tensor
    weight: Tensor
    chosen: Tensor
    loss: Tensor
