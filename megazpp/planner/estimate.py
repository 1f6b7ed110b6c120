"""One run, estimated: bytes by wire, memory by kind, time; for the flags as they are and for others beside them."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch

from megazpp.arguments import RunConfig
from megazpp.checks import RunPlan, check_run_config
from megazpp.model.attention_kernels import FIRST_CAPABILITY, capability, mask_reason
from megazpp.planner.costs import ClusterCosts, Costs, NoCosts
from megazpp.planner.memory import MemoryPlan, usable_gigabytes
from megazpp.planner.speed import measure
from megazpp.planner.step import PaperStep, TrafficTable
from megazpp.planner.trace import Trace, trace_model
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import WIRES
from megazpp.topology.shares import Shares, calibration_for
from megazpp.training.flops import model_flops_per_token

BEFORE_AMPERE = ("P100", "V100", "T4", "RTX 20", "TITAN")  # how the names of devices without flash attention begin


class Estimate(NamedTuple):
    """What a run will need and do.

    Attributes:
        config, plan: the run.
        memory: of rank 0, where it is most.
        logits_bytes: of the logits of a micro-batch, which are among the activations.
        wires: bytes that rank 0 sends per optimizer step, by wire.
        node_cross_bytes: bytes that all ranks of a node send to other nodes per optimizer step.
        micro_batches: of a step.
        seconds: of a step; None where the cluster file does not say enough. So are those below.
        busy: seconds by axis, and of the compute.
        exposed: seconds that the step would be shorter if an axis took no time, by axis; {} if not asked for.
    """

    config: RunConfig
    plan: RunPlan
    memory: MemoryPlan
    logits_bytes: int
    wires: dict[str, int]
    node_cross_bytes: int
    micro_batches: int
    seconds: float | None
    busy: dict[str, float]
    exposed: dict[str, float]
    flops_per_token: int

    @property
    def gigabytes(self) -> float:
        """Of rank 0."""
        return self.memory.total / 1e9

    @property
    def fits(self) -> bool:
        """Whether that is in a rank's memory, where that is known."""
        usable = usable_gigabytes(self.plan.layout.cluster.device)
        return usable is None or self.gigabytes <= usable

    @property
    def tokens(self) -> int:
        """Of an optimizer step."""
        assert self.config.data.seq_length is not None
        return self.plan.batches.global_batch_size * self.config.data.seq_length

    @property
    def days(self) -> float:
        """Of all samples of the run at this speed, without evaluations, checkpoints and restarts."""
        batches = self.plan.batches
        return (self.seconds or 0.0) * batches.total_samples / batches.global_batch_size / 86400

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def teraflops(self) -> float:
        """Model TFLOP/s of a GPU: forward and backward once, however much is recomputed (training/flops.py)."""
        return 1e-12 * self.flops_per_token * self.tokens_per_second / self.plan.layout.cluster.world_size


class Estimator:
    """Estimates runs on one cluster; what the model does is traced once for each shape of it.

    Args:
        cluster: nodes, links and device.
        vocab_size: tokens of the tokenizer.
        device_type: whose checks apply.

    Attributes:
        calibration: what the device and the wires reach of their data sheets.
    """

    def __init__(self, cluster: Cluster, *, vocab_size: int, device_type: str) -> None:
        self.cluster, self._vocab_size = cluster, vocab_size
        self.device_type, self.calibration = device_type, calibration_for(cluster.device)
        self._traces: dict[object, Trace] = {}

    def estimates(self, config: RunConfig) -> tuple[Estimate, ...]:
        """One, or the fastest and the slowest where the shares were not checked for so few tokens per rank."""
        first = self.estimate(config)
        if first.seconds is None:
            return (first,)
        tokens = first.tokens / first.micro_batches / self.cluster.world_size
        return first, *(self.estimate(config, shares=shares) for shares in self.calibration.ends(tokens)[1:])

    def estimate(self, config: RunConfig, *, exposed: bool = False, shares: Shares | None = None) -> Estimate:
        """Bytes, memory and time of a run with these flags.

        Args:
            exposed: also find out what each axis costs the step.
            shares: None for those of the calibration.
        Raises:
            ValueError: the flags do not fit each other or the cluster.
        """
        plan = check_run_config(config, self.cluster, device_type=self.device_type)
        trace = self._trace(config, plan, on_cpu=self._on_cpu)
        count = plan.batches.num_micro_batches_at(plan.batches.rampup_samples)
        shares = shares or self.calibration.shares
        step = self.paper_step(config, plan, ClusterCosts(plan.layout, shares) if self._timed else NoCosts())
        traffic, seconds, busy = measure(step, count)
        hidden = {}
        if exposed and self._timed:
            for axis in sorted({axis for _, axis, _ in traffic}):
                free = ClusterCosts(plan.layout, shares, free=(axis,))
                hidden[axis] = seconds - measure(self.paper_step(config, plan, free), count).seconds
        wires = {wire: sum(t.sent_bytes for key, t in traffic.items() if key[0] == wire) for wire in WIRES}
        return Estimate(
            config=config,
            plan=plan,
            memory=step.ledger.fullest,
            logits_bytes=trace.logits_bytes,
            wires=wires,
            node_cross_bytes=self._node_bytes(plan, traffic),
            micro_batches=count,
            seconds=seconds if self._timed else None,
            busy=busy if self._timed else {},
            exposed=hidden,
            flops_per_token=self._flops(config, plan),
        )

    @property
    def _timed(self) -> bool:
        return self.cluster.device is not None and self.cluster.links is not None

    def paper_step(
        self, config: RunConfig, plan: RunPlan, costs: Costs, *, rank: int = 0, on_cpu: bool = False
    ) -> PaperStep:
        """The run's step on one rank."""
        return PaperStep(
            self._trace(config, plan, on_cpu=on_cpu or self._on_cpu),
            layout=plan.layout,
            wire=plan.wire,
            zero=config.zero,
            precision=config.precision,
            costs=costs,
            rank=rank,
            on_cpu=on_cpu,
            moments=2 if config.optimizer.optimizer == "adam" else 1,
        )

    @property
    def _on_cpu(self) -> bool:
        """Whether no GPU is planned for: neither the cluster file's nor this machine's."""
        return self.cluster.device is None and self.device_type == "cpu"

    def _trace(self, config: RunConfig, plan: RunPlan, *, on_cpu: bool) -> Trace:
        assert config.data.seq_length is not None
        sequence_parallel = config.parallel.sequence_parallel and plan.layout.tp > 1
        size, documents = plan.batches.micro_batch_size, self._documents(config, on_cpu)
        shape = (config.model, plan.layout.tp, size, config.data.seq_length, sequence_parallel, config.precision)
        key = (shape, documents, on_cpu)
        if key not in self._traces:
            self._traces[key] = trace_model(
                config.model,
                vocab_size=self._vocab_size,
                seq_length=config.data.seq_length,
                micro_batch_size=size,
                layout=plan.layout,
                sequence_parallel=sequence_parallel,
                dtype=config.precision.param_dtype,
                documents=documents,
                on_cpu=on_cpu,
            )
        return self._traces[key]

    def _documents(self, config: RunConfig, on_cpu: bool) -> Literal["kernel", "mask"] | None:
        """How attention stays inside documents on the device that is planned for."""
        if not config.data.reset_attention_mask:
            return None
        found = None
        if self.cluster.device is not None:
            found = (7, 0) if self.cluster.device.name.startswith(BEFORE_AMPERE) else FIRST_CAPABILITY
        elif self.device_type == "cuda":
            found = capability(torch.device("cuda"))
        reason = mask_reason(config.model, capability=None if on_cpu else found, dtype=config.precision.param_dtype)
        return "mask" if reason else "kernel"

    def _node_bytes(self, plan: RunPlan, traffic: TrafficTable) -> int:
        """Counted on rank 0's axes: every rank sends as much on an axis, over the network those whose link is one."""
        layout = plan.layout
        senders = {axis: layout.links(axis).get("network", 0) / layout.cluster.num_nodes for _, axis, _ in traffic}
        return round(sum(senders[axis] * counted.sent_bytes for (_, axis, _), counted in traffic.items()))

    def _flops(self, config: RunConfig, plan: RunPlan) -> int:
        model = config.model
        assert config.data.seq_length is not None
        return model_flops_per_token(
            model,
            padded_vocab_size=model.padded_vocab_size(self._vocab_size, plan.layout.tp),
            seq_length=config.data.seq_length,
        )


def schemes(config: RunConfig) -> dict[str, RunConfig]:
    """The run with every way to shard and send beside each other: names as the flags have them."""
    plain_parallel = dataclasses.replace(config.parallel, hsdp=False, num_distributed_optimizer_instances=1)
    off = dataclasses.replace(
        config.zero,
        zero_stage=3,
        use_distributed_optimizer=False,
        zeropp=False,
        zero_quantized_weights=None,
        zero_hpz_partition_size=None,
        zero_quantized_gradients=None,
    )
    plain = dataclasses.replace(config, parallel=plain_parallel, zero=off)

    def switched(**flags: object) -> RunConfig:
        return dataclasses.replace(plain, zero=dataclasses.replace(off, **flags))  # type: ignore[arg-type]

    return {
        "ZeRO-3": plain,
        "HSDP": dataclasses.replace(plain, parallel=dataclasses.replace(plain_parallel, hsdp=True)),
        "qwZ": switched(zero_quantized_weights=True),
        "hpZ": switched(zero_hpz_partition_size="auto"),
        "qgZ": switched(zero_quantized_gradients=True),
        "--zeropp": switched(zeropp=True),
    }


def scheme_name(config: RunConfig) -> str:
    """The run's own scheme by its name in `schemes`; "as given" where it is none of these."""
    own = (dataclasses.replace(config.zero, zero_stage=3) if config.zero.stage == 3 else config.zero, config.parallel)
    return next((name for name, other in schemes(config).items() if (other.zero, other.parallel) == own), "as given")
