"""Test the global batch size of each step, --rampup-batch-size, and the number of steps in a run."""

from typing import Any

from helpers.refusals import not_refused
from hypothesis import given
from hypothesis import strategies as st

from megazpp.optim.schedule import TrainingProgress
from megazpp.training.batches import BatchConfig, BatchPlan, plan_batches


def plan(dp: int = 2, **flags: Any) -> BatchPlan:
    return plan_batches(BatchConfig(**{"micro_batch_size": 4, **flags}), data_parallel_size=dp)


def test_missing_batch_size_defaults_to_one_micro_batch_per_rank():
    constant = plan(train_iters=5)
    assert (constant.batch_size_at(0), constant.num_micro_batches_at(0)) == (8, 1)
    assert (constant.total_iterations, constant.total_samples) == (5, 40)
    for ranks in (1, 2, 4, 8, 16):
        shared = plan(ranks, micro_batch_size=None, global_batch_size=16, train_iters=5)
        assert (shared.micro_batch_size, shared.num_micro_batches_at(0)) == (16 // ranks, 1)


def test_constant_batch_size_splits_evenly_and_drops_a_partial_batch():
    # The batch size is constant without ramp-up, with a ramp-up that starts at the full batch size, and with one that
    # ends after 0 samples.
    for rampup in (None, (24, 8, 96), (8, 8, 0)):
        constant = plan(global_batch_size=24, train_samples=100, rampup_batch_size=rampup)
        assert (constant.batch_size_at(0), constant.num_micro_batches_at(77)) == (24, 3)
        assert (constant.total_iterations, constant.total_samples) == (4, 96)
        assert [constant.iteration_at(s) for s in (0, 23, 24, 96)] == [0, 0, 1, 4]


def test_ramp_up_grows_in_equal_steps_over_the_given_samples():
    # The batch size grows from 8 to 32 by (32 - 8) / 8 = 3 increments of 8, one every 96 / 3 = 32 samples.
    ramp = plan(global_batch_size=32, rampup_batch_size=(8, 8, 96), train_samples=500)
    assert [ramp.batch_size_at(s) for s in (0, 31, 32, 63, 64, 95, 96, 97, 400)] == [8, 8, 16, 16, 24, 24, 32, 32, 32]
    # Steps of batch size 8 start at samples 0, 8, 16 and 24, of size 16 at 32 and 48, of size 24 at 64 and 88, and of
    # size 32 from sample 112 on: (500 - 112) // 32 = 12 of them.
    assert [ramp.consumed_samples_at(i) for i in range(11)] == [0, 8, 16, 24, 32, 48, 64, 88, 112, 144, 176]
    assert ramp.total_iterations == 8 + 12
    assert ramp.total_samples == 112 + 12 * 32
    assert [ramp.num_micro_batches_at(s) for s in (0, 32, 64, 96)] == [1, 2, 3, 4]


@given(
    start=st.integers(1, 6),
    increments=st.integers(0, 7),
    increment=st.integers(1, 5),
    samples=st.integers(0, 3000),
    train_samples=st.integers(1, 6000),
)
def test_step_by_step_walk_agrees_with_the_closed_forms(start, increments, increment, samples, train_samples):
    """Go through a run step by step, and compare with the plan's methods, which compute all numbers in closed form."""
    full = start + increments * increment
    ramp = plan(
        dp=1,
        micro_batch_size=1,
        global_batch_size=full,
        rampup_batch_size=(start, increment, samples),
        train_samples=train_samples,
    )
    consumed, iteration = 0, 0
    while consumed + ramp.batch_size_at(consumed) <= train_samples:
        assert ramp.consumed_samples_at(iteration) == consumed
        assert ramp.iteration_at(consumed) == iteration
        assert ramp.iteration_at(consumed + ramp.batch_size_at(consumed) - 1) == iteration
        assert (ramp.batch_size_at(consumed) - start) % increment == 0
        consumed += ramp.batch_size_at(consumed)
        iteration += 1
    assert (ramp.total_iterations, ramp.total_samples) == (iteration, consumed)
    assert ramp.batch_size_at(samples + 1) == full


# number of steps of one stage, and the batch size of these steps
SIZES = st.tuples(st.integers(1, 40), st.integers(1, 9))


@given(stages=st.lists(SIZES, min_size=1, max_size=4), train_samples=st.integers(1, 2000))
def test_run_of_samples_ends_at_its_samples_for_any_batch_sizes(stages, train_samples):
    at = TrainingProgress()
    for steps, size in stages:
        sized = plan(dp=1, micro_batch_size=size, train_samples=train_samples).resumed_at(at)
        assert sized.dataset_samples == train_samples
        iteration, consumed = at.iteration, at.consumed_samples
        while not sized.is_complete(at) and at.iteration < iteration + steps:
            at = TrainingProgress(at.iteration + 1, at.consumed_samples + size)
            assert sized.consumed_samples_at(at.iteration) == at.consumed_samples
            assert sized.iteration_at(at.consumed_samples) == at.iteration
        rest = (train_samples - consumed) // size
        assert (sized.total_iterations, sized.total_samples) == (iteration + rest, consumed + rest * size)
        assert sized.is_complete(at) == (train_samples - at.consumed_samples < size)


@given(stages=st.lists(SIZES, min_size=1, max_size=4), train_iters=st.integers(1, 99))
def test_run_of_steps_requests_all_samples_that_it_can_still_consume(stages, train_iters):
    at = TrainingProgress()
    for steps, size in stages:
        sized = plan(dp=1, micro_batch_size=size, train_iters=train_iters).resumed_at(at)
        left = max(0, train_iters - at.iteration)
        assert (sized.total_iterations, sized.dataset_samples) == (train_iters, at.consumed_samples + left * size)
        assert sized.is_complete(at) == (left == 0)
        at = TrainingProgress(at.iteration + min(steps, left), at.consumed_samples + min(steps, left) * size)


def test_resumed_run_of_samples_with_another_ramp_up_ends_at_its_samples():
    ramp = plan(global_batch_size=32, rampup_batch_size=(8, 8, 96), train_samples=500)
    assert ramp.resumed_at(TrainingProgress(8, 112)) == ramp
    constant = plan(global_batch_size=32, train_samples=500).resumed_at(TrainingProgress(8, 112))
    assert (constant.total_iterations, constant.total_samples) == (8 + 12, 112 + 12 * 32)
    again = plan(global_batch_size=16, rampup_batch_size=(8, 8, 200), train_samples=500)
    # The run resumes at sample 112. The new ramp-up has (200 - 112) / 8 = 11 steps of batch size 8, and (500 - 200) //
    # 16 = 18 steps of batch size 16 follow.
    assert again.resumed_at(TrainingProgress(8, 112)).total_samples == 200 + 18 * 16
    assert again.resumed_at(TrainingProgress(8, 112)).total_iterations == 8 + 11 + 18


RAMP = {"global_batch_size": 32, "train_samples": 900}
ITERS = {"train_iters": 1}
REFUSED = [
    ({"global_batch_size": 30, **ITERS}, "--global-batch-size 30 is not divisible by --micro-batch-size 4 x"),
    ({"micro_batch_size": None, **ITERS}, "--micro-batch-size is required"),
    ({"train_iters": 0}, "--train-iters 0 is not positive"),
    ({}, "give either --train-iters or --train-samples"),
    ({"train_samples": 8, **ITERS}, "--train-iters 1 and --train-samples 8: give only one"),
    ({"rampup_batch_size": (8, 8, 96), **ITERS}, "8 8 96 needs --train-samples, not --train-iters 1"),
    ({**RAMP, "rampup_batch_size": (8, 16, 96)}, "--global-batch-size 32 is not 8 plus a multiple of 16"),
    ({**RAMP, "rampup_batch_size": (40, 8, 96)}, "--global-batch-size 32 is not 40 plus a multiple of 8"),
    ({**RAMP, "rampup_batch_size": (8, 4, 96)}, "8 4 96: start size and increment must both be divisible by --micro-"),
    ({**RAMP, "rampup_batch_size": (4, 4, 96)}, "--rampup-batch-size 4 4 96: start size and increment must both"),
    ({**RAMP, "rampup_batch_size": (8, 0, 96)}, "start size and increment must be positive"),
    ({**RAMP, "rampup_batch_size": (8, 8)}, "--rampup-batch-size 8 8: give three numbers"),
]


def test_invalid_sizes_raise_an_error_with_flag_and_value():
    assert not not_refused(REFUSED, lambda flags: plan(**flags))
