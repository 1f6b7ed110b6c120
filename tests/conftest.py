"""Settings and fixtures shared by all tests."""

import atexit
import gc
import os
import signal
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch
from helpers.cpu_seconds import LIMIT, FileSeconds
from helpers.ranks import start_server
from hypothesis import settings

gc.disable()  # until collection ends: imported objects stay anyway, and scanning them takes a sixth of the start
# a shell's background job ignores SIGINT, and so would programs that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("no deadline", deadline=None)  # tests must not fail on busy cores
settings.load_profile("no deadline")

if not torch.cuda.is_available():
    # must be set before any kernel is defined; Triton then runs on CPU tensors
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    if LIMIT in os.environ:
        config.pluginmanager.register(FileSeconds(float(os.environ[LIMIT])))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "nightly" not in config.option.markexpr:  # such tests run only if -m names them
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords would also match folder names
                item.add_marker(skip)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return two processes for the whole suite on CPUs, otherwise none.

    Selected tests run in one process, and so does everything on a GPU, where tests measure memory.
    """
    whole = config.args == config.getini("testpaths") and not config.option.keyword
    return 2 if whole and len(os.sched_getaffinity(0)) > 1 and not torch.cuda.is_available() else 0


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    uses_ranks = any(hasattr(getattr(item, "module", None), "ranks") for item in session.items)
    if uses_ranks and not session.config.option.collectonly:
        start_server()


@pytest.fixture
def run_main(tmp_path, monkeypatch, capfd) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a main in an empty folder and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(main: Callable[[], int], *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", [f"{main.__module__}.py", *map(str, words)])
        return main(), *capfd.readouterr()

    return run
