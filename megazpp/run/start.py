"""Start of every distributed program, before its workers exist.

A program's `main` is decorated with `distributed_program`. It reads and checks its flags, and then either starts the
workers (`start_workers`), each of which runs the same `main`, or becomes a worker itself (`worker_process` in
parallel/worker.py). The functions for the cluster use only flags and environment variables, because the workers that
could discover it have not started.
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
from megazpp.base.flags import as_words, flag_name
from megazpp.base.program import (
    LAUNCHER_PID,
    JobError,
    UserError,
    in_words,
    launched_rank,
    program,
    say_at_terminal,
    say_notices,
)
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.data.cache import cache_key
from megazpp.data.tokenizer import Tokenizer
from megazpp.kernels import formats
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.environment import prepare_environment
from megazpp.parallel.launch import RankInfo, detect_rank_info, hosts_of, launch_workers, launch_workers_of_host
from megazpp.parallel.roll_call import hosts_in, launched_place, report_failure, roll_call_at_start
from megazpp.run.arguments import ParsedRun, RunConfig
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import read_cluster
from megazpp.training.config import TrackingConfig
from megazpp.training.context import default_run_dir

# Ends of the names of fields with paths, and other fields whose values may differ between hosts.
PATHS = ("path", "file", "dir", "folder", "model", "save", "load", "store", "patches")
OF_THE_HOST = (
    "lora_base",
    "reward_funcs",
    "nproc",
    "local_rank",
    "max_restarts",
    "num_workers",
    "node_rank",
    "master_addr",
)
# Environment variables that change results, or that NCCL needs to be equal on all ranks.
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
# Environment variable with the run folder, set by a launcher that may restart its workers.
RUN_DIR = "MEGAZPP_RUN_DIR"


def distributed_program(main: Callable[[list[str]], int]) -> Callable[..., int]:
    """Turn a `main` function into the entry point of a program with workers, which returns the exit status.

    It prepares the environment for CUDA and Triton before `main` uses torch, and prints errors as `program` does. On
    ranks that a launcher has started, one rank of each host prints them, and the ranks of other hosts end too.

    Args:
        main: takes the arguments without the program name, and returns the exit status.
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
            place, hosts = launched_place(), hosts_in(argv)
            failure = error if isinstance(error, JobError) else UserError(in_words(error, argv))
            if place is not None:
                report_failure(place, failure, name=roll_call_at_start())
            elif hosts is not None:
                failure.show()
                hosts.tell(str(failure))
            else:
                raise
            return failure.exit_code

    return run


def facts_of(parsed: ParsedRun) -> dict[str, str]:
    """Return what must be equal on all ranks before they start: flags, versions, and variables of the environment."""
    return facts_of_flags(parsed.parts)


def facts_of_flags(parts: Sequence[Any]) -> dict[str, str]:
    """Return flags, versions, and variables of the environment, by the names that messages use.

    Paths may differ between hosts. What the files contain is compared once they are open.

    Args:
        parts: the configs of a run.
    """
    flags = {}
    for part in parts:
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            is_path = field.name.endswith(PATHS) and not isinstance(value, bool)
            if not is_path and field.name not in OF_THE_HOST:
                flags[flag_name(field)] = as_words(value)
    versions = {
        "the version of MegaZ++": f"{megazpp.__version__} (sources {_digest_of_sources()})",
        "the version of torch": torch.__version__,
    }
    variables = {f"the environment variable {name}": os.environ.get(name, "not set") for name in VARIABLES}
    return versions | variables | flags


def facts_of_data(tokenizer: Tokenizer, samples: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts about a tokenizer and about samples (data/identity.py) that must be equal on all ranks."""
    digests = [digest for _, digest, *_ in samples.get("sources", [])]
    return {
        "the tokenizer": str(tokenizer.identity),
        "the training data": cache_key(digests=digests, order=samples.get("order")),
        "the validation data": cache_key(digest=samples.get("valid")),
        "the test data": cache_key(digest=samples.get("test")),
    }


def _digest_of_sources() -> str:
    """Return a digest of the program's source files, because a stale checkout has the same version."""
    digest = hashlib.sha256()
    for folder in (Path(megazpp.__file__).parent, Path(formats.__file__).parent):
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def start_workers(place: RankInfo, launch: LaunchConfig, main: Callable[[], int]) -> int:
    """Start the workers on this machine, wait for them, and return the exit status.

    Args:
        place: number of workers.
        launch: flags of the launch.
        main: entry point of this program, which each worker runs with the same arguments.
    """
    size = place.launched_size or place.world_size
    hosts = hosts_of(launch, size)
    say_at_terminal(f"starting {size} workers")
    if hosts is not None:
        return launch_workers_of_host([sys.executable, *sys.argv], hosts)
    return launch_workers(main, size, max_restarts=launch.max_restarts)


def hold_run_dir(parsed: ParsedRun) -> None:
    """Choose the run folder now if this process may restart workers, so that they all use the same one.

    Call it in the launching process, after all checks.
    """
    config = parsed.config
    if config.launch.max_restarts and config.tracking.run_dir is None and LAUNCHER_PID not in os.environ:
        os.environ[RUN_DIR] = str(default_run_dir(parsed.name, datetime.datetime.now()))


def own_checkpoints(
    checkpoint: CheckpointConfig, tracking: TrackingConfig, *, restarted: bool, env: Mapping[str, str] = os.environ
) -> CheckpointConfig:
    """Return the flags by which a job finds its own checkpoints after a restart: --save-to-run-dir sets --save.

    Args:
        checkpoint: checkpoint flags.
        tracking: flags with the run folder.
        restarted: True if a fault ended an earlier attempt of this job.
        env: environment of this process.
    Raises:
        ValueError: torchrun may restart this job, and a restarted job would not find the run folder.
    """
    if not checkpoint.save_to_run_dir or checkpoint.save is not None:
        return checkpoint
    run_dir, restarts = tracking.run_dir or env.get(RUN_DIR), env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if run_dir is None and (restarted or (restarts.isdecimal() and int(restarts) > 0)):
        raise ValueError(
            f"--save-to-run-dir with torchrun's --max-restarts {restarts}: a restarted job would not find its "
            "checkpoints, because the name of the run folder has the time; add --run-dir or --save"
        )
    if not restarted or run_dir is None:
        return checkpoint
    return dataclasses.replace(checkpoint, save=str(Path(run_dir) / "checkpoints"))


def announced_cluster(config: RunConfig, place: RankInfo) -> Cluster:
    """Return the cluster that the flags and the launcher's environment describe, as known before workers start."""
    launcher_env = os.environ if place.started and place.world_size > 1 else {}  # ignore a batch script's variables
    if place.launched_size is not None:
        launcher_env = {"LOCAL_WORLD_SIZE": str(place.launched_size)}
    return config.detect_cluster(place.world_size, launcher_env)


def planned_cluster(config: RunConfig) -> Cluster:
    """Return the cluster for a program that starts no workers, such as --plan.

    It is the cluster of --cluster-file, or without the flag the ranks that this command would start.
    """
    path = config.cluster.cluster_file
    if path is None:
        return announced_cluster(config, detect_rank_info(config.launch, {}))
    return config.detect_cluster(read_cluster(path).world_size, {})
