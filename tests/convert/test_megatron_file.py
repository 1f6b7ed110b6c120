"""Megatron's pickles are read without running them."""

from __future__ import annotations

import argparse
import enum
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megazpp.convert.megatron import load_file


class Malicious:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class ModelType(enum.Enum):
    encoder = 1


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_refused_and_not_run(zipped: bool, tmp_path: Path):
    for place in ("args", "model", "optimizer"):
        content = {"args": argparse.Namespace(a=1), "model": {"w": torch.ones(2)}}
        content[place] = Malicious(f"touch {tmp_path / 'ran'}")
        file = tmp_path / "model_optim_rng.pt"
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match=r"refused, and nothing in it was run: it asks for posix.system") as caught:
            load_file(file)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_megatron_s_own_classes_are_not_needed(zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module: Any = types.ModuleType("megatron.core.enums")
    module.ModelType = ModelType
    monkeypatch.setattr(ModelType, "__module__", module.__name__)
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    file = tmp_path / "model_optim_rng.pt"
    args = argparse.Namespace(num_layers=2, model_type=ModelType.encoder, params_dtype=torch.bfloat16)
    content = {"args": args, "model": {"w": torch.ones(2)}}
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    for name in ("megatron", "megatron.core", module.__name__):
        monkeypatch.delitem(sys.modules, name)
    found = load_file(file)
    assert (found["args"].num_layers, found["args"].params_dtype) == (2, torch.bfloat16)
    assert torch.equal(found["model"]["w"], torch.ones(2))


def test_junk_is_no_checkpoint(tmp_path: Path):
    file = tmp_path / "model_optim_rng.pt"
    with pytest.raises(ValueError, match="is missing"):
        load_file(file)
    torch.save({"model": {"w": torch.randn(5000)}}, file)
    whole = file.read_bytes()
    for junk in (
        b"",
        b"\x80",
        bytes(range(256)) * 30,
        whole[: len(whole) // 2],
        whole[:-30],
        b"PK\x03\x04" + whole[4:90],
    ):
        file.write_bytes(junk)
        with pytest.raises(ValueError, match="damaged or no checkpoint") as caught:
            load_file(file)
        assert "\n" not in str(caught.value)
    for other in ([1, 2], {"weights": torch.ones(2)}, {"model": 3}):
        torch.save(other, file)
        with pytest.raises(ValueError, match="holds no model"):
            load_file(file)
