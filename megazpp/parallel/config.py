"""The flags of parallelism, of worker processes and of NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megazpp.base.address import parse_host
from megazpp.base.flags import Config, flag, spelling

LARGEST_SEED = 2**32 - 1  # largest seed that numpy accepts
YEAR_SECONDS = 366 * 24 * 3600.0  # longest timeout that a flag accepts; a much longer one would overflow clock values
MOST_CTAS = 64  # NCCL's upper limit for CTAs (channels) per collective, since version 2.25 (32 before)


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
        node_rank: number of this host, from 0; host 0 has the address --master-addr.
        master_addr: address of host 0, at which the others connect to it.
        master_port: TCP port of host 0, which its firewall must allow.
        max_restarts: number of times to restart all local workers after one has failed (under torchrun, use torchrun's
            --max-restarts).
        distributed_backend: communication library (default: nccl with GPUs, gloo without).
        distributed_timeout_minutes: minutes without progress, up to the end of the first step, after which the job
            counts as hung and is ended.
        distributed_timeout_seconds_after_init: limit for steps after the first one, when kernels are compiled and ranks
            are connected: seconds without progress, after which the job counts as hung and is ended (default: half of
            --distributed-timeout-minutes).
        local_rank: ignored; accepted because old launchers pass it (the environment decides).
        seed: seed for the initial weights, the data order and dropout.
    """

    nproc: int | None = flag(None, common=True, must_be="positive", per_host=True)
    nnodes: int | None = flag(None, common=True, must_be="positive")
    node_rank: int | None = flag(None, common=True, must_be="not negative", per_host=True)
    master_addr: str | None = flag(None, common=True, per_host=True)
    master_port: int = flag(29500)
    max_restarts: int = flag(0, must_be="not negative", per_host=True)
    distributed_backend: Literal["nccl", "gloo"] | None = flag(None)
    distributed_timeout_minutes: float = flag(10, must_be="positive")
    distributed_timeout_seconds_after_init: float | None = flag(None, must_be="positive")
    local_rank: int | None = flag(None, aliases=("--local_rank",), per_host=True)
    seed: int = flag(1234)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("node_rank", "master_addr"):
            if self.nnodes is None and (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{spelling(self, name)} {value} needs --nnodes, the number of hosts: add --nnodes, or leave the "
                    "flag out for a job on one host"
                )
        if self.node_rank is not None and self.node_rank >= self.num_nodes:
            raise ValueError(
                f"--node-rank {self.node_rank} is not a number from 0 to {self.num_nodes - 1}: with --nnodes "
                f"{self.num_nodes}, hosts are numbered from 0"
            )
        if self.master_addr is not None:
            parse_host(self.master_addr, "--master-addr")
        if not 0 < self.master_port < 2**16:
            raise ValueError(f"--master-port {self.master_port} is not a TCP port: give a number from 1 to 65535")
        if self.num_nodes > 1 and self.max_restarts:
            raise ValueError(
                f"--max-restarts {self.max_restarts} is not supported with --nnodes {self.nnodes}: leave it out, and "
                "after a failure start the command again on each host, with --load"
            )
        if not 0 <= self.seed <= LARGEST_SEED:
            raise ValueError(f"--seed {self.seed} is not a number from 0 to {LARGEST_SEED}, as numpy requires")
        names = ("distributed_timeout_minutes", "distributed_timeout_seconds_after_init")
        for name, seconds in zip(names, self.hang_seconds, strict=True):
            if seconds > YEAR_SECONDS:
                raise ValueError(
                    f"{spelling(self, name)} {getattr(self, name)} is more than a year, the upper limit: give less"
                )

    @property
    def num_nodes(self) -> int:
        """The number of hosts on which MegaZ++'s own launcher starts workers: --nnodes, or 1."""
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
    nccl_cross_max_ctas: int | None = flag(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (ctas := self.nccl_cross_max_ctas) is not None and not 1 <= ctas <= MOST_CTAS:
            raise ValueError(f"--nccl-cross-max-ctas {ctas} is not a number from 1 to {MOST_CTAS}, NCCL's limits")
