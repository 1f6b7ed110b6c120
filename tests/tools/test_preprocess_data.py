"""The program takes Megatron's flags, and whatever ends it leaves no dataset that is not whole."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import preprocess_data
import pytest
from helpers.program import Program

from megazpp.data.indexed_dataset import IndexedDataset

NULL = ["--tokenizer-type", "NullTokenizer"]


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = preprocess_data.main([str(word) for word in argv])
    return code, *capsys.readouterr()


def write_jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text, "title": text[:1]}) + "\n" for text in texts), encoding="utf-8")
    return path


def test_a_megatron_command_line_works_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    corpus = write_jsonl(tmp_path / "a.jsonl", "one", "two")
    flags = [
        "--input",
        corpus,
        "--json-keys",
        "text",
        "title",
        "--output-prefix",
        tmp_path / "my",
        *NULL,
        "--append-eod",
    ]
    code, out, err = run(
        capsys, *flags, "--workers", 1, "--partitions", 2, "--log-interval", 1, "--dataset-impl", "mmap"
    )
    assert code == 0
    assert out.split() == [f"{tmp_path}/my_text_document", f"{tmp_path}/my_title_document"]
    assert "--partitions is ignored" in err
    assert "Processed 2 documents, 12 tokens" in err
    assert IndexedDataset(tmp_path / "my_title_document").tokens.tolist() == [111, 256, 116, 256]


def test_skipped_lines_are_reported_one_by_one_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    corpus = write_jsonl(tmp_path / "a.jsonl", "one")
    corpus.write_text(corpus.read_text() + "x\ny\n")
    code, _, err = run(capsys, "--input", corpus, "--output-prefix", tmp_path / "my", *NULL, "--on-error", "skip")
    assert code == 0
    assert f"skipped {corpus}, line 2: not JSON" in err
    assert f"skipped {corpus}, line 3: not JSON" in err
    assert err.endswith("2 bad lines were skipped\n")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--input none.jsonl", "none.jsonl cannot be read"),
        ("--input junk", "junk, line 1: not UTF-8"),
        ("--input junk.jsonl", "junk.jsonl, line 1: not UTF-8"),
        ("--input empty.jsonl", "holds no text"),
        ("--input a.jsonl --tokenizer-model nothing", "--tokenizer-model nothing does not exist"),
        ("--input a.jsonl --tokenizer-model junk", "not a SentencePiece model"),
        ("--input a.jsonl --output-prefix there/x", "there is no directory"),
        ("--input a.jsonl --json-keys body", "a.jsonl, line 1: there is no 'body'"),
        ("--input a.jsonl --split-sentences", "--split-sentences is a Megatron flag that is not supported"),
        ("--input a.jsonl --dataset-impl lazy", "only mmap"),
        ("--inptu a.jsonl", "--inptu is not a flag; did you mean --input?"),
        ("--input a.jsonl --workers many", "--workers"),
    ],
)
def test_bad_input_gives_one_line_and_leaves_the_folder_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str, reason: str
):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", "one")
    for name, content in (("junk", bytes(range(255, 0, -1))), ("empty.jsonl", b"")):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "junk.jsonl").write_bytes((tmp_path / "junk").read_bytes())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    defaults = ["--output-prefix", "x"] + ([] if "--tokenizer" in flags else NULL)
    code, out, err = run(capsys, *defaults, *flags.split())
    assert (code, out) == (2, "")
    assert err.startswith("preprocess_data.py: error: ")
    assert reason in err
    assert err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_in_the_middle_leaves_no_dataset_and_can_be_run_again(
    tmp_path: Path, how: signal.Signals
):
    corpus = tmp_path / "a.jsonl"
    with open(corpus, "w") as file:
        file.writelines([json.dumps({"text": "x" * 100_000}) + "\n"] * 1000)  # 100 blocks, of which 8 are read ahead
    command = ["tools/preprocess_data.py", "--output-prefix", f"{tmp_path}/my", *NULL, "--log-interval", "1"]
    program = Program(*command, "--input", str(corpus), "--workers", "2", folder=tmp_path)
    try:
        program.wait_for("Processed")
        os.kill(program.process.pid, how)
        program.process.wait(timeout=30)
        assert program.seconds_until_all_are_gone(20) < 20  # the workers, too
    finally:
        program.kill()
    left = {path.name for path in tmp_path.glob("my*")}
    if how == signal.SIGKILL:
        assert left == {"my_text_document.bin.unfinished"}
        assert (tmp_path / "my_text_document.bin.unfinished").stat().st_size > 0
    elif how == signal.SIGTERM:
        assert (program.process.returncode, left) == (143, set())
    else:
        assert program.process.returncode == 130
        assert program.output().splitlines()[-1] == "preprocess_data.py: interrupted; nothing was written"
        assert left == set()
    small = write_jsonl(tmp_path / "b.jsonl", "one")
    assert preprocess_data.main([*command[1:], "--input", str(small)]) == 0
    assert {path.name for path in tmp_path.glob("my*")} == {"my_text_document.bin", "my_text_document.idx"}
    assert IndexedDataset(tmp_path / "my_text_document").tokens.tolist() == list(b"one")
