"""safetensors files tensor by tensor: the package reads what we write, and junk is named."""

import json
import struct

import pytest
import safetensors.torch
import torch

from megazpp.convert.model import Deferred
from megazpp.convert.safetensors_file import open_tensors, split_into_files, write_tensors

TENSORS = {
    "matrix": torch.randn(7, 5),
    "half": torch.randn(3).half(),
    "brain": torch.randn(2, 3, 5).bfloat16(),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(2.5),
}


def deferred(tensors: dict[str, torch.Tensor]) -> dict[str, Deferred]:
    return {name: Deferred(tuple(x.shape), x.dtype, x.clone) for name, x in tensors.items()}


def test_the_package_reads_what_is_written(tmp_path):
    file = tmp_path / "model.safetensors"
    size = write_tensors(file, deferred(TENSORS))
    assert size == sum(x.nbytes for x in TENSORS.values())
    found = safetensors.torch.load_file(file)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safetensors.safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}  # transformers asks for it
    (header,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert header % 8 == 0  # the data are aligned


def test_what_the_package_writes_is_read_when_it_is_wanted(tmp_path):
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(TENSORS, file)
    found = open_tensors(file)
    assert {name: (entry.shape, entry.dtype) for name, entry in found.items()} == {
        name: (tuple(x.shape), x.dtype) for name, x in TENSORS.items()
    }
    assert all(torch.equal(entry.read(), TENSORS[name]) for name, entry in found.items())


def test_files_are_cut_between_tensors():
    tensors = deferred({str(i): torch.zeros(count) for i, count in enumerate([10, 10, 30, 1, 1, 9])})
    groups = [list(group) for group in split_into_files(tensors, 80)]
    assert groups == [["0", "1"], ["2"], ["3", "4", "5"]]  # the third is larger than a file by itself
    assert split_into_files({}, 80) == [{}]


def test_junk_is_named_in_one_line(tmp_path):
    file = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        open_tensors(file)
    write_tensors(file, deferred(TENSORS))
    whole = file.read_bytes()
    for junk in (b"", b"abc", bytes(range(256)) * 9, whole[:30], whole[:-1], whole + b"x", b"\xff" * 8 + whole[8:]):
        file.write_bytes(junk)
        with pytest.raises(ValueError, match="is damaged or no safetensors file") as caught:
            open_tensors(file)
        assert "\n" not in str(caught.value)


def test_a_quantized_tensor_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    header = json.dumps({"w": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    with pytest.raises(ValueError, match="w has type I8; only F32, F16, BF16 can be converted"):
        open_tensors(file)
