"""Estimate of a training run for --plan: bytes sent by kind of link, memory by kind, and seconds per step."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any, NamedTuple

import torch

from megazpp.base.program import MEGA
from megazpp.diloco.config import DilocoPlan
from megazpp.model.backends import FIRST_CAPABILITY, capability, mask_reason
from megazpp.parallel.axis import Traffic
from megazpp.planner.cost import ClusterCosts, Costs, calibration_for
from megazpp.planner.simulator import Memory, lossless_share
from megazpp.planner.step import SimulatedStep, StepSimulator, TrafficTable, measure, sent_on
from megazpp.planner.trace import Documents, TraceInputs, trace_on_rank
from megazpp.run.arguments import RunConfig
from megazpp.run.checks import RunPlan, plan_run
from megazpp.topology.cluster import Cluster, Device, LinkKind, Links
from megazpp.topology.layout import AXES, DOWNLOAD, EXPERT_AXES, HOST, NODE, PCIE, UPLOAD, WIRES, Layout
from megazpp.training.flops import model_flops_per_token
from megazpp.zero.plan import WeightDelta, default_weight_delta

# Largest fraction of the training time that DiLoCo's synchronizations without overlap may take so that the network
# bandwidth counts as sufficient (`Estimate.sufficient_gigabits`)
EXPOSED = 0.05
USABLE_MEMORY = 0.9  # assumed fraction of device memory for tensors; CUDA, NCCL and fragmentation take the rest
# Beginnings of the names of GPUs that are older than Ampere and therefore lack flash attention
BEFORE_AMPERE = ("P100", "V100", "T4", "RTX 20", "TITAN")


class Estimate(NamedTuple):
    """Estimate of a training run's memory, communication and time, without starting the run (--plan).

    With local steps (DiLoCo), replica groups synchronize once in H optimizer steps. Bytes and seconds per step then
    include 1/H of the synchronization's bytes and seconds.

    Attributes:
        config: flags of the run.
        plan: layout, wire formats and batch sizes of the run.
        memory: bytes on rank 0 by kind at the memory peak.
        wires: bytes that rank 0 sends per optimizer step, by kind of link ("tp", "local" or "cross").
        exchanged: bytes that rank 0 sends for context parallelism per optimizer step; `wires` includes them.
        node_cross_bytes: bytes that all ranks of a node send to other nodes per optimizer step.
        node_replica_group_bytes: bytes that a node sends to other replica groups in one synchronization of all
            fragments; 0 without local steps.
        micro_batches: number of micro-batches per optimizer step.
        seconds: seconds per optimizer step; None if the cluster file lacks the device or the links.
        held_up: seconds by which one synchronization of the replica groups delays training; 0 without local steps.
        busy: seconds per optimizer step that collectives take, by axis; for the key "compute" the seconds of kernels,
            and for "host" the seconds of launches. {} if `seconds` is None.
        muon: sentence about Muon's work and communication, for the report; "" for other optimizers.
        host_bytes: bytes of rank 0's training states in host memory; 0 without --optimizer-cpu-offload.
        copied: bytes that rank 0 copies per optimizer step between the device and its states in host memory, by
            direction (UPLOAD or DOWNLOAD).
    """

    config: RunConfig
    plan: RunPlan
    memory: Counter[Memory]
    wires: dict[str, float]
    exchanged: int
    node_cross_bytes: float
    node_replica_group_bytes: int
    micro_batches: int
    seconds: float | None
    held_up: float
    busy: dict[str, float]
    muon: str
    host_bytes: int
    copied: dict[str, int]

    @property
    def gigabytes(self) -> float:
        """Device memory of rank 0 at the memory peak, in GB."""
        return self.memory.total() / 1e9

    @property
    def host_gigabytes(self) -> float:
        """GB of host memory for the training states of a node's ranks; 0 without --optimizer-cpu-offload."""
        return self.plan.layout.cluster.ranks_per_node * self.host_bytes / 1e9

    @property
    def usable_gigabytes(self) -> float:
        """Device memory that tensors can use, in GB; infinite if the cluster file does not describe the device."""
        device = self.plan.layout.cluster.device
        return math.inf if device is None else USABLE_MEMORY * device.gigabytes

    @property
    def fits(self) -> bool:
        """True if device memory suffices for the run, and host memory for the training states that it keeps there."""
        host = self.plan.layout.cluster.host
        return self.gigabytes <= self.usable_gigabytes and (host is None or self.host_gigabytes <= host.gigabytes)

    @property
    def tokens(self) -> int:
        """Number of tokens per optimizer step over all ranks."""
        return self.plan.batches.global_batch_size * (self.config.data.seq_length or 0)

    @property
    def days(self) -> float:
        """Days that all training steps take, without evaluations, checkpoints and restarts; 0 if `seconds` is None."""
        batches = self.plan.batches
        return (self.seconds or 0.0) * batches.total_samples / batches.global_batch_size / 86400

    @property
    def tokens_per_second(self) -> float:
        """Training tokens per second of all ranks together; 0 if `seconds` is None."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def teraflops(self) -> float:
        """Model TFLOP/s per GPU, counting one forward and one backward, no recomputation; 0 if `seconds` is None."""
        model, layout = self.config.model, self.plan.layout
        padded = model.padded_vocab_size(self.config.tokenizer.vocab_size or 0, layout.tp)
        length = self.config.data.seq_length or 0
        flops = model_flops_per_token(model, padded_vocab_size=padded, seq_length=length)
        return 1e-12 * flops * self.tokens_per_second / layout.cluster.world_size

    @property
    def sufficient_gigabits(self) -> float:
        """Network bandwidth of a node, in Gbit/s each way, with which communication takes no longer than compute.

        With local steps (DiLoCo), the bytes of a synchronization may take as long as the steps that overlap with it.
        Without overlap they may take the fraction EXPOSED of the time of all steps. The result is 0 if the estimate has
        no times.
        """
        compute, diloco = self.busy.get("compute", 0.0), self.plan.of(DilocoPlan)
        sent = self.node_cross_bytes
        if diloco is not None:
            steps = diloco.fragments * diloco.hiding_steps or EXPOSED * diloco.steps
            sent += self.node_replica_group_bytes * (1 / steps - 1 / diloco.steps)
        return 8e-9 * sent / compute if compute else 0.0


class Estimator:
    """Estimator of the memory, communication and time of training runs on one cluster.

    It serves --plan and the choice of a format for --zero-weight-delta auto.

    Args:
        cluster: nodes and ranks, with the device and links of the cluster file if there is one.
        device_type: "cuda" or "cpu", which selects the checks of the flags.
        expert_load: tokens of each expert of the simulated rank, relative to the mean over all experts. Above 1, all
            experts of the rank are as busy as the busiest expert of the model.
        elastic: True if the replica groups of local steps are separate jobs (elastic DiLoCo). Each job then computes
            the whole outer step.
    """

    def __init__(self, cluster: Cluster, *, device_type: str, expert_load: float = 1.0, elastic: bool = False) -> None:
        self.cluster, self.expert_load, self._device_type = cluster, expert_load, device_type
        self.elastic = elastic
        self.calibration = calibration_for(cluster.device)
        self._estimates = dict[RunConfig, Estimate]()  # by flags, because a report needs some estimates several times

    def estimate(self, config: RunConfig) -> Estimate:
        """Estimate bytes, memory and time of a run. Later calls with equal flags return the same estimate.

        Args:
            config: flags of the run. For --zero-weight-delta auto, the estimate has the format that
                `choose_weight_delta` chooses.

        Raises:
            ValueError: the flags conflict, or do not fit the cluster. Or the cluster file has the device and links, but
                lacks a kind of link that the run uses, or the host memory that --optimizer-cpu-offload uses.
        """
        if config not in self._estimates:
            choice, found = self._choose(config)
            plan = plan_run(config, self.cluster, device_type=self._device_type, weight_delta=choice)
            if config.zero.optimizer_cpu_offload and self.cluster.host is None and self._is_timed(plan.layout):
                file = config.cluster.cluster_file
                raise ValueError(
                    f"--cluster-file {file} lacks `host`, the bandwidth to host memory, which the times of "
                    "--optimizer-cpu-offload need: add it"
                )
            self._estimates[config] = self._estimate(config, plan) if found is None else found._replace(plan=plan)
        return self._estimates[config]

    def exposed(self, estimate: Estimate) -> dict[str, float]:
        """Return the exposed communication of a run: the seconds by which the collectives of each axis delay a step.

        The run is simulated once more per axis, with collectives of this axis that take 0 seconds. The axis's exposed
        communication is the time that this saves.

        Args:
            estimate: an estimate that this estimator has returned. If it has no times, the result is {}.
        """
        saved = dict[str, float]()
        for axis in sorted(estimate.busy.keys() - {"compute", "host"}):
            _, step, meeting, every = self._simulate(estimate.config, estimate.plan, free=(axis,))
            saved[axis] = (estimate.seconds or 0.0) - step.seconds - meeting.seconds / every
        return saved

    def choose_weight_delta(self, config: RunConfig, *, gigabytes: float | None = None) -> WeightDelta | None:
        """Choose lossless deltas or int8 blocks as the format of weights between nodes, for --zero-weight-delta auto.

        Lossless deltas are chosen if the run with them fits into memory and its estimated step is not slower. If the
        speeds of the links are unknown, only memory decides. If the device is unknown, the estimates compare only
        communication. A run without a cluster file measures links and device first (run/trainer.py).

        Args:
            config: flags of the run.
            gigabytes: memory of a rank's device in 1e9 bytes, for a cluster file without a device; None if unknown.

        Returns:
            the chosen format with its reason; None if there is nothing to choose, because flags set the format or no
            weights cross nodes.

        Raises:
            ValueError: the flags conflict, or do not fit the cluster.
        """
        return self._choose(config, gigabytes)[0]

    def _choose(self, config: RunConfig, gigabytes: float | None = None) -> tuple[WeightDelta | None, Estimate | None]:
        """Choose the format of weights between nodes; return the choice, and the estimate of the run with it.

        The estimate is None if none was computed, or if it was computed for another cluster or another load of the
        experts than this estimator's.
        """
        # ---- return at once if flags set the format, no weights cross nodes, or fp32 compute excludes lossless deltas
        if not config.zero.chooses_weight_delta:
            return None, None
        plan = plan_run(config, self.cluster, device_type=self._device_type)
        if plan.wire.gather is None:
            return None, None
        default = default_weight_delta(config.precision.param_dtype)
        if not default.lossless:
            return default, None
        # ---- complete the cluster: compute on a device of unknown speed counts as 0 seconds
        device = self.cluster.device or Device("unknown", math.inf, gigabytes or math.inf, math.inf)
        cluster = dataclasses.replace(self.cluster, device=device, links=known_links(plan.layout))
        if cluster.links is None and math.isinf(device.gigabytes):
            return default, None
        # ---- estimate the run with lossless deltas and with int8 weights between nodes, at an even load of experts, so
        # that --plan with --plan-expert-load makes the same choice as a run
        even = Estimator(cluster, device_type=self._device_type, elastic=self.elastic)
        is_own = cluster == self.cluster and self.expert_load == even.expert_load

        def estimate(choice: WeightDelta) -> Estimate:
            plan = plan_run(config, cluster, device_type=self._device_type, weight_delta=choice)
            return even._estimate(config, plan)

        lossless = estimate(WeightDelta(True, ""))
        if not lossless.fits:
            needs, usable = f"{lossless.gigabytes:.3g} GB per rank", f"{lossless.usable_gigabytes:.3g} GB are usable"
            return WeightDelta(False, f"lossless deltas would need {needs} and {usable}"), None
        if lossless.seconds is None:
            return default, lossless if is_own else None
        int8 = estimate(WeightDelta(False, ""))
        assert int8.seconds is not None
        what = "a step" if self.cluster.device is not None else "the communication of a step"
        times = f"{lossless.seconds:.4g} s with lossless deltas and {int8.seconds:.4g} s with int8 blocks"
        times += _measured(cluster)
        choice = WeightDelta(lossless.seconds <= int8.seconds, f"{what} is estimated to take {times}")
        return choice, (lossless if choice.lossless else int8) if is_own else None

    def _estimate(self, config: RunConfig, plan: RunPlan) -> Estimate:
        """Estimate a run from its flags and its plan, which already has the choice of --zero-weight-delta auto."""
        simulator, step, meeting, every = self._simulate(config, plan)
        layout, timed = plan.layout, self._is_timed(plan.layout)
        busy = {key: step.busy.get(key, 0.0) + meeting.busy.get(key, 0.0) / every for key in step.busy | meeting.busy}
        # `_describe_muon` simulates a step that orthogonalizes whole matrices, which can raise the memory peak.
        # So it is called before the peak is read.
        muon = _describe_muon(config, simulator, layout)
        return Estimate(
            config=config,
            plan=plan,
            memory=simulator.ledger.peak,
            wires={wire: sent_on(step.traffic, wire) + sent_on(meeting.traffic, wire) / every for wire in WIRES},
            exchanged=sum(t.sent_bytes for (_, axis, _), t in step.traffic.items() if axis == "cp"),
            node_cross_bytes=_of_node(step.traffic, layout) + _of_node(meeting.traffic, layout) / every,
            node_replica_group_bytes=_of_node(meeting.traffic, layout),
            micro_batches=plan.batches.num_micro_batches_at(plan.batches.rampup_samples),
            seconds=step.seconds + meeting.seconds / every if timed else None,
            held_up=meeting.seconds,
            busy=busy if timed else {},
            muon=muon,
            host_bytes=simulator.host_bytes,
            copied={way: step.traffic.get((PCIE, HOST, way), Traffic(0, 0)).sent_bytes for way in (UPLOAD, DOWNLOAD)},
        )

    def _simulate(
        self, config: RunConfig, plan: RunPlan, free: tuple[str, ...] = ()
    ) -> tuple[StepSimulator, SimulatedStep, SimulatedStep, int]:
        """Simulate an optimizer step of a run, and a synchronization of DiLoCo's replica groups.

        Args:
            config: flags of the run.
            plan: layout, wire formats and batch sizes of the run.
            free: axes whose collectives take no time.

        Returns:
            the simulator; the optimizer step; the synchronization, which is empty without DiLoCo; and the number of
            steps per synchronization, 1 without DiLoCo.
        """
        costs, layout = None, plan.layout
        if self._is_timed(layout):
            known = {} if self.cluster.links is None else self.cluster.links.known
            for kind, axis in _used_links(layout).items():
                if kind not in known:
                    file = config.cluster.cluster_file
                    raise ValueError(
                        f"--cluster-file {file} lacks links.{kind}, which the axis {axis} uses: add the link's speed"
                    )
            costs = ClusterCosts(layout, self.calibration.efficiency, free=free)
        simulator = build_step_simulator(
            config,
            plan,
            costs,
            device_type=self._device_type,
            expert_load=self.expert_load,
            on_cpu=self.cluster.device is not None and self.cluster.device.is_cpu,
            lossless_share=lossless_share(config.schedule.lr),
            elastic=self.elastic,
        )
        step = measure(simulator, plan.batches.num_micro_batches_at(plan.batches.rampup_samples))
        diloco = plan.of(DilocoPlan)
        return simulator, step, simulator.synchronize(step.seconds), 1 if diloco is None else diloco.steps

    def _is_timed(self, layout: Layout) -> bool:
        """Return True if estimates have times: the cluster file has the device, and links if the layout uses any."""
        return self.cluster.device is not None and (self.cluster.links is not None or not _used_links(layout))


def _measured(cluster: Cluster) -> str:
    """Return the end of the notice about the choice of --zero-weight-delta auto: the measured rates that it used.

    The text begins with "; measured: ". It is "" if --measure-links has measured neither the link between nodes nor the
    rates at which a CPU encodes and decodes deltas.
    """
    network, device, figures = (cluster.links or Links()).network, cluster.device, list[str]()
    if network is not None and network.is_measured:
        figures.append(f"{8 * network.gigabytes_per_second:.3g} Gbit/s between nodes")
    if device is not None and device.is_cpu:
        rates = f"{device.encode_gigabytes_per_second:g} and {device.decode_gigabytes_per_second:g} GB/s"
        figures.append(f"{rates} of weights to encode and decode deltas")
    return f"; measured: {', '.join(figures)}" if figures else ""


def known_links(layout: Layout) -> Links | None:
    """Return the speeds of the cluster's links; None if the layout uses a kind of link whose speed is unknown."""
    links = layout.cluster.links or Links()
    return links if _used_links(layout).keys() <= links.known.keys() else None


def _used_links(layout: Layout) -> dict[LinkKind, str]:
    """Return, for each kind of link that the layout uses, such as "network", the name of one axis that uses it."""
    axes = (*AXES, NODE, *(EXPERT_AXES if layout.has_expert_axes else ()))
    return {kind: axis for axis in reversed(axes) for kind in layout.links(axis)}


def build_step_simulator(
    config: RunConfig,
    plan: RunPlan,
    costs: Costs | None = None,
    *,
    device_type: str,
    rank: int = 0,
    on_cpu: bool = False,
    **others: Any,
) -> StepSimulator:
    """Return a simulator of the optimizer steps of a run on one rank, for the planner's estimates.

    Args:
        config: flags of the run.
        plan: layout, wire formats and batch sizes of the run.
        costs: cost model that gives the seconds of operations; None to count bytes without times.
        device_type: "cuda" or "cpu", the type of the device if the cluster file does not describe one.
        rank: global rank to simulate.
        on_cpu: True to simulate a CPU process, whatever device the cluster file describes. Lossless deltas then have
            their largest size, unless `others` has `lossless_share`. Tests compare such a simulation with a real step
            on CPUs.
        **others: values that replace or complete the fields of `TraceInputs` and the arguments of `StepSimulator` that
            this function derives from the flags.
    """
    assert config.data.seq_length is not None
    assert config.tokenizer.vocab_size is not None
    device = plan.layout.cluster.device
    is_cpu = on_cpu or (device_type == "cpu" if device is None else device.is_cpu)
    given: dict[str, Any] = {
        "seq_length": config.data.seq_length,
        "micro_batch_size": plan.batches.micro_batch_size,
        "documents": _documents(config, device, is_cpu=is_cpu),
        # By default a GPU compiles layers and loss. The compilers are assumed to be installed, because the planned
        # machine may be another one than this.
        "compiled": not is_cpu if config.model.compile is None else config.model.compile,
        "moments": 1 if config.optimizer.optimizer == "sgd" else 2,
        "muon": config.optimizer if config.optimizer.optimizer == "muon" else None,
        "diloco": plan.of(DilocoPlan),
        "lossless_share": 1.0 if on_cpu else lossless_share(config.schedule.lr),
    }
    given |= others
    inputs = {name: given.pop(name) for name in given.keys() & TraceInputs._fields}
    spec = config.model_spec(config.tokenizer.vocab_size, plan.wire)
    trace = trace_on_rank(spec, plan.layout, **inputs)
    return StepSimulator(trace, spec, plan.layout, costs=costs, rank=rank, on_cpu=on_cpu, **given)


def _describe_muon(config: RunConfig, simulator: StepSimulator, layout: Layout) -> str:
    """Simulate Muon's orthogonalization, and return a sentence about its work and bytes; "" for other optimizers."""
    if simulator.muon is None:
        return ""
    text, interval = simulator.muon.describe(), config.optimizer.muon_full_interval
    exchanged = simulator.orthogonalize(iteration=1).traffic
    sent = sum(t.sent_bytes for (_, axis, _), t in exchanged.items() if axis != "cross")
    text += f"; a rank sends {sent / MEGA:.3f} MB inside its node"
    if interval and simulator.muon.is_full(interval):
        crossing = _of_node(simulator.orthogonalize(iteration=interval).traffic, layout)
        text += f"; in one of {interval} steps a node sends {crossing / MEGA:.3f} MB to other nodes, for whole matrices"
    return text


def _documents(config: RunConfig, device: Device | None, *, is_cpu: bool) -> Documents | None:
    """Return the method by which the planned device keeps attention inside documents or a window.

    "kernel" is an attention kernel for documents, "mask" a mask for the GPU's attention, and "CPU's mask" a mask for
    the CPU's attention. The result is None for plain causal attention, which needs no such method.

    Args:
        config: flags of the run.
        device: device of the cluster file; None if the file does not describe the device.
        is_cpu: True to plan for a CPU process, whatever device the cluster file describes.
    """
    window, seq_length = config.model.window, config.data.seq_length or 0
    if not config.data.reset_attention_mask and (window is None or seq_length <= window):
        return None
    if is_cpu:
        found = None
    elif device is None:
        found = capability(torch.device("cuda"))
    else:
        found = (7, 0) if device.name.startswith(BEFORE_AMPERE) else FIRST_CAPABILITY
    if not mask_reason(config.model, capability=found, dtype=config.precision.param_dtype):
        return "kernel"
    return "CPU's mask" if is_cpu else "mask"


def _of_node(table: TrafficTable, layout: Layout) -> int:
    """Return the bytes per step that all ranks of a node send to other nodes, estimated from rank 0's traffic table.

    On each axis rank 0 sends at least as many bytes as any other rank. So the bytes of rank 0 are multiplied by the
    number of the node's ranks that have a network link on the axis. In an all-to-all, every rank of the node sends to
    other nodes. The factor is then the number of the node's ranks, times the fraction of the bytes that crosses the
    network. Copies between device and host memory do not count.
    """
    cluster, sent = layout.cluster, Counter[tuple[str, bool]]()
    for (wire, axis, collective), traffic in table.items():
        if wire != PCIE:
            sent[axis, collective == "all_to_all"] += traffic.sent_bytes
    return round(
        sum(
            num_bytes
            * (
                cluster.ranks_per_node * layout.network_share(axis)
                if is_pairwise
                else layout.links(axis).get("network", 0) / cluster.num_nodes
            )
            for (axis, is_pairwise), num_bytes in sent.items()
        )
    )
