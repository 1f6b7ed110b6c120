"""Queues keep their order, run beside the caller, carry results and errors, and respect what a task waits for."""

import threading

import pytest
import torch

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import CommQueue, StreamQueue, ThreadQueue, Work
from megazpp.parallel.timeline import Timeline


@pytest.fixture
def queue() -> ThreadQueue:
    return ThreadQueue("cross", Timeline())


def test_a_thread_queue_runs_tasks_in_order_beside_the_caller_and_after_those_of_other_queues(queue):
    gate, done = threading.Event(), []
    other = ThreadQueue("local", Timeline())
    slow = other.submit(lambda: (gate.wait(10), done.append("slow"), 20)[-1])
    one = queue.submit(lambda: slow.join() + 1, after=(slow,))
    two = queue.submit(lambda: done.append("second"))
    assert done == []  # the caller did not wait
    gate.set()
    two.wait()
    assert done == ["slow", "second"]
    assert one.wait() == 21


def test_an_error_reaches_who_waits_and_who_depends_and_the_queue_goes_on(queue):
    def fail() -> None:
        raise ValueError("lost a peer")

    failed = queue.submit(fail)
    dependent = ThreadQueue("local", Timeline()).submit(lambda: 1, after=(failed,))
    for work in (failed, dependent):
        with pytest.raises(ValueError, match="lost a peer"):
            work.wait()
    assert queue.submit(lambda: 2).wait() == 2


def test_tasks_run_without_gradients_and_in_the_callers_inference_mode(queue):
    weight = torch.nn.Parameter(torch.ones(2))
    for kind in (CommQueue(), queue):
        assert not kind.submit(lambda: weight * 2).wait().requires_grad
        with torch.inference_mode():
            out = torch.empty(2)  # may be written to in inference mode only
            kind.submit(lambda out=out: out.copy_(weight)).wait()
            assert out.tolist() == [1.0, 1.0]


def test_a_queue_without_overlap_has_run_when_submit_returns_and_an_axis_has_one_queue():
    done = []
    CommQueue().submit(lambda: done.append(1), after=(Work(None),))
    assert done == [1]
    axis = MeshAxis("cross")
    assert axis.queue is axis.queue


def test_waiting_is_recorded_where_there_was_something_to_wait_for():
    timeline = Timeline()
    queue, gate = ThreadQueue("cross", timeline), threading.Event()
    recording = timeline.start()
    ready = queue.submit(lambda: 1)
    ready.join()
    ready.wait()  # done: nothing to wait for
    slow = queue.submit(lambda: gate.wait(10))
    threading.Timer(0.05, gate.set).start()
    slow.wait()
    waits = [span for span in recording.spans() if span.track == "wait"]
    assert [span.name for span in waits] == ["cross"]
    assert waits[0].seconds > 0.02


@pytest.mark.gpu
def test_on_cuda_a_task_waits_for_its_caller_and_for_other_queues_and_a_work_waits_for_its_task():
    late = 20_000_000  # cycles: some ten milliseconds
    cross, local = StreamQueue(), StreamQueue(priority=-1)
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(late)
    x.fill_(1.0)

    def slowly(y: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(late)
        return y * 2.0

    doubled = cross.submit(lambda: slowly(x))
    again = local.submit(lambda: slowly(doubled.join()), after=(doubled,))
    assert not torch.cuda.current_stream().query()  # the host has not waited
    assert bool((again.wait() == 4.0).all())
