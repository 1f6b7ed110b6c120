"""Settings shared by all tests."""

import atexit
import gc
import os
import signal
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch
from helpers.ranks import start_server
from hypothesis import settings

gc.disable()  # until all is collected: what imports make stays, and to look through it takes a sixth of the start
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would programs
settings.register_profile("no deadline", deadline=None)  # other jobs may have the cores
settings.load_profile("no deadline")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything defines a kernel: Triton on CPU tensors


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords have names of folders, too
                item.add_marker(skip)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the whole suite; one for what someone names, and on a GPU, where tests measure memory."""
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
    """Runs a main in an empty folder: its exit code, stdout and stderr, which SentencePiece writes to itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(main: Callable[[], int], *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", [f"{main.__module__}.py", *map(str, words)])
        return main(), *capfd.readouterr()

    return run
