"""`map` in several processes, in order, that neither hangs nor leaves processes behind when one of them is killed.

The pool is the library's. It has one pipe for the results of all workers and waits for the rest of a message forever
when its sender is killed in the middle of it. So items and results are handed over as files, and messages are the names
of those: fewer bytes than a pipe takes at once, which are written wholly or not at all.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_READ_AHEAD = 4  # items per worker that are taken before the result of the first of them is given out


def map_in_processes(function: Callable[[T], R], items: Iterable[T], num_workers: int) -> Generator[R, None, None]:
    """The results of `function` for all items, in the order of the items.

    Args:
        function: pickled with every item, so small (2 KB); what it needs is best kept by a cache in the worker.
        items: taken as they are needed; they and the results can be pickled.
    Raises:
        ValueError: a worker was killed, or there is no room for temporary files.
        Exception: what `function` raises.
    """
    context = multiprocessing.get_context("spawn")  # not forked: tokenizers have threads
    ahead: deque[tuple[Path, Future[None]]] = deque()
    with tempfile.TemporaryDirectory(prefix="megazpp-workers-") as folder:
        pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_prepare_worker)
        try:
            for number, item in enumerate(items):
                path = Path(folder, str(number))
                _store(item, path)
                ahead.append((path, pool.submit(_replace, path, function)))
                if len(ahead) == _READ_AHEAD * num_workers:
                    yield _result(*ahead.popleft())
            while ahead:
                yield _result(*ahead.popleft())
        except BrokenProcessPool as error:
            raise ValueError("--workers: one was killed, perhaps for want of memory") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _result(path: Path, done: Future[None]) -> Any:
    done.result()
    result = pickle.loads(path.read_bytes())
    path.unlink()
    return result


def _replace(path: Path, function: Callable[[Any], Any]) -> None:
    """Apply `function` to the item in a file, in a worker, and put the result in its place."""
    _store(function(pickle.loads(path.read_bytes())), path)


def _store(value: object, path: Path) -> None:
    try:
        path.write_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    except OSError as error:
        raise ValueError(f"--workers: {path}: {error.strerror}; TMPDIR names another folder") from error


def _prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker of the library's waits for the next item forever when the main process is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
