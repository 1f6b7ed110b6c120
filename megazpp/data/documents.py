"""Read documents from files: JSON lines, Parquet or plain text, optionally compressed with gzip or zstd.

The name of a file, without `.gz` or `.zst`, determines its format:

    .jsonl .json .ndjson    each line is a document, a JSON object
    .parquet                each row is a document
    .txt                    the file is one document
    any other name          JSON lines if the file begins with `{`, otherwise one document

`read_blocks` cuts a file into blocks of complete lines or rows; a plain text file is one block. `parse_block` extracts
the texts of a block, and may run in another process. For a malformed document it yields a `BadLine`. `read_texts`
passes each `BadLine` to its argument `on_bad_line`, which raises an error, or returns to skip the document.
`stop_or_skip` raises or returns, as --on-error says.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Literal, NamedTuple, TypeVar, cast

from megazpp.base.files import errors_as
from megazpp.base.program import Problems, in_words
from megazpp.data.tokenizer_folder import import_package

T = TypeVar("T")
Kind = Literal["json lines", "parquet", "text"]

BLOCK_BYTES = 1 << 20  # least size of a block of JSON lines; the block ends with the line that reaches this size
_HEAD_BYTES = 512  # number of bytes at the beginning of a file by which its format is checked
_ROWS = 1024  # largest number of rows of a Parquet file in a block
_KINDS: dict[str, Kind] = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), "json lines"),
    ".parquet": "parquet",
    ".txt": "text",
}
_COMPRESSED, _PARQUET = (".gz", ".zst"), "pyarrow.parquet"
_ADVICE = "unpack an archive, and name a compressed file .gz or .zst and a Parquet file .parquet"
_JSON_ADVICE = (
    "it would be read as one plain text: name it .jsonl if each line is an object (jq -c '.[]' converts an array)"
)
_BOM = b"\xef\xbb\xbf"
# Encoding by byte order mark. UTF-32 comes first: its little-endian mark begins with the mark of UTF-16, and the first
# entry that matches counts.
_ENCODINGS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_JSON = re.compile(rb'\s*(\[\s*[{"]|\{\s*")')  # the beginning of a JSON array or object; plain text rarely begins so
Content = bytes | list[dict[str, object]]


class Block(NamedTuple):
    """Consecutive documents of one file, before their lines are parsed.

    Attributes:
        path: path of the file.
        kind: format of the file.
        first_line: number of the block's first line in the file (first row of a Parquet file), counted from 1.
        content: complete lines as bytes, or the rows of a Parquet file as dictionaries.
        disk_bytes: bytes of the file, before decompression, that were read for the block.
    """

    path: Path
    kind: Kind
    first_line: int
    content: Content
    disk_bytes: int


class BadLine(NamedTuple):
    """A malformed document of an input file.

    Attributes:
        path: path of the file.
        number: number of the line, or of the row of a Parquet file, counted from 1.
        reason: what is wrong with the line, for messages.
    """

    path: Path
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.number}: {self.reason}"


def kind_of(path: Path) -> Kind:
    """Return the format of a file of documents, from its name without .gz or .zst.

    If the name tells nothing, the file is JSON lines if it begins with `{`, and otherwise plain text.
    """
    known = _KINDS.get(Path(path.stem if path.suffix in _COMPRESSED else path.name).suffix)
    if known is not None:
        return known
    with open(path, "rb") as file, decompressed(path, file) as plain:
        return "json lines" if _read_head(plain).removeprefix(_BOM).lstrip().startswith(b"{") else "text"


def readable_inputs(values: Sequence[str], keys: Sequence[str]) -> list[Path]:
    """Return the paths of the files of --input, or raise a ValueError with a line for each file that is unsuitable.

    Args:
        values: values of --input; `~` is expanded.
        keys: columns that the files must have; see `check_readable`.
    """
    paths, problems = [Path(value).expanduser() for value in values], Problems()
    for path in paths:
        with problems, errors_as("--input"):
            check_readable(path, keys)
    problems.raise_all()
    return paths


def check_readable(path: Path, keys: Sequence[str]) -> None:
    """Check a file of documents by its first bytes, so that errors occur before hours of work.

    Args:
        path: file to check.
        keys: columns that a Parquet file must have. A plain text file is one text without columns, so `keys` must have
            one element for it. The fields of JSON lines are not checked.
    Raises:
        ValueError: the file or a package for reading it is missing, the beginning of the file is damaged or of another
            format than its name says, or a column is missing.
    """
    if not path.exists() or path.is_dir():
        raise ValueError(missing_file(path))
    if not path.is_file():
        raise ValueError(f"{path} is no regular file, but it is read more than once: copy its content to a file")
    # Any exception means an unreadable file, because each decompressor raises its own types of exceptions.
    with errors_as(f"{path} cannot be read", Exception):
        kind = kind_of(path)
        with open(path, "rb") as file:
            if kind == "parquet":
                columns = import_package(_PARQUET, "it", "pyarrow").ParquetFile(file).schema_arrow.names
                for key in keys:
                    if key not in columns:
                        raise ValueError(
                            f"the Parquet file has no column {key!r}; its columns are {', '.join(columns)}"
                        )
            else:
                head = _read_head(decompressed(path, file))
                if (reason := _not_text(head)) is not None:
                    raise ValueError(f"the file is neither UTF-8 text nor JSON lines: {reason}")
                if kind == "text" and _JSON.match(head.removeprefix(_BOM)):
                    raise ValueError(f"the file begins as JSON does, but is not named .jsonl, so {_JSON_ADVICE}")
                if kind == "json lines" and (reason := _not_lines(head)) is not None:
                    raise ValueError(reason)
    if kind == "text" and len(keys) != 1:
        raise ValueError(f"{path} is plain text with one text per document, so it has no {' and '.join(keys)}")


def missing_file(path: Path) -> str:
    """Return the message for an input path that is no file: a folder, a pattern without matches, or a missing file."""
    if path.is_dir():
        return f"{path} is a folder: give its files, {path}/*"
    if "*" in path.name:  # the shell passes a pattern to the program unchanged if no file matches the pattern
        return f"{path} matches no file"
    return f"{path} does not exist"


def _not_text(head: bytes) -> str | None:
    """Return the reason why a file with the first bytes `head` is not UTF-8 text; None if it may be UTF-8 text."""
    encoding = next((name for mark, name in _ENCODINGS.items() if head.startswith(mark)), None)
    # UTF-16 and UTF-32 texts have an even number of bytes. A file with an odd number of bytes is of another kind, even
    # if it begins with a byte order mark. In fewer than 6 bytes, too little text follows the mark to tell.
    if encoding is not None and len(head) >= 6 and len(head) % 2 == 0:
        return f"it is {encoding} (iconv -f {encoding} -t UTF-8 converts it)"
    place = next((place for place, byte in enumerate(head) if byte < 8), None)
    if place is None:
        return None
    return f"byte {place} is {head[place]:#04x}, which text never contains: {_ADVICE}"


def _not_lines(head: bytes) -> str | None:
    """Return the reason why a JSON file with the first bytes `head` is not JSON lines; None if it may be JSON lines."""
    text = head.removeprefix(_BOM).lstrip()
    first, newline, _ = text.partition(b"\n")
    if text.startswith(b"["):
        return "it is a JSON array, but JSON lines have one object on each line (jq -c '.[]' converts it)"
    if newline and text.startswith(b"{") and first.rstrip().endswith((b"{", b",", b"[")):
        return "it is JSON over several lines, but JSON lines have one object on each line (jq -c . converts it)"
    return None


def read_blocks(path: Path, keys: Sequence[str] | None = None, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Cut a file of documents into blocks of complete lines or rows, and yield the blocks in the file's order.

    Args:
        path: file to read. A plain text file becomes a single block.
        keys: columns to read from a Parquet file; None reads all columns.
        block_bytes: smallest size of a block of JSON lines, in bytes. The block ends with the line that reaches this
            size.
    Raises:
        ValueError: the file is damaged. The message names the file and a line shortly before the damage.
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
        except Exception as error:  # every type, because each decompressor raises its own types of exceptions
            what = f"the file is damaged from this line on: {type(error).__name__}: {error}"
            raise ValueError(f"{path}, line {line}: {what}") from error


def parse_block(block: Block, keys: Sequence[str]) -> Iterator[tuple[str, ...] | BadLine]:
    """Yield for each document of a block its texts under `keys`, or a `BadLine` if the document is malformed.

    A text may be empty. Blank lines are skipped.
    """
    for found in _parsed(block, lambda value: (str(value),) if block.kind == "text" else _texts(value, keys)):
        yield found if isinstance(found, BadLine) else found[1]


def read_texts(path: Path, key: str, on_bad_line: Callable[[BadLine], None]) -> Iterator[str]:
    """Yield the texts of a file of documents, including empty ones.

    Args:
        path: file to read.
        key: name of the JSON field or Parquet column that contains the text.
        on_bad_line: function that is called for each malformed line. If it returns, the line is skipped.
    """
    for block in read_blocks(path, (key,)):
        for document in parse_block(block, (key,)):
            if isinstance(document, BadLine):
                on_bad_line(document)
            else:
                yield document[0]


def read_records(path: Path, read: Callable[[dict[str, object]], T]) -> Iterator[tuple[int, T]]:
    """Yield for each line or row of a file its number, counted from 1, and the result of `read` for its JSON object.

    Args:
        path: JSON lines or Parquet file.
        read: function from the JSON object of a line, or from a row with all columns, to a result. It raises ValueError
            to reject the line.
    Raises:
        ValueError: the file cannot be read or is plain text, or a line is malformed or rejected by `read`.
    """
    if path.is_file() and kind_of(path) == "text":
        raise ValueError(f"{path} cannot be read: it is plain text, but JSON lines or Parquet is expected")
    check_readable(path, ())
    for block in read_blocks(path):
        for found in _parsed(block, lambda value: read(_object(value))):
            if isinstance(found, BadLine):
                raise ValueError(str(found))
            yield found


def _parsed(block: Block, read: Callable[[object], T]) -> Iterator[tuple[int, T] | BadLine]:
    """Parse the records of a block of documents: JSON lines, rows of a Parquet file, or one plain text.

    Args:
        block: block to parse.
        read: function from the value of a record (JSON value, row, or text) to a result. It may raise ValueError.
    Yields:
        For each record the number of its first line and the result of `read`, or a `BadLine` if the record is
        malformed.
    """
    content, plain = block.content, block.kind == "text"
    records = content if isinstance(content, list) else [content] if plain else content.split(b"\n")
    for number, record in enumerate(records, start=block.first_line):
        try:
            value: object = record
            if isinstance(record, bytes):
                text = record.removeprefix(_BOM)
                if plain and (place := text.find(0)) >= 0:
                    raise ValueError(f"byte {place} of the file is 0x00, which text never contains")
                if not plain and not text.strip():
                    continue
                value = text.decode().replace("\r\n", "\n").replace("\r", "\n") if plain else _json_value(text.decode())
            yield number, read(value)
        except UnicodeDecodeError as error:
            # In a plain text file, add the lines before the malformed byte, so that the message names the byte's line.
            inside = error.object.count(b"\n", 0, error.start)
            where = f"byte {error.object[error.start]:#04x} in position {error.start}, {error.reason}"
            advice = "iconv -f WINDOWS-1252 -t UTF-8 converts Latin-1 and Windows text"
            yield BadLine(block.path, number + inside, f"not UTF-8: {where} ({advice})")
        except (ValueError, RecursionError) as error:
            yield BadLine(block.path, number, in_words(error))


def stop_or_skip(bad: BadLine, on_error: Literal["stop", "skip"], log: Callable[[str], None]) -> None:
    """Raise ValueError for a malformed document if --on-error is "stop"; with "skip", log that it is skipped.

    In a plain text file the document is the whole file. In other files it is a line or a row.
    """
    if on_error == "stop":
        unit = "files" if kind_of(bad.path) == "text" else "lines"  # a plain text file is a single document
        raise ValueError(f"{bad} (--on-error skip skips such {unit})")
    log(f"skipped {bad}")


def _line_pieces(path: Path, file: IO[bytes], block_bytes: int) -> Iterator[tuple[bytes, int, int]]:
    """Read a text file in pieces of complete lines, and decompress it if its name says so.

    Args:
        path: path of the file, whose suffix determines the compression.
        file: the open file.
        block_bytes: smallest size of a piece in bytes; -1 reads the file in one piece.
    Yields:
        The lines, the number of line ends, and the position in the compressed file after the piece, in bytes.
    """
    plain = decompressed(path, file)
    while content := plain.read(block_bytes) + plain.readline():
        yield content, content.count(b"\n"), file.tell()


def _row_pieces(
    path: Path, file: IO[bytes], keys: Sequence[str] | None
) -> Iterator[tuple[list[dict[str, object]], int, int]]:
    """Read a Parquet file in pieces of up to 1024 rows; `keys` are the columns to read, None reads all.

    Yields:
        The rows, their number, and the position in the file after the piece, in bytes. The position is an estimate
        that assumes rows of equal size.
    """
    table, size = import_package(_PARQUET, "it", "pyarrow").ParquetFile(file), path.stat().st_size
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
        raise ValueError(f"{_shown(value)} is not a JSON object")
    return value


def _texts(value: object, keys: Sequence[str]) -> tuple[str, ...]:
    texts, record = [], _object(value)
    for key in keys:
        text = record.get(key)
        if not isinstance(text, str):
            if key not in record:
                raise ValueError(f"the field {key!r} is missing")
            raise ValueError(f"the field {key!r} is {_shown(text)}, not a string")
        if not text.isascii():
            text.encode()  # raises an error for half a surrogate pair, which JSON allows and UTF-8 does not
        texts.append(text)
    return tuple(texts)


def _shown(value: object) -> str:
    """Return up to 60 characters of a value as JSON, for messages."""
    return f"{json.dumps(value, default=str):.60}"


def decompressed(path: Path, file: IO[bytes]) -> BufferedIOBase:
    """Return a reader of an open file that decompresses .gz and .zst; other files are returned unchanged.

    Raises:
        ValueError: the package that decompresses zstd is missing.
    """
    if path.suffix == ".gz":
        return gzip.open(file)
    if path.suffix == ".zst":  # Python before 3.14 has no zstd, so the package backports.zstd reads the file
        standard = importlib.util.find_spec("compression") is not None
        name = "compression.zstd" if standard else "backports.zstd"
        file = import_package(name, "it", "backports.zstd").open(file)
    return cast(BufferedIOBase, file)


def _read_head(plain: BufferedIOBase) -> bytes:
    """Read the first 512 bytes of a decompressed file, or fewer if the file is shorter or truncated."""
    head = b""
    with contextlib.suppress(EOFError):
        while len(head) < _HEAD_BYTES and (piece := plain.read1(_HEAD_BYTES - len(head))):
            head += piece
    return head
