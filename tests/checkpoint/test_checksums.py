"""The list of files: what it finds, and that it guards itself."""

import zlib
from pathlib import Path

import pytest

from megazpp.base.files import DamagedError
from megazpp.checkpoint.checksums import (
    NAME,
    FileSum,
    read_checksums,
    sum_file,
    verify_files,
    write_checksums,
    write_durably,
)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden with spaces").write_bytes(b"abc" * 1000)
    (tmp_path / "__1_0.large").write_bytes(bytes(range(256)) * (5 << 12))  # more than one chunk, not a whole number
    write_checksums(tmp_path, {path.name: sum_file(path) for path in list(tmp_path.iterdir())})
    return tmp_path


def damage(folder: Path, **share: int) -> list[str]:
    with pytest.raises(DamagedError) as caught:
        verify_files(folder, **share)
    return str(caught.value).splitlines()


def test_a_file_is_summed_in_chunks_as_a_whole_and_what_was_not_touched_is_sound(folder):
    content = (folder / "__1_0.large").read_bytes()
    assert sum_file(folder / "__1_0.large") == FileSum(len(content), zlib.crc32(content))
    assert write_durably(folder / "text", "é") == sum_file(folder / "text")
    assert sorted(read_checksums(folder)) == [".hidden with spaces", "__1_0.large", "empty"]
    assert verify_files(folder) == 3000 + 256 * (5 << 12)


def test_each_damaged_file_is_named_with_what_is_wrong(folder):
    content = bytearray((folder / "__1_0.large").read_bytes())
    content[-1] ^= 1
    (folder / "__1_0.large").write_bytes(content)
    (folder / ".hidden with spaces").write_bytes(b"abc" * 999)
    (folder / "empty").unlink()
    problems = damage(folder)
    assert [line.split(": ")[0] for line in problems] == [
        f"{folder}/.hidden with spaces is damaged",
        f"{folder}/__1_0.large is damaged",
        f"{folder}/empty cannot be read",
    ]
    assert "2997 bytes, 3000 were written" in problems[0]


def test_a_rank_reads_what_it_has_written_and_rank_0_the_rest(folder):
    for path in folder.iterdir():
        if path.name != NAME:
            path.unlink()
    all_files = damage(folder)
    assert damage(folder, rank=1, num_ranks=2) == all_files[1:2]
    assert damage(folder, rank=0, num_ranks=2) == [all_files[0], all_files[2]]
    assert damage(folder, rank=0, num_ranks=1) == all_files


def test_the_list_finds_every_bit_flipped_in_itself_and_every_cut(folder):
    whole = (folder / NAME).read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        for content in (bytes(flipped), whole[:position]):
            (folder / NAME).write_bytes(content)
            with pytest.raises(DamagedError, match=f"{NAME} is damaged$"):
                read_checksums(folder)
    (folder / NAME).unlink()
    with pytest.raises(DamagedError, match=NAME):
        read_checksums(folder)
