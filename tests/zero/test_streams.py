"""Check ZeRO++'s use of CUDA streams for races and early reuse of memory, simulated on a CPU.

helpers/stream_races.py simulates the streams.
"""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import ranks
from helpers.stream_races import simulated_streams
from helpers.tiers import chosen, nightly, slow
from helpers.training import LLAMA_STYLE, Case, build_step, train_on_ranks
from zero.test_diloco import full, train_replica_groups
from zero.test_schedule import ALL, BF16, LOSSLESS, ON, train_while_skipping

from megazpp.diloco.config import DilocoConfig
from megazpp.parallel import comm_queue
from megazpp.zero import comms
from megazpp.zero.config import ZeroConfig

LOCAL_STEPS = DilocoConfig(diloco_steps=2, diloco_fragment_sync_delay=1, diloco_outer_momentum=0.9)
NO_OVERLAP = {"zero_weight_delta": "lossless", "overlap_param_gather": False}
SUBMIT = comm_queue.StreamQueue.submit


def submit_without_waiting(queue: Any, task: Any, *, after: Any = (), since: Any = None) -> Any:
    return SUBMIT(queue, task, after=after, since=since or mock.Mock())


# name of an injected error: the object, its attribute, and the replacement of this attribute
BREAKAGES: dict[str, tuple[Any, str, Any]] = {
    "waiting for a work does not wait": (comm_queue._StreamWork, "join", lambda work: work._result),
    "a queue does not wait for its caller": (comm_queue.StreamQueue, "submit", submit_without_waiting),
    "nothing is recorded": (torch.Tensor, "record_stream", lambda tensor, stream: None),
    "gradients are freed before they are sent": (comms.ReduceSchedule, "sent", lambda self, work: None),
}


def train(case: Case, breakage: str = "") -> list[str]:
    """Train on simulated CUDA streams, and return the races and early reuses of memory that were found.

    `breakage` is the key of an error in BREAKAGES to inject; "" injects none.
    """
    with simulated_streams() as streams, pytest.MonkeyPatch.context() as patch:
        if breakage:
            patch.setattr(*BREAKAGES[breakage])
        if case.diloco.diloco_steps is None:
            train_on_ranks(case)
        else:
            for _, replica_groups, _ in train_replica_groups(case):
                full(replica_groups.weights() | replica_groups.common())
    return streams.found


def zeropp(**flags: Any) -> ZeroConfig:
    return ZeroConfig(zeropp=True, **flags)


SETTINGS: dict[str, tuple[int, Case]] = {
    "ZeRO-3": (4, Case(zero=ZeroConfig(), nodes=2)),
    "qwZ": (4, Case(zero=ZeroConfig(zero_quantized_weights=True), nodes=2)),
    "hpZ": (4, Case(zero=ZeroConfig(zero_hpz_partition_size="auto"), nodes=2)),
    "qgZ": (4, Case(zero=ZeroConfig(zero_quantized_gradients=True), nodes=2, precision=BF16)),
    "classic": (4, Case(zero=zeropp(zero_cross_every_microbatch=True), nodes=2)),
    "not averaged, llama": (4, Case(zero=zeropp(zero_error_feedback_beta=0.0), nodes=2, model=LLAMA_STYLE)),
    "bf16 sums": (4, Case(zero=zeropp(zero_error_feedback=False, zero_accumulate_in_bf16=True), nodes=2)),
    "one node": (4, Case(zero=ALL)),
    "tp": (8, Case(zero=ALL, nodes=2, tp=2, sequence_parallel=True, model=LLAMA_STYLE, precision=BF16)),
    "copies": (4, Case(zero=ALL, nodes=2, replicas=2)),
    "lossless": (4, Case(zero=LOSSLESS, nodes=2, precision=BF16)),
    "lossless, no overlap": (2, Case(zero=zeropp(**NO_OVERLAP), nodes=2, precision=BF16)),
    "lossless, tp": (4, Case(zero=LOSSLESS, nodes=2, tp=2, sequence_parallel=True, model=LLAMA_STYLE, precision=BF16)),
    "replica groups": (2, Case(nodes=2, steps=4, diloco=LOCAL_STEPS)),
    "replica groups of nodes": (
        4,
        Case(zero=ALL, nodes=4, steps=4, diloco=DilocoConfig(diloco_steps=2, diloco_replica_groups=2)),
    ),
}


@pytest.mark.parametrize(
    "setting",
    chosen(
        SETTINGS,
        "lossless",
        slow=("classic", "copies", "lossless, no overlap", "replica groups"),
    ),
)
def test_streams_have_no_races_and_no_early_memory_reuse(setting):
    world, case = setting
    if case.diloco.diloco_steps is None:
        size = {"micro_batches": 1, "steps": 3} if case.precision.bf16 else {"micro_batches": 2, "steps": 2}
        case = dataclasses.replace(case, **size)
    assert ranks(world).run(train, case) == [[]] * world


@pytest.mark.parametrize("breakage", [*map(slow, list(BREAKAGES)[:2]), *map(nightly, list(BREAKAGES)[2:])])
def test_injected_stream_errors_are_found(breakage):
    case = Case(nodes=2, micro_batches=2, steps=2, zero=ALL)
    assert ranks(2).run(train, case, breakage)[0]


def test_task_with_an_event_waits_only_for_earlier_work():
    """Submit tasks that wait for an event: a task may read what was written before the event.

    Reading what is written after the event is a race, which the simulation must report.
    """
    with simulated_streams() as streams:
        queue, before, after = comm_queue.StreamQueue(), torch.empty(4), torch.empty(4)
        before.fill_(1.0)
        moment = queue.record_event()
        after.fill_(1.0)
        queue.submit(lambda: before * 2, since=moment)
        assert streams.found == []
        queue.submit(lambda: after * 2, since=moment)
        assert len(streams.found) == 1


def hops_of_a_forward(case: Case) -> str:
    """Return the order of the hops in the second step's forward: "c" for each cross hop, "l" for each local hop."""
    with simulated_streams():
        step, dims = build_step(case)
        batch, submitted, seen = [case.batch(0, dims.data_rank * 4, 4)], mock.Mock(), []
        step(batch, learning_rate=1e-3, weight_decay=0.0)
        submitted.c.side_effect, submitted.l.side_effect = dims.cross.queue.submit, dims.local.queue.submit
        dims.cross.queue.submit, dims.local.queue.submit = submitted.c, submitted.l
        step.model.register_forward_hook(lambda *_: seen.extend(name for name, *_ in submitted.method_calls))
        step(batch, learning_rate=1e-3, weight_decay=0.0)
    return "".join(seen)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [nightly(ALL), LOSSLESS])
def test_use_launches_its_hops_then_two_others_and_keeps_cross_queue_busy(zero):
    """After a step, each use launches only a few cross hops, so that the GPU need not wait for all launches."""
    case = Case(nodes=2, zero=zero, model=dataclasses.replace(LLAMA_STYLE, num_layers=4), precision=BF16)
    # Each of the 6 units has one cross hop. The first use submits the cross hop of its own unit. Each use then starts
    # the cross hops of two later units.
    assert ranks(4).run(hops_of_a_forward, case) == ["c" + "lcc" * 2 + "lc" + "l" * 3] * 4


def race_while_skipping(delta: str) -> list[str]:
    with simulated_streams() as streams:
        train_while_skipping({**ON, "zero_weight_delta": delta})
    return streams.found


@pytest.mark.slow
@pytest.mark.parametrize("delta", [nightly("none"), "lossless"])
def test_streams_have_no_races_with_skipped_layers_and_weight_writes(delta):
    assert ranks(4).run(race_while_skipping, delta) == [[]] * 4
