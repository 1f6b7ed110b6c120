"""Start of every distributed program, before its workers exist.

A program's `main` is decorated with `distributed_program`. `main` reads and checks its flags. The process then either
starts the workers (`start_workers`), which run the same `main`, or becomes a worker itself (`worker_process` in
parallel/worker.py). The functions that return a cluster use only flags and environment variables, because the workers
that could discover the cluster have not started.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import megazpp
from megazpp.base.files import first_free
from megazpp.base.flags import PATHS, as_words, flag_name, spelling
from megazpp.base.program import (
    LAUNCHER_PID,
    JobError,
    UserError,
    in_words,
    launched_rank,
    leave,
    program,
    say_at_terminal,
    say_notices,
)
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.metadata import CheckpointMetadata
from megazpp.data.cache import cache_key
from megazpp.data.tokenizer import Tokenizer
from megazpp.kernels import formats
from megazpp.parallel.agreement import find_differences, in_lines, raise_on_all_ranks
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.environment import prepare_environment
from megazpp.parallel.failure import report_failure
from megazpp.parallel.launch import detect_rank_info, hosts_of, launch_workers, launch_workers_of_host
from megazpp.parallel.store import RankInfo
from megazpp.run.arguments import ParsedRun, RunConfig
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import read_cluster
from megazpp.training.config import TrackingConfig

# Environment variables that all ranks compare, because they change results, or because ranks with different values of
# them hang or crash in their first collectives.
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE",
    "TRITON_INTERPRET",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_NTHREADS",
    "NCCL_PROTO",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_GLOO_LAZY_INIT",
)
# Environment variable with the run folder, which a launching process sets for all restarts of its workers.
RUN_DIR = "MEGAZPP_RUN_DIR"


def distributed_program(main: Callable[[list[str]], int]) -> Callable[..., int]:
    """Turn a `main` function into the entry point of a program with workers, which returns the exit status.

    The entry point prepares the environment for CUDA and Triton before `main` uses torch, and prints errors as
    `program` does. If a launcher such as torchrun has started this process as one of several ranks, one rank of each
    host prints the error. The ranks of all hosts then end, also if only one host has failed.

    Args:
        main: function that takes the arguments without the program name, and returns the exit status.
    """

    @program
    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        try:
            notices = prepare_environment()
            if launched_rank() == 0:
                say_notices(notices)
            return main(argv)
        except (OSError, ValueError, JobError) as error:
            failure = error if isinstance(error, JobError) else UserError(in_words(error, argv))
            if not report_failure(failure, argv):
                raise
            leave(failure.exit_code)  # an ordinary exit of the interpreter could abort, see `start_workers`

    return run


def facts_of(parsed: ParsedRun, record: CheckpointMetadata | None) -> dict[str, str]:
    """Return everything about a command line that must be equal on all ranks before they start.

    These are flags, versions, environment variables, the content of --cluster-file, and whether there is a checkpoint.
    The keys are the names that error messages use, such as "--lr", and the values are texts.

    Args:
        parsed: command line of the run.
        record: metadata of the checkpoint that this rank would load; None without one.
    """
    # If hosts have separate folders, an interrupted save may have completed the checkpoint on some hosts only. The
    # error message contains the name of the fact, so this name says what to do.
    name = "the checkpoint to load (copy it to all hosts, or move it away where it is found)"
    found = {name: "none" if record is None else "found"}
    # The paths of these folders may differ between hosts, so compare only whether each path is given. A rank without a
    # path would skip the collectives with which the other ranks load or save.
    for part in parsed.parts:
        names = {field.name for field in dataclasses.fields(part)} & {"load", "save", "lora_load"}
        found |= {spelling(part, name): "none" if getattr(part, name) is None else "given" for name in sorted(names)}
    found |= facts_of_flags(parsed.parts)
    path = parsed.config.cluster.cluster_file
    if path is None:
        return found
    cluster, fields = read_cluster(path), (field.name for field in dataclasses.fields(Cluster) if field.compare)
    return found | {f"{name} in --cluster-file": str(getattr(cluster, name)) for name in fields}


def facts_of_flags(parts: Sequence[Any]) -> dict[str, str]:
    """Return the flags, versions and environment variables that must be equal on all ranks, for given configs.

    Paths are left out, because they may differ between hosts. The ranks compare the contents of data files later
    (`facts_of_data`).

    Args:
        parts: configs whose flags must be equal.

    Returns:
        values as text, by the names that error messages use, such as "--lr" or "the version of torch".
    """
    flags = {}
    for part in parts:
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            is_path = field.name.endswith(PATHS) and not isinstance(value, bool)
            if not (is_path or field.metadata["flag"].per_host):
                flags[flag_name(field)] = as_words(value)
    versions = {
        "the version of MegaZ++": f"{megazpp.__version__} (sources {_digest_of_sources()})",
        "the version of torch": torch.__version__,
    }
    variables = {f"the environment variable {name}": os.environ.get(name, "not set") for name in VARIABLES}
    return versions | variables | flags


def facts_of_data(tokenizer: Tokenizer, samples: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the tokenizer and of the data that must be equal on all ranks, by names for error messages.

    Args:
        tokenizer: tokenizer of the data.
        samples: description of the training and held-out samples from data/identity.py; {} if ranks do not compare.
    """
    digests = [digest for _, digest, *_ in samples.get("sources", [])]
    return {
        "the tokenizer": str(tokenizer.identity),
        "the training data": cache_key(digests=digests, order=samples.get("order")),
        "the validation data": cache_key(digest=samples.get("valid")),
        "the test data": cache_key(digest=samples.get("test")),
    }


def check_kernels(dims: ParallelDims, device: torch.device) -> None:
    """Check that ranks which update copies of the same weights do so with equal CPU kernels. All ranks call this.

    Kernels of different instruction sets round differently, so copies on the axis `replicate` or tp would drift apart.
    Ranks on the axis tp must also have equal numbers of threads. Each of them computes the gradients of its copies
    itself, and the rounding of these sums depends on the number of threads. On other devices than CPUs, nothing is
    compared.

    Raises:
        ValueError: on all ranks, if two ranks with copies of the same weights differ.
    """
    if device.type != "cpu":
        return
    name = "the instruction set of torch's CPU kernels (the environment variable ATEN_CPU_CAPABILITY can lower it)"
    instructions = {name: torch.backends.cpu.get_cpu_capability()}
    threads = {"the number of torch's threads (the environment variable OMP_NUM_THREADS)": str(torch.get_num_threads())}
    found = find_differences(dims.replicate, instructions) | find_differences(dims.tp, instructions | threads)

    def check() -> None:
        """Raise ValueError if kernels or threads differ in this rank's process group on the axis `replicate` or tp."""
        if found:
            raise ValueError(in_lines(found)[0])

    raise_on_all_ranks(dims.world, check)


def _digest_of_sources() -> str:
    """Return a digest of MegaZ++'s source files, which ranks compare.

    Comparing version numbers is not enough, because a checkout with older files may have the same number.
    """
    digest = hashlib.sha256()
    for folder in (Path(megazpp.__file__).parent, Path(formats.__file__).parent):
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def start_workers(place: RankInfo, launch: LaunchConfig, main: Callable[[], int]) -> int:
    """Start the workers on this machine, wait until they have ended, and return the exit status of the program.

    Args:
        place: rank information of this process, with the number of workers to start.
        launch: flags about the launch, such as --max-restarts and --nnodes.
        main: entry point of this program, which each worker runs with the same arguments.
    """
    size = place.launched_size or place.world_size
    hosts, (_, end_seconds) = hosts_of(launch, size), launch.hang_seconds
    say_at_terminal(f"starting {size} workers")
    if hosts is not None:
        # If the job's store is lost, a thread of the launcher may be blocked in a call to it. An ordinary exit of the
        # interpreter would then abort, so `leave` exits at once.
        leave(launch_workers_of_host([sys.executable, *sys.argv], hosts, end_seconds=end_seconds))
    return launch_workers(main, size, max_restarts=launch.max_restarts, end_seconds=end_seconds)


def hold_run_dir(parsed: ParsedRun) -> None:
    """Choose the run folder before workers start if this process may restart them, so that all attempts share it.

    The launching process calls this after all checks. The workers find the folder's path in the environment variable
    MEGAZPP_RUN_DIR. Nothing happens if --run-dir names the folder or if --max-restarts is 0.
    """
    config = parsed.config
    if config.launch.max_restarts and config.tracking.run_dir is None and LAUNCHER_PID not in os.environ:
        os.environ[RUN_DIR] = str(default_run_dir(parsed.name, datetime.datetime.now()))


def default_run_dir(config_name: str, now: datetime.datetime) -> Path:
    """Create the run folder runs/<time>-<config name>, with a number appended if it exists, and return its path.

    If two jobs start in the same second, only one of them can create the folder; the other job takes the next number.
    If the folder cannot be created, the function still returns its path, and `make_writable` later reports the reason.
    """
    first = Path("runs") / f"{now:%Y%m%d-%H%M%S}-{config_name}"
    while True:
        path = first_free(lambda number: first if number == 1 else first.with_name(f"{first.name}-{number}"))
        try:
            path.mkdir(parents=True)
        except OSError as error:
            if isinstance(error, FileExistsError) and path.is_dir():
                continue  # another job has just created this folder: try the next number
        return path


def own_checkpoints(
    checkpoint: CheckpointConfig, tracking: TrackingConfig, *, restarted: bool, env: Mapping[str, str] = os.environ
) -> CheckpointConfig:
    """Return a job's checkpoint flags; after a restart, --save-to-run-dir sets --save to a folder in the run folder.

    A restarted job must find the checkpoints of its earlier attempts, which are in its run folder. In a first attempt
    the flags are unchanged, because the run folder does not exist yet.

    Args:
        checkpoint: flags about checkpoints.
        tracking: flags with the run folder.
        restarted: True if a fault has ended an earlier attempt of this job.
        env: environment variables of this process.

    Raises:
        ValueError: torchrun may restart this job, and a restarted job would not find the run folder.
    """
    if not checkpoint.save_to_run_dir or checkpoint.save is not None:
        return checkpoint
    run_dir, restarts = tracking.run_dir or env.get(RUN_DIR), env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if run_dir is None and (restarted or (restarts.isdecimal() and int(restarts) > 0)):
        raise ValueError(
            f"--save-to-run-dir with torchrun's --max-restarts {restarts}: a restarted job would not find its "
            "checkpoints, because the name of the run folder contains the time of the start; add --run-dir or --save"
        )
    if not restarted or run_dir is None:
        return checkpoint
    return dataclasses.replace(checkpoint, save=str(Path(run_dir) / "checkpoints"))


def announced_cluster(config: RunConfig, place: RankInfo) -> Cluster:
    """Return the nodes and ranks that the flags and the launcher's environment variables describe.

    The workers later discover the actual nodes (`resolve_cluster`).

    Args:
        config: flags of the run.
        place: rank of this process and number of ranks, as the launcher has set them.
    """
    # If no launcher has started this process as one of several ranks, environment variables such as LOCAL_WORLD_SIZE
    # come from a surrounding batch script. They do not describe this run, so they are ignored.
    launcher_env = os.environ if place.started and place.world_size > 1 else {}
    if place.launched_size is not None:
        launcher_env = {"LOCAL_WORLD_SIZE": str(place.launched_size)}
    return config.detect_cluster(place.world_size, launcher_env)


def planned_cluster(config: RunConfig) -> Cluster:
    """Return the nodes and ranks for an estimate that starts no workers, such as --plan.

    These are the nodes and ranks of --cluster-file or, without this flag, the ranks that training would start.
    """
    path = config.cluster.cluster_file
    if path is None:
        return announced_cluster(config, detect_rank_info(config.launch, {}))
    return config.detect_cluster(read_cluster(path).world_size, {})
