"""Test the environment variables that are set for CUDA, Triton and NCCL, and NCCL's options, on a faked CUDA build."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megazpp.parallel import environment
from megazpp.parallel.config import NcclConfig
from megazpp.parallel.environment import (
    ALLOCATOR,
    CONNECTIONS,
    LAUNCH_ORDER,
    TRITON,
    axis_options,
    check_connections,
    node_folder,
    order_launches,
    prepare_environment,
)
from megazpp.run.start import distributed_program
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.topology.plan import plan_layout


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
    for _ in range(2):  # the folder exists in the second pass
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


# ---- NCCL -----------------------------------------------------------------------------------------------------------


def layout(nodes: int = 2, tp: int = 2, ranks: int = 4, num_replica_groups: int = 1) -> Layout:
    return plan_layout(
        Cluster(num_nodes=nodes, ranks_per_node=ranks), tp=tp, replicas=1, num_replica_groups=num_replica_groups
    )


FLAGS = NcclConfig(nccl_high_priority=False, nccl_cross_max_ctas=8)
PRIORITIES = [  # axis, nodes, flags, expected high priority, expected options
    ("tp", 2, NcclConfig(), True, {}),
    ("local", 2, NcclConfig(), True, {}),
    ("cross", 2, NcclConfig(), False, {}),
    ("shard", 2, NcclConfig(), False, {}),  # plain ZeRO's ring, which is bound by both NVLink and the network
    ("shard", 1, NcclConfig(), True, {}),
    ("cross", 2, FLAGS, False, {"max_ctas": 8}),
    ("tp", 2, FLAGS, False, {}),
]


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "nccl-lazy"])  # names of torch 2.15
def test_node_groups_have_high_priority_and_flags_reach_their_axes(backend, monkeypatch):
    def options(is_high_priority_stream=False):
        return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    for axis, nodes, config, first, own in PRIORITIES:
        made, another = (axis_options(axis, layout(nodes), config) for _ in range(2))
        assert (made.is_high_priority_stream, vars(made.config)) == (first, own), (axis, nodes, config)
        assert made is not another
    assert axis_options("tp", layout(tp=1), NcclConfig()) is None  # one rank needs no options
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert axis_options("tp", layout(), NcclConfig()) is None


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch is built without NCCL")
def test_nccl_options_of_torch_accept_every_setting(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert axis_options("cross", layout(), FLAGS).config.max_ctas == 8
    assert axis_options("tp", layout(), NcclConfig()).is_high_priority_stream


def test_launch_order_is_enforced_if_several_axes_have_ranks():
    tp_alone = layout(1, 4)
    for on in (layout(), tp_alone, layout(1, 2), layout(2, 1, ranks=1, num_replica_groups=2)):
        order_launches(on, env := {})
        assert env == ({} if on is tp_alone else {LAUNCH_ORDER: "1"}), on
        order_launches(on, env := {LAUNCH_ORDER: "0"})
        assert env == {LAUNCH_ORDER: "0"}
