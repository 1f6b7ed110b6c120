"""The flags of ZeRO, ZeRO++ and precision, and `CommPlan`: the collectives that plan.py derives from these flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from megazpp.base.flags import Config, as_written, flag
from megazpp.kernels.formats import BlockFormat

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(Config):
    """ZeRO and ZeRO++.

    These flags choose which training states are sharded over the data ranks, and in which formats ranks communicate
    weights and gradients.

    Attributes:
        zero_stage: ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters (default:
            3).
        use_distributed_optimizer: Megatron-LM's name for --zero-stage 1; not with --zeropp.
        zeropp: ZeRO++: quantized collectives in two hops (qwZ, hpZ and qgZ).
        zero_quantized_weights: qwZ: gather weights as 8-bit blocks (default: on with --zeropp).
        zero_hpz_partition_size: hpZ: number of data ranks in a node that share a secondary copy of the weights, from
            which every gather reads until the weights change; auto: all ranks of a node, 1: no copy (default: auto with
            --zeropp, else 1).
        zero_quantized_gradients: qgZ: reduce gradients as 8-bit and 4-bit blocks (default: on with --zeropp).
        zero_weight_bits: bits per gathered weight: 8, or 16 to send the compute dtype without quantization (default:
            8).
        zero_weight_delta: lossless: nodes exchange exact changes of 16-bit weights; none: whole weights; auto: lossless
            with --zeropp and 16-bit compute if it fits into memory and is not estimated to be slower than int8,
            otherwise none.
        zero_gradient_bits: bits per gradient inside a node and across nodes: 4, 8, or 16 to send gradients unquantized:
            inside a node in the dtype of reductions, across nodes in fp32, or in bf16 with --zero-accumulate-in-bf16.
        zero_error_feedback: add a moving average of the cross-node quantization errors to the next step's gradients
            (LoCo); takes 1 byte of device memory per parameter, divided among the ranks of a node.
        zero_error_feedback_beta: weight of the earlier errors in the moving average of error feedback; 0 feeds back
            only the last step's error.
        zero_error_feedback_reset: iterations after which error feedback is reset to zero, as in LoCo (default: never).
        zero_accumulate_in_bf16: accumulate the gradients that wait for the cross-node hop in bf16 instead of fp32, in
            half the memory.
        zero_cross_every_microbatch: reduce gradients across nodes in every micro-batch instead of once per step: no
            memory for accumulation, but more traffic.
        zero_verify_interval: steps between two checks that all ranks gather the same weights; if weights differ, the
            job ends before the update and names the unit and the ranks; a check costs one more gather of all weights
            (default: never).
        optimizer_cpu_offload: keep fp32 weights, moments and the gradients of a step in host memory (16 bytes per
            parameter); the optimizer updates them on the device, one sharding unit after the other, with identical
            results.
        zero_offload_partial_sums: also keep the gradients that wait for the cross-node hop in host memory; on the
            device they would take 4 bytes per parameter, divided among the ranks of a node.
        overlap_param_gather: overlap the gathers of weights with the forward and the backward (default: on with
            --zeropp).
        overlap_grad_reduce: overlap the reduction of gradients with the rest of the backward (default: on with
            --zeropp).
    """

    zero_stage: Literal[0, 1, 2, 3] | None = flag(None, common=True)
    use_distributed_optimizer: bool = flag(False)
    zeropp: bool = flag(False, common=True)
    zero_quantized_weights: bool | None = flag(None)
    zero_hpz_partition_size: str | None = flag(None)
    zero_quantized_gradients: bool | None = flag(None)
    zero_weight_bits: Literal[8, 16] | None = flag(None)
    zero_weight_delta: Literal["auto", "lossless", "none"] = flag("auto")
    zero_gradient_bits: tuple[Literal[4, 8, 16], Literal[4, 8, 16]] = flag((8, 4))
    zero_error_feedback: bool = flag(True)
    zero_error_feedback_beta: float = flag(0.8, must_be="below one")
    zero_error_feedback_reset: int | None = flag(None, must_be="positive")
    zero_accumulate_in_bf16: bool = flag(False)
    zero_cross_every_microbatch: bool = flag(False)
    zero_verify_interval: int | None = flag(None, must_be="positive")

    optimizer_cpu_offload: bool = flag(False)
    zero_offload_partial_sums: bool = flag(False, needs="--optimizer-cpu-offload")

    overlap_param_gather: bool | None = flag(None)
    overlap_grad_reduce: bool | None = flag(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_distributed_optimizer and self.stage == 0:
            raise ValueError(
                "--use-distributed-optimizer shards the moments, and --zero-stage 0 shards nothing: leave one of them "
                "out"
            )
        if self.zero_weight_delta == "lossless" and self.hpz_partition_size == "1":
            raise ValueError(
                "--zero-weight-delta lossless sends deltas from the weights that a node keeps, so it requires "
                "--zero-hpz-partition-size auto, not 1: set it to auto, or leave --zero-weight-delta out"
            )
        if (asked := self.two_hop_flags) and self.stage != 3:
            given = f"--zero-stage {self.stage}"
            if self.zero_stage is None:
                given = f"--use-distributed-optimizer, which selects {given}"
            raise ValueError(
                f"{asked[0]} requires --zero-stage 3, the default, not {given}: remove one of the two flags"
            )

    @property
    def two_hop_flags(self) -> list[str]:
        """The flags that request collectives in two hops instead of FSDP2's, spelled as on a command line.

        The first flag in the list is one that the user has set. If it is --zeropp, the user may have set none of the
        other flags, because --zeropp implies them. The list is empty if no flag requests two hops.
        """
        wanted = {
            "--zeropp": self.zeropp,
            "--zero-weight-delta lossless": self.zero_weight_delta == "lossless",
            "--zero-quantized-weights": self.quantizes_weights and self.weight_bits < 16,
            f"--zero-hpz-partition-size {self.zero_hpz_partition_size}": self.hpz_partition_size != "1",
            "--zero-quantized-gradients": self.quantizes_gradients,
        }
        return [name for name, on in wanted.items() if on]

    @property
    def weight_bits(self) -> int:
        """The bits per weight with which ranks gather whole weights (not deltas): 8, or 16 without quantization."""
        return self.zero_weight_bits or 8

    @property
    def stage(self) -> Literal[0, 1, 2, 3]:
        """The ZeRO stage, from --zero-stage or --use-distributed-optimizer; 3 by default."""
        if self.zero_stage is not None:
            return self.zero_stage
        return 1 if self.use_distributed_optimizer else 3

    @property
    def quantizes_weights(self) -> bool:
        """True if qwZ, the quantized all-gather of weights, is on: set explicitly or implied by --zeropp."""
        return self.zeropp if self.zero_quantized_weights is None else self.zero_quantized_weights

    @property
    def quantizes_gradients(self) -> bool:
        """True if qgZ, the quantized reduction of gradients, is on: set explicitly or implied by --zeropp."""
        return self.zeropp if self.zero_quantized_gradients is None else self.zero_quantized_gradients

    @property
    def chooses_weight_delta(self) -> bool:
        """True if --zero-weight-delta is auto, --zeropp is set, and no flag fixes the format of weights.

        Only then the run chooses between lossless deltas and int8 blocks for the weights that cross nodes.
        """
        return self.zero_weight_delta == "auto" and self.zeropp and not self.weight_format_flags

    @property
    def weight_format_flags(self) -> tuple[str, ...]:
        """The flags that the user has set and that fix the format of gathered weights, spelled as on a command line.

        If any of these flags is set, --zero-weight-delta auto chooses no format. Only three flags fix the format:
        --zero-quantized-weights and --zero-weight-bits with any value, and --zero-hpz-partition-size 1, with which
        nodes keep no weights to which deltas could be added.
        """
        names = [name for name in ("zero_quantized_weights", "zero_weight_bits") if getattr(self, name) is not None]
        names += ["zero_hpz_partition_size"] if self.zero_hpz_partition_size == "1" else []
        return tuple(as_written(self, field) for field in dataclasses.fields(self) if field.name in names)

    @property
    def hpz_partition_size(self) -> str:
        """The value of --zero-hpz-partition-size. If it is not set, --zeropp implies "auto"; otherwise it is "1"."""
        implied = "auto" if self.zeropp else "1"
        return implied if self.zero_hpz_partition_size is None else self.zero_hpz_partition_size

    @property
    def distinguishes_nodes(self) -> bool:
        """True if a flag makes collectives inside nodes and across nodes differ, so that the run must detect nodes."""
        return self.zeropp or self.quantizes_weights or self.hpz_partition_size != "1" or self.quantizes_gradients

    def stage_over(self, num_ranks: int) -> int:
        """Return the ZeRO stage that is used for parameters that are sharded over `num_ranks` ranks.

        With one rank a gather is only a cast to the compute dtype. Stage 2 casts once per weight update, stage 3 would
        cast at each use. So stage 3 becomes stage 2 with one rank. The exception is --optimizer-cpu-offload: under
        stage 3 the gathered weights are freed after each use, which saves device memory.
        """
        return min(self.stage, 2) if num_ranks == 1 and not self.optimizer_cpu_offload else self.stage


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Config):
    """Precision.

    Master weights are always fp32. Layers compute in fp32, bf16 or fp16.

    Attributes:
        fp16: compute in fp16 with loss scaling; master weights stay fp32.
        bf16: compute in bf16; master weights stay fp32.
        accumulate_allreduce_grads_in_fp32: accumulate and reduce gradients in fp32; with --bf16 this is on unless
            --grad-reduce-in-bf16 is set.
        grad_reduce_in_bf16: reduce gradients in bf16, with half the bytes and less exact sums; with gradients in two
            hops (--zero-quantized-gradients), unquantized sums cross nodes in bf16 only with --zero-accumulate-in-bf16.
    """

    fp16: bool = flag(False)
    bf16: bool = flag(False, common=True)
    accumulate_allreduce_grads_in_fp32: bool = flag(False)
    grad_reduce_in_bf16: bool = flag(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp16 and self.bf16:
            raise ValueError("--fp16 and --bf16 are both set: choose one")
        if self.grad_reduce_in_bf16 and not self.bf16:
            raise ValueError(
                "--grad-reduce-in-bf16 requires --bf16, which is off: add --bf16, or leave --grad-reduce-in-bf16 out"
            )
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
    """The compute and reduction dtypes of a model of `megazpp.zeropp`, which reads them from FSDP2, not from flags."""

    param_dtype: torch.dtype  # dtype in which weights are gathered and layers compute
    reduce_dtype: torch.dtype  # dtype in which gradients are reduced


class GatherPlan(NamedTuple):
    """The plan of the all-gather of weights in two hops, across nodes and inside a node."""

    fmt: BlockFormat | None  # block format in which ranks send weights; None sends the compute dtype, not quantized
    keep: bool  # True if each rank keeps the secondary partition (hpZ): the messages that it received from other nodes
    differences: bool = False  # True if lossless deltas from the kept weights cross nodes, instead of whole weights


class ReducePlan(NamedTuple):
    """The plan of the reduce-scatter of gradients in two hops: the block format of the gradients in each hop.

    `local` is the hop inside a node, `cross` the hop across nodes. None means that a hop does not quantize gradients.
    """

    local: BlockFormat | None
    cross: BlockFormat | None


class CommPlan(NamedTuple):
    """The plan of the collectives that replace FSDP2's all-gather and reduce-scatter.

    `plan_comm` makes the plan once per run from the flags. The run logs it and passes it to `shard_model`.
    """

    gather: GatherPlan | None = None  # None: weights are gathered in one hop, as by FSDP2
    reduce: ReducePlan | None = None  # None: gradients are reduced in one hop, as by FSDP2
    # `overlap_gather` is True if gathers of weights overlap with the compute, `overlap_reduce` if reductions of
    # gradients do. On CUDA, FSDP2 always overlaps collectives in one hop, whatever the two fields say.
    overlap_gather: bool = False
    overlap_reduce: bool = False
    notices: tuple[str, ...] = ()  # lines for the log about flags that have no effect

    def describe(self) -> str:
        """Return one sentence for the log that says how ranks gather weights and reduce gradients."""
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
    """Return a block format in words for the log, such as "int8 in blocks of 256"; "not quantized" for None."""
    return "not quantized" if fmt is None else f"int{fmt.bits} in blocks of {fmt.block_size}"
