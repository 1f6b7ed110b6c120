"""Variables that CUDA, torch's allocator, Triton and NCCL read once, and NCCL's options of each process group.

| variable                      | here                       | because                                           |
|-------------------------------|----------------------------|---------------------------------------------------|
| CUDA_DEVICE_MAX_CONNECTIONS=1 | unset                      | with one queue to the GPU a collective that waits |
|                               |                            | for the network holds back all that is launched   |
|                               |                            | after it; Megatron's scripts export it for an     |
|                               |                            | order of kernels that nothing here depends on     |
| PYTORCH_ALLOC_CONF            | expandable_segments:True   | streams have pools of their own, which fragment   |
| TRITON_CACHE_DIR              | the user's, on the node    | a home directory is often on a network            |
| NCCL_LAUNCH_ORDER_IMPLICIT=1  | set where several axes     | collectives hold SMs until their peers have come: |
|                               | have more than one rank    | GPUs that start two in another order wait for     |
|                               |                            | ever; NCCL 2.26 keeps the host's order            |

A user's own setting stays, but for the first.

| group  | priority | channels | because                                                                             |
|--------|----------|----------|-------------------------------------------------------------------------------------|
| tp     | high     | NCCL's   | the next matmul waits for it, several times per layer                               |
| local  | high     | NCCL's   | just in time for the next layer; so is shard where all data ranks are in one domain |
| cross  | normal   | the flag | has a whole step's time; must not take SMs from matmuls for as long as it runs      |
| island | normal   | the flag | the same, and the time of several steps                                             |
| others | normal   | NCCL's   | plain ZeRO's ring over all data ranks, all-reduces between copies                   |

Since torch 2.8 a blocking collective runs on the caller's stream, a hop on its queue's (comm_queue.py), which has the
same priority; the group's own stream has only asynchronous ones, of which a step has none.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megazpp.base.flags import flag
from megazpp.topology.layout import AXES, Layout

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # today's name, older ones
TRITON = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER")  # each says where compiled kernels are kept
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
MOST_CTAS = 64  # of NCCL 2.25 and newer; 32 before


@dataclass(frozen=True, kw_only=True)
class NcclConfig:
    """NCCL.

    Priority and channels of the process groups; no effect on gloo.

    A CTA of NCCL's is a channel and occupies an SM while its collective runs; NCCL takes up to 32 or 64 of an H100's
    132. The network is a small part of NVLink's rate, so the cross axis may need few (try 8; none is measured).
    """

    nccl_high_priority: bool = flag(
        True, "streams of high priority for tensor-parallel and node-local groups: their kernels start first"
    )
    nccl_cross_max_ctas: int | None = flag(
        None, "SMs that a collective between nodes may occupy; fewer leave more to the matmuls (NCCL decides)"
    )

    def __post_init__(self) -> None:
        if self.nccl_cross_max_ctas is not None and not 1 <= self.nccl_cross_max_ctas <= MOST_CTAS:
            raise ValueError(f"--nccl-cross-max-ctas {self.nccl_cross_max_ctas} is not a number from 1 to {MOST_CTAS}")


def prepare_environment(env: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Set the table's variables but NCCL's, where torch is built for GPUs; call before anything asks CUDA for a device.

    Returns a line for each choice of a user's that does not stand.

    Raises:
        ValueError: CUDA has started with a single connection, or the folder for Triton is somebody else's.
    """
    if not torch.backends.cuda.is_built():
        return ()
    check_connections(env)
    notices = []
    if env.get(CONNECTIONS) == "1":
        del env[CONNECTIONS]
        notices.append(f"{CONNECTIONS}=1 is unset: with it no collective would overlap with the computation")
    if not any(name in env for name in ALLOCATOR):
        env[ALLOCATOR[0]] = "expandable_segments:True"
    if not any(name in env for name in TRITON) and (folder := node_folder("triton")) is not None:
        env[TRITON[0]] = str(folder)
    return tuple(notices)


def check_connections(env: Mapping[str, str] = os.environ) -> None:
    """Raise a ValueError if CUDA has started with a single connection."""
    if env.get(CONNECTIONS) == "1" and torch.cuda.is_initialized():
        why = "no collective would overlap with the computation"
        raise ValueError(f"{CONNECTIONS}=1, and CUDA has started: {why}; unset it before the program starts")


def node_folder(name: str) -> Path | None:
    """A folder on this node of this user alone; None where no program, as compiled kernels are, may be run from it.

    Raises:
        ValueError: somebody else has made it, or others can write to it.
    """
    base = Path(tempfile.gettempdir())
    if os.statvfs(base).f_flag & os.ST_NOEXEC:
        return None
    own = base / f"megazpp-{os.getuid()}"
    for folder in (own, own / name):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            problem = "is not a folder of this user alone, and kernels are run from it"
            raise ValueError(f"{folder} {problem}: remove it, or set {TRITON[0]}")
    return own / name


def order_launches(layout: Layout, env: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL keep the order of launches where several axes have more than one rank; before the first collective."""
    # islands of one rank count too: their hops are in flight beside collectives of all ranks
    if layout.island > 1 or sum(layout.axis_size(axis) > 1 for axis in AXES) > 1:
        env.setdefault(LAUNCH_ORDER, "1")


def axis_options(axis: str, layout: Layout, config: NcclConfig) -> Any:
    """New `pg_options` for a group of `axis`, which keeps and changes them; None on gloo and for one rank."""
    if dist.get_backend() != "nccl" or layout.axis_size(axis) == 1:
        return None
    inside = axis in ("tp", "cp", "local") or (axis == "shard" and layout.cross == 1)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=inside and config.nccl_high_priority)
    if axis in ("cross", "island") and config.nccl_cross_max_ctas is not None:
        options.config.max_ctas = config.nccl_cross_max_ctas
    return options
