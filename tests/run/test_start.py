"""Test the start of a job whose ranks were started one by one. If their flags differ, each host logs the difference."""

import datetime
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.fork_python import forked_python
from helpers.ports import free_port
from helpers.pretrain import TOY
from helpers.program import LAUNCHER_VARIABLES, ROOT
from helpers.ranks import ranks
from helpers.small_run import SMALL, parse
from helpers.tiers import chosen

from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.run.start import check_kernels, default_run_dir, facts_of
from megazpp.topology.cluster import Cluster
from megazpp.training.context import RunFolder

# flags and environment variables of the second of two ranks, and the beginning of the error about its difference from
# the first
DIFFERENT = {
    "--lr 0.5": "--lr must be equal on all ranks, but is 0.001 on",
    "--num-layers 3": "--num-layers must be equal on all ranks, but is 1 on",
    "--text-path other.txt": "the training data must have the same content on all ranks, but differs between",
    "--text-path missing.txt": "--text-path missing.txt does not exist",
    "--lr 0x": "command line: --lr: invalid float value: '0x'",
    "--save-to-run-dir": "--save-to-run-dir must be equal on all ranks, but is False on",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "TORCH_DISTRIBUTED_DEBUG must be equal on all ranks, but is not set on",
    "TORCH_GLOO_LAZY_INIT=1": "TORCH_GLOO_LAZY_INIT must be equal on all ranks, but is not set on",
    "OMP_NUM_THREADS=3": "OMP_NUM_THREADS) must be equal on all ranks, but is 1 on ",
    "ATEN_CPU_CAPABILITY=default": "ATEN_CPU_CAPABILITY can lower it) must be equal on all ranks, but is ",
}
# nightly cases: the code that finds such a difference also finds the difference of a slow case
ALIKE = ("--lr 0.5", "--save-to-run-dir", "TORCH_GLOO_LAZY_INIT=1", "ATEN_CPU_CAPABILITY=default")


def test_facts_have_flags_versions_and_variables_but_no_paths(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    facts = facts_of(parse(f"{SMALL} --run-dir here --nproc 2 --lr 2e-3"), None)
    assert facts["--lr"] == "0.002"
    assert facts["--num-layers"] == "2"
    assert facts["--profile"] == "False"
    assert facts["the environment variable NCCL_ALGO"] == "Ring"
    assert "sources" in facts["the version of MegaZ++"]
    assert {"--run-dir", "--nproc", "--data-path", "--tokenizer-model"}.isdisjoint(facts)
    other = facts_of(parse(f"{SMALL} --run-dir there --nproc 2 --lr 2e-3 --seed 7"), None)
    assert {name for name in facts if facts[name] != other[name]} == {"--seed"}


@pytest.mark.parametrize("flags", ["--load here", "--save here"])
def test_facts_tell_whether_a_rank_has_a_folder_of_checkpoints(flags):
    here, there, neither = (facts_of(parse(f"{SMALL} {given}"), None) for given in (flags, f"{flags}/b", ""))
    assert here == there
    assert {name: neither[name] for name in here if here[name] != neither[name]} == {flags.split()[0]: "none"}
    found = facts_of(parse(f"{SMALL} {flags}"), mock.Mock())
    assert {name: found[name] for name in here if here[name] != found[name]} == {
        "the checkpoint to load (copy it to all hosts, or move it away where it is found)": "found"
    }


def test_facts_have_the_content_of_the_cluster_file(tmp_path):
    found = []
    for host, nodes in (("a", 1), ("b", 1), ("c", 2)):  # the path may differ between hosts
        file = tmp_path / f"{host}.yaml"
        file.write_text(f"nodes: {nodes}\nranks_per_node: 2\n")
        found.append(facts_of(parse(f"{SMALL} --cluster-file {file}"), None))
    assert found[0] == found[1]
    assert {name for name in found[0] if found[0][name] != found[2][name]} == {"num_nodes in --cluster-file"}


def compare_kernels() -> None:
    """Check which layouts reject ranks that have another number of threads, or kernels for other processors.

    Ranks 0 and 1 are on one node and have equal kernels, ranks 2 and 3 on another. So copies of weights only differ if
    they are on both nodes.
    """
    cpu, node = torch.device("cpu"), dist.get_rank() // 2
    copies = {"num_distributed_optimizer_instances": 2}
    cases: list[tuple[dict[str, Any], tuple[int, ...] | None, str, str | None]] = [
        ({}, None, "get_cpu_capability", None),
        (copies, None, "get_num_threads", None),
        (copies, None, "get_cpu_capability", r"instruction set .* is 0 on .* \(rank 0\), 1 on .* \(rank 2\)"),
        ({"tensor_model_parallel_size": 2}, None, "get_num_threads", None),
        ({"tensor_model_parallel_size": 2}, (0, 2, 1, 3), "get_num_threads", "number of torch's threads .* is 0 on .*"),
    ]
    for flags, order, function, message in cases:
        cluster = Cluster(num_nodes=2, ranks_per_node=2, order=order)
        dims = ParallelDims(plan_dims(ParallelConfig(**flags), cluster, zero_stage=3), device_type="cpu")
        where = torch if function == "get_num_threads" else torch.backends.cpu
        with mock.patch.object(where, function, return_value=node):
            if message is None:
                check_kernels(dims, cpu)
            else:
                with pytest.raises(ValueError, match=message):
                    check_kernels(dims, cpu)


def test_copies_of_weights_must_be_updated_by_equal_kernels():
    ranks(4).run(compare_kernels)


@pytest.mark.parametrize("flags", chosen({flags: flags for flags in DIFFERENT}, slow={*DIFFERENT} - {*ALIKE}))
def test_ranks_that_disagree_end_with_an_error_within_seconds(tmp_path, flags):
    """Start two ranks with different flags, variables or data, and check that both end with an error.

    Both ranks are on one host, so the error is printed once. With tensor parallelism, both ranks update copies of some
    weights. Instruction sets and numbers of threads change the rounding of sums, so both must be equal on all ranks.
    """
    text = "Call me Ishmael. Some years ago, never mind how long precisely.\n" * 400
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "other.txt").write_text(text.replace("Ishmael", "Queequeg"))
    common = [flag for flag in TOY if flag != "--mock-data"]
    common += shlex.split("--text-path text.txt --train-iters 2 --eval-iters 0 --data-cache-path cache --run-dir run")
    common += ["--tensor-model-parallel-size", "2"]
    variables = dict(word.split("=") for word in flags.split() if "=" in word)
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    env |= {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    # A fork of a process with torch would ignore variables that torch reads when it is imported.
    fork = str(forked_python())
    second = sys.executable if {"OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY"} & variables.keys() else fork
    started = [
        subprocess.Popen(
            [python, str(Path(ROOT) / "pretrain_gpt.py"), *common, *more],
            cwd=tmp_path,
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} | changed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, (python, more, changed) in enumerate(
            ((fork, [], {}), (second, [] if variables else flags.split(), variables))
        )
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert all(process.returncode != 0 for process in started)
    errors = [line for line in "".join(outputs).splitlines() if "error: " in line]
    assert DIFFERENT[flags] in errors[0], outputs
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_default_folder_is_named_by_time_and_config_and_never_reused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = datetime.datetime(2026, 1, 2, 3, 4, 5)
    for name in ("20260102-030405-gpt_tiny", "20260102-030405-gpt_tiny-2", "20260102-030405-gpt_tiny-3"):
        path = default_run_dir("gpt_tiny", now)
        assert path == Path("runs") / name
        assert path.is_dir()  # the folder exists at once, so a job that starts in the same second gets another name
        assert list(RunFolder(path).path.iterdir()) == []
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("runs").touch()
    with pytest.raises(ValueError, match=r"--run-dir runs/.* is not a folder that can be written to"):
        RunFolder(default_run_dir("gpt_tiny", now))
