"""Test a mesh axis: its collectives, their counted bytes, its process group and its communication queue."""

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import ranks

from megazpp.parallel.axis import MeshAxis, _reduce_scatter_single
from megazpp.parallel.comm_queue import CommQueue, StreamQueue, ThreadQueue, Work
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.parallel.store import wait_until
from megazpp.parallel.timeline import Activity, Timeline
from megazpp.topology.cluster import Cluster


def shard_axis(nodes: int) -> MeshAxis:
    """Return the shard axis of a job on `nodes` nodes of two ranks each."""
    layout = plan_dims(ParallelConfig(), Cluster(num_nodes=nodes, ranks_per_node=2), zero_stage=3)
    return ParallelDims(layout, device_type="cpu").shard


def test_axis_of_one_rank_is_identity_without_process_group():
    axis, x = MeshAxis("tp"), torch.arange(6.0)
    assert all(call(x) is x for call in (axis.all_reduce_, axis.all_gather, axis.reduce_scatter, axis.all_to_all))
    assert torch.equal(axis.all_gather(x, out=torch.full_like(x, float("nan"))), x)
    assert axis.gather_objects("x") == ["x"]
    assert axis.counter.table() == {}


def ring_and_gloo(dtype: torch.dtype) -> bool:
    """Return True if the axis's own reduce-scatter, which sends around a ring, equals gloo's.

    The values are integers, whose sums are exact in any order.
    """
    axis, generator = shard_axis(2), torch.Generator().manual_seed(dist.get_rank())
    x = torch.randint(-50, 50, (4 * 63, 2), generator=generator).to(dtype)
    expected, given = torch.empty(63, 2, dtype=dtype), torch.full((63, 2), -1).to(dtype)
    _reduce_scatter_single(expected, x, group=axis.group)
    return axis.reduce_scatter(x, out=given) is given and torch.equal(given, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ring_reduce_scatter_matches_gloo_in_exact_sums(dtype):
    assert ranks(4).run(ring_and_gloo, dtype) == [True] * 4


def check_collectives() -> None:
    axis = shard_axis(2)
    rank, mine, aliased = axis.rank, torch.full((3,), float(axis.rank)), torch.full((4, 3), float("nan"))
    assert axis.all_reduce_(mine.clone()).tolist() == [6.0] * 3
    assert axis.all_gather(mine).tolist() == [r for r in range(4) for _ in range(3)]
    assert axis.reduce_scatter(torch.arange(8.0)).tolist() == [8.0 * rank, 4 * (2.0 * rank + 1)]
    assert axis.all_to_all(10 * rank + torch.arange(4.0)).tolist() == [10 * sender + rank for sender in range(4)]
    # In the ring, ranks 1 and 3 send to the other node. Each rank sends 3/4 of the buffer, in an all-reduce 2 x 3/4
    wire, other = ("cross", "local") if rank in (1, 3) else ("local", "cross")
    sent = {"all_reduce": 2 * 12 * 3 // 4, "all_gather": 48 * 3 // 4, "reduce_scatter": 24}
    # In an all-to-all each rank sends one of three parts to its neighbor, and two to the ranks of the other node
    pairwise = {"local": 4, "cross": 8}
    assert axis.counter.table() == {(wire, "shard", collective): (1, count) for collective, count in sent.items()} | {
        (to, "shard", "all_to_all"): (1, count) for to, count in pairwise.items()
    }
    assert axis.counter.sent_bytes(wire) == sum(sent.values()) + pairwise[wire]
    assert axis.counter.sent_bytes(other) == pairwise[other]
    assert axis.counter.sent_on_axis("shard") == sum(sent.values()) + 12
    assert axis.gather_objects({"rank": rank}) == ([{"rank": r} for r in range(4)] if rank == 0 else [])
    aliased[rank] = mine
    axis.all_gather(aliased[rank], out=aliased.view(-1))
    assert aliased.tolist() == [[r] * 3 for r in range(4)]


def check_collectives_while_compiling() -> None:
    # torch 2.13 sets this flag for all threads, also for communication threads, while one thread compiles
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True):
        check_collectives()


@pytest.mark.parametrize("check", [check_collectives, check_collectives_while_compiling])
def test_collectives_count_the_bytes_that_each_wire_carries(check):
    ranks(4).run(check)


def send_under_way() -> int:
    """Return the counted bytes of three all-reduces: submitted before, during and after a pause of the counter.

    The first all-reduce, which counts, is still in flight when the pause begins. Only the second one may not count.
    """
    axis, paused = shard_axis(1), threading.Event()
    under_way = axis.queue.submit(lambda: (paused.wait(), axis.all_reduce_(torch.zeros(4))))
    with axis.counter.paused():
        paused.set()
        under_way.wait()
        axis.queue.submit(lambda: axis.all_reduce_(torch.zeros(400))).wait()
    axis.queue.submit(lambda: axis.all_reduce_(torch.zeros(8))).wait()
    return axis.counter.sent_bytes("local")


def test_paused_counter_ignores_only_collectives_submitted_meanwhile():
    assert ranks(2).run(send_under_way) == [16 + 32] * 2


# ---- communication queues -------------------------------------------------------------------------------------------


@pytest.fixture
def queue():
    return ThreadQueue("cross", Timeline())


def test_thread_queue_keeps_order_and_waits_for_other_queues_tasks(queue):
    gate, done = threading.Event(), []
    slow = ThreadQueue("local", Timeline()).submit(lambda: (gate.wait(10), done.append("slow"), 20)[-1])
    one = queue.submit(lambda: slow.join() + 1, after=(slow,))
    two = queue.submit(lambda: done.append("second"))
    assert done == []  # `submit` has returned although the first task still waits
    gate.set()
    two.wait()
    assert done == ["slow", "second"]
    assert one.wait() == 21


def test_task_error_reaches_waiters_and_dependents_but_not_the_queue(queue):
    failed = queue.submit(lambda: int("lost a peer"))
    dependent = ThreadQueue("local", Timeline()).submit(lambda: 1, after=(failed,))
    for work in (failed, dependent):
        with pytest.raises(ValueError, match="lost a peer"):
            work.wait()
    assert queue.submit(lambda: 2).wait() == 2


def test_queued_tasks_run_without_gradients_in_callers_inference_mode(queue):
    weight = torch.nn.Parameter(torch.ones(2))
    for kind in (CommQueue(), queue):
        assert not kind.submit(lambda: weight * 2).wait().requires_grad
        with torch.inference_mode():
            out = torch.empty(2)  # an inference tensor, to which only inference mode may write
            kind.submit(lambda out=out: out.copy_(weight)).wait()
            assert out.tolist() == [1.0, 1.0]


def test_queue_without_overlap_runs_tasks_inside_submit():
    done, axis = [], MeshAxis("cross")
    CommQueue().submit(lambda: done.append(1), after=(Work(None),))
    assert done == [1]
    assert axis.queue is axis.queue


def test_wait_is_recorded_only_if_the_task_is_unfinished():
    timeline, activity = Timeline(), Activity()
    timeline.attach(activity)
    queue, recording = ThreadQueue("cross", timeline), timeline.start()
    ready = queue.submit(lambda: 1)
    ready.join()
    ready.wait()  # the task has already finished, so nothing is recorded
    slow = queue.submit(lambda: wait_until(lambda: bool(activity.now()), 60))  # ends once `slow.wait()` below waits
    slow.wait()
    (wait,) = recording.spans()
    assert (wait.track, wait.name) == ("wait", "cross")
    assert wait.seconds > 0


@pytest.mark.gpu
def test_cuda_task_waits_for_its_caller_and_dependencies():
    late = 100_000_000  # clock cycles, about 50 ms, which is longer than the host needs for the launches below
    cross, local = StreamQueue(), StreamQueue(priority=-1)
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(1)
    x.fill_(0.0).mul(2.0)  # load these kernels now, because loading would block on the device
    torch.cuda.synchronize()
    torch.cuda._sleep(late)
    x.fill_(1.0)

    def slowly(y):
        torch.cuda._sleep(late)
        return y * 2.0

    doubled = cross.submit(lambda: slowly(x))
    again = local.submit(lambda: slowly(doubled.join()), after=(doubled,))
    assert not torch.cuda.current_stream().query()  # the device is still busy, so the host has not waited for it
    assert bool((again.wait() == 4.0).all())
