"""Test reading and writing safetensors files tensor by tensor. Damaged files are rejected."""

import struct

import pytest
import safetensors.torch
import torch

from megazpp.convert.model import held
from megazpp.convert.safetensors_file import open_tensors, write_tensors

TENSORS = {
    "matrix": torch.randn(7, 5),
    "half": torch.randn(3).half(),
    "brain": torch.randn(2, 3, 5).bfloat16(),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(2.5),
}


def test_safetensors_files_are_read_and_written_like_by_the_package(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    safetensors.torch.save_file(TENSORS, theirs)
    write_tensors(ours, open_tensors(theirs))
    torch.testing.assert_close(safetensors.torch.load_file(ours), TENSORS, rtol=0, atol=0)
    with safetensors.safe_open(ours, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # the metadata that transformers requires of a .safetensors file
    (header,) = struct.unpack("<Q", ours.read_bytes()[:8])
    assert header % 8 == 0  # the header ends at a multiple of 8 bytes, so the tensors behind it are aligned


def test_full_disk_is_reported_with_the_file(tmp_path):
    (tmp_path / "x").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as failed:
        write_tensors(tmp_path / "x", {"a": held(torch.ones(4))})
    assert failed.value.filename == str(tmp_path / "x")


def test_junk_and_unsupported_dtypes_are_rejected_in_one_line(tmp_path):
    file = tmp_path / "model.safetensors"
    whole, integers = safetensors.torch.save(TENSORS), safetensors.torch.save({"w": torch.ones(4, dtype=torch.int8)})
    contents = [b"", b"abc", bytes(range(256)) * 9, whole[:30], whole[:-1], whole + b"x", b"\xff" * 8 + whole[8:]]
    rows = [(content, "is damaged or no safetensors file") for content in contents]
    for content, message in [*rows, (integers, "w has the dtype I8, but only F32, F16, BF16 can be converted")]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            open_tensors(file)
        assert "\n" not in str(caught.value)
