"""Flags of ZeRO, ZeRO++ and precision, and the plan of the collectives that follows from them and a layout.

One file of more than 300 lines, because the flags, their checks and the plan refer to each other.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch

from megazpp.base.flags import as_words, as_written, check_below_one, check_positive, check_words, flag
from megazpp.kernels.block_quant import backend
from megazpp.kernels.formats import BlockFormat
from megazpp.topology.layout import Layout

T = TypeVar("T")

# Elements per quantization block. DIFFERENCE_BLOCK is for the quantized weight differences of DiLoCo.
WEIGHT_BLOCK, DIFFERENCE_BLOCK, GRADIENT_BLOCK = 256, 128, 128


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """ZeRO and ZeRO++.

    The training state that is sharded over the data ranks, and the formats in which shards are communicated.
    """

    zero_stage: Literal[0, 1, 2, 3] | None = flag(
        None,
        "ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters (default: 3)",
        common=True,
    )
    use_distributed_optimizer: bool = flag(False, "Megatron-LM's name for --zero-stage 1; not with --zeropp")
    zeropp: bool = flag(
        False,
        "ZeRO++: quantized collectives in two hops (qwZ, hpZ and qgZ)",
        common=True,
    )
    zero_quantized_weights: bool | None = flag(None, "qwZ: gather weights as 8-bit blocks (default: on with --zeropp)")
    zero_hpz_partition_size: str | None = flag(
        None,
        "hpZ: number of data ranks in a node that share a secondary copy of the weights, from which every gather "
        "reads until the weights change; auto: all of a node, 1: no copy (default: auto with --zeropp, 1 otherwise)",
    )
    zero_quantized_gradients: bool | None = flag(
        None, "qgZ: reduce gradients as 8-bit and 4-bit blocks (default: on with --zeropp)"
    )
    zero_weight_bits: int | tuple[int, ...] | None = flag(
        None,
        "bits per gathered weight: 8, or 16 to send the compute dtype without quantization (default: 8)",
        nargs="+",
    )
    zero_weight_delta: Literal["auto", "lossless", "none"] = flag(
        "auto",
        "lossless: nodes exchange exact changes of 16-bit weights; none: whole weights; auto: lossless with --zeropp "
        "and 16-bit compute if it fits into memory and is not estimated to be slower than int8, otherwise none",
    )
    zero_weight_keyframe_interval: int | None = flag(
        None,
        "iterations between two sends of whole weights with --zero-weight-delta lossless, which repair a secondary "
        "copy that faulty memory or a faulty link has corrupted (default: never)",
    )
    zero_gradient_bits: tuple[int, ...] = flag(
        (8, 4),
        "bits per gradient inside a node and across nodes: 4, 8, or 16 to send the reduction dtype",
        nargs=2,
    )
    zero_error_feedback: bool = flag(
        True,
        "add a moving average of the cross-node quantization errors to the next step's gradients (LoCo); takes 1 byte "
        "per parameter and node",
    )
    zero_error_feedback_beta: float = flag(
        0.8,
        "weight of the earlier errors in the moving average of error feedback; 0 feeds back only the last step's error",
    )
    zero_error_feedback_reset: int | None = flag(
        None, "iterations after which error feedback is reset to zero, as in LoCo (default: never)"
    )
    zero_accumulate_in_bf16: bool = flag(
        False, "accumulate the gradients that wait for the cross-node hop in bf16 instead of fp32, in half the memory"
    )
    zero_cross_every_microbatch: bool = flag(
        False,
        "reduce gradients across nodes in every micro-batch instead of once per step: no memory for accumulation, but "
        "more traffic",
    )

    overlap_param_gather: bool | None = flag(
        None, "overlap the gathers of weights with the forward and the backward (default: on with --zeropp)"
    )
    overlap_grad_reduce: bool | None = flag(
        None, "overlap the reduction of gradients with the rest of the backward (default: on with --zeropp)"
    )

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "zero_weight_keyframe_interval", "zero_error_feedback_reset")
        check_below_one(self, "zero_error_feedback_beta")
        written = as_words(8 if self.zero_weight_bits is None else self.zero_weight_bits)
        if written in ("16 4", "8 4"):
            raise ValueError(
                f"--zero-weight-bits {written} is no longer supported: use --zero-weight-delta lossless, which sends "
                "fewer bytes and rounds nothing"
            )
        if written not in ("8", "16", "8 8", "16 16"):
            raise ValueError(f"--zero-weight-bits {written} is not supported; expected 8 or 16")
        bits = self.zero_gradient_bits
        if len(bits) != 2 or any(b not in (4, 8, 16) for b in bits):
            raise ValueError(f"--zero-gradient-bits {as_words(bits)} is not valid; expected two of 4, 8 and 16")

    @property
    def weight_bits(self) -> int:
        """Bits per weight of a gather that sends whole weights: 8 or 16."""
        bits = 8 if self.zero_weight_bits is None else self.zero_weight_bits
        return bits if isinstance(bits, int) else bits[0]

    @property
    def stage(self) -> Literal[0, 1, 2, 3]:
        """The ZeRO stage, from --zero-stage or --use-distributed-optimizer; 3 by default."""
        if self.zero_stage is not None:
            return self.zero_stage
        return 1 if self.use_distributed_optimizer else 3

    @property
    def quantizes_weights(self) -> bool:
        """True if qwZ is on, set explicitly or implied by --zeropp."""
        return _default(self.zero_quantized_weights, self.zeropp)

    @property
    def chooses_weight_delta(self) -> bool:
        """True if --zero-weight-delta auto has a format to choose: with --zeropp, unless a flag sets the format."""
        return self.zero_weight_delta == "auto" and self.zeropp and not self.weight_format_flags

    @property
    def weight_format_flags(self) -> tuple[str, ...]:
        """Flags that set the format of weights, as on a command line; --zero-weight-delta auto contradicts them.

        These are --zero-quantized-weights and --zero-weight-bits with any value, and --zero-hpz-partition-size 1, which
        keeps no weights to which deltas could be added.
        """
        names = [name for name in ("zero_quantized_weights", "zero_weight_bits") if getattr(self, name) is not None]
        names += ["zero_hpz_partition_size"] if self.zero_hpz_partition_size == "1" else []
        return tuple(as_written(self, field) for field in dataclasses.fields(self) if field.name in names)

    @property
    def hpz_partition_size(self) -> str:
        """The value of --zero-hpz-partition-size, or the value that --zeropp implies for it."""
        return _default(self.zero_hpz_partition_size, "auto" if self.zeropp else "1")

    @property
    def distinguishes_nodes(self) -> bool:
        """True if a flag treats ranks of the same node differently from ranks of other nodes."""
        in_two_hops = self.quantizes_weights or self.hpz_partition_size != "1" or self.zero_quantized_gradients
        return bool(self.zeropp or in_two_hops)

    def stage_over(self, num_ranks: int) -> int:
        """Return the stage that is used when parameters are sharded over `num_ranks` ranks.

        With one rank a gather is only a cast to the compute dtype. Stage 2 casts once per weight update, stage 3 would
        cast at each use. So stage 3 becomes stage 2.
        """
        return min(self.stage, 2) if num_ranks == 1 else self.stage


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision.

    Master weights are always fp32. Layers compute in fp32, bf16 or fp16.
    """

    fp16: bool = flag(False, "compute in fp16 with loss scaling; master weights stay fp32")
    bf16: bool = flag(False, "compute in bf16; master weights stay fp32", common=True)
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "accumulate and reduce gradients in fp32; with --bf16 this is on unless --grad-reduce-in-bf16 is set"
    )
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in bf16, with half the bytes and less exact sums")

    def __post_init__(self) -> None:
        if self.fp16 and self.bf16:
            raise ValueError("--fp16 and --bf16 are both set: choose one")
        if self.grad_reduce_in_bf16 and not self.bf16:
            raise ValueError("--grad-reduce-in-bf16 needs --bf16")
        if self.grad_reduce_in_bf16 and self.accumulate_allreduce_grads_in_fp32:
            raise ValueError("--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 are both set: choose one")

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
    """The compute and reduction dtypes of a model that was not configured by flags, as in `megazpp.zeropp`."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype


class WeightDelta(NamedTuple):
    """The format that --zero-weight-delta auto has chosen for the weights that cross nodes.

    Attributes:
        lossless: True for lossless deltas, False for int8 blocks.
        reason: reason for the choice, as a clause for the log.
    """

    lossless: bool
    reason: str

    def describe(self) -> str:
        """Return one line for the log with the choice and its reason."""
        chosen = "lossless deltas" if self.lossless else "int8 blocks"
        return f"--zero-weight-delta auto: weights cross nodes as {chosen}, because {self.reason}"


def default_weight_delta(param_dtype: torch.dtype) -> WeightDelta:
    """Return the choice of --zero-weight-delta auto if nothing is known about the links: lossless deltas if possible.

    Args:
        param_dtype: dtype in which weights are gathered and layers compute.
    """
    if param_dtype.itemsize != 2:
        dtype = str(param_dtype).removeprefix("torch.")
        return WeightDelta(False, f"with {dtype} compute nearly all weights change in every step")
    return WeightDelta(True, "the speed of the links is unknown")


class GatherPlan(NamedTuple):
    """The plan of the two-hop all-gather of weights."""

    fmt: BlockFormat | None  # quantization of messages; None sends the compute dtype
    keep: bool  # whether each rank keeps the secondary partition (hpZ): the messages that it received from other nodes
    differences: bool = False  # whether lossless differences from the kept weights cross nodes, not whole weights


class ReducePlan(NamedTuple):
    """The plan of the two-hop reduce-scatter of gradients: the block format of each hop.

    None sends the reduction dtype, without quantization. `local` is the hop inside a node, `cross` the hop across
    nodes.
    """

    local: BlockFormat | None
    cross: BlockFormat | None


class CommPlan(NamedTuple):
    """The collectives that replace FSDP2's; None keeps FSDP2's own.

    It is made once by `plan_comm`, logged, and passed to `shard_model`.
    """

    gather: GatherPlan | None = None
    reduce: ReducePlan | None = None
    overlap_gather: bool = False  # on CUDA, FSDP2's own collectives always overlap, whatever is set here
    overlap_reduce: bool = False
    notices: tuple[str, ...] = ()  # lines for the log about flags that have no effect

    def describe(self) -> str:
        """Return one line for the log that says how weights and gradients are communicated."""
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
    """Return a block format in words."""
    return "not quantized" if fmt is None else f"int{fmt.bits} in blocks of {fmt.block_size}"


def plan_comm(config: ZeroConfig, layout: Layout, param_dtype: torch.dtype, *, lossless: bool = False) -> CommPlan:
    """Plan which of FSDP2's collectives the flags replace on `layout`.

    Args:
        config: the flags of ZeRO and ZeRO++.
        layout: the data ranks inside a node and across nodes.
        param_dtype: dtype in which weights are gathered and layers compute.
        lossless: choice of --zero-weight-delta auto: whether lossless deltas cross nodes, not int8 blocks. Other values
            of this flag ignore it.
    Raises:
        ValueError: the flags contradict each other or the layout; the message names the flags and their values.
    """
    # ---- weights: whole or as differences
    keep = _keeps_secondary(config, layout)
    lossless = lossless if config.chooses_weight_delta else config.zero_weight_delta == "lossless"
    if lossless and not keep:
        raise ValueError(
            "--zero-weight-delta lossless sends differences from the weights that a node keeps: it needs "
            f"--zero-hpz-partition-size auto, not {config.hpz_partition_size}"
        )
    if lossless and param_dtype.itemsize != 2:
        raise ValueError(
            f"--zero-weight-delta lossless needs --bf16 or --fp16: of weights in {param_dtype} nearly all change in "
            "every step"
        )
    quantized_weights = config.quantizes_weights and config.weight_bits < 16 and not lossless
    quantized_gradients = _default(config.zero_quantized_gradients, config.zeropp)

    # ---- every one of these switches needs stage 3
    wanted = {
        "--zeropp": config.zeropp,
        "--zero-weight-delta lossless": lossless,
        "--zero-quantized-weights": quantized_weights,
        f"--zero-hpz-partition-size {config.zero_hpz_partition_size}": keep,
        "--zero-quantized-gradients": quantized_gradients,
    }
    asked = [name for name, on in wanted.items() if on]
    if asked and config.stage != 3:
        given = f"--zero-stage {config.stage}"
        if config.zero_stage is None:
            given = f"--use-distributed-optimizer, which selects {given}"
        raise ValueError(f"{asked[0]} needs --zero-stage 3, the default, not {given}; remove that flag")

    # ---- overlap with the compute
    overlap_gather, overlap_reduce = (
        _default(asked_for, config.zeropp) and config.stage == 3
        for asked_for in (config.overlap_param_gather, config.overlap_grad_reduce)
    )
    # With HSDP, FSDP2 all-reduces over the replicas right after each reduction, so it must be complete by then.
    overlap_reduce = overlap_reduce and layout.replicate == 1
    plan, notices = CommPlan(overlap_gather=overlap_gather, overlap_reduce=overlap_reduce), list[str]()

    # ---- the two hops
    if asked and layout.cross == 1:
        notices.append(f"{asked[0]} has no effect: no traffic crosses nodes, so ZeRO-3's collectives are used")
        quantized_weights = quantized_gradients = keep = False
    if layout.local == 1 and keep:
        notices.append(
            "--zero-hpz-partition-size: each node has one data rank, so each rank keeps a full copy of the weights"
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
    """Return rows (piece, implementation, reason) for the log's table of back ends; none if nothing is quantized.

    Raises:
        ValueError: block quantization is not implemented for a device of this type.
    """
    formats: list[object] = [plan.gather.fmt, plan.gather.differences] if plan.gather else []
    formats += [plan.reduce.local, plan.reduce.cross] if plan.reduce else []
    return [backend(device_type)] if any(formats) else []


def _keeps_secondary(config: ZeroConfig, layout: Layout) -> bool:
    """Return True if the flags ask for the secondary partition (hpZ).

    Raises:
        ValueError: --zero-hpz-partition-size is neither auto, 1 nor the number of data ranks of a node.
    """
    size = config.hpz_partition_size
    if size == "auto":
        return True
    if not size.isdecimal() or int(size) not in (1, layout.local):
        raise ValueError(
            f"--zero-hpz-partition-size {size} is not valid; expected auto, 1 (no secondary partition) or "
            f"{layout.local} (the data ranks of a node)"
        )
    return int(size) > 1


def _without_effect(config: ZeroConfig, plan: CommPlan) -> str | None:
    """Return a line for the log that names the flags which are set but have no effect under `plan`.

    Returns None if every set flag has an effect.
    """
    two_hops, crossing = plan.reduce is not None, plan.reduce is not None and plan.reduce.cross is not None
    used = {
        "zero_quantized_weights": config.weight_bits < 16 and not (plan.gather and plan.gather.differences),
        "zero_weight_bits": config.weight_bits == 8
        or (config.quantizes_weights and not (plan.gather and plan.gather.differences)),
        "zero_weight_keyframe_interval": plan.gather is not None and plan.gather.differences,
        "zero_gradient_bits": two_hops,
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
    """Return the block format for this many bits; None for 16 bits, which are not quantized.

    Args:
        bits: 4, 8 or 16 bits per element.
        block_size: elements per block, with one scale each.
        clip: whether 4-bit blocks clip their largest elements, see `BlockFormat`.
    """
    return None if bits == 16 else BlockFormat(bits, block_size, clip)  # type: ignore[arg-type]


def _default(value: T | None, default: T) -> T:
    """Return `value`, or `default` if it is None."""
    return default if value is None else value
