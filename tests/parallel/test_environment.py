"""Variables that CUDA, its allocator and Triton read once, on a machine that is told it is built for CUDA."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from megazpp.base import run
from megazpp.parallel import environment
from megazpp.parallel.environment import check_connections, node_folder, prepare_environment


@pytest.fixture(autouse=True)
def built_for_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))


def test_a_single_connection_is_unset_with_a_line_and_other_numbers_stay():
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    (line,) = prepare_environment(env)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in env
    assert line.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 is unset: ")
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert prepare_environment(env) == ()
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_a_single_connection_is_refused_once_cuda_has_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for check in (prepare_environment, check_connections):
        with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS=1, and CUDA has started"):
            check({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    check_connections({"CUDA_DEVICE_MAX_CONNECTIONS": "8"})


def test_programs_unset_it_before_they_look_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name in (*environment.ALLOCATOR, *environment.TRITON):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["program"])
    assert run.run_on_ranks(lambda: 7 if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ else 1) == 7
    assert capsys.readouterr().err.startswith("note: CUDA_DEVICE_MAX_CONNECTIONS=1 is unset")


@pytest.mark.parametrize("name", environment.ALLOCATOR)
def test_segments_are_expandable_unless_the_user_has_configured_the_allocator(name: str):
    env: dict[str, str] = {}
    prepare_environment(env)
    assert env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    env = {name: "max_split_size_mb:128"}
    prepare_environment(env)
    assert [env.get(other) for other in environment.ALLOCATOR if other != name] == [None, None]


def test_triton_s_cache_is_a_folder_of_this_user_alone(tmp_path: Path):
    env: dict[str, str] = {}
    for _ in range(2):  # the second time it is there
        prepare_environment(env)
        folder = Path(env.pop("TRITON_CACHE_DIR"))
        assert folder.is_relative_to(tmp_path)
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", environment.TRITON)
def test_a_cache_that_the_user_has_named_stays(name: str, tmp_path: Path):
    env = {name: "mine"}
    prepare_environment(env)
    assert [env.get(other) for other in environment.TRITON if other != name] == [None, None]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_could_have_filled_is_refused(tmp_path: Path):
    own = tmp_path / f"megazpp-{os.getuid()}"
    own.mkdir(mode=0o777)
    own.chmod(0o777)
    with pytest.raises(ValueError, match="is not a folder of this user alone"):
        node_folder("triton")
    own.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is not a folder of this user alone"):
        node_folder("triton")


def test_where_nothing_can_be_run_from_a_temporary_folder_triton_keeps_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((0,) * 8 + (os.ST_NOEXEC, 255)))
    env: dict[str, str] = {}
    prepare_environment(env)
    assert "TRITON_CACHE_DIR" not in env


def test_a_build_for_the_cpu_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert prepare_environment(env) == ()
    assert env == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
