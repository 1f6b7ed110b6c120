"""Read and write safetensors files one tensor at a time, and read torch's pickled files (.bin).

A safetensors file has 8 bytes with the length of the header, a header in JSON ({name: dtype, shape, offsets}), and the
data of all tensors. The package safetensors reads single tensors, but it can only write tensors that are all in memory.
The writer of this file computes the header from the shapes, which are known before any tensor is read.
"""

from __future__ import annotations

import functools
import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megazpp.base.files import errors_as, errors_naming, sync
from megazpp.convert.model import Deferred, held
from megazpp.data.tokenizer_folder import import_package

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ALIGNMENT = 8  # the header is padded to a multiple of this number of bytes, so that the tensors are aligned


def open_tensors(path: Path, used: Callable[[str], bool] = lambda name: True) -> dict[str, Deferred]:
    """Open the tensors of a safetensors file or of a .bin file, to be read on demand, and return them by name.

    torch's restricted unpickler reads .bin files, so no code from the file runs.

    Args:
        path: file to open.
        used: function that returns True for the name of a tensor to open. Other tensors are left out.
    Raises:
        ValueError: the file is missing, damaged or has another format, or a tensor has an unsupported dtype.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing, so the weights are not complete: copy all files of the model")
    if path.suffix == ".bin":
        return _open_pickled(path, used)
    safetensors = import_package("safetensors", str(path))
    found = {}
    with (
        errors_as(f"{path} is damaged or no safetensors file", (safetensors.SafetensorError, OSError)),
        safetensors.safe_open(path, framework="pt") as file,
    ):
        for name in filter(used, file.keys()):
            entry = file.get_slice(name)
            dtype = entry.get_dtype()
            if dtype not in DTYPES:
                raise ValueError(f"{path}: {name} has the dtype {dtype}, but only {', '.join(DTYPES)} can be converted")
            found[name] = Deferred(tuple(entry.get_shape()), DTYPES[dtype], functools.partial(_read, path, name))
    return found


def _open_pickled(path: Path, used: Callable[[str], bool]) -> dict[str, Deferred]:
    """Open the tensors of one of torch's pickled files (.bin), with the arguments and errors of `open_tensors`."""
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        found = {name: held(tensor) for name, tensor in values.items() if used(name)}
    except Exception as error:  # torch raises errors of many types for damaged files
        raise ValueError(
            f"{path} is damaged or contains more than tensors ({type(error).__name__}): copy it again, or save it as "
            "safetensors"
        ) from error
    for name, entry in found.items():
        check_stored(name, entry.read(), path)
    return found


def check_stored(name: str, tensor: torch.Tensor, path: str | Path) -> None:
    """Raise ValueError if a tensor from a pickled file cannot be converted. Its values are not read.

    Args:
        name: name of the tensor in the file.
        tensor: tensor, as torch has loaded it.
        path: path of the file, for the message.
    """
    if tensor.dtype not in DTYPES.values():
        raise ValueError(f"{path}: {name} has the dtype {tensor.dtype}, but only {', '.join(DTYPES)} can be converted")
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "without values" if tensor.is_meta else f"with the layout {tensor.layout}"
        raise ValueError(f"{path}: {name} is a tensor {kind}, which cannot be converted; save a dense tensor")


def _read(path: Path, name: str) -> torch.Tensor:
    """Read one tensor of a safetensors file, and close the file.

    Pages of an open file are memory-mapped, and would count as memory of the process.
    """
    with import_package("safetensors", str(path)).safe_open(path, framework="pt") as file:
        return file.get_tensor(name).clone()


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in a safetensors file's header, a dictionary of strings; {} if there is none.

    The file must be valid: `open_tensors` or PEFT has opened it before.
    """
    with import_package("safetensors", str(path)).safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def write_tensors(path: Path, tensors: Mapping[str, Deferred], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, and sync it to disk.

    Args:
        path: file to write.
        tensors: tensors by name. Each is read when it is written, one after the other.
        metadata: strings to store in the header, by name; None for no metadata.
    """
    names, start = {dtype: name for name, dtype in (*DTYPES.items(), ("U8", torch.uint8))}, 0
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    for name, entry in tensors.items():
        place = [start, start + num_bytes(entry)]
        header[name] = {"dtype": names[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
        start = place[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with errors_naming(path), path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, entry in tensors.items():
            tensor = entry.read()
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), name
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor
        sync(file)


def num_bytes(entry: Deferred) -> int:
    """Return the size of a tensor's data in a safetensors file, in bytes."""
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta").nbytes
