"""Flags of ZeRO, ZeRO++ and precision, and the form of the plan that plan.py makes from them and a layout."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from megazpp.base.flags import as_words, as_written, check_below_one, check_positive, check_words, flag
from megazpp.kernels.formats import BlockFormat

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


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
    zero_weight_bits: Literal[8, 16] | None = flag(
        None, "bits per gathered weight: 8, or 16 to send the compute dtype without quantization (default: 8)"
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

    optimizer_cpu_offload: bool = flag(
        False,
        "keep fp32 weights, moments and the gradients of a step in host memory (16 bytes per parameter); the optimizer "
        "updates them on the device, one sharding unit after the other, with identical results",
    )
    zero_offload_partial_sums: bool = flag(
        False,
        "also keep the gradients that wait for the cross-node hop in host memory, instead of 4 bytes per parameter and "
        "rank of a node on the device",
        needs="--optimizer-cpu-offload",
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
        bits = self.zero_gradient_bits
        if len(bits) != 2 or any(b not in (4, 8, 16) for b in bits):
            raise ValueError(f"--zero-gradient-bits {as_words(bits)} is not valid; expected two of 4, 8 and 16")

    @property
    def weight_bits(self) -> int:
        """Bits per weight of a gather that sends whole weights: 8 or 16."""
        return self.zero_weight_bits or 8

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
    def quantizes_gradients(self) -> bool:
        """True if qgZ is on, set explicitly or implied by --zeropp."""
        return _default(self.zero_quantized_gradients, self.zeropp)

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
        return self.zeropp or self.quantizes_weights or self.hpz_partition_size != "1" or self.quantizes_gradients

    def stage_over(self, num_ranks: int) -> int:
        """Return the stage that is used when parameters are sharded over `num_ranks` ranks.

        With one rank a gather is only a cast to the compute dtype. Stage 2 casts once per weight update, stage 3 would
        cast at each use. So stage 3 becomes stage 2, except with --optimizer-cpu-offload, which saves memory.
        """
        return min(self.stage, 2) if num_ranks == 1 and not self.optimizer_cpu_offload else self.stage


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
        import torch

        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are accumulated and reduced."""
        import torch

        if self.grad_reduce_in_bf16:
            return torch.bfloat16
        if self.fp16 and not self.accumulate_allreduce_grads_in_fp32:
            return torch.float16
        return torch.float32


class Dtypes(NamedTuple):
    """The compute and reduction dtypes of a model that was not configured by flags, as in `megazpp.zeropp`."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype


class GatherPlan(NamedTuple):
    """The plan of the two-hop all-gather of weights."""

    fmt: BlockFormat | None  # quantization of messages; None sends the compute dtype
    keep: bool  # whether each rank keeps the secondary partition (hpZ): the messages that it received from other nodes
    differences: bool = False  # whether lossless deltas from the kept weights cross nodes, not whole weights


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
                formats += " inside nodes, lossless deltas across"
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


def _default(value: T | None, default: T) -> T:
    """Return `value`, or `default` if it is None."""
    return default if value is None else value


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Silent data corruption.

    The flags of the check.
    """

    zero_verify_interval: int | None = flag(
        None,
        "steps between two checks that all ranks gather the same weights; a difference ends the job before the update "
        "and names the unit and the ranks; a check costs one more gather of all weights (default: never)",
    )

    def __post_init__(self) -> None:
        check_positive(self, "zero_verify_interval")
