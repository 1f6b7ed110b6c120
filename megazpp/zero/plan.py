"""Make the plan of the collectives that replace FSDP2's, from the flags of ZeRO and ZeRO++ and the layout of ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from megazpp.base.flags import as_written
from megazpp.kernels.formats import BlockFormat
from megazpp.topology.layout import Layout
from megazpp.zero.config import CommPlan, GatherPlan, ReducePlan, ZeroConfig

if TYPE_CHECKING:
    import torch

# Number of elements per quantization block: of gathered weights, of DiLoCo's quantized weight deltas, and of gradients.
WEIGHT_BLOCK, DIFFERENCE_BLOCK, GRADIENT_BLOCK = 256, 128, 128


class WeightDelta(NamedTuple):
    """The format that --zero-weight-delta auto has chosen for the weights that cross nodes.

    Attributes:
        lossless: True for lossless deltas, False for whole weights in int8 blocks.
        reason: reason for the choice, a clause that the log puts after "because".
    """

    lossless: bool
    reason: str

    def describe(self) -> str:
        """Return one sentence for the log: which format --zero-weight-delta auto has chosen, and why."""
        chosen = "lossless deltas" if self.lossless else "int8 blocks"
        return f"--zero-weight-delta auto: weights cross nodes as {chosen}, because {self.reason}"


def default_weight_delta(param_dtype: torch.dtype) -> WeightDelta:
    """Return the format in which weights cross nodes with --zero-weight-delta auto, if the links' speed is unknown.

    The format is lossless deltas for 16-bit compute dtypes, and int8 blocks for all other compute dtypes.

    Args:
        param_dtype: dtype in which weights are gathered and layers compute.
    """
    if param_dtype.itemsize != 2:
        dtype = str(param_dtype).removeprefix("torch.")
        return WeightDelta(False, f"with {dtype} compute nearly all weights change in every step")
    return WeightDelta(True, "the speed of the links is unknown")


def plan_comm(config: ZeroConfig, layout: Layout, param_dtype: torch.dtype, *, lossless: bool = False) -> CommPlan:
    """Return the plan of the collectives that replace FSDP2's, as the flags ask for them on this layout of ranks.

    Args:
        config: flags of ZeRO and ZeRO++.
        layout: numbers of data ranks inside a node, across nodes, and over replicas.
        param_dtype: dtype in which weights are gathered and layers compute.
        lossless: format that --zero-weight-delta auto has chosen for weights that cross nodes: True for lossless
            deltas, False for int8 blocks. It is ignored if --zero-weight-delta is not auto.
    Raises:
        ValueError: the flags contradict each other or the layout; the message names the flags and their values.
    """
    # ---- decide whether nodes keep weights (hpZ), and whether weights cross nodes whole or as lossless deltas
    if config.optimizer_cpu_offload:
        _check_host_states(config, layout)
    keep = _keeps_secondary(config, layout)
    lossless = lossless if config.chooses_weight_delta else config.zero_weight_delta == "lossless"
    if lossless and param_dtype.itemsize != 2:
        raise ValueError(
            f"--zero-weight-delta lossless requires --bf16 or --fp16, not {param_dtype}: nearly all weights of this "
            "dtype change in every step, so deltas would save nothing; add --bf16, or leave --zero-weight-delta out"
        )
    quantized_weights = config.quantizes_weights and config.weight_bits < 16 and not lossless
    quantized_gradients = config.quantizes_gradients

    # ---- decide whether gathers and reductions overlap with the compute, which only stage 3 supports
    overlap_gather, overlap_reduce = (
        (config.zeropp if asked_for is None else asked_for) and config.stage == 3
        for asked_for in (config.overlap_param_gather, config.overlap_grad_reduce)
    )
    # With HSDP, FSDP2 all-reduces gradients over the replicas right after each reduce-scatter. The reduce-scatter must
    # be complete then, so it cannot overlap with the rest of the backward.
    overlap_reduce = overlap_reduce and layout.replicate == 1
    plan, notices = CommPlan(overlap_gather=overlap_gather, overlap_reduce=overlap_reduce), list[str]()

    # ---- choose the formats of the two-hop collectives; with one node, FSDP2's collectives in one hop are used
    if config.two_hop_flags and layout.cross == 1:
        notices.append(
            f"{config.two_hop_flags[0]} has no effect: no traffic crosses nodes, so ZeRO-3's collectives are used"
        )
        quantized_weights = quantized_gradients = keep = False
    if layout.local == 1 and keep:
        notices.append("each node has one data rank, so each rank keeps a full copy of the weights for its node (hpZ)")
    if quantized_weights or keep:
        fmt = block_format(config.weight_bits, WEIGHT_BLOCK) if quantized_weights else None
        plan = plan._replace(gather=GatherPlan(fmt, keep, lossless))
    if quantized_gradients:
        local, across = config.zero_gradient_bits
        # 4-bit blocks between nodes clip large gradients only with error feedback, which sends the rest one step later.
        clip = across == 4 and config.zero_error_feedback
        reduce = ReducePlan(block_format(local, GRADIENT_BLOCK), block_format(across, GRADIENT_BLOCK, clip=clip))
        plan = plan._replace(reduce=reduce)
    if unused := _without_effect(config, plan):
        notices.append(unused)
    return plan._replace(notices=tuple(notices))


def _check_host_states(config: ZeroConfig, layout: Layout) -> None:
    """Raise a ValueError if --optimizer-cpu-offload does not support the ZeRO stage or the layout of ranks.

    `ZeroConfig` itself accepts --optimizer-cpu-offload with every stage, because the planner's search creates a
    `ZeroConfig` for each stage.
    """
    if config.stage != 3:
        raise ValueError(
            f"--optimizer-cpu-offload requires --zero-stage 3, the default, not {config.stage}: remove one of the flags"
        )
    if layout.replicate > 1:
        raise ValueError(
            f"--optimizer-cpu-offload does not support {layout.replicate} replicas of the model (--hsdp, "
            "--num-distributed-optimizer-instances): use ZeRO-3 or --zeropp over all data ranks"
        )


def _keeps_secondary(config: ZeroConfig, layout: Layout) -> bool:
    """Return True if the flags select ZeRO++'s secondary partition (hpZ), which keeps received weights for later uses.

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
    """Return a line for the log that names flags without effect: the user has set them, but `plan` does not use them.

    Returns None if every flag that the user has set has an effect.
    """
    # `two_hops` is True if gradients are reduced in two hops, `crossing` if the cross-node hop quantizes them. `used`
    # has the flags that may lack an effect: False if `plan` does not use the flag.
    two_hops, crossing = plan.reduce is not None, plan.reduce is not None and plan.reduce.cross is not None
    used = {
        "zero_quantized_weights": config.weight_bits < 16 and not (plan.gather and plan.gather.differences),
        "zero_weight_bits": config.weight_bits == 8
        or (config.quantizes_weights and not (plan.gather and plan.gather.differences)),
        "zero_gradient_bits": two_hops,
        "zero_error_feedback_beta": crossing and config.zero_error_feedback,
        "zero_error_feedback_reset": crossing and config.zero_error_feedback,
        "zero_accumulate_in_bf16": two_hops,
        "zero_cross_every_microbatch": two_hops,
        "zero_offload_partial_sums": two_hops and not config.zero_cross_every_microbatch,
        "overlap_param_gather": plan.overlap_gather or not config.overlap_param_gather,
        "overlap_grad_reduce": plan.overlap_reduce or not config.overlap_grad_reduce,
    }
    fields = [field for field in dataclasses.fields(config) if not used.get(field.name, True)]
    unused = [as_written(config, field) for field in fields if getattr(config, field.name) != field.default]
    return f"ignored on this layout: {', '.join(unused)}" if unused else None


def block_format(bits: int, block_size: int, *, clip: bool = False) -> BlockFormat | None:
    """Return the block format for a flag's number of bits; None for 16 bits, which means no quantization.

    Args:
        bits: 4, 8 or 16 bits per element.
        block_size: number of elements that share one scale.
        clip: True if 4-bit blocks clip their largest elements, see `BlockFormat`.
    """
    return None if bits == 16 else BlockFormat(bits, block_size, clip)  # type: ignore[arg-type]
