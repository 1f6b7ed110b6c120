"""Detection of the launcher that started this process, from environment variables. This file does not import torch.

Supported launchers and their variables:

| launcher                  | rank, number of ranks        | rank and number of ranks on this node              |
|---------------------------|------------------------------|----------------------------------------------------|
| torchrun, or set by users | RANK, WORLD_SIZE             | LOCAL_RANK, LOCAL_WORLD_SIZE                       |
| mpirun (Open MPI)         | OMPI_COMM_WORLD_RANK, _SIZE  | OMPI_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE            |
| mpirun (MVAPICH2)         | MV2_COMM_WORLD_RANK, _SIZE   | MV2_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE             |
| horovodrun                | HOROVOD_RANK, _SIZE          | HOROVOD_LOCAL_RANK, _LOCAL_SIZE                    |
| jsrun                     | JSM_NAMESPACE_RANK, _SIZE    | JSM_NAMESPACE_LOCAL_RANK, _LOCAL_SIZE              |
| flux run                  | FLUX_TASK_RANK, _JOB_SIZE    | FLUX_TASK_LOCAL_ID, FLUX_JOB_SIZE / FLUX_JOB_NNODES|
| mpiexec (MPICH, Intel)    | PMI_RANK or PMI_ID, PMI_SIZE | MPI_LOCALRANKID, MPI_LOCALNRANKS                   |
| mpiexec (PALS)            | PMI_RANK, PMI_SIZE           | PMI_LOCAL_RANK, _SIZE or PALS_LOCAL_RANKID, _SIZE  |
| srun                      | SLURM_PROCID, _STEP_NUM_TASKS| SLURM_LOCALID, SLURM_NTASKS_PER_NODE               |

A job of one rank does not count as launched, so the program then starts its own workers. Only torchrun's variables
count with one rank too. A rank above 0 without a number of ranks is an error, because each process of such a job would
train alone.

The order of the checks matters, because the variables of two launchers can be set together. On Slurm, mpirun starts one
daemon per node with srun, and mpirun's ranks inherit the SLURM_PROCID of the daemon. srun's PMI plugins set PMI_RANK
and PMI_SIZE to the same values as Slurm's variables.

Sources: "Environment variables set for MPI applications" of Open MPI; "Environment Variables Not Propagated by Hydra"
of Intel MPI; Lightning's LSFEnvironment (jsrun); the manual pages flux-run(1), srun(1) and pals(7).
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from megazpp.base.address import parse_host, parse_port

LOOPBACK = "127.0.0.1"
# Environment variables with this process's rank. Some launchers set one of them without a variable that has the number
# of ranks.
_RANKS_ALONE = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "MP_CHILD")
# Environment variables with the ID of the job, which is equal on all ranks of the job
_JOB_IDS = ("PMIX_NAMESPACE", "FLUX_JOB_ID", "PALS_APID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")

# Distance between the store's ports of two consecutive steps of a Slurm job. The ports of consecutive jobs differ by 1.
# With this large distance, steps of jobs with similar job numbers do not get the same port.
PORTS_PER_STEP = 7919


class Launched(NamedTuple):
    """Rank of a process that a launcher such as torchrun has started.

    Attributes:
        launcher: command of the launcher, such as "mpirun".
        variable: name of the environment variable with the number of ranks, for messages.
        rank: rank of this process.
        world_size: number of ranks of the job.
        local_rank: rank of this process among the ranks of its node.
        local_size: number of ranks on this node; None if unknown.
    """

    launcher: str
    variable: str
    rank: int
    world_size: int
    local_rank: int = 0
    local_size: int | None = None


class _Names(NamedTuple):
    """Names of a launcher's environment variables. If a field has several names, the first set variable counts."""

    launcher: str  # command of the launcher
    rank: str  # environment variable with this process's rank
    size: str  # environment variable with the number of ranks of the job
    local_rank: tuple[str, ...]  # environment variables with this process's rank among the ranks of its node
    local_size: tuple[str, ...] = ()  # environment variables with the number of ranks on this node
    nodes: tuple[str, ...] = ()  # environment variables with the number of nodes of the job


def _of_prefix(launcher: str, prefix: str) -> _Names:
    """Return the names of the variables PREFIX_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE of a launcher."""
    local = f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"
    return _Names(launcher, f"{prefix}_RANK", f"{prefix}_SIZE", local[:1], local[1:])


_TORCHRUN = _Names("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_SRUN = _Names("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), ("SLURM_NTASKS_PER_NODE",))
_PMI = _Names(
    "mpiexec",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
)
_MPI = (
    _of_prefix("mpirun", "OMPI_COMM_WORLD"),
    _of_prefix("mpirun", "MV2_COMM_WORLD"),
    _of_prefix("jsrun", "JSM_NAMESPACE"),
    _of_prefix("horovodrun", "HOROVOD"),
    _Names("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", ("FLUX_TASK_LOCAL_ID",), nodes=("FLUX_JOB_NNODES",)),
    _PMI._replace(rank="PMI_ID"),
)
_RANKS = (*(names.rank for names in (_TORCHRUN, *_MPI, _PMI, _SRUN)), "MPI_LOCALRANKID", *_RANKS_ALONE)


def find_launcher(env: Mapping[str, str] = os.environ) -> Launched | None:
    """Return this process's rank from its launcher's environment variables; None if no launcher has started it.

    A job of a single rank counts as launched only with torchrun's variables, not with the variables of other launchers.
    The module's docstring says what happens with such a job, and why the order of the checks matters.

    Raises:
        ValueError: a variable is not a number, or is out of range, or the environment has a rank but no number of
            ranks.
    """
    if _TORCHRUN.rank in env and _TORCHRUN.size in env:
        return _read(_TORCHRUN, env)
    srun, pmi = _several(_SRUN, env), _several(_PMI, env)
    if srun is not None and pmi is not None and srun[2:4] == pmi[2:4]:
        pmi = None  # srun's PMI plugin has set the variables of PMI, so the launcher is srun
    for found in (*(_several(names, env) for names in _MPI), pmi, srun):
        if found is not None:
            return found

    # No launcher was found. If a variable nevertheless shows that this process is one of several ranks, this is an
    # error, because each process would train alone. A rank above 0 shows it. So does any rank, even 0, in a variable
    # whose launcher may set no number of ranks.
    sizes = [names.size for names in (*_MPI, _PMI, _SRUN) if names.size in env]
    later = [name for name in _RANKS if env.get(name, "").isdecimal() and int(env[name]) > 0]
    alone = [name for name in _RANKS_ALONE if name in env and not sizes]
    for name in (*later, *alone):
        raise ValueError(
            f"{name}={env[name]}: a launcher has started this process, and no variable says how many it has started. "
            f"Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank, or unset "
            f"{name}"
        )
    return None


def find_address(launched: Launched, env: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT for launchers that do not set them, such as mpirun; {} for torchrun.

    Variables that are already set keep their values. With srun, the default address is the first host of the job step,
    on which rank 0 runs. The default port is computed from the numbers of job and step, so that several steps of a job
    can run at the same time. With other launchers there are defaults only on a single node: the loopback address and a
    port that is computed from the id of the job. All default ports are from 20000 to 39999.

    Args:
        launched: rank of this process, from its launcher.
        env: environment variables of this process.

    Raises:
        ValueError: MASTER_ADDR is no host, MASTER_PORT no port, or SLURM_JOB_ID or SLURM_STEP_ID no number. Or a
            variable is not set and has no default, because the ranks may be on several nodes, the job has no id, or
            Slurm's list of hosts cannot be read.
    """
    for name, parse in (("MASTER_ADDR", parse_host), ("MASTER_PORT", parse_port)):
        if env.get(name):
            parse(env[name], name)  # called for its ValueError
    if launched.launcher == "torchrun":
        return {}
    known = {name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if env.get(name)}
    if launched.launcher == "srun":
        if "MASTER_ADDR" not in known:
            known["MASTER_ADDR"] = first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")
        job_id, step = (env_number(name, env, default=0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        known.setdefault("MASTER_PORT", str(20000 + (job_id + PORTS_PER_STEP * step) % 20000))
    elif launched.local_size == launched.world_size:
        known.setdefault("MASTER_ADDR", LOOPBACK)
        job = next((env[name] for name in _JOB_IDS if env.get(name)), None)
        if job is not None:
            known.setdefault("MASTER_PORT", str(20000 + zlib.crc32(job.encode()) % 20000))
    missing = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in known)
    if missing:
        started = f"{launched.launcher} has started {launched.world_size} ranks ({launched.variable})"
        raise ValueError(
            f"{started}, and lacks {missing}: export the host of rank 0 as MASTER_ADDR and a free port of this host as "
            f"MASTER_PORT on all ranks, or use torchrun. If {launched.launcher} has not started this program, unset "
            f"{launched.variable}"
        )
    return known


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's host list `nodes`, for instance "rack1n01" for "rack[1-2]n[01-16,20],login".

    If the list has a single host, the result is the loopback address. `scontrol show hostnames` would expand such a
    list, but a container may lack that program.

    Raises:
        ValueError: `nodes` is not a host list of Slurm.
    """
    if not re.fullmatch(r"([\w.-]|\[[\d,-]+\])+(,([\w.-]|\[[\d,-]+\])+)*", nodes):
        raise ValueError(
            f"the environment has SLURM_STEP_NODELIST or SLURM_JOB_NODELIST={nodes}, which is not a list of hosts, so "
            "the host of rank 0 is unknown: export its name as MASTER_ADDR on all ranks"
        )
    several = "," in nodes or re.search(r"\[\d+-", nodes)
    first = re.match(r"[^\[,]*(\[[^\]]*\][^\[,]*)*", nodes)
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if several else LOOPBACK


def _several(names: _Names, env: Mapping[str, str]) -> Launched | None:
    """Return this process's rank from a launcher's variables; None if rank or size is not set, or the size is 1."""
    found = _read(names, env) if names.rank in env and names.size in env else None
    return None if found is None or found.world_size == 1 else found


def _read(names: _Names, env: Mapping[str, str]) -> Launched:
    """Return this process's rank from a launcher's variables.

    Raises:
        ValueError: the variable with the rank or the size is not set, a variable is not a number, or the rank is not
            below the size.
    """
    rank, world_size = env_number(names.rank, env), env_number(names.size, env, least=1)
    if rank >= world_size:
        raise ValueError(
            f"the environment has {names.rank}={rank} and {names.size}={world_size}, but ranks are numbered from 0: "
            "correct them"
        )
    local_rank, local_size, nodes = (
        next((env_number(name, env, least=least) for name in each if env.get(name)), None)
        for each, least in ((names.local_rank, 0), (names.local_size, 1), (names.nodes, 1))
    )
    if nodes and world_size % nodes == 0:
        local_size = world_size // nodes
    return Launched(names.launcher, names.size, rank, world_size, local_rank or 0, local_size)


def env_number(name: str, env: Mapping[str, str], default: int | str = "", *, least: int = 0) -> int:
    """Return the environment variable `name` as an integer, or `default` if it is not set or empty.

    Raises:
        ValueError: the variable is not a number, or is below `least`. Or it has no value, and there is no default.
    """
    value = str(env.get(name) or default)
    if not value.isdecimal() or int(value) < least:
        above = f" of at least {least}" if value.removeprefix("-").isdecimal() else ""
        raise ValueError(f"the environment has {name}={env.get(name)}, which is not a number{above}: correct it")
    return int(value)
