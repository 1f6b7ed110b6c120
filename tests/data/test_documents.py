"""Test the readers of documents for every kind of text file. A malformed line is reported by file and line number."""

import bz2
import gzip
import itertools
import json
import sys
import zipfile
from pathlib import Path

import pyarrow
import pytest
from backports import zstd
from helpers.refusals import not_refused
from pyarrow import parquet

from megazpp.data.documents import (
    BadLine,
    Block,
    check_readable,
    parse_block,
    read_blocks,
    read_records,
    read_texts,
    readable_inputs,
    stop_or_skip,
)

TEXTS = ["one\ntwo", "", "naïve—日本語 🐳", "line\u2028separator", "a\x00b", "x" * 5000]
JSON_LINES = "".join(json.dumps({"title": str(i), "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()
HALF = len(JSON_LINES) // 2


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def write_parquet(path: Path, **columns: list[object]) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


def documents(path: Path, *keys: str, block_bytes: int = 1 << 20) -> list[tuple[str, ...] | BadLine]:
    blocks = read_blocks(path, keys or ("text",), block_bytes=block_bytes)
    return [document for block in blocks for document in parse_block(block, keys or ("text",))]


CONTAINERS = {
    # all four names hold JSON lines; `a` has no suffix, so its first character { decides
    **dict.fromkeys(("a.jsonl", "a.json", "a.ndjson", "a"), JSON_LINES),
    "a.part-1": b"\xef\xbb\xbf" + JSON_LINES,
    "a.dump": b"\n " + JSON_LINES,
    "a.gz": gzip.compress(JSON_LINES),
    "a.jsonl.gz": gzip.compress(JSON_LINES[:HALF]) + gzip.compress(JSON_LINES[HALF:]),
    "a.jsonl.zst": zstd.compress(JSON_LINES[:HALF]) + zstd.compress(JSON_LINES[HALF:]),
}


def test_error_about_inputs_lists_each_unsuitable_file(tmp_path):
    (tmp_path / "good.txt").write_text("a text")
    names = [str(tmp_path / name) for name in ("none.txt", "good.txt", "none.jsonl")]
    with pytest.raises(ValueError, match=r"--input: .*none.txt does not exist\n--input: .*none.jsonl does not exist$"):
        readable_inputs(names, ["text"])
    assert readable_inputs(names[1:2], ["text"]) == [Path(names[1])]


def test_json_lines_are_read_from_any_container(tmp_path):
    for block_bytes, num_blocks in ((1, 6), (100, None), (1 << 20, 1)):
        for name, content in CONTAINERS.items():
            path = write(tmp_path / name, content)
            check_readable(path, ["text"])
            assert documents(path, block_bytes=block_bytes) == [(text,) for text in TEXTS], name
            assert documents(path, "title", "text") == [(str(i), text) for i, text in enumerate(TEXTS)], name
            blocks = list(read_blocks(path, ["text"], block_bytes=block_bytes))
            assert sum(block.disk_bytes for block in blocks) == len(content)
            assert num_blocks in (None, len(blocks)), name


def test_parquet_row_is_a_document(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", text=[*TEXTS, None, *["z"] * 3000], other=list(range(3007)))
    check_readable(path, ["text"])
    got = documents(path)
    assert got[:6] == [(text,) for text in TEXTS]
    assert got[6] == BadLine(path, 7, "the field 'text' is null, not a string")
    assert got[7:] == [("z",)] * 3000
    blocks = list(read_blocks(path, ["text"]))
    assert [block.first_line for block in blocks] == [1, 1025, 2049]
    assert sum(block.disk_bytes for block in blocks) == path.stat().st_size


def test_text_file_is_one_document_with_normalized_line_ends(tmp_path):
    content = b'\xef\xbb\xbf{"text": 1}\r\nb\rc\n\n'
    for suffix, pack in {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}.items():
        path = write(tmp_path / f"a.txt{suffix}", pack(content))
        assert documents(path, block_bytes=1) == [('{"text": 1}\nb\nc\n\n',)]
    assert documents(write(tmp_path / "a.md", b"# {")) == [("# {",)]


def test_blank_lines_other_line_ends_and_bom_are_ignored(tmp_path):
    for content in (
        b'\n{"text": "a"}\n  \n{"text": "b"}',  # blank lines between documents, and no newline at the end of the file
        b'{"text": "a"}\r\n\r\n{"text": "b"}\r\n',
        # concatenated files, each of which begins with a byte order mark
        b'\xef\xbb\xbf{"text": "a"}\n\xef\xbb\xbf\n{"text": "b"}\n\xef\xbb\xbf',
        b' {"text":"a"} \n\t{"more": {"text": 1}, "text":"b"}\n',
    ):
        for block_bytes in (1, 1 << 20):
            assert documents(write(tmp_path / "a.jsonl", content), block_bytes=block_bytes) == [("a",), ("b",)]
    for name in ("empty.jsonl", "empty.txt", "empty"):
        path = write(tmp_path / name, b"")
        check_readable(path, ["text"])
        assert documents(path) == []


BAD_LINES = [
    (b'{"text": ', "not JSON"),
    (b'{"text": "a"} {"text": "b"}', "not JSON: Extra data"),
    (b'{"text": "\xff"}', "0xff in position 10"),
    ('{"text": "a"}'.encode("utf-16"), "not UTF-8"),
    (b'{"txt": "a"}', "the field 'text' is missing"),
    (b'{"text": 5}', "'text' is 5, not a string"),
    (b'{"text": ["a"]}', 'is ["a"], not a string'),
    (b'["text"]', '["text"] is not a JSON object'),
    (b'{"text": "\\ud800"}', "half of a surrogate pair, which is not valid text"),
    (b'{"text": ' + b"[" * 100_000, "not JSON: maximum recursion depth"),
    (b'{"text": ' + b"9" * 5000, "not JSON: Exceeds the limit"),
]


def test_bad_line_is_named_and_the_others_are_read(tmp_path):
    for (line, reason), block_bytes in itertools.product(BAD_LINES, (1, 1 << 20)):
        path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n\n' + line.replace(b"\n", b"") + b'\n{"text": "b"}\n')
        first, bad, last = documents(path, block_bytes=block_bytes)
        assert (first, last) == (("a",), ("b",))
        assert str(bad) == f"{path}, line 3: {bad.reason}"
        assert reason in bad.reason
    # these suffixes mean JSON, so text that does not begin with { is malformed JSON and not plain text
    for name in ("a.jsonl", "a.json", "a.ndjson"):
        assert [bad.reason[:8] for bad in documents(write(tmp_path / name, b"text"))] == ["not JSON"]
    (bad,) = documents(write(tmp_path / "a.txt", b"a\nb\n\xff\n"))
    assert (bad.number, bad.reason[:9]) == (3, "not UTF-8")
    assert "byte 0xff in position 4" in bad.reason
    assert "iconv -f WINDOWS-1252" in bad.reason
    # a malformed plain text is one document, so --on-error skip skips the file as a whole
    with pytest.raises(ValueError, match="--on-error skip skips such files"):
        stop_or_skip(bad, "stop", print)
    (bad,) = documents(write(tmp_path / "a.txt", b"a\n" * 5000 + b"\0"))
    assert bad.reason == "byte 10000 of the file is 0x00, which text never contains"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_file_is_rejected_after_its_readable_blocks(tmp_path, suffix):
    lines = b"".join(b'{"text": "%d %d %d"}\n' % (i, i * i, i**3) for i in range(20_000))
    checksum = {zstd.CompressionParameter.checksum_flag: 1}
    whole = gzip.compress(lines) if suffix == ".gz" else zstd.compress(lines, options=checksum)
    third = len(whole) // 3
    for content in (whole[:third], whole[:-1], whole[:third] + b"\xff" * 100 + whole[third + 100 :]):
        path, blocks = write(tmp_path / f"a.jsonl{suffix}", content), list[Block]()
        with pytest.raises(ValueError, match=r"a\.jsonl\.\w+, line \d+: the file is damaged from this line on: \w+: "):
            blocks.extend(read_blocks(path, block_bytes=1000))
        assert len(blocks) > 40
        if content == whole[: len(content)]:
            assert lines.startswith(b"".join(block.content for block in blocks))
    with pytest.raises(ValueError, match=r"a.txt.gz, line 1: the file is damaged"):
        documents(write(tmp_path / "a.txt.gz", gzip.compress(b"a\n" * 10_000)[:-1]))


def test_files_of_unsupported_formats_are_rejected_in_advance(tmp_path):
    (tmp_path / "folder").mkdir()
    archive, zipped = tmp_path / "archive.zip", "the file is neither UTF-8 text nor JSON lines: byte"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.jsonl", JSON_LINES)
    rows = [
        ("none.jsonl", None, "none.jsonl does not exist"),
        ("*.jsonl", None, "*.jsonl matches no file"),
        ("folder", None, "is a folder: give its files"),
        ("junk.jsonl.gz", b"junk junk junk", "gzip"),
        ("junk.jsonl.zst", b"junk junk junk", "cannot be read"),
        ("junk.parquet", b"junk junk junk", "Parquet"),
        ("zip.jsonl", archive.read_bytes(), zipped),
        ("zip.jsonl.gz", gzip.compress(archive.read_bytes()), zipped),
        ("bz2.txt", bz2.compress(JSON_LINES), "name a compressed file"),
        ("gzip.jsonl", gzip.compress(JSON_LINES), "name a compressed file .gz"),
        ("zstd.txt", zstd.compress(JSON_LINES), "name a compressed file .gz or .zst"),
        ("utf16.jsonl", "{}".encode("utf-16"), "it is UTF-16 (iconv -f UTF-16 -t UTF-8 converts it)"),
        ("utf16le.txt", "call me".encode("utf-16-le"), "byte 1 is 0x00, which text never contains"),
        ("array.txt", b'[\n {"text": "a"}]', "the file begins as JSON does, but is not named .jsonl"),
        ("array", b'["a", "b"]', "the file begins as JSON does, but is not named .jsonl"),
        ("lines.txt", b'{"text": "a"}\n', "the file begins as JSON does, but is not named .jsonl"),
        ("utf32.txt", "call me".encode("utf-32"), "it is UTF-32 (iconv"),
        ("nul.txt", b"call\0me", "byte 4 is 0x00, which text never contains"),
        ("bell.jsonl", b'{"text": "a\x07"}', "byte 11 is 0x07, which text never contains"),
        (
            "array.json",
            b' [\n  {"text": "a"}\n]',
            "it is a JSON array, but JSON lines have one object on each line",
        ),
        ("one-line.json", b'[{"text": "a"}]', "it is a JSON array"),
        ("pretty.json", b'{\n  "text": "a"\n}\n', "it is JSON over several lines"),
        ("pretty.jsonl", b'\xef\xbb\xbf{"text": "a",\r\n "n": 1}\n', "it is JSON over several lines"),
        ("parquet.data", write_parquet(tmp_path / "a", text=TEXTS).read_bytes(), "a Parquet file .parquet"),
    ]

    def check(name: str, content: bytes | None, *keys: str) -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        check_readable(tmp_path / name, keys or ("text",))

    assert not not_refused(rows, check)
    assert not not_refused([(*row[:2], str(tmp_path / row[0])) for row in rows], check)
    columns = write_parquet(tmp_path / "a", title=["a"], body=["b"]).read_bytes()
    rows = [
        ("a.parquet", columns, "text", "body", "the Parquet file has no column 'text'; its columns are title, body"),
        ("a.txt", b"a", "text", "title", "a.txt is plain text with one text per document, so it has no text and title"),
    ]
    assert not not_refused(rows, check)


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "backports.zstd")])
def test_missing_package_is_named(tmp_path, monkeypatch, name, package):
    write(tmp_path / name, b"x")
    for module in ("pyarrow", "pyarrow.parquet", "compression", "compression.zstd", "backports", "backports.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"{name} .*pip install {package}"):
        check_readable(tmp_path / name, ["text"])


def test_texts_and_records_are_numbered_and_bad_lines_go_to_the_caller(tmp_path):
    path, bad = write(tmp_path / "a.jsonl", b'{"text": "a"}\n1\n{"text": ""}\n'), []
    assert [*read_texts(path, "text", bad.append)] == ["a", ""]
    assert [line.number for line in bad] == [2]
    lines = write(tmp_path / "b.jsonl", b'{"prompt": "p", "answer": 3}\n\n{"messages": [{"role": "user"}]}\n')
    first = {"prompt": "p", "answer": 3}
    assert [*read_records(lines, dict)] == [(1, first), (3, {"messages": [{"role": "user"}]})]
    rows = write_parquet(tmp_path / "b.parquet", prompt=["p", "q"], answer=[3, None])
    assert [*read_records(rows, dict)] == [(1, first), (2, {"prompt": "q", "answer": None})]


def test_bad_record_is_rejected_by_file_and_line(tmp_path):
    rows = [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "a.jsonl, line 2: [1] is not a JSON object"),
        ("a.jsonl", b'{"a": "\xff"}\n', "a.jsonl, line 1: not UTF-8"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9)[:-12], "the file is damaged from this line on"),
        ("a.txt", b"words", "a.txt cannot be read: it is plain text, but JSON lines or Parquet is expected"),
        ("a.parquet", b"words", "a.parquet cannot be read"),
    ]
    assert not not_refused(rows, lambda name, content: list(read_records(write(tmp_path / name, content), dict)))
