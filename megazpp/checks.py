"""All configs of a run checked against each other and the machine, and what follows from them.

Every check happens here, before any process group, file or tensor is made; each error names the flags and their
values. What concerns one config alone is checked by its owner; this file calls the owners and adds what lies
between them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from megazpp.arguments import RunConfig
from megazpp.checkpoint.config import check_checkpoint
from megazpp.data.dataset import DataConfig, check_data
from megazpp.flags import check_positive
from megazpp.model.config import GPTConfig, check_gpt_config
from megazpp.optim.loss_scale import check_loss_scale
from megazpp.optim.optimizer import check_optimizer
from megazpp.optim.schedule import Schedule, build_schedule
from megazpp.parallel.dims import plan_dims
from megazpp.parallel.launch import check_launch
from megazpp.parallel.nccl import check_nccl
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.topology.links import Links
from megazpp.training.anomalies import check_anomalies
from megazpp.training.batches import BatchPlan, plan_batches
from megazpp.training.profiler import check_profiler
from megazpp.training.step_timeline import check_timeline
from megazpp.training.tracking import check_tracking
from megazpp.zero.config import WirePlan, plan_wire, wire_backends


class RunPlan(NamedTuple):
    """What follows from a config and a cluster before anything is made; `notices` are lines to show the user."""

    layout: Layout
    wire: WirePlan
    batches: BatchPlan
    schedule: Schedule
    notices: tuple[str, ...]

    def with_links(self, links: Links) -> RunPlan:
        """The same plan on a cluster whose links are known now."""
        cluster = dataclasses.replace(self.layout.cluster, links=links)
        return self._replace(layout=dataclasses.replace(self.layout, cluster=cluster))


class ModelPlan(NamedTuple):
    """The part of a `RunPlan` that a model needs which is not trained."""

    layout: Layout
    wire: WirePlan
    notices: tuple[str, ...]


def check_model_config(config: RunConfig, cluster: Cluster, *, device_type: str) -> ModelPlan:
    """What `check_run_config` checks about the model, its layout and its wires.

    Raises:
        ValueError: names the flags and their values.
    """
    check_launch(config.launch)
    check_nccl(config.nccl)
    layout = _check_parallel(config, cluster)
    seq_length = config.data.seq_length
    if seq_length is None:
        raise ValueError("--seq-length is missing")
    _check_model(config.model, layout.tp, seq_length)
    sequence_parallel = _check_sequence_parallel(config.parallel.sequence_parallel, layout.tp, seq_length)
    wire = plan_wire(config.zero, layout)
    wire_backends(wire, device_type)  # refuses a device that cannot quantize
    return ModelPlan(layout, wire, (*cluster.notices, *layout.notices, *sequence_parallel, *wire.notices))


def check_run_config(config: RunConfig, cluster: Cluster, *, device_type: str) -> RunPlan:
    """Check everything that can be checked before anything is made, and return what the checks worked out.

    Called twice: with the cluster that flags and launcher describe, before workers start, and with what they find.

    Args:
        cluster: the nodes and ranks that the job has or will have.
        device_type: "cuda" or "cpu".
    Raises:
        ValueError: names the flags and their values.
    """
    _check_required(config)
    check_positive(config.tokenizer, "vocab_size")
    check_anomalies(config.anomalies, saves=config.checkpoint.save is not None)
    check_checkpoint(config.checkpoint)
    check_data(config.data)
    check_tracking(config.tracking)
    layout, wire, notices = check_model_config(config, cluster, device_type=device_type)
    check_optimizer(config.optimizer, device_type)
    check_loss_scale(config.loss_scale)
    batches = plan_batches(config.batches, data_parallel_size=layout.data)
    ends: dict[str, Any] = {
        "total_iterations": batches.total_iterations,
        "exit_interval": config.stop.exit_interval,
        "trains": not config.stop.skip_train,
    }
    check_timeline(config.timeline, **ends)
    check_profiler(config.profiler, device_type=device_type, world_size=cluster.world_size, **ends)
    schedule = build_schedule(
        config.schedule,
        weight_decay=config.optimizer.weight_decay,
        train_iters=config.batches.train_iters,
        train_samples=config.batches.train_samples,
        global_batch_size=batches.global_batch_size,
    )
    return RunPlan(layout, wire, batches, schedule, notices)


def _check_required(config: RunConfig) -> None:
    model, data, batches = config.model, config.data, config.batches
    learned = model.positions == "learned_absolute"
    needed = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": model.num_attention_heads,
        "--max-position-embeddings": model.max_position_embeddings if learned else 1,
        "--seq-length": data.seq_length,
        "--micro-batch-size": batches.micro_batch_size,
        "--lr": config.schedule.lr,
        "--train-iters (or --train-samples)": (
            batches.train_samples if batches.train_iters is None else batches.train_iters
        ),
        "--data-path (or --text-path, or --mock-data)": _has_data(data) or None,
    }
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ValueError(f"required flags are missing: {', '.join(missing)}")


def _has_data(data: DataConfig) -> bool:
    paths = (data.data_path, data.text_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    return data.mock_data or any(paths)


def _check_parallel(config: RunConfig, cluster: Cluster) -> Layout:
    if config.parallel.hsdp and cluster.num_islands == 1:
        raise ValueError("--hsdp makes one copy of the model per node, and there is only one node")
    if config.zero.use_distributed_optimizer and config.zero.stage == 0:
        raise ValueError("--use-distributed-optimizer shards the moments, --zero-stage 0 shards nothing")
    return plan_dims(config.parallel, cluster, zero_stage=config.zero.stage)


def _check_model(model: GPTConfig, tp_size: int, seq_length: int) -> None:
    if model.num_query_groups != 1 and not model.group_query_attention:
        raise ValueError(f"--num-query-groups {model.num_query_groups} needs --group-query-attention")
    if model.rope_scaling_factor != 8.0 and not model.use_rope_scaling:
        raise ValueError(f"--rope-scaling-factor {model.rope_scaling_factor} needs --use-rope-scaling")
    check_gpt_config(model, tp_size=tp_size, seq_length=seq_length)


def _check_sequence_parallel(asked: bool, tp_size: int, seq_length: int) -> tuple[str, ...]:
    if not asked:
        return ()
    if tp_size == 1:
        return ("--sequence-parallel is ignored: --tensor-model-parallel-size is 1",)
    if seq_length % tp_size:
        raise ValueError(
            f"--seq-length {seq_length} is not divisible by --tensor-model-parallel-size {tp_size}, "
            "which --sequence-parallel needs"
        )
    return ()
