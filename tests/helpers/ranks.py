"""Worker processes that run distributed tests, started once per world size and shared by many test cases.

`ranks(n).run(function, *args)` calls `function(*args)` on n gloo ranks and returns the n results in rank order. The
function must be importable (at the top level of a module under tests/), and its arguments must be picklable. If a rank
raises an exception, the test fails with that rank's traceback, and new workers replace the old ones.
"""

import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

SECONDS_PER_CALL = 600  # limit for one call on busy cores; a hanging collective times out after 180 s


class Ranks:
    """The worker processes of one world size, each of which waits at a pipe for functions to call."""

    def __init__(self, world_size: int) -> None:
        start_server()
        context = multiprocessing.get_context("forkserver")
        self.directory = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (rank, world_size, f"{self.directory.name}/store", theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        atexit.register(self.stop)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function` with these arguments on all ranks, and return its results in rank order.

        Raises:
            AssertionError: a rank has raised an exception, died or not answered in time, or ranks have made different
                numbers of process groups. All workers are killed, and the next call of `ranks` starts new ones.
        """
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send((function, args, kwargs))
            except BrokenPipeError:
                self._fail(f"rank {rank} of {len(self.pipes)} has died since the last call")
        results: list[Any] = [None] * len(self.pipes)
        groups = [0] * len(self.pipes)
        waiting = dict(enumerate(self.pipes))
        while waiting:
            ready = wait(list(waiting.values()), timeout=SECONDS_PER_CALL)
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                try:
                    failure, results[rank], groups[rank] = waiting.pop(rank).recv()
                except EOFError:
                    failure = "the process died"
                if failure:
                    self._fail(f"rank {rank} of {len(self.pipes)}:\n{failure}")
            if not ready:
                self._fail(f"ranks {sorted(waiting)} did not answer within {SECONDS_PER_CALL} s")
        # torch numbers process groups per process; with unequal numbers, making the next group would hang
        if len(set(groups)) > 1:
            self._fail(f"{function.__name__} made process groups on some ranks only: ranks have {groups}")
        return results

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.directory.cleanup()

    def _fail(self, message: str) -> None:
        ranks.cache_clear()
        self.stop()
        raise AssertionError(message)


@functools.cache
def ranks(world_size: int) -> Ranks:
    """Return the worker processes of a world size; the first call starts them."""
    return Ranks(world_size)


def start_server() -> None:
    """Fork the server from which all worker processes are forked, so that workers have this process's modules.

    Call this before this process creates process groups. Their threads may hold locks during the fork, and in the
    server these locks would never be released.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multiprocessing.util.spawnv_passfds", _fork_server)
        forkserver.ensure_running()


def _fork_server(python: str, command: list[str], passed: list[int]) -> int:
    """Run the fork server of `multiprocessing` in a fork of this process, not in a new Python as multiprocessing does.

    Args:
        python: path of the interpreter; unused.
        command: arguments of the interpreter, which end with "-c" and the server's code.
        passed: the server's files: its socket, and the end of a pipe on which it waits for the end of this process.
    """
    # Python warns of a fork in a process with several threads, which pytest-xdist has started here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    try:
        for file in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if file not in passed and os.path.sameopenfile(file, passed[1]):
                    # Close the pipe's other end. If the server kept it open, the read of the pipe would never return
                    os.close(file)
        exec(command[-1], {})
    finally:
        os._exit(0)


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from megazpp.parallel.worker import keep_freed_memory, share_gloo_device

    torch.set_num_threads(1)
    # torch's own function also seeds devices that these ranks do not use, and records a stack trace for each of them
    torch.manual_seed = torch.default_generator.manual_seed
    torch._logging.set_logs(all=logging.ERROR)  # torch's warnings on ranks would be printed between pytest's lines
    share_gloo_device()
    keep_freed_memory()
    timeout, place = timedelta(seconds=180), {"rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), timeout=timeout, **place)
    _share_groups_between_cases()
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        torch.manual_seed(0)  # no result may depend on earlier calls
        try:
            answer = ("", function(*args, **kwargs), distributed_c10d._world.group_count)
        except BaseException:
            answer = (traceback.format_exc(), None, 0)
        try:
            pipe.send(answer)
        except Exception:  # the result cannot be pickled, so the test gets the traceback of that error
            pipe.send((traceback.format_exc(), None, 0))


def _share_groups_between_cases() -> None:
    """Make each layout's process groups only once per worker process, and give them to all test cases.

    Every gloo group keeps threads and connections. A group cannot be destroyed while DTensor's caches may hold it, so
    hundreds of test cases must share their groups.
    """
    from megazpp.parallel import dims

    make_group = dims.make_group
    groups: dict[Any, Any] = {}

    def shared_group(partition: Any, name: str, options: Any = None, **backend: Any) -> Any:
        key = (tuple(partition), name)
        if key not in groups:
            groups[key] = make_group(partition, name, options, **backend)
        return groups[key]

    dims.make_group = shared_group
