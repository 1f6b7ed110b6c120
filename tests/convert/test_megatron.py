"""Megatron's ranks put together are the model they were cut from, for every version; their pickles are not run."""

import argparse
import dataclasses
import enum
import itertools
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.megatron_files import PADDED, VOCAB, arguments, make_weights, write_megatron
from helpers.refusals import not_refused
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


def test_the_ranks_make_the_whole_model(tmp_path):
    gpt, llama = ((config, make_weights(config)) for config in (GPT, LLAMA))
    for number, ((config, weights), version, names, tp) in enumerate(
        [
            *((gpt, 0, "old", tp) for tp in (1, 2, 4)),
            *((gpt, 1.0, "old", tp) for tp in (1, 2, 4)),
            *((gpt, 2.0, "old", 2), (gpt, 3.0, "new", 1), (gpt, 3.0, "core", 4)),
            *((llama, 3.0, names, tp) for names in ("new", "core") for tp in (1, 2, 4)),
        ]
    ):
        folder = write_megatron(tmp_path / str(number), weights, config, tp=tp, version=version, names=names)
        assert_same_model(folder, weights)


def test_head_norms_and_scaled_frequencies_of_the_core_are_taken_over(tmp_path):
    weights = make_weights(SCALED)
    more = {"qk_layernorm": True, "use_rope_scaling": True, "rope_scaling_factor": 32.0}
    folder = write_megatron(tmp_path, weights, SCALED, tp=2, names="core", args=arguments(SCALED, 2, **more))
    assert_same_model(folder, weights)
    found = open_megatron(folder, None).config
    assert (found.qk_layernorm, found.rope_scaling) == (True, 32.0)


def test_files_of_torch_before_1_6_and_other_places_are_read(tmp_path):
    weights = make_weights(GPT)
    folder = write_megatron(tmp_path, weights, GPT, tp=2, zipped=False)
    assert_same_model(folder, weights)
    (folder / "iter_0000100").rename(folder / "release")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    assert_same_model(folder, weights)
    (folder / "release/mp_rank_00/model_optim_rng.pt").rename(folder / "release/mp_rank_00/model_rng.pt")
    assert_same_model(folder / "release", weights)


def test_a_converted_checkpoint_has_the_weights_and_the_tokenizer_s_rows(tmp_path):
    null = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1)
    for config, tokenizer, rows in ((GPT, null, VOCAB), (LLAMA, TokenizerConfig(), PADDED)):
        weights, output = make_weights(config), tmp_path / f"{rows} rows"
        source = write_megatron(tmp_path / f"{rows} theirs", weights, config, tp=2)
        convert(ConvertConfig(input=str(source), output=str(output)), tokenizer, lambda line: None)
        record = read_record(output / "iter_0000100")
        assert (record.vocab_size, record.flags["seq_length"]) == (rows, 16)
        found = GPTConfig(**shape_of(record.flags))
        assert (found.openai_gelu, found.positions) == (config.openai_gelu, config.positions)
        for name, entry in open_checkpoint(output, None)[0].tensors.items():
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


def test_what_cannot_be_taken_over_is_named(tmp_path):
    for number, (changes, message) in enumerate(REFUSED):
        folder = write_megatron(tmp_path / str(number), make_weights(GPT), GPT, tp=2, **changes)
        with pytest.raises(ValueError, match=message) as caught:
            open_megatron(folder, None)
        assert "\n" not in str(caught.value)


def test_a_pipeline_a_missing_rank_and_a_distributed_checkpoint_are_told_apart(tmp_path):
    write_megatron(tmp_path / "rank", make_weights(GPT), GPT, tp=2)
    shutil.copytree(tmp_path / "rank", tmp_path / "pipeline")
    for folder, name in (("rank", "mp_rank_02"), ("pipeline", "mp_rank_00_000")):
        checkpoint = tmp_path / folder / "iter_0000100"
        (checkpoint / "mp_rank_00").rename(checkpoint / name)
    (tmp_path / "rank" / "iter_0000300").mkdir()
    (tmp_path / "rank" / "iter_0000300" / ".metadata").touch()
    (tmp_path / "tracker").mkdir()
    (tmp_path / "tracker" / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\x00")
    rows = [
        (tmp_path / "rank", 100, "has mp_rank_01, mp_rank_02: a rank is missing"),
        (tmp_path / "rank", 200, "iter_0000200 is no checkpoint with mp_rank_00 in it"),
        (tmp_path / "rank", 300, "iter_0000300 is a distributed checkpoint"),
        (tmp_path / "pipeline", None, "mp_rank_00_000 is of a pipeline"),
        (tmp_path / "tracker", None, "is damaged: it says"),
    ]
    assert not_refused(rows, open_megatron) == []


class Malicious:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class ModelType(enum.Enum):
    encoder = 1


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path):
    file = tmp_path / "model_optim_rng.pt"
    for place, zipped in itertools.product(("args", "model", "optimizer"), (True, False)):
        content = {"args": argparse.Namespace(a=1), "model": {"w": torch.ones(2)}}
        content[place] = Malicious(f"touch {tmp_path / 'ran'}")
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match=r"refused, and nothing in it was run: it asks for posix.system") as caught:
            load_file(file)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "ran").exists()


def test_megatron_s_own_classes_are_not_needed(tmp_path, monkeypatch):
    names = ("megatron", "megatron.core", "megatron.core.enums")
    modules: list[Any] = [types.ModuleType(name) for name in names]
    modules[-1].ModelType = ModelType
    monkeypatch.setattr(ModelType, "__module__", names[-1])
    args = argparse.Namespace(num_layers=2, model_type=ModelType.encoder, params_dtype=torch.bfloat16)
    files = {zipped: tmp_path / f"{zipped}.pt" for zipped in (True, False)}
    with monkeypatch.context() as patch:
        for name, module in zip(names, modules, strict=True):
            patch.setitem(sys.modules, name, module)
        for zipped, file in files.items():
            torch.save({"args": args, "model": {"w": torch.ones(2)}}, file, _use_new_zipfile_serialization=zipped)
    for file in files.values():
        found = load_file(file)
        assert (found["args"].num_layers, found["args"].params_dtype) == (2, torch.bfloat16)
        assert torch.equal(found["model"]["w"], torch.ones(2))


def test_junk_is_no_checkpoint(tmp_path):
    file = tmp_path / "model_optim_rng.pt"
    with pytest.raises(ValueError, match="is missing"):
        load_file(file)
    torch.save({"model": {"w": torch.randn(5000)}}, file)
    whole = file.read_bytes()
    cut = (whole[: len(whole) // 2], whole[:-30])
    for junk in (b"", b"\x80", bytes(range(256)) * 30, *cut, b"PK\x03\x04" + whole[4:90]):
        file.write_bytes(junk)
        with pytest.raises(ValueError, match="damaged or no checkpoint") as caught:
            load_file(file)
        assert "\n" not in str(caught.value)
    for other in ([1, 2], {"weights": torch.ones(2)}, {"model": 3}):
        torch.save(other, file)
        with pytest.raises(ValueError, match="holds no model"):
            load_file(file)
