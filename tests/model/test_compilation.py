"""Where layers are compiled by default, and what is said where they cannot be."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.training import GPT2_STYLE

from megazpp.model import compilation, gpt
from megazpp.model.compilation import compiles_layers, missing_compiler


def choice(compile: bool | None, device: str) -> tuple[bool, str]:
    return compiles_layers(dataclasses.replace(GPT2_STYLE, compile=compile), device)


@pytest.mark.parametrize(("flag", "device", "expected"), [
    (None, "cuda", (True, "the default on CUDA: see --no-compile")),
    (None, "cpu", (False, "the default on a CPU: see --compile")),
    (False, "cuda", (False, "--no-compile")),
    (True, "cpu", (True, "--compile")),
])  # fmt: skip
def test_layers_are_compiled_on_cuda_unless_the_flag_says_otherwise(
    flag: bool | None, device: str, expected: tuple[bool, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compilation, "missing_compiler", lambda device_type: None)
    assert choice(flag, device) == expected


def test_without_a_compiler_layers_are_eager_by_default_and_the_table_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compilation, "missing_compiler", lambda device_type: "there is no Triton")
    assert choice(None, "cuda") == (False, "cannot be compiled: there is no Triton")
    monkeypatch.setattr(gpt, "compiles_layers", lambda config, device_type: choice(None, "cuda"))
    rows = gpt.model_backends(GPT2_STYLE, 1, device=torch.device("cpu"), dtype=torch.float32, documents=False)
    assert rows[-1] == ("layers", "eager", "cannot be compiled: there is no Triton")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_compile_without_a_compiler_is_refused(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compilation, "missing_compiler", lambda device_type: "there is no Triton")
    with pytest.raises(ValueError, match=r"^--compile: there is no Triton"):
        choice(True, device)


def test_what_torch_compile_needs_on_a_cpu_is_its_cxx_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert missing_compiler("cpu") == "there is no C++ compiler (no-such-compiler)"
    monkeypatch.setenv("CXX", "ls")
    assert missing_compiler("cpu") is None


def test_what_torch_compile_needs_on_cuda_is_triton_a_device_for_it_and_a_c_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: None)
    assert missing_compiler("cuda") == "there is no Triton (pip install triton)"
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(compilation, "capability", lambda device: (6, 1))
    assert missing_compiler("cuda") == "Triton needs compute capability 7.0, not 6.1"
    monkeypatch.setattr(compilation, "capability", lambda device: (9, 0))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert missing_compiler("cuda") == "CC=no-such-compiler is not found"
    monkeypatch.setenv("CC", "ls")
    assert missing_compiler("cuda") is None
