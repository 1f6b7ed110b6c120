"""The loop's bookkeeping: what is asked of whom, when, and when it ends."""

from __future__ import annotations

from helpers.pretended_run import Run

from megazpp.checkpoint.record import TrainingProgress


def test_each_step_gets_the_next_samples_and_a_line_is_logged_every_interval_and_at_the_end():
    run = Run([5.0, 4.0, 3.0, 2.0, 1.0])
    batches = [batch for call in run.fake.calls for batch in call["batch"]]
    assert [(batch.first, len(batch.tokens)) for batch in batches] == [(0, 2), (2, 2), (4, 2), (6, 2), (8, 2)]
    assert run.progress == TrainingProgress(iteration=5, consumed_samples=10, scheduled_samples=10, micro_batches=5)
    assert [(r["iteration"], r["lm_loss"]) for r in run.tracker.records] == [(2, 4.5), (4, 2.5), (5, 1.0)]
    assert run.out.getvalue().count(" consumed samples: ") == 3
    assert run.tracker.validations == [(3, 7.0)]


def test_a_skipped_step_consumes_samples_but_does_not_move_the_schedule():
    nan = float("nan")
    run = Run([1.0, nan, 1.0, 1.0])
    assert [call["learning_rate"] for call in run.fake.calls] == [0.0, 0.25, 0.25, 0.5]
    assert run.progress == TrainingProgress(iteration=4, consumed_samples=8, scheduled_samples=6, micro_batches=4)
    assert "number of skipped iterations:   1 |" in run.out.getvalue()


def test_exit_interval_ends_the_run_after_a_multiple_and_logs_the_last_step():
    run = Run([1.0] * 9, log_interval=100, exit_interval=4)
    assert run.progress.iteration == 4
    assert run.progress.stop_reason == "--exit-interval 4"
    assert [r["iteration"] for r in run.tracker.records] == [4]


def test_observers_stand_around_every_step():
    assert Run([1.0, 2.0, 3.0]).observed == [(1, 1), (2, 1), (3, 1)]
