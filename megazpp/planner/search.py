"""The best (tensor parallelism, local domain, micro-batch, recomputation, bits) that fits, and why not the others.

The local domain is not a choice of its own: a layout (topology/layout.py) gives tensor parallelism the innermost ranks
of a node or NVLink domain and the local axis all that are left, and the flags have no other. So it varies with tensor
parallelism, and each candidate says which it has.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from megazpp.arguments import RunConfig
from megazpp.planner.estimate import Estimate, Estimator
from megazpp.planner.memory import usable_gigabytes
from megazpp.topology.cluster import nested_sizes

RECOMPUTE: tuple[Literal["full", "selective"] | None, ...] = (None, "selective", "full")  # the first that fits is taken
MICRO_BATCHES = (1, 2, 4, 8, 16)
GRADIENT_BITS = ((8, 8), (8, 4), (4, 4))
BITS_PAY = 1.02  # other bits than asked for are taken only if they are so much faster: fewer are less exact


class Choice(NamedTuple):
    """One candidate: `estimate` is None where it cannot run, `verdict` says why it was not taken, "" for the best."""

    name: str
    estimate: Estimate | None
    verdict: str


def search(estimator: Estimator, config: RunConfig) -> list[Choice]:
    """All candidates, the best first if any fits.

    Tensor parallelism, micro-batch and recomputation vary together; bits then vary at the best of them.
    """
    choices = [
        choice
        for tp in nested_sizes(estimator.cluster.ranks_per_domain, estimator.cluster.ranks_per_domain)
        for size in MICRO_BATCHES
        for choice in _recomputations(estimator, config, tp, size)
    ]
    best = _fastest(choices)
    if best is not None and best.estimate is not None and best.estimate.plan.wire.reduce is not None:
        chosen = best.estimate.config
        for bits in GRADIENT_BITS:
            if bits != chosen.zero.zero_gradient_bits:
                varied = dataclasses.replace(chosen, zero=dataclasses.replace(chosen.zero, zero_gradient_bits=bits))
                choices.append(_try(estimator, varied, f"{best.name}, gradient bits {bits[0]} {bits[1]}"))
        other = _fastest(choices)
        assert other is not None
        assert other.estimate is not None
        if best.estimate.seconds and other.estimate.tokens_per_second >= BITS_PAY * best.estimate.tokens_per_second:
            best = other
    return sorted((_judge(choice, best) for choice in choices), key=_order)


def with_recompute(config: RunConfig, granularity: Literal["full", "selective"] | None) -> RunConfig:
    """The same run with another --recompute-granularity; the method stays where it means something."""
    full = granularity == "full"
    model = dataclasses.replace(
        config.model,
        recompute_granularity=granularity,
        recompute_activations=False,
        recompute_method=config.model.recompute_method if full else None,
        recompute_num_layers=config.model.recompute_num_layers if full else None,
    )
    return dataclasses.replace(config, model=model)


def _recomputations(estimator: Estimator, config: RunConfig, tp: int, size: int) -> list[Choice]:
    """Up to the first that fits."""
    choices = []
    for recompute in RECOMPUTE:
        recomputing = with_recompute(config, recompute)
        candidate = dataclasses.replace(
            recomputing,
            parallel=dataclasses.replace(config.parallel, tensor_model_parallel_size=tp, sequence_parallel=tp > 1),
            batches=dataclasses.replace(config.batches, micro_batch_size=size),
        )
        local = max(estimator.cluster.island_size // tp, 1)
        name = f"tp {tp}, local domain {local}, micro-batch {size}, recompute {recompute or 'none'}"
        choices.append(_try(estimator, candidate, name))
        if choices[-1].estimate is None or not choices[-1].verdict:
            break
    return choices


def _try(estimator: Estimator, config: RunConfig, name: str) -> Choice:
    try:
        estimate = estimator.estimate(config)
    except ValueError as error:
        return Choice(name, None, str(error))
    if estimate.fits:
        return Choice(name, estimate, "")
    usable = usable_gigabytes(estimator.cluster.device)
    return Choice(name, estimate, f"needs {estimate.gigabytes:.1f} GB, a rank has {usable:.1f}")


def _fastest(choices: list[Choice]) -> Choice | None:
    fitting = [choice for choice in choices if choice.estimate is not None and not choice.verdict]
    return max(fitting, key=lambda choice: choice.estimate.tokens_per_second if choice.estimate else 0.0, default=None)


def _judge(choice: Choice, best: Choice | None) -> Choice:
    if choice.verdict or best is None or choice is best or choice.estimate is None or best.estimate is None:
        return choice
    if best.estimate.seconds is None:
        return choice._replace(verdict="fits")
    share = choice.estimate.tokens_per_second / best.estimate.tokens_per_second
    if share > 1:
        return choice._replace(verdict=f"fits, {100 * (share - 1):.1f} % faster, which other bits are not taken for")
    return choice._replace(verdict=f"fits, {100 * (1 - share):.1f} % slower than the best")


def _order(choice: Choice) -> tuple[bool, float]:
    return bool(choice.verdict), -(choice.estimate.tokens_per_second if choice.estimate else 0.0)
