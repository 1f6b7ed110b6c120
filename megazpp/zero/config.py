"""The flags of ZeRO, ZeRO++ and precision, and the wire plan that follows from them on a given layout.

One file of more than 300 lines: the flags, their checks and the plan that follows from them name each other.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch

from kernels.block_quant import backend
from kernels.formats import BlockFormat
from megazpp.base.flags import as_words, as_written, check_positive, check_words, flag
from megazpp.topology.layout import Layout

T = TypeVar("T")

WEIGHT_BLOCK, DIFFERENCE_BLOCK, GRADIENT_BLOCK = 256, 128, 128
WEIGHT_BITS = ((8, 8), (16, 16), (16, 4), (8, 4))  # inside a node, across nodes


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """ZeRO and ZeRO++: what is sharded over the data ranks, and how it travels."""

    zero_stage: Literal[0, 1, 2, 3] | None = flag(
        None, "0: nothing, 1: moments, 2: and gradients, 3: and parameters (default 3)"
    )
    use_distributed_optimizer: bool = flag(False, "Megatron's name for --zero-stage 1")
    zeropp: bool = flag(
        False,
        "ZeRO++: --zero-quantized-weights, --zero-hpz-partition-size auto and --zero-quantized-gradients, each "
        "can be set or unset alone",
    )
    zero_quantized_weights: bool | None = flag(None, "qwZ: gather weights as 8-bit blocks")
    zero_hpz_partition_size: str | None = flag(
        None,
        "hpZ: keep a secondary partition over this many data ranks of a node and gather from it until the weights "
        "change; auto: the node's, 1: none",
    )
    zero_quantized_gradients: bool | None = flag(None, "qgZ: reduce gradients as 8-bit and 4-bit blocks")
    zero_weight_bits: int | tuple[int, ...] = flag(
        (8, 8),
        "bits of a weight inside a node and across nodes, one value for both: 8 8; 16 16, the compute format, not "
        "quantized; 16 4 and 8 4: what crosses nodes is the difference from the kept weights, so these are kept in the "
        "compute format (2 bytes per parameter and node instead of 1; 3 with 8 4)",
        nargs="+",
    )
    zero_weight_keyframe_interval: int | None = flag(
        None,
        "with 4 bits across nodes: whole weights cross after every this many iterations, which heals a kept "
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

    @property
    def weight_bits(self) -> tuple[int, ...]:
        """Bits of a weight inside a node and across nodes."""
        bits = self.zero_weight_bits
        given = (bits,) if isinstance(bits, int) else tuple(bits)
        return given * 2 if len(given) == 1 else given

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

    def stage_over(self, num_ranks: int) -> int:
        """The stage in which shards of `num_ranks` ranks run.

        One rank has nobody to gather from: instead of casting its weights anew for each use, as stage 3 would, it
        keeps them in the compute format until they change, as stage 2 does.
        """
        return min(self.stage, 2) if num_ranks == 1 else self.stage


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision: fp32 master weights always; compute in fp32, bf16 or fp16."""

    fp16: bool = flag(False, "compute in fp16, with loss scaling")
    bf16: bool = flag(False, "compute in bf16")
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
    """The dtypes that `PrecisionConfig` comes to, for models whose precision no flags describe."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype


class GatherPlan(NamedTuple):
    """The all-gather of weights in two hops.

    Attributes:
        fmt: block format of the messages, with differences of those inside a node; None: the compute format, not
            quantized.
        keep: whether the secondary partition is kept (hpZ).
        differences: block format of the differences from the kept weights that cross nodes; None: the same messages
            travel across nodes and inside.
    """

    fmt: BlockFormat | None
    keep: bool
    differences: BlockFormat | None = None


class ReducePlan(NamedTuple):
    """The reduce-scatter of gradients in two hops.

    Attributes:
        local, cross: block formats inside a node and across nodes; None: the reduction format, not quantized.
    """

    local: BlockFormat | None
    cross: BlockFormat | None


class WirePlan(NamedTuple):
    """The replacement of FSDP2's collectives; it is made once, shown to the user and handed to `shard_model`.

    Attributes:
        gather, reduce: the two-hop collectives; None where FSDP2's own stay.
        overlap_gather, overlap_reduce: whether collectives run beside the compute (FSDP2's own on CUDA always do).
        notices: lines for the user.
    """

    gather: GatherPlan | None = None
    reduce: ReducePlan | None = None
    overlap_gather: bool = False
    overlap_reduce: bool = False
    notices: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line for the log."""
        weights = "gathered by FSDP2's ring"
        if self.gather is not None:
            kept = "kept inside the node until they change" if self.gather.keep else "not kept"
            fmt, differences = _spell(self.gather.fmt), self.gather.differences
            formats = fmt if differences is None else f"{fmt} inside nodes, differences as {_spell(differences)} across"
            weights = f"gathered in two hops, {formats}, {kept}"
        gradients = "reduced by FSDP2's ring"
        if self.reduce is not None:
            gradients = (
                f"reduced in two hops, {_spell(self.reduce.local)} inside nodes, {_spell(self.reduce.cross)} across"
            )
        weights += ", ahead of use" if self.overlap_gather else ""
        gradients += ", under the backward" if self.overlap_reduce else ""
        return f"weights are {weights}; gradients are {gradients}"


def _spell(fmt: BlockFormat | None) -> str:
    return "not quantized" if fmt is None else f"int{fmt.bits} in blocks of {fmt.block_size}"


def plan_wire(config: ZeroConfig, layout: Layout) -> WirePlan:
    """Plan from the flags which collectives are replaced on `layout`, and by what.

    Raises:
        ValueError: a combination of flags means nothing; the message names flags and values.
    """
    _check_values(config)
    inside, across = config.weight_bits if config.quantizes_weights else (16, 16)
    quantized_weights, quantized_gradients = across < 16, _default(config.zero_quantized_gradients, config.zeropp)
    keep = _keeps_secondary(config, layout)
    if across < 8 and not keep:
        raise ValueError(
            f"--zero-weight-bits {inside} {across} sends differences from the weights that a node keeps: it needs "
            f"--zero-hpz-partition-size auto, not {config.zero_hpz_partition_size or 1}"
        )
    wanted = {
        "--zeropp": config.zeropp,
        "--zero-quantized-weights": quantized_weights,
        f"--zero-hpz-partition-size {config.zero_hpz_partition_size}": keep,
        "--zero-quantized-gradients": quantized_gradients,
    }
    asked = [name for name, on in wanted.items() if on]
    if asked and config.stage != 3:
        raise ValueError(f"{asked[0]} needs --zero-stage 3, not {config.stage}: it changes how shards travel")
    notices = []
    overlap_gather = _default(config.overlap_param_gather, config.zeropp) and config.stage == 3
    overlap_reduce = _default(config.overlap_grad_reduce, config.zeropp) and config.stage == 3
    for name, flag_value in (
        ("--overlap-param-gather", config.overlap_param_gather),
        ("--overlap-grad-reduce", config.overlap_grad_reduce),
    ):
        if flag_value and config.stage != 3:
            notices.append(f"{name} is ignored: ZeRO stage {config.stage} leaves overlap to FSDP2")
    if overlap_reduce and layout.replicate > 1:
        overlap_reduce = False
        if config.overlap_grad_reduce:
            notices.append("--overlap-grad-reduce is ignored: FSDP2 sums over copies right after each reduction")
    if asked and layout.cross == 1:
        notices.append(f"{asked[0]}: no traffic crosses nodes here, so weights and gradients travel as in ZeRO-3")
        return WirePlan(None, None, overlap_gather, overlap_reduce, tuple(notices))
    if layout.local == 1 and keep:
        notices.append(
            "--zero-hpz-partition-size: a node has one data rank, so each rank keeps a whole copy of the weights"
        )
    gather = None
    if quantized_weights or keep:
        if across < inside == 8 and layout.local == 1:
            inside = 16
            notices.append(
                f"--zero-weight-bits 8 {across} is 16 {across} here: nothing travels inside nodes of one data rank"
            )
        gather = GatherPlan(
            block_format(inside, WEIGHT_BLOCK),
            keep,
            block_format(across, DIFFERENCE_BLOCK) if across < 8 else None,
        )
    reduce = None
    if quantized_gradients:
        local, across = config.zero_gradient_bits
        reduce = ReducePlan(
            block_format(local, GRADIENT_BLOCK),
            block_format(across, GRADIENT_BLOCK, clip=across == 4 and config.zero_error_feedback),
        )
    notices += _without_effect(config, gather, reduce)
    return WirePlan(gather, reduce, overlap_gather, overlap_reduce, tuple(notices))


def wire_backends(plan: WirePlan, device_type: str) -> list[tuple[str, str, str]]:
    """Rows (piece, implementation, why) for the table of back ends: none where nothing is quantized.

    Raises:
        ValueError: blocks cannot be quantized on a device of this type.
    """
    formats = [plan.gather.fmt, plan.gather.differences] if plan.gather else []
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


def _check_values(config: ZeroConfig) -> None:
    """Raise ValueError for values out of range, whether the flags are used or not."""
    check_positive(config, "zero_weight_keyframe_interval")
    if config.weight_bits not in WEIGHT_BITS:
        raise ValueError(
            f"--zero-weight-bits {as_words(config.zero_weight_bits)} is not one of "
            f"{', '.join(map(as_words, WEIGHT_BITS))}"
        )
    bits = config.zero_gradient_bits
    if len(bits) != 2 or any(b not in (4, 8, 16) for b in bits):
        raise ValueError(f"--zero-gradient-bits {as_words(bits)} is not two of 4, 8 and 16")
    beta, reset = config.zero_error_feedback_beta, config.zero_error_feedback_reset
    if not 0 <= beta < 1:
        raise ValueError(f"--zero-error-feedback-beta {beta} is not from 0 to below 1")
    if reset is not None and reset < 1:
        raise ValueError(f"--zero-error-feedback-reset {reset} is not a positive number of iterations")


def _without_effect(config: ZeroConfig, gather: GatherPlan | None, reduce: ReducePlan | None) -> list[str]:
    """A line for each flag that was set and changes nothing of what travels."""
    weights = _default(config.zero_quantized_weights, config.zeropp)
    crossing = reduce is not None and reduce.cross is not None
    no_feedback = None if crossing and config.zero_error_feedback else "no error is fed back (--zero-error-feedback)"
    one_hop = None if reduce else "gradients are not reduced in two hops (--zero-quantized-gradients, --zeropp)"
    whole = "whole weights cross nodes in every step (--zero-weight-bits 16 4)"
    unused = {
        "zero_quantized_weights": "--zero-weight-bits 16" if weights and config.weight_bits == (16, 16) else None,
        "zero_weight_bits": None if weights else "weights are not quantized (--zero-quantized-weights, --zeropp)",
        "zero_weight_keyframe_interval": None if gather and gather.differences else whole,
        "zero_gradient_bits": one_hop,
        "zero_error_feedback": None if crossing else "gradients are not quantized across nodes (--zeropp)",
        "zero_error_feedback_beta": no_feedback,
        "zero_error_feedback_reset": no_feedback,
        "zero_accumulate_in_bf16": one_hop,
        "zero_cross_every_microbatch": one_hop,
    }
    return [
        f"{as_written(config, field)} is ignored: {unused[field.name]}"
        for field in dataclasses.fields(config)
        if unused.get(field.name) and getattr(config, field.name) != field.default
    ]


def block_format(bits: int, block_size: int, *, clip: bool = False) -> BlockFormat | None:
    """The format of messages with so many bits; None for 16, which are not quantized."""
    return None if bits == 16 else BlockFormat(bits, block_size, clip)  # type: ignore[arg-type]


def _default(value: T | None, default: T) -> T:
    return default if value is None else value
