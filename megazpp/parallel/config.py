"""The flags of parallelism, of worker processes and of NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megazpp.base.address import MOST_PORT, parse_host
from megazpp.base.flags import MOST_PROCESSES, Config, flag

# Largest timeout of a flag in minutes, a year. A much longer timeout would overflow clock values.
YEAR_MINUTES = 366 * 24 * 60


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Config):
    """Parallelism.

    The degrees of tensor, context and data parallelism.

    Attributes:
        tensor_model_parallel_size: number of ranks that split the matrices of every layer.
        pipeline_model_parallel_size: pipeline stages; only 1 is supported.
        context_parallel_size: number of ranks of a node that split the tokens of every sample and exchange them for
            heads in attention (Ulysses, arXiv 2309.14509); divides the data-parallel size, but not the number of
            parameter shards.
        allow_cp_across_nodes: allow context-parallel groups that span nodes, whose activations then cross the network.
        expert_model_parallel_size: number of ranks of a node that split the experts of each layer; divides
            --num-experts.
        sequence_parallel: split activations along the sequence between tensor-parallel regions.
        num_distributed_optimizer_instances: number of copies of the sharded model (HSDP): shard inside a copy,
            all-reduce gradients between copies.
        hsdp: keep one copy of the sharded model per node (per NVLink domain, if that is larger).
    """

    tensor_model_parallel_size: int = flag(1, common=True, must_be="positive")
    pipeline_model_parallel_size: int = flag(1)
    context_parallel_size: int = flag(1, must_be="positive")
    allow_cp_across_nodes: bool = flag(False)
    expert_model_parallel_size: int = flag(1, must_be="positive")
    sequence_parallel: bool = flag(False)
    num_distributed_optimizer_instances: int = flag(1, must_be="positive")
    hsdp: bool = flag(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (size := self.pipeline_model_parallel_size) != 1:
            raise ValueError(
                f"--pipeline-model-parallel-size {size} is not supported; split the model by "
                "--tensor-model-parallel-size and --zero-stage 3 (the default) instead"
            )


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Config):
    """Launch.

    Worker processes, the communication back end and the seed.

    Attributes:
        nproc: number of local worker processes (default: one per GPU; on CPUs 2 to 4 for training, otherwise one per
            tensor-parallel rank).
        nnodes: number of hosts; start this command on each, with its own --node-rank.
        node_rank: number of this host, from 0; host 0 is at --master-addr.
        master_addr: address of host 0, at which the others connect to it.
        master_port: TCP port of host 0, which its firewall must allow.
        max_restarts: number of times to restart all local workers after one has failed (under torchrun, use torchrun's
            --max-restarts).
        distributed_backend: communication library (default: nccl with GPUs, gloo without).
        distributed_timeout_minutes: minutes without progress, up to the end of the first step, after which the job
            counts as hung and is ended.
        distributed_timeout_seconds_after_init: seconds without progress, in steps after the first one, after which the
            job counts as hung and is ended; only the first step compiles kernels and connects ranks (default: half of
            --distributed-timeout-minutes).
        local_rank: ignored, because the environment variables of the launcher set the rank; accepted because old
            launchers pass it.
        seed: seed for the initial weights, the data order and dropout.
    """

    nproc: int | None = flag(None, common=True, must_be="positive", most=MOST_PROCESSES, per_host=True)
    nnodes: int | None = flag(None, common=True, must_be="positive")
    node_rank: int | None = flag(None, common=True, must_be="not negative", per_host=True, needs="--nnodes")
    master_addr: str | None = flag(None, common=True, per_host=True, needs="--nnodes")
    master_port: int = flag(29500, must_be="positive", most=(MOST_PORT, "the largest TCP port"))
    max_restarts: int = flag(0, must_be="not negative", per_host=True)
    distributed_backend: Literal["nccl", "gloo"] | None = flag(None)
    distributed_timeout_minutes: float = flag(10, must_be="positive", most=(YEAR_MINUTES, "a year"))
    distributed_timeout_seconds_after_init: float | None = flag(
        None, must_be="positive", most=(60 * YEAR_MINUTES, "a year")
    )
    local_rank: int | None = flag(None, aliases=("--local_rank",), per_host=True)
    seed: int = flag(1234, must_be="not negative", most=(2**32 - 1, "the largest seed of numpy"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nnodes is not None and self.node_rank is not None and self.node_rank >= self.nnodes:
            raise ValueError(
                f"--node-rank {self.node_rank} is not a number from 0 to {self.nnodes - 1}: with --nnodes "
                f"{self.nnodes}, hosts are numbered from 0"
            )
        if self.master_addr is not None:
            parse_host(self.master_addr, "--master-addr")
        if self.num_nodes > 1 and self.max_restarts:
            raise ValueError(
                f"--max-restarts {self.max_restarts} is not supported with --nnodes {self.nnodes}: leave it out, and "
                "after a failure start the command again on each host, with --load"
            )

    @property
    def num_nodes(self) -> int:
        """The number of hosts on which MegaZ++'s own launcher starts workers: --nnodes, or 1 without this flag."""
        return self.nnodes or 1

    @property
    def hang_seconds(self) -> tuple[float, float]:
        """Two limits of the watchdog: the seconds without progress after which a job counts as hung.

        The first limit holds up to the end of the first step, the second limit for all later steps.
        """
        first, later = 60 * self.distributed_timeout_minutes, self.distributed_timeout_seconds_after_init
        return first, first / 2 if later is None else later


@dataclass(frozen=True, kw_only=True)
class NcclConfig(Config):
    """NCCL.

    Stream priority and channels of the NCCL process groups. No effect with gloo.

    A channel of NCCL is one CTA, which occupies an SM while its collective runs. NCCL may use up to 32 or 64 of the
    132 SMs of an H100. The network is much slower than NVLink, so inter-node collectives may need only a few channels.
    8 is a value to try; no value has been measured.

    Attributes:
        nccl_high_priority: give tensor-parallel and intra-node groups high-priority streams, so that their kernels
            start first.
        nccl_cross_max_ctas: largest number of SMs that an inter-node collective may occupy; a lower number leaves more
            SMs to the matmuls (default: chosen by NCCL).
    """

    nccl_high_priority: bool = flag(True)
    # NCCL's limit is 64 CTAs (channels) per collective since version 2.25, and 32 in earlier versions.
    nccl_cross_max_ctas: int | None = flag(None, must_be="positive", most=(64, "NCCL's limit"))
