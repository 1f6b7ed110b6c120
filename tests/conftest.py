"""Set up pytest for all tests: environment, tiers, parallel processes and common fixtures."""

import atexit
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Images of Docker often set these two variables. With the first one, programs would write the parts of a line one by
# one, which mixes ranks' lines. With the second one, each test process would compile all tests in each run
os.environ.pop("PYTHONUNBUFFERED", None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from helpers.cpu_seconds import LIMIT, FileSeconds
from helpers.fork_python import WORKER, forked_python
from helpers.ranks import start_server
from hypothesis import settings

# No garbage collection until the tests are collected: imported objects stay anyway, and scanning them would take a
# sixth of the time until the first test
gc.disable()
# A background job of a shell ignores SIGINT. The programs that tests start would inherit this, and could not be tested
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # nohup ignores SIGHUP, and programs would inherit this, too. They do not inherit a handler of Python, which keeps
    # pytest alive when the terminal is closed.
    signal.signal(signal.SIGHUP, lambda *_: None)
settings.register_profile("no deadline", deadline=None)  # a time limit per example would make tests fail on busy cores
settings.load_profile("no deadline")


def has_gpu() -> bool:
    """Return True if torch can use a GPU. Import torch, which takes seconds, only if NVIDIA's driver is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


if not has_gpu():
    # Set before any Triton kernel is defined; Triton then interprets its kernels on CPU tensors
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    if LIMIT in os.environ:
        config.pluginmanager.register(FileSeconds(float(os.environ[LIMIT])))
    # Let pytest-xdist's main process start the test processes as forks of a process that has imported torch
    if set(config.option.tx) == {"popen"}:
        config.option.tx = [f"popen//python={forked_python()} {WORKER}"] * len(config.option.tx)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "nightly" not in config.option.markexpr:  # the nightly tier runs only if -m names it
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]
    if not has_gpu():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):  # `item.keywords` would also match names of folders
                item.add_marker(skip)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of test processes for `-n auto`: two for the whole suite on CPUs, otherwise none.

    A selection of tests runs in one process. All tests on a GPU do so too, because some measure GPU memory.
    """
    whole = config.args == config.getini("testpaths") and not config.option.keyword
    return 2 if whole and len(os.sched_getaffinity(0)) > 1 and not has_gpu() else 0


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    uses_ranks = any(hasattr(getattr(item, "module", None), "ranks") for item in session.items)
    if uses_ranks and not session.config.option.collectonly:
        start_server()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch, so that no result depends on the tests that this process has run before."""
    if torch := sys.modules.get("torch"):
        # torch.manual_seed records a stack trace for each kind of device that is not initialized, which takes longer
        # than many tests
        (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def run_main(tmp_path, monkeypatch, capfd) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a program's `main` in an empty folder, and returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(main: Callable[[], int], *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", [f"{main.__module__}.py", *map(str, words)])
        return main(), *capfd.readouterr()

    return run
