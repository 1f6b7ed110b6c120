"""Prompts in, texts out: the same for 1 and 2 tp ranks, from packed weights and from a store."""

import io
import re
import shutil
import sys
from pathlib import Path

import convert_checkpoint
import pytest
from generate import read_prompts
from helpers.hf_models import make_llama, save
from helpers.program import run_program
from helpers.tool import run_tool

PROMPTS = ["Call me", "S", "Some years ago"]
GREEDY = ["--temperature", 0]


def run(load: Path, *flags: object, world: int = 1) -> str:
    code, output = run_tool("generate", "--load", load, *flags, "--tensor-model-parallel-size", world, world=world)
    assert code == 0, output
    return output


def texts(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(tuple(PROMPTS))]


@pytest.fixture
def load(converted) -> Path:
    return converted / "ours"


@pytest.mark.slow
def test_greedy_texts_are_the_same_for_1_and_2_tp_ranks_and_drawn_ones_for_any_batches(load, tmp_path):
    alone = run(load, "--prompt", *PROMPTS, *GREEDY, "--sample-tokens", 25)
    assert re.search(r"with the cache: 75 tokens in .* s, then \S+ tokens/s", alone)
    assert len(texts(alone)) == 3
    (tmp_path / "prompts").write_text("\n".join([PROMPTS[0], "", *PROMPTS[1:]]))  # an empty line is no prompt
    from_file = ["--prompt-file", tmp_path / "prompts", "--sample-tokens", 25, "--prompts-at-once"]
    split = run(load, *from_file, 2, *GREEDY, world=2)
    assert texts(split) == texts(alone)
    assert split.count("with the cache: ") == 2  # batches
    assert split.count("loading weights") == 1
    drawn = [texts(run(load, *from_file, size, "--seed", 5)) for size in (1, 2, 3)]
    assert drawn[0] == drawn[1] == drawn[2] != texts(alone)
    assert texts(run(load, *from_file, 2, "--seed", 6)) != drawn[0]
    empty = run(load, "--prompt", "", *GREEDY, "--sample-tokens", 5)  # is continued from nothing
    assert "with the cache: 5 tokens in" in empty


def peak_bytes(load: Path, *flags: str) -> int:
    """The most memory of a process of the real program."""
    tool = [sys.executable, "tools/generate.py", "--load", str(load), "--prompt", "a", "--sample-tokens", "3", *flags]
    measure = f"subprocess.run({tool}, check=True); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    code, output = run_program("-c", f"import resource, subprocess; {measure}", folder=load)
    assert code == 0, output
    return 1024 * int(output.split()[-1])


@pytest.mark.slow
def test_weights_are_in_memory_once_in_the_dtype_that_is_computed_in(tmp_path):
    """Models of 1 and 25 layers of 4.3 million fp32 weights."""
    for layers in (1, 25):
        model = make_llama(vocab_size=300, hidden_size=512, intermediate_size=2304, num_hidden_layers=layers)
        places = ["--input", str(save(model, tmp_path / f"hf{layers}")), "--output", str(tmp_path / str(layers))]
        assert convert_checkpoint.main([*places, "--tokenizer-type", "NullTokenizer", "--vocab-size", "299"]) == 0
    small = peak_bytes(tmp_path / "1", "--no-bf16")
    for flags, num_bytes in (("--no-bf16", 4), ("--bf16", 2), ("--no-bf16 --tensor-model-parallel-size 2", 2)):
        assert peak_bytes(tmp_path / "25", *flags.split()) - small < 1.3 * num_bytes * 24 * 4_325_376, flags


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it_if_that_is_asked_for(load, tmp_path):
    spoilt = shutil.copytree(load, tmp_path / "load")
    (good,) = spoilt.glob("iter_*")
    record = shutil.copytree(good, spoilt / "iter_0000099") / "run.json"
    record.write_text(record.read_text().replace('"iteration": 0', '"iteration": 99'))
    (spoilt / "latest_checkpointed_iteration.txt").write_text("99\n")
    for where in ("device", "host"):
        flags = ["--prompt", PROMPTS[0], *GREEDY, "--sample-tokens", 5, "--weights-on", where]
        code, output = run_tool("generate", "--load", spoilt, *flags)
        assert (code, "run.json is damaged" in output) == (2, True), output
        output = run(spoilt, *flags, "--load-fallback")
        assert f"loading weights from {good}" in output
        assert texts(output) == texts(run(load, *flags))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_texts_from_a_store_on_disk_are_those_of_packed_weights_in_memory_with_as_many_prompts_at_once_as_fit(
    load, tmp_path, tp
):
    flags = ["--prompt", *PROMPTS * 4, "--prompts-at-once", "auto", *GREEDY, "--sample-tokens", 12, "--weight-bits", 8]
    resident = run(load, *flags, "--weights-on", "device", world=tp)
    disk = [*flags, "--kv-on", "host", "--weights-on", "disk", "--weight-store"]
    first, second = (run(load, *disk, tmp_path, world=tp) for _ in range(2))
    assert " 256 prompts at once" in first
    assert len(texts(resident)) == 12
    assert texts(first) == texts(second) == texts(resident)
    assert (first.count(" wrote "), second.count(" wrote ")) == (1, 0)
    (per_pass,) = re.findall(r"(\d+) bytes are fetched per pass", second)
    assert f" 12 passes fetched {12 * int(per_pass)} bytes; " in second  # one batch
    assert len(list(tmp_path.glob("*.weights"))) == tp
    # a store that cannot be written is named by its flag
    code, output = run_tool("generate", "--load", load, *disk, "/proc/x", "--tensor-model-parallel-size", tp, world=tp)
    assert code == 2
    assert "error: rank 0: --weight-store /proc/x: /proc/x: No such file or directory\n" in output


def test_prompts_come_from_the_flag_a_file_or_stdin_and_from_a_terminal_as_they_are_typed(tmp_path, monkeypatch):
    (tmp_path / "prompts").write_text("a\r\n\nb\nc")
    for given, batches in (
        (["p", "q\nq"], [["p", "q\nq"]]),
        ([""], [[""]]),
        (["p", "", "q"], [["p", ""], ["q"]]),
        ([], [["a", "b"], ["c"]]),
    ):
        assert list(read_prompts(given, str(tmp_path / "prompts"), 2)) == batches
    terminal = io.StringIO("x\ny\n")
    monkeypatch.setattr(sys, "stdin", terminal)
    assert list(read_prompts([], None, 2)) == [["x", "y"]]
    terminal.seek(0)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert next(read_prompts([], None, 2)) == ["x"]
    assert terminal.tell() == 2
