"""The best (scheme, tensor parallelism, local domain, micro-batch, recomputation, bits) that fits, and why not others.

The local domain is not a choice of its own: a layout (topology/layout.py) gives tensor parallelism the innermost ranks
of a node or NVLink domain and the local axis all that are left, and the flags have no other. So it varies with tensor
parallelism, and each candidate says which it has. Speeds are those of the calibration's own shares.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from megazpp.arguments import RunConfig
from megazpp.planner.estimate import Estimate, Estimator, scheme_name, schemes
from megazpp.planner.memory import usable_gigabytes
from megazpp.planner.nearest import with_batch, with_tp
from megazpp.topology.cluster import nested_sizes

RECOMPUTE: tuple[Literal["full", "selective"] | None, ...] = (None, "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8, 16)
SCHEMES = ("ZeRO-3", "HSDP", "--zeropp")
VARIED = 3  # of the candidates with the run's own scheme, that are tried with the others
GRADIENT_BITS = ((8, 8), (8, 4), (4, 4))
BITS_PAY = 1.02  # other bits than asked for are taken only if they are so much faster: fewer are less exact
MEMORY_SWITCHES: tuple[tuple[str, dict[str, bool]], ...] = (
    ("--no-zero-error-feedback", {"zero_error_feedback": False}),
    ("--zero-accumulate-in-bf16", {"zero_accumulate_in_bf16": True}),
    ("--no-overlap-grad-reduce", {"overlap_grad_reduce": False}),
)


class Choice(NamedTuple):
    """One candidate: `estimate` is None where it cannot run, `verdict` says why it was not taken, "" for the best."""

    name: str
    estimate: Estimate | None
    verdict: str

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.fits


def search(estimator: Estimator, config: RunConfig) -> list[Choice]:
    """All candidates, the best first if any fits, and those that do not fit last.

    Tensor parallelism, micro-batch and recomputation vary together; then the scheme at the best of them (where nothing
    fits, at the smallest), then bits at the best of all.
    """
    choices = [
        choice
        for tp in nested_sizes(estimator.cluster.ranks_per_domain, estimator.cluster.ranks_per_domain)
        for size in MICRO_BATCHES
        for choice in _recomputations(estimator, with_tp(config, tp), size)
    ]
    for choice in sorted(choices, key=_order)[:VARIED]:
        if choice.estimate is not None:
            size = choice.estimate.plan.batches.micro_batch_size
            named = schemes(with_tp(config, choice.estimate.plan.layout.tp))
            for scheme in SCHEMES:
                if scheme != scheme_name(config):
                    choices += _recomputations(estimator, named[scheme], size)
    best = _fastest(choices)
    if best is not None and best.estimate is not None and best.estimate.plan.wire.reduce is not None:
        choices += _other_bits(estimator, best.name, best.estimate.config)
        other = _fastest(choices)
        assert other is not None
        assert other.estimate is not None
        if best.estimate.seconds and other.estimate.tokens_per_second >= BITS_PAY * best.estimate.tokens_per_second:
            best = other
    return sorted((_judge(choice, best) for choice in choices), key=_order)


def memory_switches(estimator: Estimator, config: RunConfig) -> tuple[str, Estimate] | None:
    """The fewest switches of the two hops' memory with which the run fits, or all where that is not enough.

    Returns:
        The flags and what comes of them; None where the run has no two hops of gradients, so that they change nothing.
    """
    if estimator.estimate(config).plan.wire.reduce is None:
        return None
    for count in range(1, len(MEMORY_SWITCHES) + 1):
        for some in itertools.combinations(MEMORY_SWITCHES, count):
            fields: dict[str, Any] = {name: value for _, field in some for name, value in field.items()}
            zero = dataclasses.replace(config.zero, **fields)
            found = " ".join(flag for flag, _ in some), estimator.estimate(dataclasses.replace(config, zero=zero))
            if found[1].fits:
                return found
    return found


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


def _recomputations(estimator: Estimator, config: RunConfig, size: int) -> list[Choice]:
    """Without recomputation, and with all of it where that does not fit ("selective" keeps as much as none)."""
    tp, asked = config.parallel.tensor_model_parallel_size, config.batches.global_batch_size
    if size > 1 and asked is not None and size * estimator.cluster.world_size > asked * tp:
        return []
    local, choices = max(estimator.cluster.island_size // tp, 1), []
    sized = dataclasses.replace(config, batches=dataclasses.replace(config.batches, micro_batch_size=size))
    sized = with_batch(sized, estimator.cluster)
    samples, name = sized.batches.global_batch_size, f"{scheme_name(config)}, tp {tp}, local domain {local}"
    name += f", micro-batch {size}" + (f" of batch {samples}" if samples != asked else "")
    levels: tuple[Literal["full"] | None, ...] = (None, "full")
    for recompute in levels:
        choices.append(_try(estimator, with_recompute(sized, recompute), f"{name}, recompute {recompute or 'none'}"))
        if choices[-1].estimate is None or choices[-1].fits:
            break
    return choices


def _other_bits(estimator: Estimator, name: str, config: RunConfig) -> Iterator[Choice]:
    for bits in GRADIENT_BITS:
        if bits != config.zero.zero_gradient_bits:
            varied = dataclasses.replace(config, zero=dataclasses.replace(config.zero, zero_gradient_bits=bits))
            yield _try(estimator, varied, f"{name}, gradient bits {bits[0]} {bits[1]}")


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
    return max((choice for choice in choices if choice.fits), key=_speed, default=None)


def _judge(choice: Choice, best: Choice | None) -> Choice:
    if choice.verdict or best is None or choice is best or choice.estimate is None or best.estimate is None:
        return choice
    if best.estimate.seconds is None:
        return choice._replace(verdict="fits")
    share = _speed(choice) / _speed(best)
    if share > 1:
        return choice._replace(verdict=f"fits, {100 * (share - 1):.1f} % faster, which other bits are not taken for")
    return choice._replace(verdict=f"fits, {100 * (1 - share):.1f} % slower than the best")


def _speed(choice: Choice) -> float:
    return choice.estimate.tokens_per_second if choice.estimate else 0.0


def _order(choice: Choice) -> tuple[bool, bool, float]:
    """The best, what fits by its speed, what does not by its size, what cannot run."""
    size = choice.estimate.gigabytes if choice.estimate else math.inf
    return bool(choice.verdict), not choice.fits, -_speed(choice) if choice.fits else size
