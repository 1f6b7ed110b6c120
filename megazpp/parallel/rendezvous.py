"""Where the ranks of a job find each other: the store, and who else can reach it.

| started by          | store                          | reachable from                                    |
|---------------------|--------------------------------|---------------------------------------------------|
| nobody: one process | in the process                 | nowhere                                           |
| our launcher        | in the launcher                | this machine                                      |
| torchrun            | torchrun's                     | the network: torch listens on every interface     |
| srun, by hand       | in rank 0, at MASTER_ADDR      | the network; this machine if that is its loopback |

torch's store asks nobody who they are: whoever reaches it can stop the job, or take part in it. On the network it
belongs behind a firewall (SECURITY.md).
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import torch.distributed as dist

from megazpp.parallel.launch import Place

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "localhost")
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True": whoever started the workers has the store


def loopback_store(port: int = 0, *, timeout: timedelta = timedelta(minutes=5)) -> dist.TCPStore:
    """A store in this process that listens on the loopback only.

    torch's own listens on every interface, whatever address it is given.

    Args:
        port: 0 for any that is free.
        timeout: of a client's wait for a key.
    """
    listener = socket.create_server((LOOPBACK, port))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def agent_variables(store: dist.TCPStore) -> dict[str, str]:
    """What tells workers that `store`, in the process that starts them, is theirs."""
    return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), AGENT_STORE: "True"}


def open_store(
    place: Place, timeout: timedelta, env: MutableMapping[str, str] = os.environ
) -> tuple[dist.Store, int, int]:
    """This worker's store, its rank and the number of ranks.

    Sets MASTER_ADDR and MASTER_PORT where srun has not.
    """
    if place.world_size == 1:
        return dist.HashStore(), 0, 1
    _set_missing_address(env)
    if place.rank == 0 and env["MASTER_ADDR"] in LOOPBACK_NAMES and env.get(AGENT_STORE) != "True":
        return loopback_store(int(env["MASTER_PORT"]), timeout=timeout), 0, place.world_size
    return next(dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout))


def is_on_one_machine(place: Place, env: Mapping[str, str] = os.environ) -> bool:
    """Whether it is known, once the store is open and before any rank has spoken, that no other machine takes part."""
    local = env.get("LOCAL_WORLD_SIZE") == str(place.world_size)
    return place.world_size == 1 or local or env.get("MASTER_ADDR") in LOOPBACK_NAMES


def _set_missing_address(env: MutableMapping[str, str]) -> None:
    """Give `env://` an address where srun, unlike torchrun, has left that to the program."""
    if "SLURM_PROCID" not in env:
        return
    if "MASTER_ADDR" not in env:
        hosts = subprocess.run(
            ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        env["MASTER_ADDR"] = hosts[0] if len(hosts) > 1 else LOOPBACK
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))
