"""The best (scheme, tensor parallelism, local domain, micro-batch, recomputation, bits) that fits, and why not others.

The local domain is not a choice of its own: a layout (topology/layout.py) gives tensor parallelism the innermost ranks
of a node or NVLink domain and the local axis all that are left, and the flags have no other. So it varies with tensor
parallelism, and each candidate says which it has. Local steps are no choice either: all candidates have the run's own.
Speeds are those of the calibration's own shares.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

from megazpp.arguments import RunConfig
from megazpp.checks import RunPlan
from megazpp.planner.estimate import Estimate, Estimator
from megazpp.planner.variants import (
    RECOMPUTE,
    changed,
    scheme_name,
    schemes,
    weight_formats,
    with_batch,
    with_recompute,
    with_tp,
)
from megazpp.topology.cluster import nested_sizes

MICRO_BATCHES = (1, 2, 4, 8, 16)
COMPARED = ("ZeRO-3", "HSDP", "--zeropp")
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

    @property
    def speed(self) -> float:
        return self.estimate.tokens_per_second if self.estimate else 0.0

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The best, what fits by its speed, what does not by its size, what cannot run."""
        size = self.estimate.gigabytes if self.estimate else math.inf
        return bool(self.verdict), not self.fits, -self.speed if self.fits else size


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
    for choice in sorted(choices, key=lambda choice: choice.order)[:VARIED]:
        if choice.estimate is not None:
            size = choice.estimate.plan.batches.micro_batch_size
            named = schemes(with_tp(config, choice.estimate.plan.layout.tp))
            for scheme in _compared(choice.estimate.plan):
                if scheme != scheme_name(config):
                    varied = dataclasses.replace(named[scheme], diloco=config.diloco)
                    choices += _recomputations(estimator, varied, size)
    best = _fastest(choices)
    if best is not None and best.estimate is not None and best.estimate.plan.wire.reduce is not None:
        for bits in GRADIENT_BITS:
            if bits != best.estimate.config.zero.zero_gradient_bits:
                varied = changed(best.estimate.config, zero={"zero_gradient_bits": bits})
                choices.append(_try(estimator, varied, f"{best.name}, gradient bits {bits[0]} {bits[1]}"))
        for name, varied in weight_formats(best.estimate.config).items():
            choices.append(_try(estimator, varied, f"{best.name}, weight bits {name}"))
        other = _fastest(choices)
        if other is not None and best.speed and other.speed >= BITS_PAY * best.speed:
            best = other
    return sorted((_judge(choice, best) for choice in choices), key=lambda choice: choice.order)


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
            found = " ".join(flag for flag, _ in some), estimator.estimate(changed(config, zero=fields))
            if found[1].fits:
                return found
    return found


def _compared(plan: RunPlan) -> tuple[str, ...]:
    """Schemes that differ from each other on the run's islands, each of which has one copy of the model."""
    if plan.diloco is None:
        return COMPARED
    return ("ZeRO-3", "--zeropp") if plan.layout.cross > 1 else ()


def _recomputations(estimator: Estimator, config: RunConfig, size: int) -> list[Choice]:
    """Without recomputation, and with more and more of it where that does not fit."""
    tp, asked = config.parallel.tensor_model_parallel_size, config.batches.global_batch_size
    if size > 1 and asked is not None and size * estimator.cluster.world_size > asked * tp:
        return []
    local, choices = max(estimator.cluster.local_domain_size // tp, 1), []
    sized = with_batch(changed(config, batches={"micro_batch_size": size}), estimator.cluster)
    samples, steps = sized.batches.global_batch_size, config.diloco.diloco_steps
    name = scheme_name(config) + (f", --diloco-steps {steps}" if steps else "") + f", tp {tp}, local domain {local}"
    name += f", micro-batch {size}" + (f" of batch {samples}" if samples != asked else "")
    for recompute in RECOMPUTE:
        choices.append(_try(estimator, with_recompute(sized, recompute), f"{name}, recompute {recompute or 'none'}"))
        if choices[-1].estimate is None or choices[-1].fits:
            break
    return choices


def _try(estimator: Estimator, config: RunConfig, name: str) -> Choice:
    try:
        estimate = estimator.estimate(config)
    except ValueError as error:
        return Choice(name, None, str(error))
    too_much = f"needs {estimate.gigabytes:.1f} GB, a rank has {estimate.usable_gigabytes:.1f}"
    return Choice(name, estimate, "" if estimate.fits else too_much)


def _fastest(choices: list[Choice]) -> Choice | None:
    return max((choice for choice in choices if choice.fits), key=lambda choice: choice.speed, default=None)


def _judge(choice: Choice, best: Choice | None) -> Choice:
    """With the reason why it is not taken."""
    if choice.verdict or best is None or choice is best:
        return choice
    if not best.speed:
        return choice._replace(verdict="fits")
    share = choice.speed / best.speed
    if share > 1:
        return choice._replace(verdict=f"fits, {100 * (share - 1):.1f} % faster, which other bits are not taken for")
    return choice._replace(verdict=f"fits, {100 * (1 - share):.1f} % slower than the best")
