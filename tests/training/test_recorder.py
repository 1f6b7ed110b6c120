"""What is said and written of a run's steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from helpers.pretended_run import Run

from megazpp.checkpoint.record import TrainingProgress
from megazpp.training.metrics import StepRecord


def test_bytes_are_those_of_training_steps_per_node_and_not_of_evaluations():
    run = Run([1.0] * 6)
    # 100 bytes a step over 2 nodes; the evaluation at 3 falls inside the second interval
    assert [r["cross_bytes"] for r in run.tracker.records] == [50, 50, 50]


def test_an_island_counts_its_own_bytes_and_takes_the_others_to_send_as_much():
    run = Run([1.0] * 2)
    dims: Any = run.dims
    dims.island = SimpleNamespace(size=4)  # of half a node each, with one rank
    dims.sum_over_data_ = lambda x: x
    dims.counter.add("cross", "shard", "all_gather", 100)
    step = StepRecord(iteration=4, loss=1.0, grad_norm=1.0, learning_rate=1.0, global_batch_size=2, seconds=1.0)
    run.recorder.step(step, last=True)
    assert run.tracker.records[-1]["cross_bytes"] == 4 * 100 // 2


def test_a_loss_that_is_not_a_number_is_printed():
    assert "lm loss: NAN" in Run([float("nan")] * 2).out.getvalue()


def test_the_closing_lines_and_the_summary_say_what_the_run_came_to():
    run = Run([3.0, 2.0, 1.0])
    summaries: list[dict[str, Any]] = []
    run.tracker.summary = lambda values: summaries.append(values)
    run.recorder.test = lambda: 8.0
    run.recorder.finish(run.progress, evaluate=True, unigram_entropy=6.0)
    (summary,) = summaries
    assert summary["validation_loss"] == 7.0
    assert summary["unigram_entropy"] == 6.0
    assert summary["final_loss"] == 1.0
    assert summary["test_loss"] == 8.0
    assert summary["cross_bytes_per_step"] == 50
    row = {"collective": "all_gather", "axis": "shard", "wire": "cross", "calls": 3, "sent_bytes": 150}
    assert (summary["traffic"], summary["zero3"]) == ([row], None)
    assert summary["cpu_seconds_per_token"] >= 0.0
    assert run.tracker.validations == [(3, 7.0)]  # evaluated at the last iteration already, not again
    text = run.out.getvalue()
    assert 0.0 < summary["data_wait_share"] < 1.0
    assert f"{summary['data_wait_share']:.1%} of the time waiting for data" in text
    assert "validation loss: 7.0000; unigram entropy of the validation text: 6.0000 nats per token" in text
    assert "validation loss at iteration 3 on test set | lm loss value: 8.0" in text


def test_a_continued_run_is_compared_with_what_zero_3_would_have_sent_for_the_same_steps():
    run = Run([3.0, 2.0, 1.0], start=TrainingProgress(iteration=1, consumed_samples=2, micro_batches=50))
    run.tracker.summary = lambda values: None
    run.recorder.finish(run.progress, evaluate=False, unigram_entropy=6.0)
    assert run.zero3_asked == [2]  # steps 2 and 3, of one micro-batch each


def test_a_step_whose_gradients_are_ten_medians_long_is_named():
    assert "note: iteration 15: grad norm 11.000 is 11 x the median of the 14 steps before it, 1.000" in spikes(11.0)
    assert "note: " not in spikes(9.5)


def spikes(norm: float) -> str:
    """What is said of 14 steps of norm 1 and one of `norm`."""
    return Run([1.0] * 15, norms=[1.0] * 14 + [norm]).out.getvalue()
