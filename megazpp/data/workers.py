"""`map` in several processes, in order, that neither hangs nor stays behind when one of them is killed.

Every worker has a pipe of its own to the main process and nothing else in common with it. So a worker's death, in the
middle of a message or not, is the end of its pipe (concurrent.futures waits forever for the rest of such a message:
Python 3.11), and the death of the main process is the end of all of them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_READ_AHEAD = 4  # items per worker that may be done before the one that is to be given out next


def map_in_processes(
    prepare: Callable[[], Callable[[T], R]], items: Iterable[T], num_workers: int
) -> Generator[R, None, None]:
    """What `prepare()` gives for each item, in the order of the items.

    Args:
        prepare: called once in every worker, for the function to apply; everything can be pickled.
        items: taken as they are needed.
    Raises:
        ValueError: a worker ended too early.
    """
    numbered = enumerate(items)
    busy: dict[Connection, int] = {}  # the number of the item that each has
    done: dict[int, R] = {}
    given_out = 0
    with _started(prepare, num_workers) as idle:
        while True:
            room = _READ_AHEAD * num_workers - len(busy) - len(done)
            for number, item in itertools.islice(numbered, min(room, len(idle))):
                connection = idle.pop()
                busy[connection] = number
                _exchange(connection.send, item)
            if not busy:
                return
            ready = wait(list(busy))
            for connection in [each for each in busy if each in ready]:
                done[busy.pop(connection)] = _exchange(connection.recv)
                idle.append(connection)
            while given_out in done:
                yield done.pop(given_out)
                given_out += 1


def _exchange(send_or_receive: Callable[..., R], *item: object) -> R:
    try:
        return send_or_receive(*item)
    except (EOFError, OSError) as error:
        raise ValueError("--workers: one was killed, perhaps for want of memory, or failed as it says above") from error


@contextmanager
def _started(prepare: Callable[[], Callable[[T], R]], num_workers: int) -> Iterator[list[Connection]]:
    """The main process's ends of the pipes of workers that end with the block."""
    context = multiprocessing.get_context("spawn")  # not forked: tokenizers have threads
    pipes = [context.Pipe() for _ in range(num_workers)]
    workers = [context.Process(target=_work, args=(theirs, prepare), daemon=True) for _, theirs in pipes]
    try:
        for worker, (_, theirs) in zip(workers, pipes, strict=True):
            worker.start()
            theirs.close()  # else its death would not end the pipe
        yield [ours for ours, _ in pipes]
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()
        for pipe in pipes:
            for end in pipe:
                end.close()


def _work(pipe: Connection, prepare: Callable[[], Callable[[T], R]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends the workers
    function = prepare()
    while True:
        try:
            item = pipe.recv()
        except (EOFError, OSError):  # the main process is gone
            return
        result = function(item)
        try:
            pipe.send(result)
        except OSError:
            return
