"""The list of files: what it finds, and that it guards itself."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from megazpp.checkpoint.checksums import (
    NAME,
    DamagedError,
    FileSum,
    find_damage,
    read_checksums,
    sum_file,
    write_checksums,
    write_durably,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden with spaces").write_bytes(b"abc" * 1000)
    (tmp_path / "large").write_bytes(bytes(range(256)) * (5 << 12))  # more than one chunk, not a whole number
    write_checksums(tmp_path, {path.name: sum_file(path) for path in list(tmp_path.iterdir())})
    return tmp_path


def test_a_file_is_summed_in_chunks_as_a_whole(folder: Path):
    content = (folder / "large").read_bytes()
    assert sum_file(folder / "large") == FileSum(len(content), zlib.crc32(content))
    assert write_durably(folder / "text", "é") == sum_file(folder / "text")


def test_what_was_not_touched_is_sound(folder: Path):
    sums = read_checksums(folder)
    assert sorted(sums) == [".hidden with spaces", "empty", "large"]
    assert find_damage(folder, sums, sums) == []


def test_each_damaged_file_is_named_with_what_is_wrong(folder: Path):
    sums = read_checksums(folder)
    content = bytearray((folder / "large").read_bytes())
    content[-1] ^= 1
    (folder / "large").write_bytes(content)
    (folder / ".hidden with spaces").write_bytes(b"abc" * 999)
    (folder / "empty").unlink()
    problems = find_damage(folder, sums, sorted(sums))
    assert [line.split(": ")[0] for line in problems] == [
        f"{folder}/.hidden with spaces is damaged",
        f"{folder}/empty cannot be read",
        f"{folder}/large is damaged",
    ]
    assert "2997 bytes, 3000 were written" in problems[0]
    assert find_damage(folder, sums, ["empty"]) == problems[1:2]  # only what was asked for


def test_the_list_finds_every_bit_flipped_in_itself_and_every_cut(folder: Path):
    whole = (folder / NAME).read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        for content in (bytes(flipped), whole[:position]):
            (folder / NAME).write_bytes(content)
            with pytest.raises(DamagedError, match=NAME):
                read_checksums(folder)
    (folder / NAME).unlink()
    with pytest.raises(DamagedError, match=NAME):
        read_checksums(folder)
