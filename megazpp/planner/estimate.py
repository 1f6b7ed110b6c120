"""One run, estimated: bytes by wire, memory by kind, time."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import torch

from megazpp.base.program import MEGA
from megazpp.diloco.config import DilocoPlan
from megazpp.model.backends import FIRST_CAPABILITY, capability, mask_reason
from megazpp.planner.cost import ClusterCosts, Costs, calibration_for
from megazpp.planner.simulator import Memory, lossless_share
from megazpp.planner.step import SimulatedStep, StepSimulator, TrafficTable, measure, sent_on
from megazpp.planner.trace import Documents
from megazpp.run.arguments import RunConfig
from megazpp.run.checks import RunPlan, check_run_config
from megazpp.topology.cluster import Cluster, Device
from megazpp.topology.layout import NODE, WIRES, Layout
from megazpp.training.flops import model_flops_per_token

EXPOSED = 0.05  # of the steps' time that a synchronization of islands may take
USABLE_MEMORY = 0.9  # assumed: the rest is for CUDA's context, NCCL's buffers and what the allocator cannot use
BEFORE_AMPERE = ("P100", "V100", "T4", "RTX 20", "TITAN")  # how the names of devices without flash attention begin


class Estimate(NamedTuple):
    """Needs and speed of a run. With local steps, bytes and times are means over steps and a synchronization.

    Attributes:
        memory: of rank 0, where it is most.
        wires: bytes that rank 0 sends per optimizer step, by wire.
        exchanged: of these, what context parallelism exchanges.
        node_cross_bytes: bytes that all ranks of a node send to other nodes per optimizer step.
        node_island_bytes: of one synchronization of all that islands have, as many; 0 without local steps.
        micro_batches: of a step.
        seconds: of a step; None where the cluster file does not say enough. So are those below.
        held_up: seconds by which a synchronization holds the steps up; 0 without local steps.
        busy: seconds by axis, and of the compute.
        exposed: seconds that the step would be shorter if an axis took no time, by axis; {} if not asked for.
        muon: what Muon does in a step, and sends in addition at its interval; "" without it.
    """

    config: RunConfig
    plan: RunPlan
    memory: Counter[Memory]
    wires: dict[str, float]
    exchanged: int
    node_cross_bytes: float
    node_island_bytes: int
    micro_batches: int
    seconds: float | None
    held_up: float
    busy: dict[str, float]
    exposed: dict[str, float]
    muon: str

    @property
    def gigabytes(self) -> float:
        return self.memory.total() / 1e9

    @property
    def usable_gigabytes(self) -> float:
        """Room for tensors on a rank; infinite where the device is not known."""
        device = self.plan.layout.cluster.device
        return math.inf if device is None else USABLE_MEMORY * device.gigabytes

    @property
    def fits(self) -> bool:
        return self.gigabytes <= self.usable_gigabytes

    @property
    def tokens(self) -> int:
        return self.plan.batches.global_batch_size * (self.config.data.seq_length or 0)

    @property
    def days(self) -> float:
        """The days that all samples of the run take at this speed, without evaluations, checkpoints and restarts."""
        batches = self.plan.batches
        return (self.seconds or 0.0) * batches.total_samples / batches.global_batch_size / 86400

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def teraflops(self) -> float:
        """Model TFLOP/s of a GPU: forward and backward once, however much is recomputed (training/flops.py)."""
        model, layout = self.config.model, self.plan.layout
        padded = model.padded_vocab_size(self.config.tokenizer.vocab_size or 0, layout.tp)
        length = self.config.data.seq_length or 0
        flops = model_flops_per_token(model, padded_vocab_size=padded, seq_length=length)
        return 1e-12 * flops * self.tokens_per_second / layout.cluster.world_size

    @property
    def sufficient_gigabits(self) -> float:
        """The rate of a node's links, each way, from which on sending takes no longer than the compute of a step.

        With local steps sending takes no longer than the steps that hide it, or than EXPOSED of all steps.
        0 where the times are not known.
        """
        compute, islands = self.busy.get("compute", 0.0), self.plan.of(DilocoPlan)
        sent = self.node_cross_bytes
        if islands is not None:
            steps = islands.fragments * islands.hiding_steps or EXPOSED * islands.steps
            sent += self.node_island_bytes * (1 / steps - 1 / islands.steps)
        return 8e-9 * sent / compute if compute else 0.0


class Estimator:
    """Estimates runs on one cluster; `device_type` is whose checks apply."""

    def __init__(self, cluster: Cluster, *, device_type: str) -> None:
        self.cluster, self._device_type = cluster, device_type
        self.calibration = calibration_for(cluster.device)

    def estimate(self, config: RunConfig, *, exposed: bool = False) -> Estimate:
        """Bytes, memory and time of a run with these flags.

        Args:
            exposed: also find out what each axis costs the step.
        Raises:
            ValueError: the flags do not fit each other or the cluster.
        """
        plan = check_run_config(config, self.cluster, device_type=self._device_type)
        layout, efficiency = plan.layout, self.calibration.efficiency
        count = plan.batches.num_micro_batches_at(plan.batches.rampup_samples)
        diloco = plan.of(DilocoPlan)
        every = 1 if diloco is None else diloco.steps
        timed = self.cluster.device is not None and self.cluster.links is not None

        def run(costs: Costs | None) -> tuple[StepSimulator, SimulatedStep, SimulatedStep]:
            """A step and a synchronization."""
            paper = paper_step(config, plan, costs, device_type=self._device_type)
            step = measure(paper, count)
            return paper, step, paper.synchronize(step.seconds)

        paper, step, meeting = run(ClusterCosts(layout, efficiency) if timed else None)
        seconds, hidden = step.seconds + meeting.seconds / every, dict[str, float]()
        for axis in sorted({axis for _, axis, _ in step.traffic | meeting.traffic} if exposed and timed else ()):
            _, faster, sooner = run(ClusterCosts(layout, efficiency, free=(axis,)))
            hidden[axis] = seconds - faster.seconds - sooner.seconds / every
        busy = {key: step.busy.get(key, 0.0) + meeting.busy.get(key, 0.0) / every for key in step.busy | meeting.busy}
        muon = _describe_muon(config, paper, layout)  # before the memory: a step on whole matrices needs more
        return Estimate(
            config=config,
            plan=plan,
            memory=paper.ledger.peak,
            wires={wire: sent_on(step.traffic, wire) + sent_on(meeting.traffic, wire) / every for wire in WIRES},
            exchanged=sum(t.sent_bytes for (_, axis, _), t in step.traffic.items() if axis == "cp"),
            node_cross_bytes=_of_node(step.traffic, layout) + _of_node(meeting.traffic, layout) / every,
            node_island_bytes=_of_node(meeting.traffic, layout),
            micro_batches=count,
            seconds=seconds if timed else None,
            held_up=meeting.seconds,
            busy=busy if timed else {},
            exposed=hidden,
            muon=muon,
        )


def paper_step(
    config: RunConfig,
    plan: RunPlan,
    costs: Costs | None = None,
    *,
    device_type: str,
    rank: int = 0,
    on_cpu: bool = False,
    **others: Any,
) -> StepSimulator:
    """The run's step on one rank; `on_cpu` whatever is planned for. `others` are arguments of `StepSimulator`.

    A dry run, which is on a CPU, has no weights from which the size of differences could be known: they are whole.
    """
    assert config.data.seq_length is not None
    assert config.tokenizer.vocab_size is not None
    arguments: dict[str, Any] = {
        "seq_length": config.data.seq_length,
        "micro_batch_size": plan.batches.micro_batch_size,
        "documents": _documents(config, plan.layout.cluster.device, device_type, on_cpu=on_cpu),
        "moments": 1 if config.optimizer.optimizer == "sgd" else 2,
        "muon": config.optimizer if config.optimizer.optimizer == "muon" else None,
        "islands": plan.of(DilocoPlan),
        "lossless_share": 1.0 if on_cpu else lossless_share(config.schedule.lr),
    }
    spec = config.model_spec(config.tokenizer.vocab_size, plan.wire)
    return StepSimulator(spec, plan.layout, costs=costs, rank=rank, on_cpu=on_cpu, **arguments | others)


def _describe_muon(config: RunConfig, paper: StepSimulator, layout: Layout) -> str:
    if paper.muon is None:
        return ""
    text, interval = paper.muon.describe(), config.optimizer.muon_full_interval
    sent = sum(t.sent_bytes for (_, axis, _), t in paper.orthogonalize(iteration=1).traffic.items() if axis == NODE)
    text += f"; a rank sends {sent / MEGA:.3f} MB inside its node"
    if interval and paper.muon.is_full(interval):
        crossing = _of_node(paper.orthogonalize(iteration=interval).traffic, layout)
        text += f"; in one of {interval} steps a node sends {crossing / MEGA:.3f} MB more to others, for whole matrices"
    return text


def _documents(config: RunConfig, device: Device | None, device_type: str, *, on_cpu: bool) -> Documents | None:
    """The way to keep attention inside documents and windows on the device that is planned for."""
    window, seq_length = config.model.window, config.data.seq_length or 0
    if not config.data.reset_attention_mask and (window is None or seq_length <= window):
        return None
    on_cpu = on_cpu or (device is None and device_type == "cpu")
    if on_cpu:
        found = None
    elif device is None:
        found = capability(torch.device("cuda"))
    else:
        found = (7, 0) if device.name.startswith(BEFORE_AMPERE) else FIRST_CAPABILITY
    if not mask_reason(config.model, capability=found, dtype=config.precision.param_dtype):
        return "kernel"
    return "CPU's mask" if on_cpu else "mask"


def _of_node(table: TrafficTable, layout: Layout) -> int:
    """Bytes that all ranks of a node send to others.

    Counted on rank 0's axes: no rank sends more on an axis, over the network those do whose link is one.
    """
    senders = {axis: layout.links(axis).get("network", 0) / layout.cluster.num_nodes for _, axis, _ in table}
    return round(sum(senders[axis] * t.sent_bytes for (_, axis, _), t in table.items()))
