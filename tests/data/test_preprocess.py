"""A corpus becomes the pairs that Megatron would write, the same bytes with any number of workers, or nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from helpers.refusals import not_refused
from sentencepiece import SentencePieceProcessor

from megazpp.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megazpp.data.preprocess import PreprocessConfig, PreprocessProgress, preprocess
from megazpp.data.text import train_sentencepiece
from megazpp.data.tokenizer import TokenizerConfig

BYTES = TokenizerConfig(tokenizer_type="NullTokenizer")
SAID: list[str] = []


def write_jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def run(path: Path | list[Path], out: Path, said: list[str] | None = None, **flags: Any) -> PreprocessProgress:
    paths = path if isinstance(path, list) else [path]
    config = PreprocessConfig(input=tuple(map(str, paths)), output_prefix=str(out), **flags)
    return preprocess(config, BYTES, ([] if said is None else said).append)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pair_of(texts: list[str], folder: Path, eod: list[int]) -> dict[str, bytes]:
    """The files of tokenized documents; one without ids has no sequence and no eod, but a place among the documents."""
    with IndexedDatasetBuilder(folder / "expected", "<u2") as builder:
        for text in texts:
            builder.add_document(*([[*text.encode(), *eod]] if text else []))
        builder.finalize()
    return {suffix: (folder / f"expected{suffix}").read_bytes() for suffix in (".bin", ".idx")}


@pytest.mark.parametrize("append_eod", [False, True])
def test_the_files_are_megatrons_byte_for_byte(tmp_path, append_eod):
    rows = [("T1", "one"), ("", "twö"), ("T3", ""), ("T4", "four"), ("", "")]
    lines = [json.dumps({"title": title, "text": text}) for title, text in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:2]))
    (tmp_path / "b.jsonl").write_text("\n".join(lines[2:]))
    out = tmp_path / "out"
    out.mkdir()
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    progress = run(inputs, out / "my.corpus", json_keys=("text", "title"), append_eod=append_eod)
    expected = {}
    for column, key in enumerate(("title", "text")):
        pair = pair_of([row[column] for row in rows], tmp_path, [256] if append_eod else [])
        expected |= {f"my.corpus_{key}_document{suffix}": content for suffix, content in pair.items()}
    assert contents(out) == expected
    assert (progress.documents, progress.bad_lines) == (5, 0)
    assert progress.tokens == 17 + (6 if append_eod else 0)  # without those of empty texts
    assert progress.text_bytes == 17
    assert progress.disk_bytes == progress.total_disk_bytes
    texts = IndexedDataset(out / "my.corpus_text_document")
    assert [bytes(texts.get(i)[:3].tolist()).decode() for i in (0,)] == ["one"]
    assert texts.document_lengths.tolist() == [3 + append_eod, 4 + append_eod, 0, 4 + append_eod, 0]


def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path):
    """Blocks of very different cost, so that later ones are done first; one line is bad; ids are SentencePiece's."""
    texts = [f"{i}" * (200_000 if i % 5 == 0 else 1 + i) for i in range(20)]
    path = write_jsonl(tmp_path / "a.jsonl", *texts)
    path.write_bytes(path.read_bytes() + b"junk\n")
    model = tmp_path / "sp.model"
    model.write_bytes(train_sentencepiece(["some text to learn from " * 20], 270))
    tokenizer, results = TokenizerConfig(tokenizer_model=str(model)), []
    for workers in (1, 2, 3):
        said: list[str] = []
        flags = {"input": (str(path),), "output_prefix": f"{tmp_path}/out", "on_error": "skip", "overwrite": True}
        preprocess(PreprocessConfig(**flags, workers=workers), tokenizer, said.append)
        (skipped,) = [line for line in said if "skipped" in line]
        assert f"{path}, line 21: not JSON" in skipped
        results.append([(tmp_path / f"out_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")])
    assert results[0] == results[1] == results[2]
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert [dataset.get(i).tolist() for i in range(20)] == SentencePieceProcessor(model_file=str(model)).encode(texts)


def test_a_bad_line_stops_the_run_or_is_counted(tmp_path):
    path, out = write_jsonl(tmp_path / "a.jsonl", "one", "two"), tmp_path / "out"
    out.mkdir()
    path.write_bytes(path.read_bytes() + b'{"text": "\xff"}\n{"txt": ""}\n{"text": "three"}\n')
    for workers in (1, 2):
        with pytest.raises(ValueError, match=r"a\.jsonl, line 3: not UTF-8.*--on-error skip"):
            run(path, out / "x", workers=workers)
        assert contents(out) == {}
    said: list[str] = []
    progress = run(path, out / "x", said, on_error="skip")
    assert (progress.documents, progress.bad_lines) == (3, 2)
    assert [line.split(": ")[0] for line in said] == [f"skipped {path}, line 3", f"skipped {path}, line 4"]
    pair = pair_of(["one", "two", "three"], tmp_path, [])
    assert contents(out) == {f"x_text_document{suffix}": content for suffix, content in pair.items()}


def test_what_exists_is_kept_unless_it_may_be_replaced(tmp_path):
    path, out = write_jsonl(tmp_path / "a.jsonl", "one"), tmp_path / "out"
    out.mkdir()
    run(path, out / "x")
    before = contents(out)
    other = write_jsonl(tmp_path / "b.jsonl", "two")
    with pytest.raises(ValueError, match=r"x_text_document\.bin exists \(--overwrite replaces it\)"):
        run(other, out / "x")
    assert contents(out) == before
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"junk")
    with pytest.raises(ValueError, match="not JSON"):
        run(bad, out / "x", overwrite=True)
    assert contents(out) == before
    run(other, out / "x", overwrite=True)
    assert contents(out)["x_text_document.bin"] == b"t\x00w\x00o\x00"


def test_a_corpus_or_key_without_text_is_refused_and_leaves_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    for content in (b"", b"\n\n", b'{"text": ""}\n', b"\xef\xbb\xbf"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"--input .*a\.jsonl holds no text"):
            run(path, tmp_path / "x")
    path.write_text('{"text": "one", "title": ""}\n')
    with pytest.raises(ValueError, match=r"--input .*a\.jsonl holds no title"):
        run(path, tmp_path / "x", json_keys=("text", "title"))
    assert set(contents(tmp_path)) == {"a.jsonl"}


def test_wrong_flags_are_refused_before_anything_is_written(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", "one")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, "[UNK]")).save(str(tmp_path / "tokenizer.json"))
    without_eod, before = TokenizerConfig(tokenizer_model=str(tmp_path)), contents(tmp_path)
    rows = [
        ({"input": ()}, BYTES, "--input is missing"),
        ({"input": ("none.jsonl",)}, BYTES, "none.jsonl cannot be read: "),
        ({"output_prefix": None}, BYTES, "--output-prefix is missing"),
        ({"output_prefix": "/nowhere/x"}, BYTES, "/nowhere is no directory"),
        ({"json_keys": ("text", "text")}, BYTES, "--json-keys text text names one twice"),
        ({"workers": 0}, BYTES, "--workers 0 is not positive"),
        ({"log_interval": 0}, BYTES, "--log-interval 0 is not positive"),
        ({}, TokenizerConfig(), "--tokenizer-model is missing"),
        ({"append_eod": True}, without_eod, "--append-eod: the tokenizer has no end-of-document token"),
    ]
    usual = {"input": (str(path),), "output_prefix": str(tmp_path / "x")}
    assert not not_refused(rows, lambda flags, by: preprocess(PreprocessConfig(**{**usual, **flags}), by, SAID.append))
    assert contents(tmp_path) == before


def test_the_time_left_follows_from_the_share_of_the_input(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    progress = PreprocessProgress(
        total_disk_bytes=40, started=90.0, documents=5, tokens=20, text_bytes=30_000_000, disk_bytes=0
    )
    assert "0.5 docs/s, 3.00 MB/s, 2 tokens/s); 0.0% of the input, 0:00:10 gone, ? left" in str(progress)
    progress.disk_bytes = 10
    assert "25.0% of the input, 0:00:10 gone, 0:00:30 left" in str(progress)
