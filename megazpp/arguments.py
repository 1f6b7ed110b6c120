"""All configs of a run together: read from the command line, then checked against each other and the machine.

Every check happens here, before any process group, file or tensor is made; each error names the flags and their
values. What concerns one config alone is checked by its owner; this file calls the owners and adds what lies
between them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megazpp.checkpoint.config import CheckpointConfig, check_checkpoint
from megazpp.checkpoint.record import RunRecord, shape_of
from megazpp.data.dataset import DataConfig, check_data
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.flag_files import expand_flag_files
from megazpp.flag_report import render_flags
from megazpp.flags import FlagParser, flag, split_into_flags
from megazpp.inference.sample import SampleConfig
from megazpp.megatron_flags import read_megatron_flags, sift_flags
from megazpp.model.config import GPTConfig, check_gpt_config
from megazpp.optim.loss_scale import LossScaleConfig, check_loss_scale
from megazpp.optim.optimizer import OptimizerConfig, check_optimizer
from megazpp.optim.schedule import Schedule, ScheduleConfig, build_schedule
from megazpp.parallel.dims import ParallelConfig, plan_dims
from megazpp.parallel.launch import LaunchConfig, check_launch
from megazpp.parallel.nccl import NcclConfig, check_nccl
from megazpp.topology.cluster import Cluster, ClusterConfig
from megazpp.topology.layout import Layout
from megazpp.topology.links import Links
from megazpp.training.anomalies import AnomalyConfig, check_anomalies
from megazpp.training.batches import BatchConfig, BatchPlan, plan_batches
from megazpp.training.evaluate import EvalConfig
from megazpp.training.profiler import ProfilerConfig, check_profiler
from megazpp.training.setup import ModelSpec
from megazpp.training.step_timeline import TimelineConfig, check_timeline
from megazpp.training.stopping import StopConfig
from megazpp.training.straggler import StragglerConfig
from megazpp.training.timers import TimersConfig
from megazpp.training.tracking import TrackingConfig, check_tracking
from megazpp.zero.config import WirePlan, ZeroConfig, plan_wire, wire_backends
from megazpp.zero.precision import PrecisionConfig
from megazpp.zero.verify import VerifyConfig

DEFAULT_FLAG_FILE = "@configs/gpt_tiny.args"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One config of each kind; each belongs to the file that defines its class."""

    model: GPTConfig
    batches: BatchConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    precision: PrecisionConfig
    loss_scale: LossScaleConfig
    parallel: ParallelConfig
    zero: ZeroConfig
    cluster: ClusterConfig
    nccl: NcclConfig
    launch: LaunchConfig
    stop: StopConfig
    anomalies: AnomalyConfig
    verify: VerifyConfig
    checkpoint: CheckpointConfig
    evaluation: EvalConfig
    tracking: TrackingConfig
    timers: TimersConfig
    timeline: TimelineConfig
    profiler: ProfilerConfig
    straggler: StragglerConfig
    sample: SampleConfig

    @property
    def parts(self) -> tuple[Any, ...]:
        """The configs in order."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def model_spec(self, vocab_size: int) -> ModelSpec:
        """What the run's model is built from, given the number of the tokenizer's tokens."""
        return ModelSpec(
            config=self.model,
            vocab_size=vocab_size,
            sequence_parallel=self.parallel.sequence_parallel,
            zero=self.zero,
            precision=self.precision,
            seed=self.launch.seed,
        )


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """Show something and stop"""

    print_config: bool = flag(False, "print every flag, its value and where that came from, and stop")
    plan: bool = flag(
        False, "print memory, bytes and time of the run, what else would fit, and stop; see --cluster-file"
    )
    dry_run: bool = flag(
        False,
        "be one rank of a cluster that is not there for one step without data, compare what it sends with the plan",
    )
    dry_run_rank: int = flag(0, "the rank that --dry-run is")


class ParsedRun(NamedTuple):
    """A command line that was understood.

    Attributes:
        config: the values.
        origins: field name -> "command line" or "file:line", for the fields that are not at their default.
        notices: one line for each flag that was accepted and ignored.
        name: of the last flag file on the command line, without folder and suffix; "run" if there is none.
        print_config: whether to print `report()` instead of training.
        plan: whether to print what the run will need instead of training.
        dry_run: the rank whose first step to run on paper instead of training; None: train.
        extra: the program's own configs.
    """

    config: RunConfig
    origins: dict[str, str]
    notices: tuple[str, ...]
    name: str
    print_config: bool
    plan: bool
    dry_run: int | None
    extra: tuple[Any, ...] = ()

    def values(self) -> dict[str, Any]:
        """Every flag's value by field name."""
        return {f.name: getattr(part, f.name) for part in self.config.parts for f in dataclasses.fields(part)}

    def report(self) -> str:
        """Every flag with its value and origin; can be read back as a flag file."""
        return render_flags(self.config.parts, self.origins)


def parse_run_config(
    argv: Sequence[str],
    script_dir: Path,
    *,
    program: str = "pretrain_gpt.py",
    description: str | None = None,
    extra: Sequence[type] = (),
    default_file: str | None = DEFAULT_FLAG_FILE,
) -> ParsedRun:
    """Read the command line (without the program's name) and the flag files it names.

    Args:
        script_dir: where flag files are looked for if they are not in the working directory.
        program, description: for --help.
        extra: config classes that the program has beside those of a run.
        default_file: read first where neither a flag file nor --num-layers is given.
    Raises:
        ValueError: one line per problem, each with the place where the flag was written.
        SystemExit: after --help.
    """
    if default_file is not None and not any(text.startswith(("@", "--num-layers")) for text in argv):
        argv = [default_file, *argv]
    classes = typing.get_type_hints(RunConfig)
    parser = FlagParser(
        [*extra, *classes.values(), ShowConfig], program=program, description=description or _DESCRIPTION
    )
    given = list(split_into_flags(expand_flag_files(argv, script_dir)))
    sifted = sift_flags(given, parser.spellings, read_megatron_flags())
    values, origins = parser.parse(sifted.flags)
    *configs, show = parser.build(values)
    own, configs = configs[: len(extra)], configs[len(extra) :]
    files = [text[1:] for text in argv if text.startswith("@")]
    return ParsedRun(
        config=RunConfig(**dict(zip(classes, configs, strict=True))),
        origins=origins,
        notices=sifted.notices,
        name=Path(files[-1]).stem if files else "run",
        print_config=show.print_config,
        plan=show.plan,
        dry_run=show.dry_run_rank if show.dry_run else None,
        extra=tuple(own),
    )


def with_checkpoint_args(parsed: ParsedRun, record: RunRecord | None) -> ParsedRun:
    """`parsed` with the model's shape from the checkpoint, if --use-checkpoint-args asks for it.

    Args:
        record: of the checkpoint that will be loaded; None if there is none.
    Raises:
        ValueError: there is none.
    """
    config = parsed.config
    if not config.checkpoint.use_checkpoint_args:
        return parsed
    if record is None:
        raise ValueError(f"--use-checkpoint-args: --load {config.checkpoint.load} has no checkpoint")
    shape, own = shape_of(record.flags), parsed.values()
    notices = [
        f"--{name.replace('_', '-')} {own[name]} gives way to the checkpoint's {shape[name]}"
        for name in shape
        if name in parsed.origins and shape[name] != own[name]
    ]
    return parsed._replace(
        config=dataclasses.replace(config, model=dataclasses.replace(config.model, **shape)),
        origins=parsed.origins | dict.fromkeys(shape, "checkpoint"),
        notices=(*parsed.notices, *notices),
    )


_DESCRIPTION = (
    "Train a GPT. @file stands for the flags that the file holds, one or more to a line; what comes later wins. "
    "Without flags: " + DEFAULT_FLAG_FILE
)


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
    _check_positive("--vocab-size", config.tokenizer.vocab_size)
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


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name} {value} is not positive")


def _check_parallel(config: RunConfig, cluster: Cluster) -> Layout:
    if config.parallel.hsdp and cluster.num_islands == 1:
        raise ValueError("--hsdp makes one copy of the model per node, and there is only one node")
    if config.zero.use_distributed_optimizer and config.zero.stage == 0:
        raise ValueError("--use-distributed-optimizer shards the moments, --zero-stage 0 shards nothing")
    return plan_dims(config.parallel, cluster, zero_stage=config.zero.stage)


def _check_model(model: GPTConfig, tp_size: int, seq_length: int) -> None:
    if model.num_query_groups != 1 and not model.group_query_attention:
        raise ValueError(f"--num-query-groups {model.num_query_groups} needs --group-query-attention")
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
