"""Megatron's ranks put together are the model they were cut from, for every version; their pickles are not run."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.megatron_files import PADDED, VOCAB, arguments, make_weights, write_megatron
from helpers.training import LLAMA_STYLE

from megazpp.checkpoint.record import read_record, shape_of
from megazpp.convert.convert import ConvertConfig, convert
from megazpp.convert.megatron import load_file, open_megatron
from megazpp.convert.native import open_checkpoint
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.model.config import GPTConfig

GPT = GPTConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    ffn_hidden_size=20,
    max_position_embeddings=16,
    openai_gelu=True,
)
LLAMA = dataclasses.replace(LLAMA_STYLE, make_vocab_size_divisible_by=128)
SCALED = dataclasses.replace(LLAMA, qk_layernorm=True, use_rope_scaling=True, rope_scaling_factor=32.0)


def assert_same_model(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    found = open_megatron(folder, None)
    tensors = {name: entry.read() for name, entry in found.tensors.items()}
    assert tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensors[name], tensor), name
    assert (found.progress.iteration, found.progress.consumed_samples, found.seq_length) == (100, 4000, 16)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_ranks_make_the_whole_model(tp: int, tmp_path: Path):
    for version, names in ((0, "old"), (1.0, "old"), (2.0, "old"), (3.0, "new"), (3.0, "core")):
        folder, weights = tmp_path / f"{version} {names}", make_weights(GPT)
        assert_same_model(write_megatron(folder, weights, GPT, tp=tp, version=version, names=names), weights)
    for names in ("new", "core"):
        weights = make_weights(LLAMA)
        assert_same_model(write_megatron(tmp_path / f"llama {names}", weights, LLAMA, tp=tp, names=names), weights)


def test_head_norms_and_scaled_frequencies_of_the_core_are_taken_over(tmp_path: Path):
    weights = make_weights(SCALED)
    more = {"qk_layernorm": True, "use_rope_scaling": True, "rope_scaling_factor": 32.0}
    folder = write_megatron(tmp_path, weights, SCALED, tp=2, names="core", args=arguments(SCALED, 2, **more))
    assert_same_model(folder, weights)
    found = open_megatron(folder, None).config
    assert (found.qk_layernorm, found.rope_scaling) == (True, 32.0)


def test_files_of_torch_before_1_6_and_other_places_are_read(tmp_path: Path):
    weights = make_weights(GPT)
    folder = write_megatron(tmp_path, weights, GPT, tp=2, zipped=False)
    assert_same_model(folder, weights)
    (folder / "iter_0000100").rename(folder / "release")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    assert_same_model(folder, weights)
    (folder / "release/mp_rank_00/model_optim_rng.pt").rename(folder / "release/mp_rank_00/model_rng.pt")
    assert_same_model(folder / "release", weights)


@pytest.mark.parametrize(("config", "tokenizer"), [(GPT, True), (LLAMA, False)])
def test_a_converted_checkpoint_has_the_weights_and_the_tokenizer_s_rows(
    config: GPTConfig, tokenizer: bool, tmp_path: Path
):
    weights = make_weights(config)
    source, output = write_megatron(tmp_path / "theirs", weights, config, tp=2), tmp_path / "ours"
    flags = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1) if tokenizer else TokenizerConfig()
    convert(ConvertConfig(input=str(source), output=str(output)), flags, lambda line: None)
    record = read_record(output / "iter_0000100")
    rows = VOCAB if tokenizer else PADDED
    assert record.vocab_size == rows
    assert record.flags["seq_length"] == 16
    found = GPTConfig(**shape_of(record.flags))
    assert (found.openai_gelu, found.positions) == (config.openai_gelu, config.positions)
    model, _ = open_checkpoint(output, None)
    for name, entry in model.tensors.items():
        expected = weights[name][:rows] if name in ("embedding.word.weight", "output.weight") else weights[name]
        assert torch.equal(entry.read(), expected), name


# fmt: off
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"args": None}, "has no args"),
    ({"args": argparse.Namespace(num_layers=2)}, "args: num_attention_heads is missing"),
    ({"args": arguments(GPT, 4)}, "tensor_model_parallel_size is 4, but there are 2 ranks"),
    ({"checkpoint_version": 4.0}, "checkpoint_version 4.0 is not known"),
    ({"model": {"language_model": {"pooler": torch.zeros(2)}}}, "language_model.pooler has no place"),
    ({"args": arguments(GPT, 2, num_experts=8)}, "num_experts 8 is not supported"),
    (
        {"args": arguments(dataclasses.replace(GPT, position_embedding_type="rope"), 2, use_rope_scaling=True)},
        "use_rope_scaling True is not supported here with the legacy",
    ),
    ({"args": arguments(GPT, 2, window_size=(4, 0))}, "window_size .* is not supported"),
    ({"args": arguments(dataclasses.replace(GPT, num_layers=10**9), 2)}, "describes a model of 1000000000 layers"),
    ({"args": arguments(GPT, 2, apply_residual_connection_post_layernorm=True)}, "post_layernorm True"),
    ({"args": arguments(dataclasses.replace(GPT, num_layers=3), 2)}, "layers.2.attention_norm.weight"),
    ({"args": arguments(dataclasses.replace(GPT, hidden_size=28), 2)}, "has shape"),
]
# fmt: on


def test_what_cannot_be_taken_over_is_named(tmp_path: Path):
    for number, (changes, message) in enumerate(REFUSED):
        folder = write_megatron(tmp_path / str(number), make_weights(GPT), GPT, tp=2, **changes)
        with pytest.raises(ValueError, match=message) as caught:
            open_megatron(folder, None)
        assert "\n" not in str(caught.value)


def test_a_pipeline_a_missing_rank_and_a_distributed_checkpoint_are_told_apart(tmp_path: Path):
    folder = write_megatron(tmp_path, make_weights(GPT), GPT, tp=2)
    checkpoint = folder / "iter_0000100"
    (checkpoint / "mp_rank_00").rename(checkpoint / "mp_rank_02")
    with pytest.raises(ValueError, match="has mp_rank_01, mp_rank_02: a rank is missing"):
        open_megatron(folder, 100)
    (checkpoint / "mp_rank_02").rename(checkpoint / "mp_rank_00_000")
    with pytest.raises(ValueError, match="mp_rank_00_000 is of a pipeline"):
        open_megatron(folder, None)
    with pytest.raises(ValueError, match="iter_0000200 is no checkpoint with mp_rank_00 in it"):
        open_megatron(folder, 200)
    (folder / "iter_0000300").mkdir()
    (folder / "iter_0000300/.metadata").touch()
    with pytest.raises(ValueError, match="iter_0000300 is a distributed checkpoint"):
        open_megatron(folder, 300)
    (folder / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\x00")
    with pytest.raises(ValueError, match="is damaged: it says"):
        open_megatron(folder, None)


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
