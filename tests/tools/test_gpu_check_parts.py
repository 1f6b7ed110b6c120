"""The parts of tools/gpu_check.py: what they make of programs' ends, and at their smallest on a CPU."""

import os
import sys
from pathlib import Path
from typing import Any

import gpu_check_parts as parts
import gpu_check_sides
import pytest
import torch
from gpu_check_parts import Check
from helpers.fork_python import forked_python

from megazpp.base.arguments import parse_run_config
from megazpp.base.program import EXIT_USER_ERROR
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis

ROOT = Path(parts.__file__).parents[1]
LOG = """\
tests/kernels/test_a.py::test_x[8-128-dtype0] PASSED                     [ 33%]
[gw3] [ 66%] FAILED tests/kernels/test_a.py::test_x[8-256-dtype0]
[gw0] [ 67%] PASSED tests/kernels/test_a.py::test_x[2-256-dtype0]
tests/model/test_b.py::test_y SKIPPED (no)                               [ 99%]
tests/model/test_b.py::test_z """


@pytest.fixture
def check(tmp_path, monkeypatch) -> Check:
    monkeypatch.chdir(ROOT)
    paths = [str(ROOT), *(str(ROOT / name) for name in ("tools", "tools/benchmarks", "tests"))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Check(tmp_path / "part", "", "cpu", 600.0, False, lambda: None)


@pytest.fixture
def by_forks(monkeypatch) -> None:
    """Programs start in milliseconds."""
    monkeypatch.setattr(sys, "executable", str(forked_python()))


def ending(monkeypatch: pytest.MonkeyPatch, code: int | None, text: str) -> None:
    """Programs end so, with this in their log."""

    def run(self: Check, words: str, log: Path, *more: Any, **options: Any) -> int | None:
        log.write_text(text)
        return code

    monkeypatch.setattr(Check, "run", run)


def test_tests_are_counted_also_if_they_were_ended(check, monkeypatch):
    ending(monkeypatch, None, LOG)
    parts.correct(check)
    assert check.found["rows"] == [{"passed": 2, "failed": 1, "error": 0, "skipped": 1}]
    assert "the time was over" in check.found["notes"][0]
    assert len(check.found["failures"]) == 1


def test_only_float8_may_be_refused(check, monkeypatch):
    for side, flags, code in (("a", parts.FLOAT8, EXIT_USER_ERROR), ("b", parts.FLOAT8, 1), ("c", "", EXIT_USER_ERROR)):
        ending(monkeypatch, code, "needs torchao\n")
        assert parts.train(check, side, f"pretrain_gpt.py @configs/gpt_125m.args {flags}", 60) == []
    assert check.found["notes"] == ["a: skipped, needs torchao"]
    assert check.found["failures"] == ["b: exit code 1, needs torchao", "c: exit code 2, needs torchao"]


def test_the_baseline_is_of_the_same_size():
    for name in ("gpt_125m", "llama_1b", "llama_8b"):
        config = parse_run_config([f"@configs/{name}.args"], ROOT).config
        assert config.data.seq_length is not None
        with torch.device("meta"):
            ours = GPTModel(config.model, vocab_size=50304, tp=MeshAxis("tp"))
            theirs = gpu_check_sides.PlainModel(config.model, 50304, config.data.seq_length)
        counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
        assert counts[0] == counts[1], name


@pytest.mark.slow
@pytest.mark.usefixtures("by_forks")
@pytest.mark.parametrize("side", ["ours", "baseline", "pretended --zeropp"])
def test_a_side_trains_and_logs(check, side):
    kind, _, flags = side.partition(" ")
    program = "pretrain_gpt.py" if kind == "ours" else f"-m gpu_check_sides {kind}"
    lines = parts.train(check, side, f"{program} @configs/llama_1b.args --mock-data {flags}", 300)
    assert check.found["failures"] == []
    assert [line["iteration"] for line in lines] == [2, 3, 4]
    assert [line["consumed_tokens"] for line in lines] == [2 * 4 * 32, 3 * 4 * 32, 4 * 4 * 32]


@pytest.mark.slow
@pytest.mark.usefixtures("by_forks")
def test_kernels_are_timed_beside_a_copy(check):
    parts.kernels(check)
    assert check.found["failures"] == []
    kernels = [row["kernel"] for row in check.found["rows"]]
    assert kernels.count("memcpy fp32") == 2
    assert kernels.count("quantize bf16 to int8, base bf16") == 2
    assert [row["goal"] for row in check.found["rows"] if row["kernel"] == "dequantize int8 to bf16"] == ["90%"] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("by_forks")
def test_saves_and_generation_from_the_host_are_measured(check):
    parts.checkpoint(check)
    assert check.found["failures"] == []
    saves, places = check.found["rows"][:2], check.found["rows"][2:]
    assert [row["save"] for row in saves] == ["--save", "--async-save"]
    assert [row["weights on"] for row in places] == ["device", "host", "host --weight-bits 8", "host --weight-bits 4"]
    assert places[1]["same text"] == "yes"


@pytest.mark.slow
@pytest.mark.usefixtures("by_forks")
@pytest.mark.parametrize(("program", "same"), [("gpu_check_sides streams", True), ("helpers.impatient", False)])
def test_disturbances_change_no_bit_unless_something_does_not_wait(check, program, same):
    ways = [f"{way} --num-layers 2" for way in (parts.OVERLAP_OFF, "--zeropp --disturbed")]
    off, on = parts.on_two_nodes(check, f"-m {program}", ways)
    assert len(off) == len(on) == 4
    equal = [(a["lm_loss"], a["grad_norm"]) == (b["lm_loss"], b["grad_norm"]) for a, b in zip(off, on, strict=True)]
    assert all(equal) == same
