"""The tool as a user runs it: prompts in, texts out, the same with and without the cache, for 1 and 2 tp ranks."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import generate
import pytest
from generate import read_prompts
from helpers.hf_models import make_llama, save
from helpers.program import ROOT, run_forked
from helpers.trained import Trained

PROMPTS = ["the cat sat", "D", "Document 3: the"]


def run(trained: Trained, *flags: str) -> str:
    code, output = run_forked("tools/generate.py", "--load", str(trained.load), *flags, folder=trained.home)
    assert code == 0, output
    return output


def texts(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(tuple(PROMPTS))]


@pytest.mark.slow
def test_greedy_texts_are_the_same_for_1_and_2_tp_ranks(trained: Trained):
    greedy = ["--temperature", "0", "--sample-tokens", "25"]
    alone = run(trained, "--prompt", *PROMPTS, *greedy)
    assert re.search(r"with the cache: 75 tokens in .* s, then \S+ tokens/s", alone)
    assert len(texts(alone)) == 3
    file = trained.home / "prompts.txt"
    file.write_text("\n".join([PROMPTS[0], "", *PROMPTS[1:]]))  # an empty line is no prompt
    split = run(
        trained, "--prompt-file", str(file), *greedy, "--tensor-model-parallel-size", "2", "--prompts-at-once", "2"
    )
    assert texts(split) == texts(alone)
    assert split.count("with the cache: ") == 2  # batches
    assert split.count("loading weights") == 1


MEASURED = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of 1 and 25 layers of 4.3 million fp32 weights."""
    home = tmp_path_factory.mktemp("large")
    for layers in (1, 25):
        model = make_llama(vocab_size=300, hidden_size=512, intermediate_size=2304, num_hidden_layers=layers)
        places = ["--input", str(save(model, home / f"hf{layers}")), "--output", str(home / f"{layers}")]
        kind = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "299"]
        code, output = run_forked("tools/convert_checkpoint.py", *places, *kind, folder=home)
        assert code == 0, output
    return [home / "1", home / "25"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--no-bf16",), ("--bf16",), ("--no-bf16", "--tensor-model-parallel-size", "2")])
def test_weights_are_in_memory_once_in_the_dtype_that_is_computed_in(large: list[Path], flags: tuple[str, ...]):
    peaks = []
    for load in large:
        command = [sys.executable, "tools/generate.py", "--load", str(load), "--prompt", "a", *flags]
        run = [sys.executable, "-c", MEASURED, *command, "--sample-tokens", "3", "--temperature", "0"]
        done = subprocess.run(run, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(1024 * int(done.stdout.split()[-1]))
    weights = 24 * 4_325_376 * (2 if "--bf16" in flags else 4) / (2 if len(flags) > 1 else 1)
    assert peaks[1] - peaks[0] < 1.3 * weights


@pytest.mark.slow
@pytest.mark.parametrize("where", ["device", "host"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it_if_that_is_asked_for(
    trained: Trained, tmp_path: Path, where: str
):
    shutil.copytree(trained.load, tmp_path / "load")
    (good,) = (tmp_path / "load").glob("iter_*")
    bad = shutil.copytree(good, tmp_path / "load/iter_0000099")
    values = json.loads((bad / "run.json").read_text())
    values["progress"]["iteration"] = 99
    (bad / "run.json").write_text(json.dumps(values))
    (tmp_path / "load/latest_checkpointed_iteration.txt").write_text("99\n")
    flags = ["--prompt", PROMPTS[0], "--temperature", "0", "--sample-tokens", "5", "--weights-on", where]
    load = ["--load", str(tmp_path / "load")]
    code, output = run_forked("tools/generate.py", *load, *flags, folder=trained.home)
    assert (code, "run.json is damaged" in output) == (2, True), output
    code, output = run_forked("tools/generate.py", *load, *flags, "--load-fallback", folder=trained.home)
    assert code == 0, output
    assert f"loading weights from {good}" in output
    assert texts(output) == texts(run(trained, *flags))


@pytest.mark.slow
def test_an_empty_prompt_is_continued_from_nothing(trained: Trained):
    flags = ["--temperature", "0", "--sample-tokens", "5"]
    assert "with the cache: 5 tokens in" in run(trained, "--prompt", "", *flags)


@pytest.mark.slow
@pytest.mark.parametrize("tp", ["1", "2"])
def test_texts_from_a_store_on_disk_are_those_of_packed_weights_in_memory(trained: Trained, tmp_path: Path, tp: str):
    flags = ["--prompt", *PROMPTS, "--temperature", "0", "--sample-tokens", "12", "--tensor-model-parallel-size", tp]
    disk = ["--weights-on", "disk", "--weight-bits", "8", "--weight-store", str(tmp_path / "store")]
    resident = run(trained, *flags, "--weights-on", "device", "--weight-bits", "8")
    first, second = (run(trained, *flags, *disk, "--kv-on", "host") for _ in range(2))
    assert len(texts(resident)) == 3
    assert texts(first) == texts(second) == texts(resident)
    assert (first.count(" wrote "), second.count(" wrote ")) == (1, 0)
    (per_pass,) = re.findall(r"(\d+) bytes are fetched per pass", second)
    assert f" 12 passes fetched {12 * int(per_pass)} bytes; " in second
    assert len(list((tmp_path / "store").glob("*.weights"))) == int(tp)


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_named_by_its_flag(trained: Trained):
    for tp in ("1", "2"):
        flags = ["--load", str(trained.load), "--prompt", "a", "--weights-on", "disk", "--weight-store", "/proc/x"]
        code, output = run_forked("tools/generate.py", *flags, "--tensor-model-parallel-size", tp, folder=trained.home)
        assert code == 2
        assert "error: rank 0: --weight-store /proc/x: /proc/x: No such file or directory\n" in output


def test_prompts_come_from_the_flag_a_file_or_stdin_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "prompts").write_text("a\r\n\nb\nc")
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\ny\n"))
    assert list(read_prompts(["p", "q\nq"], None, 2)) == [["p", "q\nq"]]
    assert list(read_prompts([""], None, 2)) == [[""]]
    assert list(read_prompts(["p", "", "q"], None, 2)) == [["p", ""], ["q"]]
    assert list(read_prompts([], str(tmp_path / "prompts"), 2)) == [["a", "b"], ["c"]]
    assert list(read_prompts([], None, 2)) == [["x", "y"]]


@pytest.mark.slow
def test_as_many_prompts_as_fit_are_one_batch(trained: Trained, tmp_path: Path):
    (tmp_path / "prompts").write_text("\n".join(PROMPTS * 4))
    flags = ["--prompt-file", str(tmp_path / "prompts"), "--prompts-at-once", "auto", "--sample-tokens", "2"]
    output = run(trained, *flags, "--weights-on", "host", "--weight-bits", "4")
    assert " 256 prompts at once" in output
    assert output.count("with the cache: 24 tokens") == 1


def test_on_a_terminal_each_line_is_answered_by_itself(monkeypatch: pytest.MonkeyPatch):
    terminal = io.StringIO("x\ny\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    batches = read_prompts([], None, 2)
    assert next(batches) == ["x"]
    assert terminal.tell() == 2


def test_what_cannot_be_is_refused_in_one_line(trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    load = ("--load", str(trained.load))
    empty, junk = tmp_path / "empty", tmp_path / "junk"
    empty.write_text("\n\n")
    junk.write_bytes(bytes(range(256)))
    for flags, message in (
        ((), "--load is missing: the folder of checkpoints"),
        ((*load, "--prompt-file", "nowhere"), "--prompt-file nowhere does not exist"),
        ((*load, "--prompt-file", str(empty)), f"--prompt-file {empty} holds no prompt"),
        ((*load, "--prompt-file", str(junk)), f"--prompt-file {junk} is not text in UTF-8: "),
        ((*load, "--prompt-file", "nowhere", "--prompt", "x"), "--sample-prompt and --prompt-file exclude each other"),
        ((*load, "--prompts-at-once", "0"), "--prompts-at-once 0 is not positive"),
    ):
        assert generate.main(list(flags)) == 2
        error = capfd.readouterr().err
        assert message in error
        assert error.count("\n") == 1, error
