"""Test the error feedback of quantized gradients.

The stored errors must be clipped, skipped and rescaled together with the gradients whose rounding left them.
"""

import copy
import dataclasses
import math
from typing import Any, NamedTuple

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import LLAMA_STYLE, Case, build_step

from megazpp.kernels.block_quant import Feedback, range_table, rescale_
from megazpp.kernels.formats import BlockFormat, plan_row
from megazpp.optim.config import LossScaleConfig
from megazpp.optim.optimizer import LossScaler
from megazpp.zero.config import ZeroConfig

FEEDBACK = ZeroConfig(zero_quantized_gradients=True, zero_error_feedback=True, zero_error_feedback_beta=0.0)
AVERAGED = dataclasses.replace(FEEDBACK, zero_error_feedback_beta=0.8)
EVERY = dataclasses.replace(FEEDBACK, zero_cross_every_microbatch=True)


def watched_steps(case: Case, clip: float) -> dict[str, Any]:
    """Train, and watch the error feedback at the end of each step.

    Returns:
        "norms": gradient norm of each step; "noted": for each call of `end_step`, its factor and the buffers of the
        error feedback before and after it.
    """
    step, dims = build_step(case)
    step.clip_grad, noted, original = clip, [], step.sharding.end_step

    def end_step(factor: torch.Tensor | float, *, iteration: int) -> None:
        before = copy.deepcopy(step.sharding.rank_state())
        original(factor, iteration=iteration)
        noted.append((float(factor), before, copy.deepcopy(step.sharding.rank_state())))

    step.sharding.end_step = end_step  # type: ignore[method-assign]
    taken = [step(case.batches(index, dims), learning_rate=1e-2, weight_decay=0.0) for index in range(case.steps)]
    return {"norms": [record.grad_norm for record in taken], "noted": noted}


@pytest.mark.parametrize(("zero", "micro_batches"), [(FEEDBACK, 1), slow(EVERY, 2)])
def test_stored_errors_are_clipped_with_gradients_once_per_step(zero, micro_batches):
    """Check that a step's end multiplies the stored errors by the clipping factor of the gradients, and only once."""
    case = Case(nodes=2, zero=zero, micro_batches=micro_batches, steps=3)
    for result in ranks(4).run(watched_steps, case, 0.25):
        assert len(result["noted"]) == 3
        for norm, (factor, before, after) in zip(result["norms"], result["noted"], strict=True):
            assert factor == pytest.approx(0.25 / norm, rel=1e-5)
            rounded = torch.tensor(factor).bfloat16()
            for name, buffer in before.items():
                expected = buffer * rounded if name.endswith("scales") else buffer
                assert buffer.any()
                assert torch.equal(after[name], expected)


def test_first_steps_error_is_averaged_with_beta():
    """After the first step, the scales of the averaged errors are 1 - beta = 0.2 times the scales without an average.

    The tolerance covers the rounding of both scales to bf16.
    """
    cases = [Case(nodes=2, zero=zero, steps=1) for zero in (FEEDBACK, AVERAGED)]
    for of_ranks in zip(*(ranks(4).run(watched_steps, case, 0.25) for case in cases), strict=True):
        all_of_it, share = (result["noted"][0][1] for result in of_ranks)
        for name in filter(lambda name: name.endswith("scales"), share):
            torch.testing.assert_close(share[name].float(), 0.2 * all_of_it[name].float(), rtol=2**-6, atol=0)


class Seen(NamedTuple):
    skipped: bool
    moved: bool  # True if the step changed the weights
    nothing_to_feed_back: bool


def skipped_and_reset(case: Case) -> dict[str, Seen]:
    """Take six steps, in the second of which only rank 3 computes a NaN; return what happened in each step, by name."""
    step, dims = build_step(case)
    seen, factor = {}, 1.0
    step.model.final_norm.register_forward_hook(lambda module, inputs, output: output * factor)
    for index, name in enumerate(("taken", "skipped", "reset", "taken 4", "taken 5", "reset again"), start=1):
        factor = float("nan") if name == "skipped" and dims.world.rank == 3 else 1.0
        before = [p.detach().to_local().clone() for p in step.model.parameters()]
        record = step(case.batches(index, dims), learning_rate=1e-2, weight_decay=0.0, iteration=index)
        moved = not all(map(torch.equal, before, (p.detach().to_local() for p in step.model.parameters())))
        nothing = not any(x.any() for key, x in step.sharding.rank_state().items() if key.endswith("scales"))
        seen[name] = Seen(record.skipped and not math.isfinite(record.grad_norm), moved, nothing)
    return seen


@pytest.mark.parametrize("weights", [{}, slow({"zero_quantized_weights": True, "zero_hpz_partition_size": "auto"})])
def test_skipped_step_and_reset_interval_clear_stored_errors(weights):
    zero = dataclasses.replace(FEEDBACK, zero_error_feedback_reset=3, **weights)
    taken, reset = Seen(False, True, False), Seen(False, True, True)
    expected = {"taken": taken, "skipped": Seen(True, False, True), "reset": reset}
    expected |= {"taken 4": taken, "taken 5": taken, "reset again": reset}
    assert ranks(4).run(skipped_and_reset, Case(nodes=2, zero=zero)) == [expected] * 4


def losses_with_scale(case: Case, growing: bool) -> list[tuple[float, float]]:
    step, dims = build_step(case)
    if growing:  # a window of one step makes the loss scale double after every step
        step.scaler = LossScaler(LossScaleConfig(initial_loss_scale=2.0**8, loss_scale_window=1.0), fp16=True)
    taken = [step(case.batches(index, dims), learning_rate=1e-2, weight_decay=0.0) for index in range(case.steps)]
    assert [record.loss_scale for record in taken] == [2.0 ** (8 + index) if growing else 1.0 for index in range(4)]
    return [(record.loss, record.grad_norm) for record in taken]


def test_growing_loss_scale_changes_no_bit():
    """Loss scales are powers of two, which change no bit in fp32.

    Only a stored error that keeps the units of an older loss scale would change the losses.
    """
    case = Case(nodes=2, zero=AVERAGED, model=LLAMA_STYLE, steps=4)
    plain, scaled = (ranks(2).run(losses_with_scale, case, growing) for growing in (False, True))
    assert plain == scaled


def test_rescale_multiplies_every_stored_error():
    fmt = BlockFormat(4, 32)
    errors = [Feedback.zeros((2,), range_table(plan_row(n, fmt), torch.float32)) for n in (1, 63, 257)]
    for error in errors:
        error.scales.fill_(0.75)
    rescale_(errors, torch.tensor(0.3))
    assert all(torch.equal(e.scales, torch.full_like(e.scales, 0.75 * torch.tensor(0.3).bfloat16())) for e in errors)
    rescale_(errors, 0.0)
    assert not any(error.scales.any() for error in errors)
    rescale_([], 2.0)
