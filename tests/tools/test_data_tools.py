"""The tools for data and reports: what they write and say, and refusals that leave the folder as it was."""

import gzip
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import inspect_dataset
import merge_datasets
import preprocess_data
import pytest
import report
import train_tokenizer
from helpers.program import Program
from helpers.refusals import table

from megazpp.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megazpp.data.tokenizer import TokenizerConfig, load_tokenizer

Run = Callable[..., tuple[int, str, str]]
NULL = ["--tokenizer-type", "NullTokenizer"]
TEXT = "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money.\n" * 9
A, B, C = [[[1, 2], [3]], [[4]]], [[], [[5, 6, 7]]], [[[8]]]  # documents of sentences of ids


def write(prefix: Path | str, documents: list[list[list[int]]], dtype: str = "<u2") -> str:
    with IndexedDatasetBuilder(Path(prefix), dtype) as builder:
        for sentences in documents:
            builder.add_document(*sentences)
        builder.finalize()
    return str(prefix)


def pair(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def write_jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text, "title": text[:1]}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path, monkeypatch, capfd) -> Run:
    """Runs a tool's main in an empty folder: its exit code, stdout and stderr, which SentencePiece writes to itself."""
    monkeypatch.chdir(tmp_path)

    def run_main(main: Callable[[list[str]], int], *argv: object) -> tuple[int, str, str]:
        code = main([str(word) for word in argv])
        return code, *capfd.readouterr()

    return run_main


# ---- refusals -----------------------------------------------------------------------------------------------------

REFUSED = """
inspect_dataset | --tokens 1 | --input is missing
inspect_dataset | --input nothing | nothing.idx does not exist
inspect_dataset | --input junk | not a Megatron index
inspect_dataset | --input a --document 4 | --document 4: there are documents 0 to 1
inspect_dataset | --input a --tokens -1 | --tokens -1 is negative
inspect_dataset | --input large --tokenizer-type NullTokenizer | has the id 300: the tokenizer has only 257
merge_datasets | --output-prefix x | --input is missing
merge_datasets | --input a | --output-prefix is missing
merge_datasets | --input a wide --output-prefix x | a holds uint16 ids, wide int32
merge_datasets | --input a none --output-prefix x | --input none: none.idx does not exist
merge_datasets | --input empty --output-prefix x | there are no .bin and .idx files in it
merge_datasets | --input half --output-prefix x | half/x.idx does not exist
merge_datasets | --input sparse --output-prefix x | do not lie back to back
merge_datasets | --input modes --output-prefix x | multimodal
merge_datasets | --input a --output-prefix a --overwrite | a is one of the inputs
merge_datasets | --input a --output-prefix wide | wide.bin exists
preprocess_data | --input none.jsonl | none.jsonl cannot be read
preprocess_data | --input junk | junk, line 1: not UTF-8
preprocess_data | --input junk.jsonl | junk.jsonl, line 1: not UTF-8
preprocess_data | --input empty.jsonl | holds no text
preprocess_data | --input a.jsonl --tokenizer-model nothing | --tokenizer-model nothing does not exist
preprocess_data | --input a.jsonl --tokenizer-model junk | not a SentencePiece model
preprocess_data | --input a.jsonl --output-prefix there/x | there is no directory
preprocess_data | --input a.jsonl --json-keys body | a.jsonl, line 1: there is no 'body'
preprocess_data | --input a.jsonl --split-sentences | --split-sentences is a Megatron flag that is not supported
preprocess_data | --input a.jsonl --dataset-impl lazy | only mmap
preprocess_data | --inptu a.jsonl | --inptu is not a flag; did you mean --input?
preprocess_data | --input a.jsonl --workers many | --workers
train_tokenizer | --workers 1 | --input is missing
train_tokenizer | --input a.jsonl --output-prefix none/x | none is no directory
train_tokenizer | --input none.jsonl | none.jsonl cannot be read
train_tokenizer | --input empty.jsonl | holds no text
train_tokenizer | --input junk.jsonl | junk.jsonl, line 1: not UTF-8
train_tokenizer | --input a.jsonl --vocab-size 100000 | --vocab-size 100000 does not suit this text
train_tokenizer | --input a.jsonl --vocab-size 0 | --vocab-size 0 is not positive
train_tokenizer | --input a.jsonl --output-prefix there | there.model exists (--overwrite replaces it)
train_tokenizer | --input a.jsonl --model-type word | 'word' is not one of bpe, unigram
report | none | none is no folder
report | junk_run | metrics.jsonl: no line is a JSON object
report | run --output run/metrics.jsonl | metrics.jsonl exists and is no report
report | run --output none/r.html | none/r.html cannot be written: No such file or directory
"""
TOOLS = {tool.__name__: tool for tool in (inspect_dataset, merge_datasets, preprocess_data, train_tokenizer, report)}
DEFAULTS = {
    "preprocess_data": ["--output-prefix", "x"],
    "train_tokenizer": ["--output-prefix", "x", "--vocab-size", "300"],
}


def make_bad_input() -> None:
    """In the working folder, as `REFUSED` names it."""
    write_jsonl(Path("a.jsonl"), TEXT)
    for name, content in (("junk", b"\xff\xfe"), ("empty.jsonl", b""), ("there.model", b"mine")):
        Path(name).write_bytes(content)
    for name in ("junk.jsonl", "junk.bin", "junk.idx"):
        Path(name).write_bytes(b"\xff\xfe junk")
    write("a", A)
    write("wide", A, "<i4")
    write("large", [[[300]]])
    sparse, modes = write("sparse", B[1:]), write("modes", C)
    index = bytearray(Path(f"{sparse}.idx").read_bytes())
    index[34] = index[38] = 2  # its only sequence begins at the second id
    Path(f"{sparse}.idx").write_bytes(index)
    with open(f"{modes}.idx", "ab") as file:
        file.write(b"\x00")
    for folder in ("empty", "half", "run", "junk_run"):
        Path(folder).mkdir()
    Path("half/x.bin").write_bytes(b"1")
    Path("run/metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 5.0}\n')
    Path("junk_run/metrics.jsonl").write_bytes(b"\x00\xff junk")


def test_bad_input_is_refused_in_one_line_and_the_folder_stays_as_it_was(run, tmp_path):
    make_bad_input()

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = content()
    for name, flags, message in table(REFUSED):
        null = NULL if name == "preprocess_data" and "--tokenizer" not in flags else []
        code, out, err = run(TOOLS[name].main, *DEFAULTS.get(name, []), *null, *flags.split())
        *progress, line = err.splitlines()
        assert code == 2, flags
        assert not out or name == "inspect_dataset", flags
        assert line.startswith(f"{name}.py: error: "), flags
        assert message in line
        assert not progress or name == "train_tokenizer", flags
        assert content() == before, flags


# ---- inspect_dataset ----------------------------------------------------------------------------------------------


def test_sizes_lengths_and_ends_are_counted_and_a_document_is_decoded(run, tmp_path):
    prefix = tmp_path / "my"
    texts = [[b"Hello, ", b"world"], [], [b"x" * 1000], [b"end"]]
    write(prefix, [[[*text, *([256] if text == b"world" else [])] for text in sentences] for sentences in texts])
    code, out, _ = run(inspect_dataset.main, "--input", prefix, *NULL)
    assert code == 0
    for said in (
        "2,032 bytes in .bin, 122 in .idx",
        "1,016 of uint16",
        "4, 1 of them empty, in 4 sequences",
        "0 to 1,000 tokens, mean 254.0",
        "half below 8,",
        "at most 256; a vocabulary of 257",
        "of the first 3 documents that have text 1 end with eod (256)",
    ):
        assert said in out
    assert out.endswith("\ndocument 0, 13 of its 13 tokens:\nHello, world\n")
    _, out, _ = run(inspect_dataset.main, "--input", prefix, *NULL, "--document", 2, "--tokens", 5)
    assert out.endswith("document 2, 5 of its 1,000 tokens:\nxxxxx\n")
    _, out, _ = run(inspect_dataset.main, "--input", prefix, "--document", 3)  # without a tokenizer
    assert out.endswith("document 3, 3 of its 3 tokens:\n101 110 100\n")
    assert "eod" not in out
    _, out, _ = run(inspect_dataset.main, "--input", write(tmp_path / "one", [[[1]]]))
    assert "1 to 1 tokens" in out


# ---- merge_datasets -----------------------------------------------------------------------------------------------


def test_a_merged_pair_is_the_one_written_in_one_go(run, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    b, a, c = (write(folder / name, documents) for name, documents in (("b", B), ("a.1", A), ("c", C)))
    (folder / "notes.txt").touch()
    (folder / "d.bin.unfinished").touch()
    # a folder stands for its pairs in the order of their names
    code, out, err = run(merge_datasets.main, "--input", folder, "--output-prefix", tmp_path / "all")
    assert (code, out) == (0, f"{tmp_path}/all\n")
    assert err.splitlines()[1] == f"2 of 3: {folder}/b, 3 tokens"
    assert pair(tmp_path / "all") == pair(write(tmp_path / "expected", [*A, *B, *C]))
    dataset = IndexedDataset(tmp_path / "all")
    assert dataset.document_lengths.tolist() == [3, 1, 0, 3, 1]
    assert dataset.tokens.tolist() == list(range(1, 9))
    overwrite = ("--output-prefix", tmp_path / "all", "--overwrite")
    assert run(merge_datasets.main, "--input", c, a, *overwrite)[0] == 0
    assert pair(tmp_path / "all") == pair(write(tmp_path / "expected", [*C, *A]))
    assert IndexedDataset(Path(b)).tokens.tolist() == [5, 6, 7]


# ---- preprocess_data ----------------------------------------------------------------------------------------------


def test_a_megatron_command_line_works_as_it_is_and_skipped_lines_are_counted(run, tmp_path):
    corpus = write_jsonl(tmp_path / "a.jsonl", "one", "two")
    flags = ["--input", corpus, "--output-prefix", tmp_path / "my", *NULL, "--append-eod"]
    megatron = "--json-keys text title --workers 1 --partitions 2 --log-interval 1 --dataset-impl mmap"
    code, out, err = run(preprocess_data.main, *flags, *megatron.split())
    assert code == 0
    assert out.split() == [f"{tmp_path}/my_text_document", f"{tmp_path}/my_title_document"]
    assert "--partitions is ignored" in err
    assert "Processed 2 documents, 12 tokens" in err
    assert IndexedDataset(tmp_path / "my_title_document").tokens.tolist() == [111, 256, 116, 256]
    corpus.write_text(corpus.read_text() + "x\ny\n")
    code, _, err = run(preprocess_data.main, *flags, "--overwrite", "--on-error", "skip")
    assert code == 0
    assert [f"skipped {corpus}, line {line}: not JSON" in err for line in (2, 3, 4)] == [False, True, True]
    assert err.endswith("2 bad lines were skipped\n")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_in_the_middle_leaves_no_dataset_and_can_be_run_again(tmp_path, how):
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
    else:
        assert (program.process.returncode, left) == (128 + how, set())
    if how == signal.SIGINT:
        assert program.output().splitlines()[-1] == "preprocess_data.py: interrupted; nothing was written"
    small = write_jsonl(tmp_path / "b.jsonl", "one")
    assert preprocess_data.main([*command[1:], "--input", str(small)]) == 0
    assert {path.name for path in tmp_path.glob("my*")} == {"my_text_document.bin", "my_text_document.idx"}
    assert IndexedDataset(tmp_path / "my_text_document").tokens.tolist() == list(b"one")


# ---- train_tokenizer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_trained_tokenizer_gives_text_back(run, tmp_path, model_type):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "Zanzibar! " * 50}).encode()))
    flags = ["--input", "a.txt", "b.jsonl.gz", "--vocab-size", 292, "--output-prefix", "my"]
    code, out, err = run(train_tokenizer.main, *flags, "--model-type", model_type)
    assert (code, out) == (0, "my.model\n")
    assert re.fullmatch(r"read 1,319 .*; training 292 pieces takes a while\na tokenizer of 292 pieces in .* s\n", err)
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_model="my.model"))
    assert tokenizer is not None
    assert (tokenizer.vocab_size, tokenizer.eod) == (292, 1)
    for text in (TEXT, "Zanzibar", "  naïve—日本語 🐳\n\n", "<eod>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("Zanzibar")) < 8  # of 8 letters of which Z, z and b are only in the second file
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "b.jsonl.gz", "my.model"}


def test_every_file_gives_an_equal_part_of_the_text_and_sentencepiece_speaks_if_it_is_asked_to(run, tmp_path):
    for name, letter in (("a", "q"), ("b", "z")):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"body": f"{letter}{letter} " * 100}) + "\n") * 100)
    inputs = ["--input", "a.jsonl", "b.jsonl", "--max-characters", 3000, "--json-key", "body", "--minloglevel", 0]
    code, _, err = run(train_tokenizer.main, *inputs, "--vocab-size", 265, "--output-prefix", "my")
    assert code == 0
    assert "read 3,000 characters" in err
    assert "trainer_interface" in err
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_model="my.model"))
    assert tokenizer is not None
    assert len(tokenizer.encode("qq")) == len(tokenizer.encode("zz")) < 3


# ---- report -------------------------------------------------------------------------------------------------------


def test_the_page_is_in_the_first_folder_or_where_it_was_asked_for(run):
    make_bad_input()
    assert run(report.main, "run")[:2] == (0, "report: run/report.html\n")
    assert run(report.main, "run", "--output", "my.html")[:2] == (0, "report: my.html\n")
    for page in ("run/report.html", "my.html"):
        assert Path(page).read_text().endswith("</body></html>\n")
