"""model_optim_rng.pt of Megatron-LM, read without running anything that is in it.

Such a file is a pickle: beside tensors it holds the arguments (an `argparse.Namespace`), enums of Megatron's, states of
random generators. torch's restricted unpickler makes tensors, plain containers and the namespace; what is
Megatron's or numpy's becomes an `Unknown` that knows nothing; a file that names anything else is refused.
"""

from __future__ import annotations

import argparse
import io
import pickle
import pickletools
import re
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

# Whose names may occur: packages of Megatron and its forks, and what states of random generators are made of
_HARMLESS = ("megatron.", "apex.", "deepspeed.", "transformer_engine.", "fp16.", "numpy.", "pathlib.", "signal.")
_HARMLESS_NAMES = ("_codecs.encode", "_io.BytesIO", "types.SimpleNamespace", "enum.Enum")


# What torch and pickle raise for junk
_DAMAGE = (OSError, zipfile.BadZipFile, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError)


class Unknown:
    """Stands for an object of a package that is not here."""

    def __init__(self, *args: Any) -> None:
        pass

    def __new__(cls, *args: Any) -> Unknown:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def load_file(path: Path) -> dict[str, Any]:
    """The content; tensors stay in the file until they are used (files of torch before 1.6 are read whole).

    Raises:
        ValueError: it is missing, damaged, no such file, or names what a checkpoint has no use for.
    """
    try:
        names = _global_names(path)
        known = {name for name in names if name.startswith(_HARMLESS) or name in _HARMLESS_NAMES}
        allowed: list[Any] = [argparse.Namespace, *((Unknown, name) for name in known)]
        with torch.serialization.safe_globals(allowed):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except pickle.UnpicklingError as error:
        # torch's text goes on about how to run it all the same
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise ValueError(f"{path} is damaged or no checkpoint") from error
        text = f"it asks for {named[1]}, which a checkpoint has no use for"
        raise ValueError(f"{path} is refused, and nothing in it was run: {text}") from error
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged or no checkpoint ({type(error).__name__})") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError(f"{path} holds no model")
    return content


def _global_names(path: Path) -> set[str]:
    """The names that the pickle would import, read without unpickling."""

    def names(file: IO[bytes]) -> set[str]:
        codes = pickletools.genops(file)
        return {str(value).replace(" ", ".") for code, value, _ in codes if code.name in ("GLOBAL", "INST")}

    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            name = [name for name in archive.namelist() if name.endswith("/data.pkl")][0]  # noqa: RUF015 - IndexError
            return names(io.BytesIO(archive.read(name)))
    with path.open("rb") as file:  # magic number, version, machine, content
        return set().union(*(names(file) for _ in range(4)))
