"""Environment variables for CUDA, PyTorch, Triton and NCCL.

CUDA, PyTorch's allocator, Triton and NCCL read these variables once, so the program sets them before their first use:

| variable                      | setting                    | reason                                              |
|-------------------------------|----------------------------|-----------------------------------------------------|
| CUDA_DEVICE_MAX_CONNECTIONS=1 | unset                      | with a single hardware queue, a collective that     |
|                               |                            | waits for the network delays every later kernel.    |
|                               |                            | Megatron-LM's scripts set it to fix the order of    |
|                               |                            | kernels; this code does not need that order         |
| PYTORCH_ALLOC_CONF            | expandable_segments:True   | each stream has its own memory pool, and the pools  |
|                               |                            | fragment                                            |
| TRITON_CACHE_DIR              | per user, on the node      | home directories are often on a network file system |
| NCCL_LAUNCH_ORDER_IMPLICIT=1  | set if several axes have   | a collective occupies SMs until its peers join. Two |
|                               | more than one rank         | GPUs that start two collectives in different orders |
|                               |                            | can deadlock; with this, NCCL 2.26 and newer start  |
|                               |                            | them in the host's order                            |

Values that the user has set are kept, except CUDA_DEVICE_MAX_CONNECTIONS=1.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import torch

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# Names of the variable with the settings of PyTorch's allocator: the current name, then older names
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
TRITON = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER")  # each one selects where Triton caches kernels


def prepare_environment(env: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Set the environment variables of CUDA, PyTorch's allocator and Triton; without a CUDA build of torch, do nothing.

    Call this before the first use of CUDA. `order_launches` (dims.py) sets NCCL_LAUNCH_ORDER_IMPLICIT, which depends on
    the layout of the ranks.

    Args:
        env: environment variables, changed in place.
    Returns:
        A notice for the log for each value of the user that was overridden.
    Raises:
        ValueError: CUDA is already initialized with CUDA_DEVICE_MAX_CONNECTIONS=1, or Triton's cache folder belongs to
            another user.
    """
    if not torch.backends.cuda.is_built():
        return ()
    check_connections(env)
    notices = []
    if env.get(CONNECTIONS) == "1":
        del env[CONNECTIONS]
        notices.append(f"{CONNECTIONS}=1 was unset: with it, no collective would overlap with compute")
    if not any(name in env for name in ALLOCATOR):
        env[ALLOCATOR[0]] = "expandable_segments:True"
    if not any(name in env for name in TRITON) and (folder := node_folder("triton")) is not None:
        env[TRITON[0]] = str(folder)
    return tuple(notices)


def check_connections(env: Mapping[str, str] = os.environ) -> None:
    """Raise a ValueError if CUDA is already initialized with CUDA_DEVICE_MAX_CONNECTIONS=1.

    With this setting no collective would overlap with compute, and CUDA reads the setting only once.
    """
    if env.get(CONNECTIONS) == "1" and torch.cuda.is_initialized():
        why = "no collective would overlap with compute"
        raise ValueError(f"CUDA was initialized with {CONNECTIONS}=1: {why}; unset it before the program starts")


def node_folder(name: str) -> Path | None:
    """Return a private folder for compiled kernels on this node, TEMP/megazpp-UID/NAME; create it if it is missing.

    TEMP is the system's folder for temporary files, usually /tmp, and UID the number of the user.

    Returns:
        The folder, or None if its file system is mounted `noexec`, because compiled kernels could not be loaded.
    Raises:
        ValueError: the folder belongs to another user, or other users have access to it.
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
                f"{folder} must be a folder that only this user can access, because compiled kernels are loaded from "
                f"it; remove it, or set {TRITON[0]}"
            )
    return own / name
