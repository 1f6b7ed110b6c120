"""Prompts in, texts out: the same for 1 and 2 tp ranks, from packed weights and from a store; and what is refused."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import convert_checkpoint
import generate
import pytest
from generate import read_prompts
from helpers.hf_models import make_llama, save
from helpers.program import ROOT
from helpers.trained import run_tool

PROMPTS = ["Call me", "S", "Some years ago"]
GREEDY = ["--temperature", 0]


def run(converted: Path, *flags: object, world: int = 1) -> str:
    split = ["--tensor-model-parallel-size", world]
    code, output = run_tool("generate", "--load", converted / "ours", *flags, *split, world=world)
    assert code == 0, output
    return output


def texts(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(tuple(PROMPTS))]


@pytest.mark.slow
def test_greedy_texts_are_the_same_for_1_and_2_tp_ranks_and_drawn_ones_for_any_batches(converted, tmp_path):
    alone = run(converted, "--prompt", *PROMPTS, *GREEDY, "--sample-tokens", 25)
    assert re.search(r"with the cache: 75 tokens in .* s, then \S+ tokens/s", alone)
    assert len(texts(alone)) == 3
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join([PROMPTS[0], "", *PROMPTS[1:]]))  # an empty line is no prompt
    in_twos = ["--prompt-file", file, "--prompts-at-once", 2, "--sample-tokens", 25]
    split = run(converted, *in_twos, *GREEDY, world=2)
    assert texts(split) == texts(alone)
    assert split.count("with the cache: ") == 2  # batches
    assert split.count("loading weights") == 1
    drawn = [texts(run(converted, *in_twos, "--prompts-at-once", size, "--seed", 5)) for size in (1, 2, 3)]
    assert drawn[0] == drawn[1] == drawn[2] != texts(alone)
    assert texts(run(converted, *in_twos, "--seed", 6)) != drawn[0]
    empty = run(converted, "--prompt", "", *GREEDY, "--sample-tokens", 5)  # is continued from nothing
    assert "with the cache: 5 tokens in" in empty


MEASURED = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)


def peak_bytes(load: Path, *flags: str) -> int:
    """The most memory of a process of the real program."""
    tool = [sys.executable, "tools/generate.py", "--load", str(load), "--prompt", "a", *flags]
    command = [sys.executable, "-c", MEASURED, *tool, "--sample-tokens", "3", "--temperature", "0"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.split()[-1])


@pytest.mark.slow
def test_weights_are_in_memory_once_in_the_dtype_that_is_computed_in(tmp_path):
    """Models of 1 and 25 layers of 4.3 million fp32 weights."""
    for layers in (1, 25):
        model = make_llama(vocab_size=300, hidden_size=512, intermediate_size=2304, num_hidden_layers=layers)
        places = ["--input", str(save(model, tmp_path / f"hf{layers}")), "--output", str(tmp_path / str(layers))]
        assert convert_checkpoint.main([*places, "--tokenizer-type", "NullTokenizer", "--vocab-size", "299"]) == 0
    small = peak_bytes(tmp_path / "1", "--no-bf16")
    for flags, num_bytes in (
        (["--no-bf16"], 4),
        (["--bf16"], 2),
        (["--no-bf16", "--tensor-model-parallel-size", "2"], 2),
    ):
        assert peak_bytes(tmp_path / "25", *flags) - small < 1.3 * num_bytes * 24 * 4_325_376, flags


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it_if_that_is_asked_for(converted, tmp_path):
    load = shutil.copytree(converted / "ours", tmp_path / "load")
    (good,) = load.glob("iter_*")
    bad = shutil.copytree(good, load / "iter_0000099")
    values = json.loads((bad / "run.json").read_text())
    values["progress"]["iteration"] = 99
    (bad / "run.json").write_text(json.dumps(values))
    (load / "latest_checkpointed_iteration.txt").write_text("99\n")
    for where in ("device", "host"):
        flags = ["--prompt", PROMPTS[0], *GREEDY, "--sample-tokens", 5, "--weights-on", where]
        code, output = run_tool("generate", "--load", load, *flags)
        assert (code, "run.json is damaged" in output) == (2, True), output
        code, output = run_tool("generate", "--load", load, *flags, "--load-fallback")
        assert code == 0, output
        assert f"loading weights from {good}" in output
        assert texts(output) == texts(run(converted, *flags))


@pytest.mark.slow
def test_texts_from_a_store_on_disk_are_those_of_packed_weights_in_memory(converted, tmp_path):
    for tp in (1, 2):
        flags, store = ["--prompt", *PROMPTS, *GREEDY, "--sample-tokens", 12, "--weight-bits", 8], tmp_path / str(tp)
        disk = ["--weights-on", "disk", "--weight-store", store, "--kv-on", "host"]
        resident = run(converted, *flags, "--weights-on", "device", world=tp)
        first, second = (run(converted, *flags, *disk, world=tp) for _ in range(2))
        assert len(texts(resident)) == 3
        assert texts(first) == texts(second) == texts(resident)
        assert (first.count(" wrote "), second.count(" wrote ")) == (1, 0)
        (per_pass,) = re.findall(r"(\d+) bytes are fetched per pass", second)
        assert f" 12 passes fetched {12 * int(per_pass)} bytes; " in second
        assert len(list(store.glob("*.weights"))) == tp


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_named_by_its_flag(converted):
    flags = ["--load", converted / "ours", "--prompt", "a", "--weights-on", "disk", "--weight-store", "/proc/x"]
    for tp in (1, 2):
        code, output = run_tool("generate", *flags, "--tensor-model-parallel-size", tp, world=tp)
        assert code == 2
        assert "error: rank 0: --weight-store /proc/x: /proc/x: No such file or directory\n" in output


def test_prompts_come_from_the_flag_a_file_or_stdin_in_batches_and_from_a_terminal_as_they_are_typed(
    tmp_path, monkeypatch
):
    (tmp_path / "prompts").write_text("a\r\n\nb\nc")
    assert list(read_prompts(["p", "q\nq"], None, 2)) == [["p", "q\nq"]]
    assert list(read_prompts([""], None, 2)) == [[""]]
    assert list(read_prompts(["p", "", "q"], None, 2)) == [["p", ""], ["q"]]
    assert list(read_prompts([], str(tmp_path / "prompts"), 2)) == [["a", "b"], ["c"]]
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\ny\n"))
    assert list(read_prompts([], None, 2)) == [["x", "y"]]
    monkeypatch.setattr(sys, "stdin", terminal := io.StringIO("x\ny\n"))
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert next(read_prompts([], None, 2)) == ["x"]
    assert terminal.tell() == 2


@pytest.mark.slow
def test_as_many_prompts_as_fit_are_one_batch(converted, tmp_path):
    (tmp_path / "prompts").write_text("\n".join(PROMPTS * 4))
    flags = ["--prompt-file", tmp_path / "prompts", "--prompts-at-once", "auto", "--sample-tokens", 2]
    output = run(converted, *flags, "--weights-on", "host", "--weight-bits", 4)
    assert " 256 prompts at once" in output
    assert output.count("with the cache: 24 tokens") == 1


def test_what_cannot_be_is_refused_in_one_line(converted, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text("\n\n")
    Path("junk").write_bytes(bytes(range(256)))
    load = f"--load {converted}/ours"
    for flags, message in (
        ("", "--load is missing"),
        (f"{load} --prompt-file nowhere", "--prompt-file nowhere does not exist"),
        (f"{load} --prompt-file empty", "--prompt-file empty holds no prompt"),
        (f"{load} --prompt-file junk", "--prompt-file junk is not text in UTF-8: "),
        (f"{load} --prompt-file nowhere --prompt x", "--sample-prompt and --prompt-file exclude each other"),
        (f"{load} --prompts-at-once 0", "--prompts-at-once 0 is not positive"),
    ):
        assert generate.main(flags.split()) == 2, flags
        error = capfd.readouterr().err
        assert message in error
        assert error.count("\n") == 1, error
