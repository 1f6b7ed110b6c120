"""Environment variables that CUDA, torch's allocator and Triton read once: what they have to be, before that.

| variable                      | here                       | because                                           |
|-------------------------------|----------------------------|---------------------------------------------------|
| CUDA_DEVICE_MAX_CONNECTIONS=1 | unset                      | with one queue to the GPU a collective that waits |
|                               |                            | for the network holds back all that is launched   |
|                               |                            | after it; Megatron's scripts export it for an     |
|                               |                            | order of kernels that nothing here depends on     |
| PYTORCH_ALLOC_CONF            | expandable_segments:True   | streams have pools of their own, which fragment   |
| TRITON_CACHE_DIR              | a folder of the user's own | a home directory is often on a network file       |
|                               | on the node                | system, and every rank would compile there        |

What a user has set stays, but for the first. NCCL's are in nccl.py.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import torch

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # today's name, older ones
TRITON = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER")  # each says where compiled kernels are kept


def prepare_environment(env: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Set the table above, where torch is built for GPUs; call before anything asks CUDA for a device.

    Returns:
        A line for each choice of a user's that does not stand.
    Raises:
        ValueError: CUDA has started with a variable that it had better not seen, or the folder for Triton is somebody
            else's.
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
    if not any(name in env for name in TRITON):
        folder = node_folder("triton")
        if folder is not None:
            env[TRITON[0]] = str(folder)
    return tuple(notices)


def check_connections(env: Mapping[str, str] = os.environ) -> None:
    """
    Raises:
        ValueError: CUDA has started with a single connection.
    """
    if env.get(CONNECTIONS) == "1" and torch.cuda.is_initialized():
        raise ValueError(
            f"{CONNECTIONS}=1, and CUDA has started: no collective would overlap with the computation; unset it before "
            "the program starts"
        )


def node_folder(name: str) -> Path | None:
    """A folder on this node that nobody but this user can write to or read; made if need be.

    None where no program may be run from a temporary folder: what is kept in it are programs.

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
            raise ValueError(
                f"{folder} is not a folder of this user alone, and kernels are run from it: remove it, or set "
                f"{TRITON[0]}"
            )
    return own / name
