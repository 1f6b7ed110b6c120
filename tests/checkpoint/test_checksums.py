"""Test the file of checksums in a checkpoint: it reveals damaged files, and damage to itself."""

import os
import pickle
import zlib
from pathlib import Path

import pytest
import torch
from helpers.refusals import not_refused
from torch.distributed.checkpoint.metadata import TensorProperties

from megazpp.base.files import DamagedError
from megazpp.checkpoint.checksums import (
    NAME,
    FileSum,
    SummingWriter,
    read_checksums,
    sum_file,
    verify_files,
    write_checksums,
    write_durably,
)
from megazpp.parallel.timeline import Timeline

# content of more than one chunk (the piece that is summed at a time); the last chunk is partial
LARGE = bytes(range(256)) * (5 << 12)


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, content in (("empty", b""), (".hidden with spaces", b"abc" * 1000), ("__1_0.large", LARGE)):
        (tmp_path / name).write_bytes(content)
    write_checksums(tmp_path, {path.name: sum_file(path) for path in list(tmp_path.iterdir())})
    return tmp_path


def damage(folder: Path, **share: int) -> list[str]:
    with pytest.raises(DamagedError) as caught:
        verify_files(folder, **share)
    return str(caught.value).splitlines()


def test_files_are_summed_in_chunks_and_undamaged_ones_pass(folder):
    assert sum_file(folder / "__1_0.large") == FileSum(len(LARGE), zlib.crc32(LARGE))
    assert verify_files(folder) == 3000 + len(LARGE)
    assert write_durably(folder / "text", "é") == sum_file(folder / "text")


def test_damaged_files_are_named_and_ranks_verify_the_files_they_wrote(folder):
    """Damage three files, and check the messages.

    Each rank verifies the files that it wrote. Rank 0 also verifies the files that no rank wrote.
    """
    (folder / "__1_0.large").write_bytes(LARGE[:-1] + b"x")
    os.truncate(folder / ".hidden with spaces", 2997)
    (folder / "empty").unlink()
    hidden, large, empty = problems = damage(folder)
    assert hidden == f"{folder}/.hidden with spaces is damaged: it has 2997 bytes, but 3000 were written"
    assert large.startswith(f"{folder}/__1_0.large is damaged: its checksum is ")
    assert empty.startswith(f"{folder}/empty cannot be read: ")
    assert damage(folder, rank=1, num_ranks=2) == [large]
    assert damage(folder, rank=0, num_ranks=2) == [hidden, empty]
    assert damage(folder, rank=0, num_ranks=1) == problems


def test_checksum_file_detects_any_flipped_bit_and_any_cut_in_itself(folder):
    whole = (folder / NAME).read_bytes()

    def read(content: bytes) -> None:
        (folder / NAME).write_bytes(content)
        read_checksums(folder)

    read(whole)
    flips = [whole[:place] + bytes([byte ^ 1 << place % 8]) + whole[place + 1 :] for place, byte in enumerate(whole)]
    cuts = [whole[:place] for place in range(len(whole))]
    rows = [(content, f"{NAME} is damaged") for content in (*flips, *cuts)]
    assert not_refused(rows, read, DamagedError) == []
    (folder / NAME).unlink()
    with pytest.raises(DamagedError, match=f"{NAME} cannot be read"):
        read_checksums(folder)


def test_index_written_by_torch_2_15_is_read_by_older_versions(tmp_path, monkeypatch):
    """Write a checkpoint's index as torch 2.15 does, and check that it has only the five fields of older versions.

    torch 2.15 would pickle a sixth field of tensor properties, and `__setstate__` of older versions fails on six. Newer
    versions accept five.
    """
    five_fields = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda properties: (*five_fields(properties)[:5], (1,)))
    writer = SummingWriter(tmp_path, Timeline("cpu"))
    writer.save({"weight": torch.arange(3.0)}, None)
    write_checksums(tmp_path, writer.sums)
    monkeypatch.setattr(
        TensorProperties, "__setstate__", lambda properties, state: vars(properties).update(fields=len(state))
    )
    with (tmp_path / ".metadata").open("rb") as file:
        (entry,) = pickle.load(file).state_dict_metadata.values()
    assert entry.properties.fields == 5
