"""Documents in files: JSON lines, Parquet or plain text, as they are or compressed with gzip or zstd.

What a file holds follows from its name, less `.gz` or `.zst`:

    .jsonl .json .ndjson    a document a line, a JSON object
    .parquet                a document a row
    .txt                    one document
    anything else           JSON lines if it begins with `{`, else one document

One process cuts a file into blocks of whole lines; any process parses a block. A line that is no document is a
`BadLine`: its reader decides what comes of it.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar, cast

from megazpp.base.program import in_words

T = TypeVar("T")
Kind = Literal["json lines", "parquet", "text"]

BLOCK_BYTES = 1 << 20
_HEAD_BYTES = 512
_ROWS = 1024
_KINDS: dict[str, Kind] = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), "json lines"),
    ".parquet": "parquet",
    ".txt": "text",
}
_COMPRESSED = (".gz", ".zst")
_ADVICE = "unpack an archive, and name a compressed file .gz or .zst and a Parquet file .parquet"
_BOM = b"\xef\xbb\xbf"
_ENCODINGS = {  # by their byte order marks, the longer ones first
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_BINARY = (  # beginnings of zip, Parquet, bzip2, gzip, zstd, xz, 7z, rar and pickle
    *(b"PK\x03\x04", b"PAR1", b"BZh", b"\x1f\x8b", b"\x28\xb5\x2f\xfd"),
    *(b"\xfd7zXZ", b"7z\xbc\xaf", b"Rar!", b"\x80"),
)
Content = bytes | list[dict[str, object]]


class Block(NamedTuple):
    """Consecutive documents of one file, read but not yet understood."""

    path: Path
    kind: Kind
    first_line: int  # its number, from 1; of a Parquet file, the row's
    content: Content  # whole lines, or rows
    disk_bytes: int  # of the file, that were read for it


class BadLine(NamedTuple):
    """A line (of a Parquet file: a row) that is no document."""

    path: Path
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.number}: {self.reason}"


def kind_of(path: Path) -> Kind:
    """The kind of a file; see the top of this file."""
    known = _KINDS.get(Path(path.stem if path.suffix in _COMPRESSED else path.name).suffix)
    if known is not None:
        return known
    with open(path, "rb") as file, decompressed(path, file) as plain:
        return "json lines" if _read_head(plain).removeprefix(_BOM).lstrip().startswith(b"{") else "text"


def check_readable(path: Path, keys: Sequence[str]) -> None:
    """Raise ValueError before the work begins: a file or a package is missing, or the file's start is damaged or of
    another kind than its name says, or it has no such columns.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give its files, {path}/*")
    try:
        kind = kind_of(path)
        with open(path, "rb") as file:
            if kind == "parquet":
                columns = _optional("pyarrow.parquet", "pyarrow").ParquetFile(file).schema_arrow.names
                for key in keys:
                    if key not in columns:
                        raise ValueError(f"it has no column {key!r}, only {', '.join(columns)}")
            else:
                head = _read_head(decompressed(path, file))
                if (reason := _not_text(head)) is not None:
                    raise ValueError(f"it is neither UTF-8 text nor JSON lines: {reason}")
                if kind == "json lines" and (reason := _not_lines(head)) is not None:
                    raise ValueError(reason)
    except Exception as error:  # each decompressor has exceptions of its own
        raise ValueError(f"{path} cannot be read: {error}") from error
    if kind == "text" and len(keys) != 1:
        raise ValueError(f"{path} is plain text: it has one text to a document, not {' and '.join(keys)}")


def _not_text(head: bytes) -> str | None:
    """Say why a file that begins with `head` is no UTF-8 text; None if it may be."""
    encoding = next((name for mark, name in _ENCODINGS.items() if head.startswith(mark)), None)
    if encoding is not None and (len(head) % 2 or len(head) < 6):  # code units have two or four bytes
        encoding = None
    if encoding is None and len(head) > 8 and not head.startswith(_BINARY):  # UTF-16 has a NUL in every other byte
        zeros = [head[start::2].count(0) / len(head[start::2]) for start in (0, 1)]
        encoding = "UTF-16" if max(zeros) > 0.4 and min(zeros) < 0.1 else None
    if encoding is not None:
        return f"it is {encoding} (iconv -f {encoding} -t UTF-8 converts it)"
    place = next((place for place, byte in enumerate(head) if byte < 8), None)
    if place is None:
        return None
    if head.startswith(_BINARY):  # an archive, a compressed or a Parquet file under another name
        return _ADVICE
    return f"byte {place} is {head[place]:#04x}, which no text has: {_ADVICE}"


def _not_lines(head: bytes) -> str | None:
    """Say why a file that begins with `head` is no JSON lines, though it is JSON; None if it may be."""
    text = head.removeprefix(_BOM).lstrip()
    first, newline, _ = text.partition(b"\n")
    if text.startswith(b"["):
        return "it is a JSON array, and JSON lines have one object on each line (jq -c '.[]' makes them of it)"
    if newline and text.startswith(b"{") and first.rstrip().endswith((b"{", b",", b"[")):
        return "it is JSON over several lines, and JSON lines have one object on each line (jq -c . makes them of it)"
    return None


def read_blocks(path: Path, keys: Sequence[str] | None = None, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """The file in order.

    Args:
        keys: columns to read of a Parquet file; None reads all.
        block_bytes: a block of lines ends with the line that reaches this size.
    Raises:
        ValueError: the file is damaged; it is named with a line shortly before.
    """
    kind = kind_of(path)
    line, position = 1, 0
    with open(path, "rb") as file:
        try:
            pieces: Iterator[tuple[Content, int, int]]
            if kind == "parquet":
                pieces = _row_pieces(path, file, keys)
            else:
                pieces = _line_pieces(path, file, -1 if kind == "text" else block_bytes)
            for content, num_lines, reached in pieces:
                yield Block(path, kind, line, content, reached - position)
                line, position = line + num_lines, reached
        except Exception as error:  # each decompressor has exceptions of its own
            what = f"the file cannot be read from here on: {type(error).__name__}: {error}"
            raise ValueError(f"{path}, line {line}: {what}") from error


def parse_block(block: Block, keys: Sequence[str]) -> Iterator[tuple[str, ...] | BadLine]:
    """The documents of a block: each the texts under `keys`, possibly empty. Blank lines are no documents."""
    for found in _parsed(block, lambda value: (str(value),) if block.kind == "text" else _texts(value, keys)):
        yield found if isinstance(found, BadLine) else found[1]


def read_texts(path: Path, key: str, on_bad_line: Callable[[BadLine], None]) -> Iterator[str]:
    """The texts of a file one after the other, empty ones too."""
    for block in read_blocks(path, (key,)):
        for document in parse_block(block, (key,)):
            if isinstance(document, BadLine):
                on_bad_line(document)
            else:
                yield document[0]


def read_records(path: Path, read: Callable[[dict[str, object]], T]) -> Iterator[tuple[int, T]]:
    """Apply `read` to the objects of a file's lines, or to its rows with all columns; each comes with its number.

    Raises:
        ValueError: the file cannot be read or is plain text, a line is no object, or `read` refuses it; it is named.
    """
    if path.is_file() and kind_of(path) == "text":
        raise ValueError(f"{path} cannot be read: it is plain text, neither JSON lines nor Parquet")
    check_readable(path, ())
    for block in read_blocks(path):
        for found in _parsed(block, lambda value: read(_object(value))):
            if isinstance(found, BadLine):
                raise ValueError(str(found))
            yield found


def _parsed(block: Block, read: Callable[[object], T]) -> Iterator[tuple[int, T] | BadLine]:
    """Apply `read` to each record, and give the number of the line where it begins; raise nothing."""
    content, plain = block.content, block.kind == "text"
    records = content if isinstance(content, list) else [content] if plain else content.split(b"\n")
    for number, record in enumerate(records, start=block.first_line):
        try:
            value: object = record
            if isinstance(record, bytes):
                text = record.removeprefix(_BOM)
                if not plain and not text.strip():
                    continue
                value = text.decode().replace("\r\n", "\n").replace("\r", "\n") if plain else _json_value(text.decode())
            yield number, read(value)
        except UnicodeDecodeError as error:
            inside = error.object.count(b"\n", 0, error.start)  # of plain text: its line
            yield BadLine(block.path, number + inside, f"not UTF-8: {error}")
        except (ValueError, RecursionError) as error:
            yield BadLine(block.path, number, in_words(error))


def stop_or_skip(bad: BadLine, on_error: Literal["stop", "skip"], log: Callable[[str], None]) -> None:
    """Treat a bad line as --on-error says: raise ValueError, or tell the user."""
    if on_error == "stop":
        raise ValueError(f"{bad} (--on-error skip goes on without such lines)")
    log(f"skipped {bad}")


def _line_pieces(path: Path, file: IO[bytes], block_bytes: int) -> Iterator[tuple[bytes, int, int]]:
    """(lines, their number, position in the file), all of it at once if `block_bytes` is -1."""
    plain = decompressed(path, file)
    while content := plain.read(block_bytes) + plain.readline():
        yield content, content.count(b"\n"), file.tell()


def _row_pieces(
    path: Path, file: IO[bytes], keys: Sequence[str] | None
) -> Iterator[tuple[list[dict[str, object]], int, int]]:
    table, size = _optional("pyarrow.parquet", "pyarrow").ParquetFile(file), path.stat().st_size
    seen, num_rows = 0, max(1, table.metadata.num_rows)
    for batch in table.iter_batches(batch_size=_ROWS, columns=None if keys is None else list(keys)):
        seen += len(batch)
        yield batch.to_pylist(), len(batch), size * seen // num_rows


def _json_value(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {in_words(error)}") from error


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{_shown(value)}, not an object")
    return value


def _texts(value: object, keys: Sequence[str]) -> tuple[str, ...]:
    texts, record = [], _object(value)
    for key in keys:
        text = record.get(key)
        if not isinstance(text, str):
            if key not in record:
                raise ValueError(f"there is no {key!r}")
            raise ValueError(f"{key!r} is {_shown(text)}, not a string")
        if not text.isascii():
            text.encode()  # half a surrogate pair, which JSON can write, is no text
        texts.append(text)
    return tuple(texts)


def _shown(value: object) -> str:
    """The beginning of a value as JSON has it; Parquet has more types."""
    return f"{json.dumps(value, default=str):.60}"


def decompressed(path: Path, file: IO[bytes]) -> BufferedIOBase:
    """Decompress `file`, which is open and called `path`; raises ValueError if that needs a package that is missing."""
    if path.suffix == ".gz":
        return gzip.open(file)
    if path.suffix == ".zst":  # Python 3.14 has it
        standard = importlib.util.find_spec("compression") is not None
        file = _optional("compression.zstd" if standard else "backports.zstd", "backports.zstd").open(file)
    return cast(BufferedIOBase, file)


def _optional(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"it needs the package {package}: pip install {package}") from error


def _read_head(plain: BufferedIOBase) -> bytes:
    """The first bytes of what is in a file, as far as they can be read if it was cut."""
    head = b""
    with contextlib.suppress(EOFError):
        while len(head) < _HEAD_BYTES and (piece := plain.read1(_HEAD_BYTES - len(head))):
            head += piece
    return head
