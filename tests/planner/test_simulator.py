"""Test the simulation of a rank: order and time of queues and links, bytes of codec passes, and memory.

The bytes of collectives are tested in test_step.py.
"""

import functools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megazpp.kernels.formats import BlockFormat
from megazpp.planner.cost import Costs
from megazpp.planner.simulator import (
    KernelSeries,
    Ledger,
    Memory,
    SimulatedCodec,
    SimulatedQueue,
    SimulatedUnit,
    Simulation,
)
from megazpp.zero.wire import plan_message


def test_codec_reports_the_bytes_that_its_passes_touch():
    axis = SimpleNamespace(size=4, rank=0)
    unit, told = SimulatedUnit([("norm", (6,)), ("weight", (6, 100))], axis), []
    layout = plan_message(unit.segments, BlockFormat(8, 128), exact_itemsize=2)
    codec, meta = SimulatedCodec(layout, torch.bfloat16, told.append), torch.device("meta")
    shards, out = torch.empty(3, 202, dtype=torch.bfloat16, device=meta), torch.empty(202, device=meta)
    messages, errors = codec.empty(3, device=meta), codec.new_errors(3, device=meta)
    codec.pack(shards, messages)
    codec.unpack(messages, shards)
    codec.unpack_sum(messages, out, accumulate=False)
    codec.unpack_sum(messages, out, accumulate=True)
    codec.pack(shards, messages, errors=errors)
    whole, sent, summed, fed_back = 3 * 202 * 2, 3 * layout.message_bytes, 202 * 4, errors.messages.nbytes
    assert told[:4] == [whole + sent, whole + sent, sent + summed, sent + 2 * summed]
    # the entry of a pass with error feedback: bytes of the tensor and of the messages, and twice the bytes of the
    # stored errors
    assert told[4:] == [whole + sent + 2 * fed_back]
    assert fed_back > 0


def test_ledger_keeps_its_peak_by_kind():
    ledger = Ledger()
    ledger.add(Memory.PARAMETERS, 10)
    ledger.pass_through(Memory.ACTIVATIONS, 5)
    ledger.add(Memory.GRADIENTS, 3)
    assert ledger.peak == {Memory.PARAMETERS: 10, Memory.ACTIVATIONS: 5}
    ledger.free(Memory.PARAMETERS)
    ledger.add(Memory.ACTIVATIONS, 13)
    assert ledger.peak == Counter({Memory.ACTIVATIONS: 13, Memory.GRADIENTS: 3})


# ---- simulated times of compute and collectives ----------------------------------------------------------------------


class TwoSeconds(Costs):
    """Costs of 2 seconds for every collective, which delays compute that runs beside it by a quarter of this time."""

    def beside(self, axis: str) -> float:
        return 0.25

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        return 2.0


@pytest.fixture
def simulation() -> Simulation:
    return Simulation(TwoSeconds())


def test_task_starts_when_submitted_and_overlaps_until_waited_for(simulation):
    queue = SimulatedQueue(simulation, "cross")
    work = queue.submit(lambda: simulation.spend(3.0))
    simulation.spend(2.0)
    work.wait()
    assert simulation.compute.now == 3.0
    simulation.spend(5.0)
    assert queue.submit(lambda: simulation.running.now).wait() == 8.0


def test_queue_keeps_order_and_tasks_wait_for_dependencies(simulation):
    cross, local = SimulatedQueue(simulation, "cross"), SimulatedQueue(simulation, "local")
    began: list[float] = []

    def task(seconds: float) -> None:
        began.append(simulation.running.now)
        simulation.spend(seconds)

    first = cross.submit(functools.partial(task, 3.0))
    cross.submit(functools.partial(task, 1.0))
    local.submit(functools.partial(task, 1.0), after=(first,))
    assert began == [0.0, 3.0, 3.0]
    assert simulation.compute.now == 0.0


def test_new_step_starts_after_all_clocks_and_ignores_old_works(simulation):
    work = SimulatedQueue(simulation, "cross").submit(lambda: simulation.spend(3.0))
    simulation.spend(1.0)
    assert simulation.busy == {"compute": 1.0}
    assert simulation.begin_step() == simulation.compute.now == 3.0
    work.wait()
    assert simulation.compute.now == 3.0
    assert not simulation.busy


def test_device_waits_for_the_host_only_when_launches_take_longer():
    costs = TwoSeconds()
    costs.launch = 1.0
    simulation = Simulation(costs)
    # four operations, which the host launches at seconds 1, 2, 3 and 4; the second one ends at second 6
    for seconds in (0.25, 4.0, 0.25, 0.25):
        simulation.spend(seconds)
    assert simulation.compute.now == 6.5
    for _ in range(4):  # four operations, which the host launches at seconds 5 to 8
        simulation.spend(0.25)
    assert simulation.compute.now == 8.25
    assert simulation.busy == {"compute": 5.75, "host": 8.0}


@pytest.mark.parametrize("seconds", [[0.25, 4.0, 0.5, 0.25], [0.125, 0.125, 0.5], [8.0, 0.125]])
@pytest.mark.parametrize("launch", [0.0, 0.5])
def test_series_takes_as_long_as_its_kernels_and_collectives_one_by_one(seconds, launch):
    """A `KernelSeries` adds up kernels in advance, to save time. It must advance all clocks like single operations."""
    kernels = [*(("compute", each) for each in seconds[:-1]), ("tp", seconds[-1])]
    costs = Costs()
    costs.launch = launch
    one_by_one, series = Simulation(costs), Simulation(costs)
    for _ in range(3):
        for key, each in kernels:
            one_by_one.spend(each, axis=None if key == "compute" else key)
        series.compute_series(KernelSeries.of(kernels, launch))
        assert series.compute.now == one_by_one.compute.now
        assert series.busy == one_by_one.busy | {"host": one_by_one.busy["host"]}


def test_collectives_of_an_axis_run_in_turn_and_delay_compute(simulation):
    reductions, gathers = simulation.new_clock(), simulation.new_clock()
    for clock in (reductions, gathers):
        with simulation.on(clock):
            simulation.send("shard", "all_gather", 1)
    assert (reductions.now, gathers.now) == (2.0, 4.0)
    assert simulation.busy["shard"] == 4.0
    assert simulation.compute.now == 1.0
    simulation.running.wait_until(gathers.now)  # the compute clock waits until all gathers end at 4 s
    # this collective runs on the compute's own clock and not in a queue: it takes 2 s
    simulation.send("shard", "all_reduce", 1)
    assert simulation.compute.now == 6.0
