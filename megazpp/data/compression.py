"""Files as they are or compressed with gzip or zstd, by their name; and what a file is that is none of ours."""

from __future__ import annotations

import contextlib
import gzip
from io import BufferedIOBase
from pathlib import Path
from types import ModuleType
from typing import IO, cast

COMPRESSED = (".gz", ".zst")
_HEAD_BYTES = 512
_FOREIGN = {  # (place, signature) -> what such a file is
    (0, b"PK\x03\x04"): "a zip archive: unpack it",
    (0, b"7z\xbc\xaf\x27\x1c"): "a 7z archive: unpack it",
    (257, b"ustar"): "a tar archive: unpack it",
    (0, b"BZh"): "compressed with bzip2: unpack it, or use gzip or zstd",
    (0, b"\xfd7zXZ\x00"): "compressed with xz: unpack it, or use gzip or zstd",
    (0, b"\x1f\x8b"): "compressed with gzip: its name has to end in .gz",
    (0, b"\x28\xb5\x2f\xfd"): "compressed with zstd: its name has to end in .zst",
    (0, b"PAR1"): "a Parquet file: its name has to end in .parquet",
    (0, b"%PDF-"): "a PDF: extract its text",
}


def decompressed(path: Path, file: IO[bytes]) -> BufferedIOBase:
    """What is in `file`, which is open and called `path`.

    Raises:
        ValueError: it needs a package that is missing.
    """
    if path.suffix == ".gz":
        return gzip.open(file)
    return cast(BufferedIOBase, _zstd().open(file) if path.suffix == ".zst" else file)


def read_head(plain: BufferedIOBase) -> bytes:
    """The first bytes of what is in a file, as far as they can be read if it was cut."""
    head = b""
    with contextlib.suppress(EOFError):
        while len(head) < _HEAD_BYTES and (piece := plain.read1(_HEAD_BYTES - len(head))):
            head += piece
    return head


def check_signature(head: bytes) -> None:
    """Refuse what begins like an archive or a format that is not read here, or not under this name.

    Raises:
        ValueError: says which.
    """
    for (place, signature), what in _FOREIGN.items():
        if head.startswith(signature, place):
            raise ValueError(f"it is {what}")


def _zstd() -> ModuleType:
    try:
        from compression import zstd  # Python 3.14
    except ImportError:
        try:
            from backports import zstd  # optional
        except ImportError as error:
            raise ValueError("it needs the package backports.zstd: pip install backports.zstd") from error
    return zstd
