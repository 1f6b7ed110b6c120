"""Test gpu_check.py: failing, hanging and killed parts, time budgets, and every part at its smallest size on a CPU."""

import json
import os
import re
import sys

import gpu_check
import gpu_check_parts
import gpu_check_workers
import pytest
import torch
from gpu_check import Part
from gpu_check_parts import FLOAT8, INT8, OVERLAP_OFF, Check, on_two_nodes, train
from helpers.fork_python import forked_python
from helpers.program import ROOT, Program

from megazpp.base.program import EXIT_USER_ERROR
from megazpp.features import FEATURES
from megazpp.model.gpt import GPTModel
from megazpp.run.arguments import parse_run_config


def good(check: Check) -> None:
    check.row(figure=1)


def failing(check: Check) -> None:
    check.row(figure=2)
    check.fail("the bits differ")


def raising(check: Check) -> None:
    check.row(other=3)
    raise RuntimeError("no memory\nat all")


@pytest.fixture
def run_parts(tmp_path, monkeypatch):
    """Return a function that runs gpu_check.py on the CPU with other parts than the real ones.

    The function returns the exit code and the results of each part from results.json.
    """
    monkeypatch.setattr(gpu_check, "exit_on_signals", lambda: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.chdir(ROOT)

    def run(parts: tuple[Part, ...], *flags: str) -> tuple[int, list[dict[str, object]]]:
        monkeypatch.setattr(gpu_check, "PARTS", parts)
        out = tmp_path / "".join(["out", *flags])
        code = gpu_check.main(["--out", str(out), "--device", "cpu", *flags])
        return code, json.loads((out / "results.json").read_text())["parts"]

    return run


def test_failed_part_keeps_its_rows_and_other_parts_run(run_parts, capsys):
    parts = tuple(Part(part.__name__, "A title", part, (60, 60), 1) for part in (failing, raising, good))
    code, found = run_parts((*parts, Part("late", "", good, (60, 60), 1000)))
    assert code == 1
    assert [part["status"] for part in found] == ["failed", "failed", "passed", "skipped"]
    assert [part["rows"] for part in found] == [[{"figure": 2}], [{"other": 3}], [{"figure": 1}], []]
    assert [part["failures"] for part in found] == [["the bits differ"], ["RuntimeError: no memory"], [], []]
    assert found[3]["notes"] == ["not run: it needs 1000 s, but less time is left"]
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith(gpu_check.REHEARSAL)
    table = re.escape("\n\n| figure |\n|---|\n| 2 |\n\n- FAILED: the bits differ\n")
    assert re.search(rf"## failing: A title \(failed, \d+ s\){table}", shown)


def test_budget_selects_parts_that_fill_it(run_parts):
    for long, minutes in ((False, 8), (True, 30)):
        assert sum(part.seconds[long] for part in gpu_check.PARTS) == 60 * minutes
    parts = (Part("good", "", good, (60, 60), 1), Part("failing", "", failing, (0, 60), 1))
    for flags, names in (("8", ["good"]), ("30", ["good", "failing"]), ("8 --parts failing", ["failing"])):
        code, found = run_parts(parts, "--budget-minutes", *flags.split())
        assert (code, [part["name"] for part in found]) == (int("failing" in names), names)


HANGING = """
import sys

sys.path.insert(1, "tests/gpu_check")
import gpu_check

def hanging(check, program="import subprocess; subprocess.run(['sleep', '600'])"):
    check.row(figure=4)
    (check.folder / "hang.py").write_text(program)
    code = check.run(f"{check.folder}/hang.py", check.folder / "log.txt", check.left())
    check.fail(f"ended with {code}")

def waiting(check):
    hanging(check, "import time; time.sleep(600)")

parts = ((hanging, (1, 1)), (waiting, (59, 59)))
gpu_check.PARTS = tuple(gpu_check.Part(part.__name__, "", part, seconds, 1) for part, seconds in parts)
gpu_check.main()
"""


@pytest.mark.slow
def test_hanging_part_is_ended_and_a_killed_run_keeps_its_results(tmp_path):
    out = tmp_path / "out"
    flags = ["--out", str(out), "--device", "cpu", "--budget-minutes", "1"]
    program = Program("-c", HANGING, *flags, folder=tmp_path)
    program.wait_for("waiting: at most ")
    program.wait_until(lambda: len(program.left_behind()) > 1)  # both exist: the launcher, and the program it runs
    program.process.kill()
    assert program.all_end()
    hung, killed = json.loads((out / "results.json").read_text())["parts"]
    assert (hung["status"], hung["failures"]) == ("failed", ["ended with None"])
    assert (killed["status"], killed["rows"]) == ("running", [{"figure": 4}])
    assert "| 4 |" in (out / "table.md").read_text()


@pytest.fixture
def check(tmp_path) -> Check:
    return Check(tmp_path / "part", "", "cpu", 600.0, False, lambda: None)


@pytest.fixture
def forking_check(check, tmp_path, monkeypatch) -> Check:
    """Return a `Check` whose programs start in milliseconds, as forks of a process that has imported torch."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "tools/benchmarks", "tests/gpu_check", "tests"))
    env = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": f"{tmp_path}/cache"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", str(forked_python()))
    monkeypatch.chdir(ROOT)
    return check


def ending(check: Check, code: int | None, text: str) -> None:
    """Replace `check.run`: the programs of the part end with `code`, and their log holds `text`."""
    check.run = lambda words, log, *more, **options: log.write_text(text) and code


LOG = """\
tests/kernels/test_a.py::test_x[8-128-dtype0] PASSED                     [ 33%]
[gw3] [ 66%] FAILED tests/kernels/test_a.py::test_x[8-256-dtype0]
[gw0] [ 67%] PASSED tests/kernels/test_a.py::test_x[2-256-dtype0]
tests/model/test_b.py::test_y SKIPPED (no)                               [ 99%]
tests/model/test_b.py::test_z """


def test_finished_tests_are_counted_after_a_timeout(check):
    ending(check, None, LOG)
    gpu_check_parts.correct(check)
    assert check.found["rows"] == [{"passed": 2, "failed": 1, "error": 0, "skipped": 1}]
    assert "the time was over" in check.found["notes"][0]
    assert len(check.found["failures"]) == 1


def test_gpu_tests_begin_with_large_offsets(monkeypatch):
    monkeypatch.chdir(ROOT)
    files = gpu_check_parts.files_with_gpu_tests()
    assert files[0] == "tests/kernels/test_implementations.py"
    assert "tests/data/test_loader.py" in files[1:]


def test_only_float8_may_be_skipped_for_a_missing_package(check):
    for side, flags, code in (("a", FLOAT8, EXIT_USER_ERROR), ("b", FLOAT8, 1), ("c", "", EXIT_USER_ERROR)):
        ending(check, code, "needs torchao\n")
        assert train(check, side, f"pretrain_gpt.py @configs/gpt_125m.args {flags}", 60) == []
    assert check.found["notes"] == ["a: skipped, needs torchao"]
    assert check.found["failures"] == ["b: exit code 1, needs torchao", "c: exit code 2, needs torchao"]


def test_baseline_has_as_many_parameters_as_our_model():
    for name in ("gpt_125m", "llama_1b", "llama_8b"):
        config = parse_run_config([f"@configs/{name}.args"], ROOT, features=FEATURES).config
        with torch.device("meta"):
            ours = GPTModel(config.model, vocab_size=50304)
            theirs = gpu_check_workers.PlainModel(config.model, 50304, config.data.seq_length)
        counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
        assert counts[0] == counts[1], name


@pytest.mark.slow
@pytest.mark.parametrize("side", ["ours", "baseline", "pretended --zeropp"])
def test_each_side_of_the_comparison_trains_and_logs(forking_check, side):
    kind, _, flags = side.partition(" ")
    program = "pretrain_gpt.py" if kind == "ours" else f"-m gpu_check_workers {kind}"
    lines = train(forking_check, side, f"{program} @configs/llama_1b.args --mock-data {flags}", 300)
    assert forking_check.found["failures"] == []
    assert [line["iteration"] for line in lines] == [2, 3, 4]
    assert [line["consumed_tokens"] for line in lines] == [2 * 4 * 32, 3 * 4 * 32, 4 * 4 * 32]


@pytest.mark.slow
def test_kernel_save_and_generation_parts_report_their_rows(forking_check):
    gpu_check_parts.kernels(forking_check)
    gpu_check_parts.checkpoint(forking_check)
    rows = forking_check.found["rows"]
    assert forking_check.found["failures"] == []
    kernels = [row["kernel"] for row in rows if "kernel" in row]
    assert kernels.count("memcpy fp32") == kernels.count("quantize bf16 to int8, base bf16") == 2
    goals = {row["kernel"]: row["goal"] for row in rows if "kernel" in row}
    assert (goals["dequantize int8 to bf16"], goals["decode delta, lr 1e-06"]) == ("90%", "60%")
    saves, places = ([row for row in rows if name in row] for name in ("save", "weights device"))
    assert [row["save"] for row in saves] == ["--save", "--async-save"]
    assert [row["weights device"] for row in places] == [
        "device",
        "host",
        "host --weight-bits 8",
        "host --weight-bits 4",
    ]
    assert places[1]["same text"] == "yes"


@pytest.mark.nightly
@pytest.mark.parametrize(("program", "same"), [("gpu_check_workers streams", True), ("helpers.broken_overlap", False)])
def test_disturbances_change_results_only_if_a_wait_is_missing(forking_check, program, same):
    ways = [f"{way} --num-layers 2" for way in (OVERLAP_OFF, f"{INT8} --disturbed")]
    off, on = on_two_nodes(forking_check, f"-m {program}", ways)
    assert len(off) == len(on) == 4
    equal = [(a["lm_loss"], a["grad_norm"]) == (b["lm_loss"], b["grad_norm"]) for a, b in zip(off, on, strict=True)]
    assert all(equal) == same
