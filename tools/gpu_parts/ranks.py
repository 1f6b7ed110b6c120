"""Several ranks on one GPU: each its own node to NCCL, which refuses two ranks of a node on one device.

They talk through sockets on the loopback. Without NVIDIA's multi-process service (MPS) the GPU gives each process its
turn, and a collective takes as many turns as it has hops; with it they run side by side.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from rank_processes import RankProcesses, RankSite, free_port, master_variables

ON_ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",  # ordinary memory: what a sandbox may not have is needed by none of the above
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    "GLOO_SOCKET_IFNAME": "lo",
}
ON_THE_CPU = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
PROBE_SECONDS = 20
POLL_SECONDS = 0.1


@contextlib.contextmanager
def running(command: Sequence[str], world_size: int, env: Mapping[str, str]) -> Iterator[RankProcesses]:
    """Run `command` once per rank, all on this machine, to NCCL each on a host of its own; end what is left of them."""
    sites = [
        RankSite(
            env={
                **env,
                "NCCL_HOSTID": f"rank{rank}",
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world_size),
                "GROUP_RANK": "0",
            }
        )
        for rank in range(world_size)
    ]
    ranks = RankProcesses(command, 1, sites=sites).start(master_variables("127.0.0.1", free_port()))
    try:
        yield ranks
    finally:
        ranks.stop()


def wait_for(ranks: RankProcesses, until: float) -> int | None:
    """The exit code of the job; None if it is not over at `until`, by the monotonic clock."""
    while (code := ranks.poll()) is None and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return code


@contextlib.contextmanager
def side_by_side() -> Iterator[Mapping[str, str]]:
    """The variables with which processes share the GPU through MPS; none where it is not there or does not work."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:  # sockets want a short path
        env = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        everything = os.environ | env
        subprocess.run([control, "-d"], env=everything, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield env if _works(everything) else {}
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input=b"quit\n", env=everything, capture_output=True, timeout=PROBE_SECONDS)


def _works(env: Mapping[str, str]) -> bool:
    try:
        probe = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda').item()"]
        return subprocess.run(probe, env=env, capture_output=True, timeout=PROBE_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False
