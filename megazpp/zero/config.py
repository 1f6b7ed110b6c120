"""The flags of ZeRO, ZeRO++ and precision, and the wire plan that follows from them on a given layout.

One file of more than 300 lines: the flags, their checks and the plan name each other.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch

from megazpp.base.flags import as_words, as_written, check_positive, check_words, flag
from megazpp.kernels.block_quant import backend
from megazpp.kernels.formats import BlockFormat
from megazpp.topology.layout import Layout

T = TypeVar("T")

WEIGHT_BLOCK, DIFFERENCE_BLOCK, GRADIENT_BLOCK = 256, 128, 128


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """ZeRO and ZeRO++.

    The states that are sharded over the data ranks, and the formats in which they are communicated.
    """

    zero_stage: Literal[0, 1, 2, 3] | None = flag(
        None, "shard nothing (0), optimizer (1), gradients (2), parameters (3, default)", common=True
    )
    use_distributed_optimizer: bool = flag(False, "Megatron's name for --zero-stage 1")
    zeropp: bool = flag(
        False,
        "ZeRO++: quantized, hierarchical communication (qwZ, hpZ and qgZ)",
        common=True,
    )
    zero_quantized_weights: bool | None = flag(None, "qwZ: gather weights as 8-bit blocks")
    zero_hpz_partition_size: str | None = flag(
        None,
        "hpZ: keep a secondary partition over this many data ranks of a node and gather from it until the weights "
        "change; auto: the node's, 1: none",
    )
    zero_quantized_gradients: bool | None = flag(None, "qgZ: reduce gradients as 8-bit and 4-bit blocks")
    zero_weight_bits: int | tuple[int, ...] = flag(
        (8,), "bits of a weight that is gathered whole: 8, or 16, the compute format, not quantized", nargs="+"
    )
    zero_weight_delta: Literal["lossless", "none"] | None = flag(
        None,
        "lossless: send bit-exact changes of 16-bit weights between nodes",
        common=True,
    )
    zero_weight_keyframe_interval: int | None = flag(
        None,
        "with --zero-weight-delta lossless: whole weights cross after every this many iterations, which heals a kept "
        "partition that memory or wire has corrupted",
    )
    zero_gradient_bits: tuple[int, ...] = flag(
        (8, 4), "bits of a gradient inside a node and across nodes: 4, 8, or 16 for the reduction format", nargs=2
    )
    zero_error_feedback: bool = flag(
        True,
        "add what the cross-node quantization of gradients has lost to the next step, as a moving average (LoCo); 1 "
        "byte per parameter and node",
    )
    zero_error_feedback_beta: float = flag(
        0.8,
        "share of the earlier error in the error that is fed back; 0: the last step's error alone, nothing is averaged",
    )
    zero_error_feedback_reset: int | None = flag(
        None, "forget the error feedback after every so many iterations, as LoCo does (default: never)"
    )
    zero_accumulate_in_bf16: bool = flag(
        False, "keep the gradients that wait for the cross-node hop in bf16 instead of fp32: half the memory"
    )
    zero_cross_every_microbatch: bool = flag(
        False, "reduce across nodes in every micro-batch: saves that memory, costs traffic"
    )

    overlap_param_gather: bool | None = flag(
        None, "gather weights across nodes under the forward, inside a node ahead of use (default: on with --zeropp)"
    )
    overlap_grad_reduce: bool | None = flag(
        None, "reduce gradients under the rest of the backward (default: on with --zeropp)"
    )

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "zero_weight_keyframe_interval")
        written = as_words(self.zero_weight_bits)
        if written in ("16 4", "8 4"):
            raise ValueError(
                f"--zero-weight-bits {written} is gone: --zero-weight-delta lossless sends fewer bytes, and rounds none"
            )
        if written not in ("8", "16", "8 8", "16 16"):
            raise ValueError(f"--zero-weight-bits {written} is neither 8 nor 16")
        bits = self.zero_gradient_bits
        if len(bits) != 2 or any(b not in (4, 8, 16) for b in bits):
            raise ValueError(f"--zero-gradient-bits {as_words(bits)} is not two of 4, 8 and 16")
        beta, reset = self.zero_error_feedback_beta, self.zero_error_feedback_reset
        if not 0 <= beta < 1:
            raise ValueError(f"--zero-error-feedback-beta {beta} is not from 0 to below 1")
        if reset is not None and reset < 1:
            raise ValueError(f"--zero-error-feedback-reset {reset} is not a positive number of iterations")

    @property
    def weight_bits(self) -> int:
        """Bits of a weight that is gathered whole."""
        bits = self.zero_weight_bits
        return bits if isinstance(bits, int) else bits[0]

    @property
    def stage(self) -> int:
        if self.zero_stage is not None:
            return self.zero_stage
        return 1 if self.use_distributed_optimizer else 3

    @property
    def quantizes_weights(self) -> bool:
        """qwZ, by itself or with --zeropp."""
        return _default(self.zero_quantized_weights, self.zeropp)

    @property
    def hpz_partition_size(self) -> str:
        """hpZ, by itself or with --zeropp."""
        return _default(self.zero_hpz_partition_size, "auto" if self.zeropp else "1")

    @property
    def distinguishes_nodes(self) -> bool:
        """True if a flag treats ranks of one node differently from ranks of another."""
        in_two_hops = self.quantizes_weights or self.hpz_partition_size != "1" or self.zero_quantized_gradients
        return bool(self.zeropp or in_two_hops)

    def stage_over(self, num_ranks: int) -> int:
        """The stage in which shards of `num_ranks` ranks run.

        One rank has nobody to gather from: instead of casting its weights anew for each use, as stage 3 would, it
        keeps them in the compute format until they change, as stage 2 does.
        """
        return min(self.stage, 2) if num_ranks == 1 else self.stage


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision.

    Master weights are always fp32. Layers compute in fp32, bf16 or fp16.
    """

    fp16: bool = flag(False, "compute in fp16, with loss scaling")
    bf16: bool = flag(False, "compute in bf16", common=True)
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "accumulate and reduce gradients in fp32 (always so with --bf16, unless --grad-reduce-in-bf16)"
    )
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in bf16: half the bytes, less exact sums")

    def __post_init__(self) -> None:
        if self.fp16 and self.bf16:
            raise ValueError("--fp16 and --bf16 exclude each other")
        if self.grad_reduce_in_bf16 and not self.bf16:
            raise ValueError("--grad-reduce-in-bf16 needs --bf16")
        if self.grad_reduce_in_bf16 and self.accumulate_allreduce_grads_in_fp32:
            raise ValueError("--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other")

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype in which weights are gathered and layers compute."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are accumulated and reduced."""
        if self.grad_reduce_in_bf16:
            return torch.bfloat16
        if self.fp16 and not self.accumulate_allreduce_grads_in_fp32:
            return torch.float16
        return torch.float32


class Dtypes(NamedTuple):
    """The dtypes of a `PrecisionConfig`, for models whose precision no flags describe."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype


class GatherPlan(NamedTuple):
    """The all-gather of weights in two hops."""

    fmt: BlockFormat | None  # of messages; None: the compute format
    keep: bool  # the secondary partition (hpZ)
    differences: bool = False  # lossless ones from the kept weights cross nodes, and not the messages of inside


class ReducePlan(NamedTuple):
    """The reduce-scatter of gradients in two hops: block formats; None: the reduction format, not quantized."""

    local: BlockFormat | None
    cross: BlockFormat | None


class CommPlan(NamedTuple):
    """The replacement of FSDP2's collectives (None: its own); made once, shown to the user, handed to `shard_model`."""

    gather: GatherPlan | None = None
    reduce: ReducePlan | None = None
    overlap_gather: bool = False  # beside the compute, as FSDP2's own on CUDA always run
    overlap_reduce: bool = False
    notices: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line for the log."""
        weights, gradients = "gathered by FSDP2's ring", "reduced by FSDP2's ring"
        if self.gather is not None:
            kept = "kept inside the node until they change" if self.gather.keep else "not kept"
            formats = _spell(self.gather.fmt)
            if self.gather.differences:
                formats += " inside nodes, lossless differences across"
            weights = f"gathered in two hops, {formats}, {kept}"
        if self.reduce is not None:
            local, cross = map(_spell, self.reduce)
            gradients = f"reduced in two hops, {local} inside nodes, {cross} across"
        weights += ", ahead of use" if self.overlap_gather else ""
        gradients += ", under the backward" if self.overlap_reduce else ""
        return f"weights are {weights}; gradients are {gradients}"


def _spell(fmt: BlockFormat | None) -> str:
    return "not quantized" if fmt is None else f"int{fmt.bits} in blocks of {fmt.block_size}"


def plan_comm(config: ZeroConfig, layout: Layout, param_dtype: torch.dtype) -> CommPlan:
    """Plan from the flags which collectives are replaced on `layout`, and by what.

    Args:
        param_dtype: of the weights that the model computes with.
    Raises:
        ValueError: a combination of flags means nothing; the message names flags and values.
    """
    keep, lossless = _keeps_secondary(config, layout), config.zero_weight_delta == "lossless"
    if lossless and not keep:
        raise ValueError(
            "--zero-weight-delta lossless sends differences from the weights that a node keeps: it needs "
            f"--zero-hpz-partition-size auto, not {config.hpz_partition_size}"
        )
    if lossless and param_dtype.itemsize != 2:
        raise ValueError(f"--zero-weight-delta lossless needs --bf16 or --fp16: weights in {param_dtype} change all")
    quantized_weights = config.quantizes_weights and config.weight_bits < 16 and not lossless
    quantized_gradients = _default(config.zero_quantized_gradients, config.zeropp)
    wanted = {
        "--zeropp": config.zeropp,
        "--zero-weight-delta lossless": lossless,
        "--zero-quantized-weights": quantized_weights,
        f"--zero-hpz-partition-size {config.zero_hpz_partition_size}": keep,
        "--zero-quantized-gradients": quantized_gradients,
    }
    asked = [name for name, on in wanted.items() if on]
    if asked and config.stage != 3:
        raise ValueError(f"{asked[0]} needs --zero-stage 3, not {config.stage}: it changes how shards travel")
    overlap_gather, overlap_reduce = (
        _default(asked_for, config.zeropp) and config.stage == 3
        for asked_for in (config.overlap_param_gather, config.overlap_grad_reduce)
    )
    overlap_reduce = overlap_reduce and layout.replicate == 1  # FSDP2 sums over copies right after each reduction
    plan, notices = CommPlan(overlap_gather=overlap_gather, overlap_reduce=overlap_reduce), list[str]()
    if asked and layout.cross == 1:
        notice = f"{asked[0]}: no traffic crosses nodes here, so weights and gradients travel as in ZeRO-3"
        return plan._replace(notices=(notice,))
    if layout.local == 1 and keep:
        notices.append(
            "--zero-hpz-partition-size: a node has one data rank, so each rank keeps a whole copy of the weights"
        )
    if quantized_weights or keep:
        fmt = block_format(config.weight_bits, WEIGHT_BLOCK) if quantized_weights else None
        plan = plan._replace(gather=GatherPlan(fmt, keep, lossless))
    if quantized_gradients:
        local, across = config.zero_gradient_bits
        clip = across == 4 and config.zero_error_feedback
        reduce = ReducePlan(block_format(local, GRADIENT_BLOCK), block_format(across, GRADIENT_BLOCK, clip=clip))
        plan = plan._replace(reduce=reduce)
    if unused := _without_effect(config, plan):
        notices.append(unused)
    return plan._replace(notices=tuple(notices))


def wire_backends(plan: CommPlan, device_type: str) -> list[tuple[str, str, str]]:
    """Rows (piece, implementation, why) for the table of back ends: none where nothing is quantized.

    Raises:
        ValueError: blocks cannot be quantized on a device of this type.
    """
    formats: list[object] = [plan.gather.fmt, plan.gather.differences] if plan.gather else []
    formats += [plan.reduce.local, plan.reduce.cross] if plan.reduce else []
    return [backend(device_type)] if any(formats) else []


def _keeps_secondary(config: ZeroConfig, layout: Layout) -> bool:
    size = config.hpz_partition_size
    if size == "auto":
        return True
    if not size.isdecimal() or int(size) not in (1, layout.local):
        raise ValueError(
            f"--zero-hpz-partition-size {size} is neither auto, 1 (none) nor {layout.local}, the data ranks of a node"
        )
    return int(size) > 1


def _without_effect(config: ZeroConfig, plan: CommPlan) -> str | None:
    """A line that names the flags that were set and change nothing of what travels."""
    two_hops, crossing = plan.reduce is not None, plan.reduce is not None and plan.reduce.cross is not None
    used = {
        "zero_quantized_weights": config.weight_bits < 16 and not (plan.gather and plan.gather.differences),
        "zero_weight_bits": config.quantizes_weights and not (plan.gather and plan.gather.differences),
        "zero_weight_keyframe_interval": plan.gather is not None and plan.gather.differences,
        "zero_gradient_bits": two_hops,
        "zero_error_feedback": crossing,
        "zero_error_feedback_beta": crossing and config.zero_error_feedback,
        "zero_error_feedback_reset": crossing and config.zero_error_feedback,
        "zero_accumulate_in_bf16": two_hops,
        "zero_cross_every_microbatch": two_hops,
        "overlap_param_gather": plan.overlap_gather or not config.overlap_param_gather,
        "overlap_grad_reduce": plan.overlap_reduce or not config.overlap_grad_reduce,
    }
    fields = [field for field in dataclasses.fields(config) if not used.get(field.name, True)]
    unused = [as_written(config, field) for field in fields if getattr(config, field.name) != field.default]
    return f"ignored on this layout: {', '.join(unused)}" if unused else None


def block_format(bits: int, block_size: int, *, clip: bool = False) -> BlockFormat | None:
    """The format of messages with so many bits; None for 16, which are not quantized."""
    return None if bits == 16 else BlockFormat(bits, block_size, clip)  # type: ignore[arg-type]


def _default(value: T | None, default: T) -> T:
    return default if value is None else value
