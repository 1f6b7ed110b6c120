"""All flags of a training run as config dataclasses, and the parser that reads them from the command line.

`RunConfig` holds one config of each class of the core, and the configs of optional features. `parse_run_config` reads
these configs from the command line. run/flag_checks.py and run/checks.py then check combinations of flags.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from megazpp.base.command_line import FlagParser
from megazpp.base.flag_tables import read_megatron_flags
from megazpp.base.flags import CHECKPOINT, COMMAND_LINE, Config, check_needs, flag, render_flags
from megazpp.base.program import say_notices
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.data.config import DataConfig
from megazpp.data.tokenizer_folder import TokenizerConfig, names_tokenizer
from megazpp.model.config import ACTIVATIONS, GPTConfig
from megazpp.optim.config import LossScaleConfig, OptimizerConfig, ScheduleConfig
from megazpp.parallel.config import LaunchConfig, NcclConfig, ParallelConfig
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import ClusterConfig, detect_cluster
from megazpp.training.batches import BatchConfig
from megazpp.training.config import (
    AnomalyConfig,
    EvalConfig,
    ModelSpec,
    ProfilerConfig,
    StopConfig,
    TimingConfig,
    TrackingConfig,
)
from megazpp.zero.config import CommPlan, PrecisionConfig, ZeroConfig

if TYPE_CHECKING:
    from megazpp.data.tokenizer import Tokenizer
    from megazpp.zero.sharding import DeviceStates

Section = TypeVar("Section", bound="FeatureConfig")
DEFAULT_FLAG_FILE = "@configs/gpt_tiny.args"
# Names of fields that no program takes from a checkpoint, because the program's device may not support their values
OF_THE_DEVICE = {"fp8_format"}
# Fields of `RunConfig` with the model and its training data, which a program can take from a checkpoint. Flags for the
# devices and for the sharding are not taken, because the program may run on another cluster than the checkpoint's run.
TAKEN = ("model", "batches", "data", "tokenizer", "precision", "evaluation")
# Groups of names of flags that exclude each other. The configs reject a run that sets two flags of one group.
_EXCLUSIVE = (
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ACTIVATIONS,
    ("position_embedding_type", "use_rotary_position_embeddings"),
    ("recompute_granularity", "recompute_activations"),
    ("fp16", "bf16"),
    ("fp16", "grad_reduce_in_bf16"),
    ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"),
    ("zero_stage", "use_distributed_optimizer"),
    ("num_distributed_optimizer_instances", "hsdp"),
    ("tokenizer_model", "vocab_file"),
    ("tokenizer_model", "merge_file"),
    ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
    *(("data_path", "text_path", "mock_data", f"{use}_data_path") for use in ("train", "valid", "test")),
)
# Phases of the learning-rate schedule, as parts of the names of fields, such as `lr_warmup_iters`. The lengths of the
# phases are in iterations or in samples, like the length of the run.
_PARTS = ("decay", "warmup", "wsd_decay")
# Pairs of names (a, b): flag `a`, on the command line or in a later flag file, overrides flag `b` of an earlier file.
MUTUALLY_EXCLUSIVE = (
    *(pair for group in _EXCLUSIVE for pair in itertools.permutations(group, 2)),
    *(("train_iters", f"lr_{part}_samples") for part in _PARTS),
    *(("train_samples", f"lr_{part}_iters") for part in _PARTS),
    ("train_iters", "rampup_batch_size"),
)


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(Config):
    """Base class of the config with the flags of an optional feature; run/feature.py explains features."""

    @property
    def distinguishes_nodes(self) -> bool:
        """True if the effect of the feature's flags depends on which ranks share a node.

        The run must then detect the nodes exactly.
        """
        return False

    @property
    def replaces_training(self) -> bool:
        """True if the feature's flags request a command instead of training (`Feature.command`)."""
        return False

    @property
    def resumed_fields(self) -> tuple[str, ...]:
        """Names of the fields that a resumed run takes from its checkpoint if no flag sets them."""
        return ()


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All flags of a run, as one config dataclass per group of flags.

    The file that defines a config's class documents the fields of the config.

    Attributes:
        features: installed optional features, each a `Feature` of run/feature.py.
        sections: configs with the flags of optional features, one for each feature that has flags.
    """

    model: GPTConfig
    batches: BatchConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    cluster: ClusterConfig
    zero: ZeroConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss_scale: LossScaleConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    evaluation: EvalConfig
    tracking: TrackingConfig
    timing: TimingConfig
    profiler: ProfilerConfig
    launch: LaunchConfig
    nccl: NcclConfig
    stop: StopConfig
    anomalies: AnomalyConfig
    features: tuple[Any, ...] = ()
    sections: tuple[FeatureConfig, ...] = ()

    @property
    def parts(self) -> tuple[Any, ...]:
        """All configs of the run: first the core's in the order of the fields, then the optional features' configs."""
        own = [field.name for field in dataclasses.fields(self) if field.name not in ("features", "sections")]
        return (*(getattr(self, name) for name in own), *self.sections)

    def values(self) -> dict[str, Any]:
        """Return the value of every flag of the run, by the field name of the flag, such as "micro_batch_size"."""
        return _values(self.parts)

    def section(self, kind: type[Section]) -> Section:
        """Return the feature config of class `kind`, or a config with default values if no feature has this class."""
        return next((section for section in self.sections if isinstance(section, kind)), None) or kind()

    @property
    def jobs(self) -> int:
        """Number of jobs that train the model together, each on a part of every batch; 1 without elastic DiLoCo."""
        return max((feature.num_jobs(self) for feature in self.features), default=1)

    def with_section(self, section: FeatureConfig) -> RunConfig:
        """Return a copy of the run's flags in which `section` replaces the feature config of the same class."""
        sections = (section if type(section) is type(other) else other for other in self.sections)
        return dataclasses.replace(self, sections=tuple(sections))

    def detect_cluster(self, world_size: int, env: Mapping[str, str]) -> Cluster:
        """Return the nodes and ranks of the cluster that the flags and the launcher's environment variables describe.

        Args:
            world_size: number of ranks.
            env: environment variables; {} to ignore the launcher's.

        Raises:
            ValueError: the flags do not fit the number of ranks or the environment variables.
        """
        tp, nodes = self.parallel.tensor_model_parallel_size, self.parallel.hsdp or self.zero.distinguishes_nodes
        nodes = nodes or any(section.distinguishes_nodes for section in self.sections)
        return detect_cluster(world_size, self.cluster, env, tp=tp, distinguishes_nodes=nodes)

    @property
    def missing(self) -> list[str]:
        """The flags that every run needs and that are not set, as texts for an error message."""
        data, batches = self.data, self.batches
        learned = self.model.positions == "learned_absolute"
        tokenizer = "" if names_tokenizer(self.tokenizer) else " and --tokenizer-model"
        needed = {
            "--num-layers": self.model.num_layers,
            "--hidden-size": self.model.hidden_size,
            "--num-attention-heads": self.model.num_attention_heads,
            "--max-position-embeddings": self.model.max_position_embeddings if learned else 1,
            "--seq-length": data.seq_length,
            "--micro-batch-size": batches.micro_batch_size or batches.global_batch_size,
            "--lr": self.schedule.lr,
            "--train-iters (or --train-samples)": (
                batches.train_samples if batches.train_iters is None else batches.train_iters
            ),
            f"--data-path{tokenizer} (or --text-path, or --mock-data)": data.sources or None,
        }
        return [name for name, value in needed.items() if value is None]

    def states(self) -> type[DeviceStates] | None:
        """Return the class with which a feature stores fp32 weights, moments and gradients outside the device.

        None if no feature does this.
        """
        return next((found for feature in self.features if (found := feature.states(self)) is not None), None)

    def model_spec(self, vocab_size: int, wire: CommPlan) -> ModelSpec:
        """Return the inputs of `build_model`: shape, vocabulary, sharding, precision and seed of the run's model.

        Args:
            vocab_size: number of tokens of the tokenizer, without padding.
            wire: formats and hops of the collectives with which ZeRO++ replaces FSDP2's.
        """
        return ModelSpec(
            config=self.model,
            vocab_size=vocab_size,
            sequence_parallel=self.parallel.sequence_parallel,
            zero=self.zero,
            wire=wire,
            precision=self.precision,
            seed=self.launch.seed,
            states=self.states(),
        )


def _values(parts: Iterable[Any]) -> dict[str, Any]:
    """Return the values of all fields of several configs in one dict, by field name; the names are unique."""
    return {field.name: getattr(part, field.name) for part in parts for field in dataclasses.fields(part)}


@dataclass(frozen=True, kw_only=True)
class ShowConfig(Config):
    """Information.

    Flags that print information instead of training. The docstring's first line is the title of these flags in --help.

    Attributes:
        print_config: print every flag with its value and origin, and stop.
    """

    print_config: bool = flag(False, common=True)


class ParsedRun(NamedTuple):
    """Parsed command line of a program that trains.

    Attributes:
        config: flags of the run.
        origins: origin of each flag that is set, by field name: "command line", "file:line" or "checkpoint".
        notices: lines to show the user, for example about ignored flags.
        name: name of the last flag file, without folder and suffix; "run" if there is no flag file.
        show: flags that print information instead of training.
        extra: configs of flags that only this program has, for example the flags of post-training.
        tokenizer: tokenizer that the flags name, if a check has already loaded it; None otherwise.
    """

    config: RunConfig
    origins: dict[str, str]
    notices: tuple[str, ...]
    name: str
    show: ShowConfig
    extra: tuple[Any, ...] = ()
    tokenizer: Tokenizer | None = None

    def values(self) -> dict[str, Any]:
        """Return the value of every flag of the program, by the field name of the flag."""
        return _values(self.parts)

    def report(self) -> str:
        """Return the text of a flag file with every flag of the program, its value and its origin."""
        return render_flags(self.parts, self.origins)

    def answers(self) -> bool:
        """Print all flags and return True if --print-config is set, which ends the program; otherwise return False."""
        if self.show.print_config:
            say_notices(self.notices)
            print(self.report())
        return self.show.print_config

    def notes(self) -> str:
        """Return the notices as text, a line "note: ..." for each, for a program that prints instead of training."""
        return "".join(f"note: {notice}\n" for notice in self.notices)

    def with_checkpoint(self, names: Iterable[str], notices: Iterable[str] = (), **parts: Any) -> ParsedRun:
        """Return a copy of the parsed command line in which some flags have a checkpoint's values.

        Args:
            names: names of the fields with the checkpoint's values. The origin of these flags becomes "checkpoint".
            notices: additional lines to show the user.
            **parts: new configs with the checkpoint's values, by field name of `RunConfig`.
        """
        return self._replace(
            config=dataclasses.replace(self.config, **parts),
            origins=self.origins | dict.fromkeys(names, CHECKPOINT),
            notices=(*self.notices, *notices),
        )

    def check_needs(self) -> None:
        """Raise a ValueError for flags that are set, but have no effect because another flag is off (`FlagSpec.needs`).

        A program calls this after a checkpoint has completed the flags, as a checkpoint may turn the needed flag on.
        """
        check_needs(self.parts, self.origins)

    @property
    def parts(self) -> tuple[Any, ...]:
        """All configs of the command line: first the `extra` configs of the program, then the configs of the run."""
        return (*self.extra, *self.config.parts)

    @property
    def training_fields(self) -> list[str]:
        """The names of the fields whose flags may affect the trained weights. All fields of optional features count.

        Fields about the layout of ranks, the data, the length of the run and its learning rates are left out.
        """
        run = self.config
        core = (run.model, run.precision, run.zero, run.optimizer, run.loss_scale, run.anomalies)
        return [field.name for part in (*self.extra, *core, *run.sections) for field in dataclasses.fields(part)]


def run_configs() -> dict[str, type]:
    """Return the config classes with the flags of the core, by field name of `RunConfig`, in the order of --help."""
    hints = typing.get_type_hints(RunConfig)
    return {name: kind for name, kind in hints.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


def section_configs(features: Sequence[Any]) -> list[type]:
    """Return the classes of the configs with the flags of optional features, one for each feature that has flags."""
    return [feature.config for feature in features if feature.config is not None]


def parse_run_config(
    argv: Sequence[str],
    script_dir: Path,
    *,
    program: str = "pretrain_gpt.py",
    description: str | None = None,
    features: Sequence[Any] = (),
    extra: Sequence[type] = (),
    common: Collection[str] | None = None,
    default_file: str | None = DEFAULT_FLAG_FILE,
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
    taken: Sequence[str] = (),
) -> ParsedRun:
    """Parse the command line of a program that trains, with the flag files that it names.

    Args:
        argv: command line without the program name.
        script_dir: folder in which flag files are searched if the working directory does not contain them.
        program: program name in --help.
        description: first line of --help; None selects the text of pretrain_gpt.py.
        features: installed optional features, each a `Feature` of run/feature.py.
        extra: classes of configs that only this program has. --help lists all of their flags.
        common: names of further fields whose flags --help lists; None for the flags that a first training run needs.
        default_file: flag file, with its `@`, that is read first if `argv` has neither a flag file nor --num-layers;
            None for no such file.
        defaults: defaults of this program, by field name, where they differ from the defaults of the configs.
        taken: names of the fields of `RunConfig` that a checkpoint completes after parsing; () if no checkpoint does.
            With such names or with --use-checkpoint-args, this function does not call `ParsedRun.check_needs`. The
            program calls that method after the checkpoint has completed the flags.

    Raises:
        ValueError: a flag or its value is wrong; the message has one line per problem.
        SystemExit: the command line has --help or --help-all.
    """
    # ---- add the default flag file if no flag describes a model
    implied = None if any(text.startswith(("@", "--num-layers")) for text in argv) else default_file
    if implied is not None:
        argv = [implied, *argv]

    # ---- parse the command line into one config per class
    kinds, sections = run_configs(), section_configs(features)
    from_checkpoint = {field.name for name in taken for field in dataclasses.fields(kinds[name])} - OF_THE_DEVICE
    classes = [*extra, *kinds.values(), *sections, ShowConfig]
    parser = FlagParser(
        classes,
        program=program,
        description=description or _DESCRIPTION,
        epilog=_EPILOG if description is None else "",
        shown=extra,
        common=common,
        mutually_exclusive=MUTUALLY_EXCLUSIVE,
        defaults=defaults,
        from_checkpoint=from_checkpoint | ({"seed"} if taken else set()),
    )
    (*configs, show), origins, notices = parser.read(argv, script_dir, read_megatron_flags(), complete=False)

    # ---- assign the parsed configs: first the program's `extra` configs, then the core's, then the features'
    own, rest = configs[: len(extra)], configs[len(extra) :]
    parts = dict(zip(kinds, rest, strict=False))
    if origins.get("zero_weight_delta") == COMMAND_LINE:
        _check_choice(parts["zero"])
    config = RunConfig(**parts, features=tuple(features), sections=tuple(rest[len(kinds) :]))
    files = [text[1:] for text in argv if text.startswith("@")]
    name = Path(files[-1]).stem if files else "run"
    if implied is not None and config.checkpoint.load is not None and config.checkpoint.finetune:
        notices = (*notices, f"--finetune without a flag file: flags that are not set have the values of {implied[1:]}")
    parsed = ParsedRun(config, origins, notices, name, show, extra=tuple(own))
    if not taken and not config.checkpoint.use_checkpoint_args:
        parsed.check_needs()
    return parsed


def _check_choice(zero: ZeroConfig) -> None:
    """Raise a ValueError if --zero-weight-delta auto has no format of weights to choose.

    "auto" has nothing to choose without --zeropp, or if other flags set the format. `parse_run_config` calls this
    function only if --zero-weight-delta is on the command line, not in a flag file. The reason is that every run writes
    the flag to its args.txt, and a later run may use this flag file with other flags.
    """
    if zero.zero_weight_delta != "auto" or zero.chooses_weight_delta:
        return
    if not zero.zeropp:
        raise ValueError("--zero-weight-delta auto chooses the format in which --zeropp sends weights: add --zeropp")
    raise ValueError(
        f"--zero-weight-delta auto and {', '.join(zero.weight_format_flags)} are both set, but both decide in which "
        "format weights are sent: leave one of them out"
    )


_DESCRIPTION = "Train a GPT. @FILE reads flags from a file; later flags win. Without flags: " + DEFAULT_FLAG_FILE
_EPILOG = """examples:
  python pretrain_gpt.py --zeropp                                  a small model on the shipped text, on this machine
  python pretrain_gpt.py @configs/gpt_125m.args --data-path my_text_document --tokenizer-model my.model
  torchrun --nproc-per-node 8 pretrain_gpt.py @configs/gpt_1b3.args --tensor-model-parallel-size 2 --zeropp ...
"""
