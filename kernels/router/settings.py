"""Settings and results of the kernels that compute the router of a mixture of experts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RouterSettings(NamedTuple):
    """Settings of a mixture of experts' router: its scores, factors of outputs, and coefficients of losses.

    Attributes:
        batch: number of samples B in the micro-batch.
        top_k: number K of experts that each token chooses.
        sigmoid: True if scores are sigmoids of the logits; False if scores are the softmax of the logits. With
            sigmoids, the factors of outputs are the scores, for K > 1 divided by their sum over the chosen experts.
        pre_softmax: True if factors of outputs come from the softmax over all experts; False if from a softmax over the
            chosen experts only. Ignored with sigmoids.
        scaling: number by which all factors of outputs are multiplied.
        balance: coefficient of the load-balancing loss sum_i c_i p_i of a sample, where c_i is how often the sample's
            tokens chose expert i, and p_i the sum of their normalized scores of expert i.
        z: coefficient of the z loss, the sum over a sample's tokens of logsumexp(logits)^2.
    """

    batch: int
    top_k: int
    sigmoid: bool
    pre_softmax: bool
    scaling: float
    balance: float
    z: float


class Routed(NamedTuple):
    """Results of a mixture of experts' router for N tokens of B samples.

    Attributes:
        choice: [N, K] int64, the K experts that each token has chosen.
        weight: [N, K] fp32, factors by which the outputs of these experts are multiplied.
        chosen: [B, E] fp32, how often the tokens of each sample have chosen each of E experts.
        loss: [B] fp32, load-balancing loss plus z loss of each sample, times their coefficients.
    """

    choice: Tensor
    weight: Tensor
    chosen: Tensor
    loss: Tensor
