"""The router of a mixture of experts on CUDA, in Triton: choices of experts, factors of outputs, losses and totals.

Each program processes a block of tokens, with a token's logits for all E experts in registers. Sums over tokens are
computed per block first, without atomic operations, so two runs have the same bits. `Router` in model/router.py defines
the results.

Tokens are numbered n = s B + b, where s is the position in the sequence and b the sample.
"""
# Compile-time constants are upper case, as is usual in Triton. mypy has no types for the arguments of kernels, which
# are pointers and tensors on the device.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megazpp.kernels.router.settings import Routed, RouterSettings

_TILE = 4096  # maximum number of logits that one program holds: its number of tokens times the number of experts
_AT_ONCE = tl.constexpr(16)  # blocks of tokens whose sums `_sum_kernel` adds up per iteration of its loop
NUM_WARPS = 4


def route(
    logits: Tensor, bias: Tensor | None, choice: Tensor | None, totals: Tensor | None, settings: RouterSettings
) -> Routed:
    """Choose the experts of all tokens, unless `choice` gives them, and compute factors, losses and totals.

    `megazpp.kernels.router.find_router` describes the arguments.
    """
    (tokens, num_experts), device = logits.shape, logits.device
    batch, shape = settings.batch, _shape(logits, settings)
    num_blocks = triton.cdiv(tokens, shape["BLOCK"])
    given, empty = choice is not None, torch.empty
    if choice is None:
        choice = empty(tokens, settings.top_k, dtype=torch.int64, device=device)
    weight = empty(tokens, settings.top_k, device=device)
    # For each block of tokens and each sample: how often each expert was chosen [E], the sums of the normalized scores
    # [E], the sum of logsumexp^2, and the sum of the entropies.
    sums = empty(num_blocks, batch, 2 * num_experts + 2, device=device)
    data = (logits, choice, weight, sums, logits if bias is None else bias)  # without BIASED the last one is not read
    _route_kernel[(num_blocks,)](
        *data, tokens, num_experts, batch, settings.scaling, GIVEN=given, BIASED=bias is not None, **shape
    )
    chosen, loss = empty(batch, num_experts, device=device), empty(batch, device=device)
    counted = loss if totals is None else totals  # without COUNTS the kernel does not use this argument
    scales = (settings.balance, settings.z)
    _sum_kernel[(1,)](
        *(sums, chosen, loss, counted, num_blocks, tokens, num_experts, batch, *scales),
        EXPERTS=shape["EXPERTS"], COUNTS=totals is not None, num_warps=NUM_WARPS,
    )  # fmt: skip
    return Routed(choice, weight, chosen, loss)


def route_backward(
    logits: Tensor, routed: Routed, of_weight: Tensor, of_loss: Tensor, settings: RouterSettings, dtype: torch.dtype
) -> Tensor:
    """Return the gradient [N, E] of the router's logits in `dtype`; see `router.find_router`.

    Args:
        logits: [N, E] fp32 logits of N tokens and E experts, as for `route`.
        routed: results of `route`.
        of_weight: [N, K] gradient of the factors by which the outputs of each token's K experts are multiplied.
        of_loss: [B] gradient of the losses of B samples.
        settings: settings of the router, as for `route`.
        dtype: dtype of the result.
    """
    shape = _shape(logits, settings)
    found = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    data = (logits, routed.choice, routed.chosen, of_weight.contiguous(), of_loss, found)
    scales = (settings.scaling, settings.balance, settings.z)
    grid = (triton.cdiv(len(logits), shape["BLOCK"]),)
    _backward_kernel[grid](*data, *logits.shape, settings.batch, of_loss.stride(0), *scales, **shape)
    return found


def _shape(logits: Tensor, settings: RouterSettings) -> dict[str, int]:
    """Return the compile-time constants of the router's kernels and the number of warps, as keyword arguments.

    EXPERTS is the number of experts, rounded up to a power of two. BLOCK is the number of tokens that one program
    processes.
    """
    experts = triton.next_power_of_2(logits.shape[1])
    kinds = {"SIGMOID": settings.sigmoid, "PRE_SOFTMAX": settings.pre_softmax}
    block = max(1, min(32, _TILE // experts))
    return {"EXPERTS": experts, "BLOCK": block, "TOP_K": settings.top_k, "num_warps": NUM_WARPS, **kinds}


@triton.jit
def _load(logits, tokens, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Load the logits [BLOCK, EXPERTS] of this program's BLOCK tokens from `logits`, [tokens, num_experts] in memory.

    Experts beyond `num_experts` get -inf. For tokens beyond `tokens`, all other logits are 0.

    Returns:
        The logits; the numbers of the tokens [BLOCK] and of the experts [EXPERTS]; the mask of logits that exist; and
        the logits' offsets in memory.
    """
    token, expert = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, EXPERTS)
    there = (token < tokens)[:, None] & (expert < num_experts)[None, :]
    index = token[:, None] * num_experts + expert[None, :]
    x = tl.load(logits + index, mask=there, other=0.0)
    return tl.where((expert < num_experts)[None, :], x, -float("inf")), token, expert, there, index


@triton.jit
def _softmax(x):
    """Return the softmax of logits [BLOCK, EXPERTS] over the experts, and their logsumexp [BLOCK]."""
    highest = tl.max(x, axis=1)
    powers = tl.exp(x - highest[:, None])
    total = tl.sum(powers, axis=1)
    return powers / total[:, None], highest + tl.log(total)


@triton.jit
def _sigmoid(x):
    """Return the elementwise sigmoid; 0 for the logit -inf, which marks an expert that does not exist."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _route_kernel(
    logits, choice, weight, sums, bias, tokens, num_experts, batch, scaling,
    GIVEN: tl.constexpr, BIASED: tl.constexpr, SIGMOID: tl.constexpr, PRE_SOFTMAX: tl.constexpr,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one block of tokens, and write the choices and the factors of the experts' outputs.

    The kernel also writes this block's sums over tokens, from which `_sum_kernel` computes losses and metrics. With
    GIVEN the choices are read instead of made, for a recomputation in backward.
    """
    x, token, expert, there, _ = _load(logits, tokens, num_experts, BLOCK, EXPERTS)
    softmax, logsumexp = _softmax(x)
    scores = _sigmoid(x) if SIGMOID else softmax
    # Logits have the same order as their softmax. In the softmax, small probabilities could underflow and tie.
    ranked = scores if SIGMOID else x
    if BIASED:
        ranked += tl.load(bias + expert, mask=expert < num_experts, other=0.0)[None, :]
    # ---- choose the K experts with the largest `ranked`, in a tie the first one, or load the choices if GIVEN. `rank`
    # [BLOCK, EXPERTS] is k + 1 for the expert of a token's choice k, and 0 for all other experts
    rank = tl.zeros((BLOCK, EXPERTS), tl.int32)
    for k in tl.static_range(TOP_K):
        place = choice + token * TOP_K + k
        if GIVEN:
            best = tl.load(place, mask=token < tokens, other=0).to(tl.int32)
        else:
            free = (rank == 0) & (expert < num_experts)[None, :]
            values = tl.where(free, ranked, -float("inf"))
            largest = free & (values >= tl.max(values, axis=1)[:, None])
            # With NaN in a token's logits, `largest` may be False for all experts. The last expert is then chosen.
            best = tl.min(tl.where(largest, expert[None, :], num_experts - 1), axis=1)
            tl.store(place, best.to(tl.int64), mask=token < tokens)
        rank += tl.where(expert[None, :] == best[:, None], k + 1, 0)
    # ---- compute the factors of the chosen experts' outputs
    factors, _ = _factors(x, scores, rank > 0, SIGMOID, PRE_SOFTMAX, TOP_K)
    for k in tl.static_range(TOP_K):
        factor = tl.sum(tl.where(rank == k + 1, factors, 0.0), axis=1) * scaling
        tl.store(weight + token * TOP_K + k, factor, mask=token < tokens)
    # ---- for each sample, sum over this block's tokens: choices, normalized scores, logsumexp^2 and entropies
    shares = scores / tl.sum(scores, axis=1)[:, None] if SIGMOID else scores
    entropy = -tl.sum(tl.where(shares > 0.0, shares * tl.log(tl.where(shares > 0.0, shares, 1.0)), 0.0), axis=1)
    sums += tl.program_id(0).to(tl.int64) * batch * (2 * num_experts + 2)
    sample = 0
    while sample < batch:  # not `for`: Triton 3.6's interpreter does not support a kernel argument as a range's end
        own = (token % batch == sample) & (token < tokens)
        counts = tl.sum(tl.where(own[:, None] & (rank > 0), 1.0, 0.0), axis=0)
        tl.store(sums + expert, counts, mask=expert < num_experts)
        shares_sum = tl.sum(tl.where(own[:, None] & there, shares, 0.0), axis=0)
        tl.store(sums + num_experts + expert, shares_sum, mask=expert < num_experts)
        tl.store(sums + 2 * num_experts, tl.sum(tl.where(own, logsumexp * logsumexp, 0.0)))
        tl.store(sums + 2 * num_experts + 1, tl.sum(tl.where(own, entropy, 0.0)))
        sums += 2 * num_experts + 2
        sample += 1


@triton.jit
def _factors(x, scores, chosen, SIGMOID: tl.constexpr, PRE_SOFTMAX: tl.constexpr, TOP_K: tl.constexpr):
    """Return the factors of the chosen experts' outputs before scaling, and the divisor that normalized them.

    The factors are [BLOCK, EXPERTS], with unused values for experts that were not chosen. The divisor is [BLOCK, 1].
    The arguments are [BLOCK, EXPERTS]: x the logits, `scores` their sigmoids or softmax, and `chosen` True for the
    experts that a token has chosen.
    """
    if SIGMOID:
        total = tl.sum(tl.where(chosen, scores, 0.0), axis=1)[:, None] + 1e-20
        factors = scores / total if TOP_K > 1 else scores
    elif PRE_SOFTMAX:
        factors, total = scores, tl.sum(scores, axis=1)[:, None]
    else:
        values = tl.where(chosen, x, -float("inf"))
        powers = tl.exp(values - tl.max(values, axis=1)[:, None])
        total = tl.sum(powers, axis=1)[:, None]
        factors = powers / total
    return factors, total


@triton.jit
def _sum_kernel(
    sums, chosen, loss, totals, num_blocks, tokens, num_experts, batch, balance, z,
    EXPERTS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Add up the sums over tokens that `_route_kernel` has written for each block of tokens, in one program.

    The kernel writes how often the tokens of each sample chose each expert [B, E], and each sample's loss [B]. With
    COUNTS it also adds this call's choices, normalized scores, tokens and entropies to the router's `totals`, from
    which metrics are computed.
    """
    expert, size = tl.arange(0, EXPERTS), 2 * num_experts + 2
    inside = expert < num_experts
    all_counts, all_shares = tl.zeros((EXPERTS,), tl.float64), tl.zeros((EXPERTS,), tl.float64)
    all_entropy = tl.sum(tl.zeros((_AT_ONCE,), tl.float64))
    sample = 0
    while sample < batch:
        counts, shares = tl.zeros((EXPERTS,), tl.float32), tl.zeros((EXPERTS,), tl.float32)
        squares, entropy = tl.zeros((_AT_ONCE,), tl.float32), tl.zeros((_AT_ONCE,), tl.float32)
        first = 0
        while first < num_blocks:
            block = first + tl.arange(0, _AT_ONCE)
            row = sums + (block.to(tl.int64) * batch + sample) * size
            there = block < num_blocks
            both = there[:, None] & inside[None, :]
            counts += tl.sum(tl.load(row[:, None] + expert[None, :], mask=both, other=0.0), axis=0)
            shares += tl.sum(tl.load(row[:, None] + num_experts + expert[None, :], mask=both, other=0.0), axis=0)
            squares += tl.load(row + 2 * num_experts, mask=there, other=0.0)
            entropy += tl.load(row + 2 * num_experts + 1, mask=there, other=0.0)
            first += _AT_ONCE
        tl.store(chosen + sample * num_experts + expert, counts, mask=inside)
        tl.store(loss + sample, balance * tl.sum(counts * shares) + z * tl.sum(squares))
        all_counts += counts.to(tl.float64)
        all_shares += shares.to(tl.float64)
        all_entropy += tl.sum(entropy.to(tl.float64))
        sample += 1
    if COUNTS:
        tl.store(totals + expert, tl.load(totals + expert, mask=inside) + all_counts, mask=inside)
        more = totals + num_experts + expert
        tl.store(more, tl.load(more, mask=inside) + all_shares, mask=inside)
        tl.store(totals + 2 * num_experts, tl.load(totals + 2 * num_experts) + tokens)
        tl.store(totals + 2 * num_experts + 1, tl.load(totals + 2 * num_experts + 1) + all_entropy)


@triton.jit
def _backward_kernel(
    logits, choice, chosen, of_weight, of_loss, found, tokens, num_experts, batch, stride, scaling, balance, z,
    SIGMOID: tl.constexpr, PRE_SOFTMAX: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the router's logits for one block of tokens.

    The kernel computes it from the gradients of the factors of experts' outputs (`of_weight`) and of the router losses
    (`of_loss`, with the stride `stride`).
    """
    x, token, expert, there, index = _load(logits, tokens, num_experts, BLOCK, EXPERTS)
    softmax, logsumexp = _softmax(x)
    scores = _sigmoid(x) if SIGMOID else softmax
    # ---- load the gradient of the factors of experts' outputs, with 0 for experts that were not chosen
    rank, of_factors = tl.zeros((BLOCK, EXPERTS), tl.int32), tl.zeros((BLOCK, EXPERTS), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.load(choice + token * TOP_K + k, mask=token < tokens, other=0).to(tl.int32)
        above = tl.load(of_weight + token * TOP_K + k, mask=token < tokens, other=0.0) * scaling
        own = expert[None, :] == best[:, None]
        rank += tl.where(own, k + 1, 0)
        of_factors += tl.where(own, above[:, None], 0.0)
    factors, total = _factors(x, scores, rank > 0, SIGMOID, PRE_SOFTMAX, TOP_K)
    # ---- compute the gradient of the logits from three gradients: of the normalized scores (balance loss), of the
    # factors of the experts' outputs, and of logsumexp^2 (z loss)
    sample = (token % batch)[:, None]
    above = tl.load(of_loss + token % batch * stride, mask=token < tokens, other=0.0)[:, None]
    counts = tl.load(chosen + sample * num_experts + expert[None, :], mask=there, other=0.0)
    of_shares = above * balance * counts
    if SIGMOID:
        sum_of_scores = tl.sum(scores, axis=1)[:, None]
        of_scores = (of_shares - tl.sum(of_shares * scores, axis=1)[:, None] / sum_of_scores) / sum_of_scores
        if TOP_K > 1:
            of_factors = (of_factors - tl.sum(of_factors * factors, axis=1)[:, None]) / total
        of_scores += tl.where(rank > 0, of_factors, 0.0)
        gradient = of_scores * scores * (1.0 - scores)
    elif PRE_SOFTMAX:
        of_scores = of_shares + of_factors
        gradient = softmax * (of_scores - tl.sum(of_scores * softmax, axis=1)[:, None])
    else:
        gradient = softmax * (of_shares - tl.sum(of_shares * softmax, axis=1)[:, None])
        gradient += factors * (of_factors - tl.sum(of_factors * factors, axis=1)[:, None])
    gradient += above * (2.0 * z) * logsumexp[:, None] * softmax
    tl.store(found + index, gradient, mask=there)
