"""Checks of a run's flags against each other and against the cluster, and the plan that follows from flags and cluster.

A config checks its own fields in its `__post_init__`. This file checks combinations of configs, and configs against the
cluster, before any process group, file or tensor is created. Each error names the flags and their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from megazpp.base.flags import spelling
from megazpp.base.program import Problems
from megazpp.data.dataset import uses_with_data
from megazpp.kernels.block_quant import backend
from megazpp.kernels.weight_delta import missing
from megazpp.model.backends import check_products
from megazpp.model.config import GPTConfig
from megazpp.optim.apex import check_apex
from megazpp.optim.schedule import Schedule, TrainingProgress, build_schedule
from megazpp.parallel.dims import plan_dims
from megazpp.run.arguments import RunConfig
from megazpp.run.flag_checks import check_flags, check_model
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.training.batches import BatchPlan, plan_batches
from megazpp.zero.config import CommPlan, ZeroConfig
from megazpp.zero.plan import WeightDelta, default_weight_delta, plan_comm

T = TypeVar("T")


class RunPlan(NamedTuple):
    """Plan of a run: everything that its flags and its cluster determine before anything is allocated.

    Attributes:
        layout: coordinates of all ranks on the parallel axes.
        wire: formats and hops of the collectives of weights and gradients.
        batches: batch sizes and length of the run.
        schedule: schedule of learning rate and weight decay.
        notices: lines to show the user, for example about flags without effect.
        features: plans of the optional features in use, each a `FeaturePlan` of run/feature.py.
    """

    layout: Layout
    wire: CommPlan
    batches: BatchPlan
    schedule: Schedule
    notices: tuple[str, ...]
    features: tuple[Any, ...] = ()

    def of(self, kind: type[T]) -> T | None:
        """Return the feature plan of class `kind`; None if that feature has no plan for this run."""
        return next((plan for plan in self.features if isinstance(plan, kind)), None)

    def weight_delta(self, config: ZeroConfig) -> str:
        """Return the value of --zero-weight-delta that checkpoints of this run record.

        In place of "auto", checkpoints record the chosen format, "lossless" or "none", with which a resumed run
        continues. If no weights cross nodes in two hops, they record "auto", so that a resumed run on more nodes can
        choose.
        """
        if not config.chooses_weight_delta or self.wire.gather is None:
            return config.zero_weight_delta
        return "lossless" if self.wire.gather.differences else "none"


def lay_out(config: RunConfig, cluster: Cluster) -> Layout:
    """Return the layout of the cluster's ranks on the parallel axes that the flags request.

    Raises:
        ValueError: flags do not fit the cluster or each other.
    """
    if config.parallel.hsdp and cluster.num_local_domains == 1:
        raise ValueError("--hsdp makes one copy of the model per node, and there is only one node: leave --hsdp out")
    groups = max((feature.num_replica_groups(config, cluster) for feature in config.features), default=1)
    return plan_dims(config.parallel, cluster, zero_stage=config.zero.stage, num_replica_groups=groups)


def plan_model(
    config: RunConfig, layout: Layout, *, device_type: str, weight_delta: WeightDelta | None = None
) -> tuple[CommPlan, tuple[str, ...]]:
    """Check the model's flags against the layout, and return the plan of its collectives with notices for the user.

    Args:
        config: flags of the run.
        layout: layout of the ranks from `lay_out`.
        device_type: "cuda" or "cpu".
        weight_delta: format that --zero-weight-delta auto has chosen; None for a program that does not train, in which
            "auto" means int8 weights.

    Raises:
        ValueError: flags contradict each other or do not fit the cluster or the device.
    """
    seq_length = config.data.seq_length
    if seq_length is None:
        raise ValueError("--seq-length, the number of tokens per sample, is missing: add it")

    # ---- check the model's sizes and the tokens per sample against the layout and the device
    check_model(config.model, config.parallel, seq_length)
    check_experts(config.model, layout, zero_stage=config.zero.stage)
    products = check_products(config.model, layout.tp, device_type, bf16=config.precision.bf16)

    # ---- plan the formats in which weights and gradients are communicated
    lossless = weight_delta is not None and weight_delta.lossless
    wire = plan_comm(config.zero, layout, config.precision.param_dtype, lossless=lossless)
    wire_backends(wire, device_type)  # called for its ValueError: the device may not support block quantization
    asks_for_deltas = wire.gather is not None and wire.gather.differences and not config.zero.chooses_weight_delta
    if asks_for_deltas and (problem := missing(device_type)):
        raise ValueError(f"--zero-weight-delta lossless cannot be used on this machine: {problem}")
    notices = (*layout.cluster.notices, *layout.notices, *products, *wire.notices)
    if weight_delta is not None and config.zero.chooses_weight_delta and wire.gather is not None:
        notices += (weight_delta.describe(),)
    return wire, notices


def plan_run(
    config: RunConfig,
    cluster: Cluster,
    *,
    device_type: str,
    start: TrainingProgress = TrainingProgress(),  # noqa: B008, the default is immutable
    weight_delta: WeightDelta | None = None,
) -> RunPlan:
    """Check all flags together and return the plan of the run, without creating process groups, files or tensors.

    Each worker makes the run's plan once. Before workers start, a program calls this function only for its checks, with
    the cluster that flags and launcher describe. So wrong flags are reported before anything starts.

    Args:
        config: flags of the run.
        cluster: nodes, ranks and links.
        device_type: "cuda" or "cpu".
        start: progress from which the run resumes; zero for a new run.
        weight_delta: format that --zero-weight-delta auto has chosen; None for the default format, which applies while
            links and devices are unknown.

    Raises:
        ValueError: flags are missing, contradict each other, or do not fit the cluster or the device. The message
            names the flags and their values.
    """
    weight_delta = weight_delta or default_weight_delta(config.precision.param_dtype)
    problems = Problems()

    # ---- check flags for which neither layout nor plan is needed
    with problems:
        check_flags(config)
    with problems:
        if config.optimizer.optimizer_backend == "apex":
            check_apex(device_type)

    # ---- plan the layout of the ranks, the collectives of the model, the batches and the schedule
    layout = None
    with problems:
        layout = lay_out(config, cluster)
    if layout is not None and not config.missing:
        with problems:
            wire, notices = plan_model(config, layout, device_type=device_type, weight_delta=weight_delta)
        with problems:
            batches = plan_batches(config.batches, data_parallel_size=layout.data * config.jobs).resumed_at(start)
            total = batches.total_iterations
            if total == 0 and config.batches.train_samples is not None and not config.stop.skip_train:
                raise ValueError(
                    f"--train-samples {config.batches.train_samples} are too few for one global batch of "
                    f"{batches.start_batch_size}, so the run would take no step: give more samples or a smaller batch"
                )
            observed = _check_observers(config, total, cluster.world_size, device_type, start=start.iteration)
            schedule = build_schedule(
                config.schedule,
                weight_decay=config.optimizer.weight_decay,
                train_iters=config.batches.train_iters,
                train_samples=config.batches.train_samples,
                global_batch_size=batches.global_batch_size,
            )
    problems.raise_all()
    assert layout is not None

    # ---- collect notices about flags without effect
    notices += observed
    if config.optimizer.muon_full_interval and layout.cross == 1:
        notices += (
            f"--muon-full-interval {config.optimizer.muon_full_interval} has no effect: no matrix is sharded over "
            "several nodes, so every step orthogonalizes whole matrices",
        )
    if (interval := config.checkpoint.save_interval) is not None and not config.checkpoint.saves:
        notices += (f"--save-interval {interval} without --save FOLDER: no checkpoints are saved",)
    left = batches.dataset_samples - batches.total_samples
    # A run drops the last samples without a notice, as Megatron-LM does. A run that has resumed with other batch sizes
    # gets a notice, because it may drop another number of samples than the run before.
    if left > 0 and batches.start_iteration > 0:
        notices += (
            f"--train-samples {config.batches.train_samples}: the last {left} are too few for a global batch of "
            f"{batches.batch_size_at(batches.total_samples)}, and no step takes them",
        )

    # ---- make the plans of the optional features, whose `check` also checks their flags
    if config.zero.optimizer_cpu_offload and config.states() is None:
        raise ValueError(
            "--optimizer-cpu-offload needs the optional feature megazpp/host_states, which this installation lacks: "
            "leave the flag out, or restore the folder"
        )
    plan, plans = RunPlan(layout, wire, batches, schedule, notices), list[Any]()
    for feature in config.features:
        with problems:
            found = feature.check(config, plan)
            plans += [] if found is None else [found]
    problems.raise_all()
    notices += tuple(notice for found in plans for notice in found.notices)
    return plan._replace(features=tuple(plans), notices=notices)


def check_uses(config: RunConfig, origins: Mapping[str, str]) -> tuple[str, ...]:
    """Check that pretraining has training data, and that it has validation data if the flags request evaluations.

    Args:
        config: flags of the run.
        origins: origins of the flags that are set, by field name.

    Returns:
        a notice if --eval-interval or --eval-iters is set and there is no validation data; otherwise ().

    Raises:
        ValueError: there is no training data, and --skip-train is not set.
    """
    data, found = config.data, uses_with_data(config.data)
    split = f"--split {data.split}"
    if data.train_data_path or data.valid_data_path or data.test_data_path:
        split = "the flags --train-data-path, --valid-data-path and --test-data-path"
    if not found.train and not config.stop.skip_train:
        raise ValueError(f"{split}: no data for training; assign data to training, or pass --skip-train")
    evaluation, names = config.evaluation, ("eval_interval", "eval_iters")
    asked = [f"{spelling(evaluation, name)} {getattr(evaluation, name)}" for name in names if name in origins]
    if asked and evaluation.eval_iters and not found.valid:
        return (f"{' '.join(asked)}: no data for validation ({split}), so nothing is evaluated during training",)
    return ()


def check_experts(model: GPTConfig, layout: Layout, *, zero_stage: int) -> None:
    """Raise a ValueError if the parallel sizes or the ZeRO stage do not fit a model with experts.

    Args:
        model: config of the model.
        layout: sizes of the parallel axes.
        zero_stage: ZeRO stage, 0 to 3.
    """
    if model.num_experts is None:
        if layout.ep > 1:
            raise ValueError(
                f"--expert-model-parallel-size {layout.ep} needs --num-experts, and this model has no experts: add "
                "--num-experts, or leave --expert-model-parallel-size out"
            )
        return
    if model.num_experts % layout.ep:
        raise ValueError(
            f"--num-experts {model.num_experts} is not divisible by --expert-model-parallel-size {layout.ep}: "
            "change one of them"
        )
    if layout.tp > layout.cluster.local_domain_size:
        raise ValueError(
            f"--num-experts {model.num_experts} with --tensor-model-parallel-size {layout.tp}, more than the "
            f"{layout.cluster.local_domain_size} ranks of a node, is not supported: use a smaller tensor-parallel size"
        )
    if zero_stage == 0 and layout.ep != layout.tp:
        raise ValueError(
            f"--num-experts {model.num_experts} with --zero-stage 0, which shards nothing, needs "
            f"--expert-model-parallel-size {layout.tp} like --tensor-model-parallel-size, not {layout.ep}"
        )
    if layout.replica_group > 1 and layout.ep > 1:
        raise ValueError(
            f"--expert-model-parallel-size {layout.ep} with --diloco-steps is not supported; use "
            "--expert-model-parallel-size 1"
        )
    if layout.replica_group > 1 and model.moe_router_enable_expert_bias:
        raise ValueError(
            "--moe-router-enable-expert-bias with --diloco-steps is not supported: replica groups would have different "
            "biases; use --moe-aux-loss-coeff instead"
        )


def _check_observers(
    config: RunConfig, total_iterations: int, world_size: int, device_type: str, *, start: int
) -> tuple[str, ...]:
    """Raise a ValueError for timeline and profiler flags that would record nothing in this run.

    Such flags name steps after the end of the run or ranks that do not exist, or need another type of device. Flags for
    steps before the start are no error, because a resumed job keeps its command line.

    Args:
        config: flags of the run.
        total_iterations: last iteration of the complete run.
        world_size: number of ranks.
        device_type: "cuda" or "cpu".
        start: iteration after which the run starts or resumes.

    Returns:
        a notice for each flag whose step lies before the start.
    """
    timeline, profiler, interval = config.timing.timeline_step, config.profiler, config.stop.exit_interval
    first, last = profiler.profile_step_start, total_iterations
    if interval is not None:
        last = min(last, (start // interval + 1) * interval)
    for flag, given in ((f"--timeline-step {timeline}", timeline), ("--profile", profiler.profile)):
        if given and config.stop.skip_train:
            raise ValueError(f"{flag} records training steps, and --skip-train takes no step: leave one of them out")
    end = f"the run ends with iteration {last}"
    if last != total_iterations:
        end = f"--exit-interval {interval} ends the run" + (f" after iteration {last}" if last != interval else "")
    if timeline is not None and timeline > last:
        raise ValueError(f"--timeline-step {timeline} is not reached: {end}; choose an earlier step")
    if profiler.profile and first >= last:
        raise ValueError(f"--profile-step-start {first} is not reached: {end}; choose an earlier step")
    if profiler.record_memory_history and device_type != "cuda":
        raise ValueError(
            f"--record-memory-history needs CUDA, and this run uses {device_type}; use --profile, which works on all "
            "devices"
        )
    for rank in profiler.profile_ranks if profiler.profile or profiler.record_memory_history else ():
        if not 0 <= rank < world_size:
            raise ValueError(f"--profile-ranks {rank} does not exist: the ranks of this run are 0 to {world_size - 1}")
    recorded = {f"--timeline-step {timeline}": timeline}
    if profiler.profile:
        recorded[f"--profile-step-end {profiler.profile_step_end}"] = profiler.profile_step_end
    return tuple(
        f"{flag}: this step is not recorded, because the run resumes after iteration {start}"
        for flag, step in recorded.items()
        if step is not None and step <= start
    )


def wire_backends(plan: CommPlan, device_type: str) -> list[tuple[str, str, str]]:
    """Return the back end of block quantization for the log's table of implementations.

    The result has one row: name of the part, its implementation, and the reason for this implementation. If `plan`
    quantizes nothing, the result is [].

    Args:
        plan: formats of the collectives of weights and gradients.
        device_type: "cuda" or "cpu".

    Raises:
        ValueError: block quantization is not implemented for a device of this type.
    """
    formats: list[object] = [plan.gather.fmt, plan.gather.differences] if plan.gather else []
    formats += [plan.reduce.local, plan.reduce.cross] if plan.reduce else []
    return [backend(device_type)] if any(formats) else []
