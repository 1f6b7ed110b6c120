"""Test the files that the data tools and the report tool write, and what these tools print."""

import gzip
import json
import re
import signal
from pathlib import Path

import inspect_dataset
import merge_datasets
import preprocess_data
import pytest
import report
import train_tokenizer
from helpers.pairs import TEXT
from helpers.program import Program
from helpers.tiers import nightly, slow

from megazpp.data.indexed_builder import IndexedDatasetBuilder
from megazpp.data.indexed_dataset import IndexedDataset
from megazpp.data.tokenizer import TokenizerConfig, load_tokenizer

NULL, MY_MODEL = ["--tokenizer-type", "NullTokenizer"], TokenizerConfig(tokenizer_model="my.model")
# three datasets: lists of documents, which are lists of sentences, which are lists of token ids
A, B, C = [[[1, 2], [3]], [[4]]], [[], [[5, 6, 7]]], [[[8]]]


def write(prefix: str, documents: list[list[list[int]]]) -> tuple[bytes, bytes]:
    with IndexedDatasetBuilder(Path(prefix), "<u2") as builder:
        for sentences in documents:
            builder.add_document(*sentences)
        builder.finalize()
    return pair(prefix)


def pair(prefix: str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def tokens(prefix: str | Path) -> list[int]:
    return IndexedDataset(Path(prefix)).tokens.tolist()


def test_inspect_dataset_counts_tokens_and_decodes_a_document(run_main):
    write("my", [[[*b"Hello, "], [*b"world", 256]], [], [[*b"x" * 1000]], [[*b"end"]]])
    _, out, _ = run_main(inspect_dataset.main, "--input", "my", *NULL)
    for said in (
        "2,032 bytes in .bin, 122 in .idx",
        "1,016 of uint16",
        "4, including 1 empty ones, in 4 sequences",
        "0 to 1,000 tokens, mean 254.0",
        "half below 8,",
        "at most 256; a vocabulary of 257",
        "of the first 3 documents with text, 1 end with eod (256)",
    ):
        assert said in out
    assert out.endswith("\ndocument 0, the first 13 of 13 tokens:\nHello, world\n")
    _, out, _ = run_main(inspect_dataset.main, "--input", "my", *NULL, "--document", 2, "--tokens", 5)
    assert out.endswith("document 2, the first 5 of 1,000 tokens:\nxxxxx\n")
    # without a tokenizer, the tool prints token ids
    _, out, _ = run_main(inspect_dataset.main, "--input", "my", "--document", 3)
    assert out.endswith("document 3, the first 3 of 3 tokens:\n101 110 100\n")
    assert "eod" not in out


def test_merged_pair_equals_one_written_in_one_go(run_main):
    Path("parts").mkdir()
    for name, documents in (("b", B), ("a.1", A), ("c", C)):
        write(f"parts/{name}", documents)
    for other in ("notes.txt", "d.bin.unfinished"):
        Path("parts", other).touch()
    # As --input, a folder stands for the .bin/.idx pairs in it, in the order of their names.
    code, out, err = run_main(merge_datasets.main, "--input", "parts", "--output-prefix", "all")
    assert (code, out) == (0, "all\n")
    assert err.splitlines()[1] == "2 of 3: parts/b, 3 tokens"
    assert pair("all") == write("expected", [*A, *B, *C])
    run_main(merge_datasets.main, "--input", "parts/c", "parts/a.1", "--output-prefix", "all", "--overwrite")
    assert pair("all") == write("expected", [*C, *A])
    assert tokens("parts/b") == [5, 6, 7]


def test_preprocess_data_accepts_megatron_flags_and_counts_bad_lines(run_main):
    documents = "".join(json.dumps({"text": text, "title": text[0]}) + "\n" for text in ("one", "two"))
    Path("a.jsonl").write_text(f"{documents}x\ny\n")
    flags = ["--input", "a.jsonl", "--output-prefix", "my", *NULL, "--append-eod", "--on-error", "skip"]
    megatron = "--json-keys text title --workers 1 --partitions 2 --log-interval 1 --dataset-impl mmap"
    code, out, err = run_main(preprocess_data.main, *flags, *megatron.split())
    assert (code, out.split()) == (0, ["my_text_document", "my_title_document"])
    for said in ("--partitions is ignored", "Processed 2 documents, 12 tokens", "\n2 bad lines were skipped\n"):
        assert said in err
    assert tokens("my_title_document") == [111, 256, 116, 256]


@pytest.mark.parametrize("how", [slow(signal.SIGKILL), slow(signal.SIGINT), nightly(signal.SIGTERM)])
def test_stopped_preprocessing_leaves_no_dataset_and_can_be_repeated(tmp_path, how):
    corpus = tmp_path / "a.jsonl"
    # the file has 100 blocks, of which workers read 8 ahead, so the program is stopped in the middle
    corpus.write_text((json.dumps({"text": "x" * 100_000}) + "\n") * 1000)
    flags = ["--input", str(corpus), "--output-prefix", f"{tmp_path}/my", *NULL, "--workers", "2"]
    program = Program("tools/preprocess_data.py", *flags, "--log-interval", "1", folder=tmp_path)
    program.wait_for("Processed")
    program.process.send_signal(how)
    assert program.all_end()  # the worker processes must end too
    output = program.finish()
    left = {path.name: path.stat().st_size > 0 for path in tmp_path.glob("my*")}
    killed = (-signal.SIGKILL, {"my_text_document.bin.unfinished": True})
    assert (program.process.returncode, left) == (killed if how == signal.SIGKILL else (128 + how, {}))
    if how == signal.SIGINT:
        assert output.splitlines()[-1] == "preprocess_data.py: interrupted; nothing was written"
    corpus.write_text('{"text": "one"}\n')
    assert preprocess_data.main(flags) == 0
    assert {path.name for path in tmp_path.glob("my*")} == {"my_text_document.bin", "my_text_document.idx"}
    assert tokens(tmp_path / "my_text_document") == list(b"one")


def test_trained_tokenizer_decodes_to_the_original_text(run_main):
    Path("a.txt").write_text(TEXT)
    Path("b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "Zanzibar! " * 50}).encode()))
    flags = ["--input", "a.txt", "b.jsonl.gz", "--vocab-size", 292, "--output-prefix", "my", "--overwrite"]
    for model_type in ("bpe", "unigram"):
        code, out, err = run_main(train_tokenizer.main, *flags, "--model-type", model_type)
        assert (code, out) == (0, "my.model\n")
        said = r"read 1,319 .*; training 292 pieces takes a while\ntrained a tokenizer with 292 pieces in .* s\n"
        assert re.fullmatch(said, err)
        tokenizer = load_tokenizer(MY_MODEL)
        assert (tokenizer.vocab_size, tokenizer.eod) == (292, 1)
        for example in (TEXT, "Zanzibar", "  naïve—日本語 🐳\n\n", "<eod>"):
            assert tokenizer.decode(tokenizer.encode(example)) == example
        # fewer pieces than the 8 letters show merges, so the training has read the second file, the only one with Z, z
        # and b
        assert len(tokenizer.encode("Zanzibar")) < 8
        assert {path.name for path in Path().iterdir()} == {"a.txt", "b.jsonl.gz", "my.model"}


def test_tokenizer_that_another_process_has_written_meanwhile_is_kept(run_main, monkeypatch):
    def trained_while_another_process_writes(*_: object, **_settings: object) -> bytes:
        Path("my.model").write_bytes(b"theirs")
        return b"mine"

    Path("a.txt").write_text(TEXT)
    monkeypatch.setattr(train_tokenizer, "train_sentencepiece", trained_while_another_process_writes)
    code, _, err = run_main(train_tokenizer.main, "--input", "a.txt", "--output-prefix", "my")
    assert code == 2
    assert "--output-prefix: my.model exists (--overwrite replaces it)" in err
    assert Path("my.model").read_bytes() == b"theirs"


def test_characters_beyond_the_coverage_are_encoded_as_bytes(run_main):
    Path("a.txt").write_text("abc " * 99 + "z")
    sizes = []
    for coverage in ("0.99", "1.0"):
        flags = ["--input", "a.txt", "--output-prefix", "my", "--vocab-size", 263, "--overwrite"]
        code, _, err = run_main(train_tokenizer.main, *flags, "--character-coverage", coverage)
        assert code == 0, err
        sizes.append(load_tokenizer(MY_MODEL).piece_bytes(load_tokenizer(MY_MODEL).encode("z")[-1]))
    assert sizes == [1, None]  # with the lower coverage "z" is encoded as a byte, and with full coverage as a piece


def test_tokenizer_reads_equal_parts_of_files_and_logs_if_asked(run_main):
    for name, letters in (("a", "qq "), ("b", "zz ")):
        Path(f"{name}.jsonl").write_text((json.dumps({"body": letters * 100}) + "\n") * 100)
    inputs = ["--input", "a.jsonl", "b.jsonl", "--max-characters", 3000, "--json-key", "body", "--minloglevel", 0]
    _, _, err = run_main(train_tokenizer.main, *inputs, "--vocab-size", 265, "--output-prefix", "my")
    assert "read 3,000 characters" in err
    assert "trainer_interface" in err
    tokenizer = load_tokenizer(MY_MODEL)
    assert len(tokenizer.encode("qq")) == len(tokenizer.encode("zz")) < 3


def test_report_is_written_to_the_first_folder_or_the_given_path(run_main):
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 5.0}\n')
    for flags, page in ((["run"], "run/report.html"), (["run", "--output", "my.html"], "my.html")):
        assert run_main(report.main, *flags)[:2] == (0, f"report: {page}\n")
        assert Path(page).read_text().endswith("</body></html>\n")
