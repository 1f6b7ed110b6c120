"""Test preprocessing of text into .bin/.idx files.

The output equals Megatron's byte for byte with any number of workers, or nothing is written.
"""

import errno
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.pairs import contents, write_jsonl
from sentencepiece import SentencePieceProcessor

from megazpp.data.indexed_builder import IndexedDatasetBuilder
from megazpp.data.indexed_dataset import IndexedDataset
from megazpp.data.preprocess import PreprocessConfig, PreprocessProgress, map_in_processes, preprocess
from megazpp.data.text import train_sentencepiece
from megazpp.data.tokenizer import TokenizerConfig

BYTES = TokenizerConfig(tokenizer_type="NullTokenizer")


def run(
    paths: Iterable[Path], out: Path, log: Callable[[str], object] = print, by: TokenizerConfig = BYTES, **flags: Any
) -> PreprocessProgress:
    return preprocess(PreprocessConfig(**{"input": tuple(map(str, paths)), "output_prefix": str(out)} | flags), by, log)


def test_output_is_megatrons_byte_for_byte(tmp_path):
    rows = [("T1", "one"), ("", "twö"), ("T3", ""), ("T4", "four"), ("", "")]
    lines = [json.dumps({"title": title, "text": text}) for title, text in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:2]))
    (tmp_path / "b.jsonl").write_text("\n".join(lines[2:]))
    for name, eod in (("without", []), ("with", [256])):
        out, expected = tmp_path / name, tmp_path / f"expected {name}"
        out.mkdir()
        expected.mkdir()
        inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        progress = run(inputs, out / "my.corpus", json_keys=("text", "title"), append_eod=bool(eod))
        for column, key in enumerate(("title", "text")):
            with IndexedDatasetBuilder(expected / f"my.corpus_{key}_document", "<u2") as builder:
                for row in rows:  # an empty text counts as a document, but has no sequence and no end-of-document token
                    builder.add_document(*([[*row[column].encode(), *eod]] if row[column] else []))
                builder.finalize()
        assert contents(out) == contents(expected)
        assert (progress.documents, progress.bad_lines, progress.text_bytes) == (5, 0, 17)
        # 17 bytes are 17 tokens; the 6 non-empty texts get an end-of-document token, and empty ones none
        assert progress.tokens == 17 + 6 * len(eod)
        assert progress.disk_bytes == progress.total_disk_bytes


def test_missing_ends_of_documents_are_noted(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", "one")
    lines = list[str]()
    run([tmp_path / "a.jsonl"], tmp_path / "without", lines.append)
    assert lines[0] == "note: documents do not end with the end-of-document token 256; --append-eod adds it"
    lines.clear()
    run([tmp_path / "a.jsonl"], tmp_path / "with", lines.append, append_eod=True)
    assert not lines


@pytest.mark.slow
def test_output_does_not_depend_on_the_number_of_workers(tmp_path):
    """Run with 1, 2 and 3 workers, and compare the output files.

    Every fifth text is much longer than the others, so later blocks of text finish first. One line is malformed, and
    the tokenizer is SentencePiece, which workers load from its file.
    """
    texts = [f"{i}" * (200_000 if i % 5 == 0 else 1 + i) for i in range(20)]
    path, model = write_jsonl(tmp_path / "a.jsonl", *texts), tmp_path / "sp.model"
    path.write_bytes(path.read_bytes() + b"junk\n")
    model.write_bytes(train_sentencepiece(["some text to learn from " * 20], 270))
    by, results = TokenizerConfig(tokenizer_model=str(model)), []
    for workers in (1, 2, 3):
        said, out = list[str](), tmp_path / f"{workers}"
        out.mkdir()
        run([path], out / "x", said.append, by, on_error="skip", workers=workers)
        (skipped,) = [line for line in said if "skipped" in line]
        assert f"{path}, line 21: not JSON" in skipped
        results.append(contents(out))
    assert results[0] == results[1] == results[2]
    dataset = IndexedDataset(out / "x_text_document")
    assert [dataset.get(i).tolist() for i in range(20)] == SentencePieceProcessor(model_file=str(model)).encode(texts)


def test_bad_line_stops_the_run_or_is_counted(tmp_path):
    path, out, said = write_jsonl(tmp_path / "a.jsonl", "one", "two"), tmp_path / "out", list[str]()
    out.mkdir()
    path.write_bytes(path.read_bytes() + b'{"text": "\xff"}\n{"txt": ""}\n{"text": "three"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: not UTF-8.*--on-error skip"):
        run([path], out / "x", workers=2)
    assert contents(out) == {}
    progress = run([path], out / "x", said.append, on_error="skip")
    assert (progress.documents, progress.bad_lines) == (3, 2)
    skipped = [line.split(": ")[0] for line in said if not line.startswith("note: ")]
    assert skipped == [f"skipped {path}, line 3", f"skipped {path}, line 4"]
    assert bytes(IndexedDataset(out / "x_text_document").tokens.tolist()) == b"onetwothree"


def test_existing_output_is_kept_unless_overwrite_is_given(tmp_path):
    path, other, bad, out = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "bad.jsonl", "out"))
    out.mkdir()
    bad.write_bytes(b"junk")
    run([write_jsonl(path, "one")], out / "x")
    before = contents(out)
    with pytest.raises(ValueError, match=r"x_text_document\.bin exists \(--overwrite replaces it\)"):
        run([write_jsonl(other, "two")], out / "x")
    with pytest.raises(ValueError, match="not JSON"):
        run([bad], out / "x", overwrite=True)
    assert contents(out) == before
    run([other], out / "x", overwrite=True)
    assert contents(out)["x_text_document.bin"] == b"t\x00w\x00o\x00"


def test_corpus_or_key_without_text_is_rejected_and_leaves_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    blank = (b"", b"\n\n", b'{"text": "", "title": ""}\n', b"\xef\xbb\xbf")
    rows = [*((content, "text") for content in blank), (b'{"text": "one", "title": ""}\n', "title")]
    for content, key in rows:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"--input .*a\.jsonl has no text in the field {key}"):
            run([path], tmp_path / "x", json_keys=("text", "title"))
    assert contents(tmp_path).keys() == {"a.jsonl"}


def test_time_left_follows_from_the_share_of_the_input(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    progress = PreprocessProgress(total_disk_bytes=40, started=100.0, documents=5, disk_bytes=50)
    assert str(progress).endswith(
        "(0.0 docs/s, 0.00 MB/s, 0 tokens/s); 100.0% of the input, 0:00:00 gone, 0:00:00 left"
    )
    progress = PreprocessProgress(total_disk_bytes=40, started=90.0, documents=5, tokens=20, text_bytes=30_000_000)
    assert "0.5 docs/s, 3.00 MB/s, 2 tokens/s); 0.0% of the input, 0:00:10 gone, ? left" in str(progress)
    progress.disk_bytes = 10
    assert "25.0% of the input, 0:00:10 gone, 0:00:30 left" in str(progress)


# ---- map_in_processes: tokenizing in worker processes -----------------------------------------------------------


def workers() -> list[Any]:
    """Return the running worker processes of preprocessing. Processes of ranks that other tests keep are left out."""
    return [process for process in multiprocessing.active_children() if process.name.startswith("SpawnProcess")]


def double_slowly_at_first(number: int) -> tuple[int, int]:
    time.sleep(0.3 if number == 0 else 0.0)
    return 2 * number, os.getpid()


def print_own_and_wait(_: int) -> None:
    print(os.getpid(), flush=True)
    time.sleep(100)


def test_results_come_in_order_and_closing_ends_the_workers():
    """Map a function over infinitely many items, which can end only if items are taken just a few ahead of results."""
    taken = itertools.count()
    results = map_in_processes(double_slowly_at_first, taken, 2)
    found = [next(results)]
    # `map_in_processes` has taken at most 8 items so far; `next` shows their number, because it takes the following one
    assert next(taken) <= 8
    found += [next(results) for _ in range(30)]
    numbers, pids = zip(*found, strict=True)
    assert numbers[:6] == (0, 2, 4, 6, 8, 10)
    assert [*numbers] == sorted(numbers)
    # the results come from the workers, or from only one of them if the other starts late on busy cores
    assert {*pids} <= {process.pid for process in workers()}
    assert len(workers()) == 2
    results.close()
    assert workers() == []


def test_killed_workers_are_noticed_during_large_transfers():
    # results of 16 MiB, far more than a pipe buffers, so workers are killed while they send
    results = map_in_processes(bytes, [1 << 24] * 100, 2)
    next(results)
    for process in workers():
        process.kill()
    with pytest.raises(ValueError, match="a worker of --workers was killed"):
        list(results)
    assert workers() == []


def test_exceptions_and_full_disks_of_workers_are_reported():
    with pytest.raises(json.JSONDecodeError, match="line 1 column 1") as caught:
        list(map_in_processes(json.loads, ["1", "junk", "2"], 1))
    assert "in raw_decode" in str(caught.value.__cause__)
    full = mock.patch.object(Path, "write_bytes", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with (
        full,
        pytest.raises(ValueError, match=r"--workers: .*/0: No space left on device; set TMPDIR to another folder"),
    ):
        list(map_in_processes(json.loads, ["1"], 1))


def test_workers_end_when_the_main_process_is_killed(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "from test_preprocess import map_in_processes, print_own_and_wait\n"
        "if __name__ == '__main__':\n"
        "    list(map_in_processes(print_own_and_wait, range(1), 1))\n"
    )
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        worker = int(main.stdout.readline())
        os.kill(worker, 0)  # signal 0 only checks that the worker exists, and raises otherwise
        main.kill()
        # the read returns once no process has the output pipe open, so the worker has ended too
        assert main.stdout.read() == ""
