"""Test the environment variables that the program sets for CUDA and Triton, with a fake CUDA build of torch."""

import os
import sys
from pathlib import Path

import pytest
import torch

from megazpp.parallel import environment
from megazpp.parallel.environment import (
    ALLOCATOR,
    CONNECTIONS,
    TRITON,
    check_connections,
    node_folder,
    prepare_environment,
)
from megazpp.run.start import distributed_program


@pytest.fixture(autouse=True)
def built_for_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))


def test_single_cuda_connection_is_unset_or_rejected_after_cuda_starts(monkeypatch):
    (line,) = prepare_environment(env := {CONNECTIONS: "1"})
    assert CONNECTIONS not in env
    assert line.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 was unset: ")
    assert prepare_environment(env := {CONNECTIONS: "32"}) == ()
    assert env[CONNECTIONS] == "32"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for check in (prepare_environment, check_connections):
        with pytest.raises(ValueError, match="CUDA was initialized with CUDA_DEVICE_MAX_CONNECTIONS=1"):
            check({CONNECTIONS: "1"})
    check_connections({CONNECTIONS: "8"})


def test_programs_unset_the_variable_before_they_query_gpus(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(CONNECTIONS, "1")
    for name in (*ALLOCATOR, *TRITON):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["program"])
    assert distributed_program(lambda argv: 7 if CONNECTIONS not in os.environ else 1)() == 7
    assert capsys.readouterr().err.startswith("note: CUDA_DEVICE_MAX_CONNECTIONS=1 was unset")


def test_allocator_and_triton_cache_get_defaults_unless_user_sets_them(tmp_path):
    for _ in range(2):  # the second pass finds the folder that the first one has made
        prepare_environment(env := {})
        assert env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        folder = Path(env["TRITON_CACHE_DIR"])
        assert folder.is_relative_to(tmp_path)
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    for names in (ALLOCATOR, TRITON):
        for name in names:
            prepare_environment(env := {name: "mine"})
            assert {other: env[other] for other in names if other in env} == {name: "mine"}


def test_folder_that_other_users_could_write_is_rejected(tmp_path):
    own, elsewhere = tmp_path / f"megazpp-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    own.symlink_to(elsewhere)
    with pytest.raises(ValueError, match="must be a folder that only this user can access"):
        node_folder("triton")
    own.unlink()
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(ValueError, match="must be a folder that only this user can access"):
        node_folder("triton")


def test_noexec_temp_folder_or_cpu_build_keeps_variables_unset(monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((0,) * 8 + (os.ST_NOEXEC, 255)))
    prepare_environment(env := {})
    assert "TRITON_CACHE_DIR" not in env
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert prepare_environment(env := {CONNECTIONS: "1"}) == ()
    assert env == {CONNECTIONS: "1"}
