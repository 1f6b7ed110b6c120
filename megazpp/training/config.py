"""The flags of a training run except the flags of its batches (batches.py), and the description of its model."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from megazpp.base.flags import Config, flag
from megazpp.model.config import GPTConfig
from megazpp.zero.config import CommPlan, PrecisionConfig, ZeroConfig

if TYPE_CHECKING:
    from megazpp.tensor_parallel.layers import Product
    from megazpp.zero.sharding import DeviceStates

# A loss is compared with the mean of at most WINDOW earlier losses, to recognize a loss spike. With fewer than FEWEST
# earlier losses, no loss counts as a spike.
WINDOW, FEWEST = 100, 20
SLOW = 1.2  # a rank counts as slow if its compute time exceeds this multiple of the ranks' median
MOST_ALLOCATIONS = 100_000  # largest number of allocations in a memory snapshot; Megatron-LM's value


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Config):
    """Evaluation.

    Frequency and size of the evaluations.

    Attributes:
        eval_iters: number of global batches in one evaluation; 0 disables evaluation.
        eval_interval: training steps between two evaluations.
    """

    eval_iters: int = flag(100, must_be="not negative")
    eval_interval: int = flag(1000, must_be="positive")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(Config):
    """Logging.

    The metrics that are recorded, how often, and where: log, Weights & Biases, TensorBoard.

    Attributes:
        run_dir: folder for the run's records (default: runs/<time>-<config name>).
        log_interval: iterations between two log lines, each of which is also recorded in all other places.
        log_params_norm: log the L2 norm of the parameters.
        log_num_zeros_in_grad: log the number of gradient elements that are zero.
        wandb_project: Weights & Biases project; an empty name disables wandb.
        wandb_entity: Weights & Biases entity: user or team (default: wandb's).
        wandb_exp_name: name of the wandb run (default: the run folder's name).
        wandb_save_dir: folder for wandb's local files (default: the run folder).
        tensorboard_dir: folder for TensorBoard events; not given: no events are written.
    """

    run_dir: str | None = flag(None)
    log_interval: int = flag(100, must_be="positive")
    log_params_norm: bool = flag(False)
    log_num_zeros_in_grad: bool = flag(False)
    wandb_project: str = flag("", common=True)
    wandb_entity: str = flag("")
    wandb_exp_name: str = flag("")
    wandb_save_dir: str = flag("")
    tensorboard_dir: str | None = flag(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wandb_project and not is_installed("wandb"):
            raise ValueError(f"--wandb-project {self.wandb_project}: wandb is not installed (pip install wandb)")
        if self.tensorboard_dir is not None and not is_installed("tensorboard"):
            where = f"--tensorboard-dir {self.tensorboard_dir}"
            raise ValueError(f"{where}: tensorboard is not installed (pip install tensorboard)")


def is_installed(package: str) -> bool:
    """Return True if a top-level package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


@dataclass(frozen=True, kw_only=True)
class TimingConfig(Config):
    """Timing.

    Times of the parts of an iteration, slow ranks, and the timeline (trace) of one step.

    Attributes:
        timing_log_level: times in the log: 0 for iterations only, 1 also for their parts, 2 also for micro-batches and
            for the collectives of each axis.
        log_straggler: measure one step per log interval, and log the ranks whose compute takes over 1.2 times the
            median.
        timeline_step: record the spans of every rank in this iteration (the first is 1); writes timeline.json for
            ui.perfetto.dev to the run folder.
    """

    timing_log_level: Literal[0, 1, 2] = flag(0)
    log_straggler: bool = flag(False)
    timeline_step: int | None = flag(None, must_be="positive")

    @property
    def records_steps(self) -> bool:
        """True if one of the timing flags requires recordings of the timeline's spans in some steps."""
        return self.timing_log_level > 0 or self.log_straggler or self.timeline_step is not None


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig(Config):
    """Profiling.

    torch's profiler and the history of CUDA allocations.

    Attributes:
        profile: record operators, kernels and collectives with torch.profiler; writes a trace for ui.perfetto.dev to
            the run folder.
        profile_step_start: number of iterations before the first one that --profile records.
        profile_step_end: last iteration that --profile records.
        profile_ranks: ranks that --profile and --record-memory-history record.
        record_memory_history: record the last 100000 CUDA allocations with their stacks for --memory-snapshot-path.
        memory_snapshot_path: file that --record-memory-history writes when training ends or runs out of memory, for
            pytorch.org/memory_viz; relative to the run folder; the rank is appended to its name.
    """

    profile: bool = flag(False)
    profile_step_start: int = flag(10)
    profile_step_end: int = flag(12)
    profile_ranks: tuple[int, ...] = flag((0,), nargs="+", metavar="RANK")
    record_memory_history: bool = flag(False)
    memory_snapshot_path: str = flag("snapshot.pickle")

    def __post_init__(self) -> None:
        super().__post_init__()
        start, end = self.profile_step_start, self.profile_step_end
        if self.profile and not 0 <= start < end:
            raise ValueError(
                f"--profile-step-start {start} must be at least 0 and lower than --profile-step-end {end}, the last "
                "recorded iteration"
            )


@dataclass(frozen=True, kw_only=True)
class StopConfig(Config):
    """Early stop.

    Conditions that end the run before its last iteration.

    Attributes:
        exit_interval: stop after the first iteration that is a multiple of this number.
        exit_duration_in_mins: stop this many minutes after the first start of the program; a restart by --max-restarts
            does not begin to count again.
        skip_train: skip training and only evaluate.
    """

    exit_interval: int | None = flag(None, must_be="positive")
    exit_duration_in_mins: int | None = flag(None, must_be="positive")
    skip_train: bool = flag(False)


@dataclass(frozen=True, kw_only=True)
class AnomalyConfig(Config):
    """NaN and loss spikes.

    Reactions of the run to losses and gradients that must not reach the weights.

    Attributes:
        check_for_nan_in_loss_and_grad: if the loss or a gradient is not finite, leave the weights unchanged, end the
            job (in the next step at the latest) and name the parameter and the rank; with
            --no-check-for-nan-in-loss-and-grad the step is skipped.
        loss_spike_sigma: skip the update of a step whose loss is more than this many standard deviations above the mean
            of the last 100 losses; takes effect after 20 steps.
    """

    check_for_nan_in_loss_and_grad: bool = flag(True)
    loss_spike_sigma: float | None = flag(None, must_be="positive")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Description of a model and its sharding, equal on all ranks and independent of the layout.

    Attributes:
        config: shape of the model.
        vocab_size: vocabulary size of the tokenizer; the model may pad it.
        sequence_parallel: True splits activations along the sequence between tensor-parallel regions.
        zero: the ZeRO flags.
        wire: plan of ZeRO++ for the collectives that replace FSDP2's, see `plan_comm`.
        precision: dtypes of compute and gradient reduction.
        seed: seed for the initial weights and for dropout.
        product: function that computes the matrix products of the linear layers. None selects the function by `config`
            and the device.
        scalar_head: True adds a head that returns one number per token, as reward models need.
        varying_sizes: True if batch sizes or sequence lengths vary between steps, so that layers are compiled for any
            size.
        states: class that stores the fp32 weights, moments and gradients outside the device, for example in host
            memory; None to store them on the device.
    """

    config: GPTConfig
    vocab_size: int
    wire: CommPlan
    sequence_parallel: bool = False
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    seed: int
    product: Product | None = None
    scalar_head: bool = False
    varying_sizes: bool = False
    states: type[DeviceStates] | None = None
