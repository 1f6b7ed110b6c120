"""Flag files: `@path` in the place of the flags that the file holds.

A flag file has shell-style lines (quotes, `#` comments, a backslash at the end does no harm) and may itself include
files with `@path`. Expanding a command line turns it into words that each remember where they were written, so
that every later message can say `configs/gpt_125m.args:7`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

COMMAND_LINE = "command line"


class Word(NamedTuple):
    """One word of a command line and where it was written: `COMMAND_LINE` or "file:line"."""

    text: str
    origin: str


def expand_flag_files(argv: Sequence[str], script_dir: Path) -> list[Word]:
    """The words of `argv` with every `@path` replaced by the words of that file.

    Args:
        argv: the command line without the program's name. Its paths are relative to the working directory and,
            where nothing is there, to `script_dir`; a file's own paths are relative to that file.
        script_dir: directory of the main script.
    Raises:
        ValueError: a file is missing, unreadable or badly quoted, or files include each other in a circle.
    """
    folders = (Path.cwd(), script_dir)
    return [word for text in argv for word in _expand(Word(text, COMMAND_LINE), folders, ())]


def _expand(word: Word, folders: Sequence[Path], chain: tuple[Path, ...]) -> Iterator[Word]:
    if not word.text.startswith("@") or word.text == "@":
        yield word
        return
    path = _find(word, folders)
    if path in chain:
        circle = " -> ".join(shown(p) for p in (*chain[chain.index(path) :], path))
        raise ValueError(f"{word.origin}: flag files include each other in a circle: {circle}")
    for inner in _read_words(path):
        yield from _expand(inner, (path.parent,), (*chain, path))


def _find(word: Word, folders: Sequence[Path]) -> Path:
    candidates = list(dict.fromkeys((folder / Path(word.text[1:]).expanduser()).resolve() for folder in folders))
    for path in candidates:
        if path.is_file():
            return path
    places = " and ".join(shown(path.parent) for path in candidates)
    raise ValueError(f"{word.origin}: there is no flag file {word.text[1:]} (looked in {places})")


def _read_words(path: Path) -> Iterator[Word]:
    try:
        with path.open(encoding="utf-8", newline="") as file:  # line breaks inside quotes as they are
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{shown(path)}: cannot be read: {error}") from None
    first = 0
    while first < len(lines):
        origin = f"{shown(path)}:{first + 1}"
        words, first = _words_from(lines, first, origin)
        for text in words:
            yield Word(text, origin)


def _words_from(lines: Sequence[str], first: int, origin: str) -> tuple[list[str], int]:
    """The words of line `first`, and of those behind it that its quotes reach over; and the next line's number."""
    for last in range(first, len(lines)):
        text = "\n".join(lines[first : last + 1])
        try:
            # words of neighbouring lines follow each other anyway, so a continuation needs no joining
            return shlex.split(text.rstrip().removesuffix("\\"), comments=True), last + 1
        except ValueError as error:
            problem = error
    raise ValueError(f"{origin}: {problem}")


def shown(path: Path) -> str:
    """`path` as a message shows it: relative to the working directory if it lies below."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
