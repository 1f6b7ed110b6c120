"""Test the import of Megatron-LM checkpoints.

The files of all ranks, of each supported checkpoint_version, form the unsharded model, and pickled code never runs.
"""

import argparse
import dataclasses
import enum
import functools
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

from megazpp.checkpoint.safe_reader import WHOLE_WEIGHTS
from megazpp.convert.config import ConvertConfig
from megazpp.convert.convert import convert
from megazpp.convert.megatron import load_file, open_megatron
from megazpp.convert.model import Model
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
LAYOUTS = [
    *((GPT, 2.0, "old", 2), (GPT, 3.0, "new", 1), (GPT, 3.0, "core", 4)),
    *((LLAMA, 3.0, names, tp) for names in ("new", "core") for tp in (1, 2, 4)),
    (SCALED, 3.0, "core", 2),
]
weights_of = functools.cache(make_weights)


def assert_same_model(folder: Path, config: GPTConfig) -> None:
    found = open_megatron(folder, None)
    assert_has(found, weights_of(config))
    assert (found.progress.iteration, found.progress.consumed_samples, found.seq_length) == (100, 4000, 16)
    flags = ("positions", "openai_gelu", "qk_layernorm", "rope_scaling", "rotary_base", "tied", "query_groups")
    assert [getattr(found.config, name) for name in flags] == [getattr(config, name) for name in flags]


def assert_has(model: Model, weights: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close({name: entry.read() for name, entry in model.tensors.items()}, weights, rtol=0, atol=0)


@pytest.mark.parametrize(("config", "version", "names", "tp"), LAYOUTS)
def test_ranks_are_merged_into_the_full_model(tmp_path, config, version, names, tp):
    write_megatron(tmp_path, weights_of(config), config, tp=tp, version=version, names=names)
    assert_same_model(tmp_path, config)


def test_other_layouts_of_folders_are_read(tmp_path):
    folder = write_megatron(tmp_path, weights_of(GPT), GPT, tp=2)
    (folder / "iter_0000100").rename(folder / "release")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    assert_same_model(folder, GPT)
    (folder / "release/mp_rank_00/model_optim_rng.pt").rename(folder / "release/mp_rank_00/model_rng.pt")
    assert_same_model(folder / "release", GPT)


def test_converted_checkpoint_has_the_weights_and_the_tokenizers_rows(tmp_path):
    null = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1)
    for config, tokenizer, rows in ((GPT, null, VOCAB), (LLAMA, TokenizerConfig(), PADDED)):
        output = tmp_path / f"{rows} rows"
        source = write_megatron(tmp_path / f"{rows} theirs", weights_of(config), config, tp=2)
        convert(
            ConvertConfig(input=str(source), output=str(output)), tokenizer, lambda line: None, opener=WHOLE_WEIGHTS
        )
        found, record = open_checkpoint(output, None)
        assert (record.vocab_size, record.flags["seq_length"], record.progress.iteration) == (rows, 16, 100)
        assert (found.config.openai_gelu, found.config.positions) == (config.openai_gelu, config.positions)
        ends = ("word.weight", "output.weight")
        assert_has(found, {name: x[:rows] if name.endswith(ends) else x for name, x in weights_of(config).items()})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"args": None}, "has no args"),
    ({"args": argparse.Namespace(num_layers=2)}, "args: num_attention_heads is missing"),
    ({"args": arguments(GPT, 4)}, "tensor_model_parallel_size is 4, but there are files of 2 ranks"),
    ({"checkpoint_version": 4.0}, "checkpoint_version 4.0 is not supported, only 2.0 and 3.0"),
    ({"checkpoint_version": 0}, "checkpoint_version 0 is not supported, only 2.0 and 3.0"),
    ({"model": {"language_model": {"pooler": torch.zeros(2)}}}, "language_model.pooler is not supported"),
    ({"args": arguments(GPT, 2, num_experts=8)}, "num_experts 8 is not supported"),
    (
        {"args": arguments(GPT, 2, position_embedding_type="rope", use_rope_scaling=True)},
        "not supported in checkpoints of Megatron-LM's legacy model",
    ),
    ({"args": arguments(GPT, 2, window_size=(4, 0))}, "window_size (4, 0) is not supported"),
    ({"args": arguments(GPT, 2, quick_geglu=True)}, "quick_geglu True is not supported"),
    ({"args": arguments(GPT, 2, activation_func_clamp_value=7.0)}, "activation_func_clamp_value 7.0"),
    ({"args": arguments(GPT, 2, glu_linear_offset=1.0)}, "glu_linear_offset 1.0 is not supported"),
    ({"args": arguments(GPT, 2, apply_residual_connection_post_layernorm=True)}, "post_layernorm True"),
    ({"args": arguments(GPT, 2, qk_l2_norm=True)}, "qk_l2_norm True is not supported"),
    ({"args": arguments(GPT, 2, use_mup=True)}, "use_mup True is not supported"),
    ({"args": arguments(GPT, 2, softmax_type="off-by-one")}, "softmax_type 'off-by-one' is not supported"),
    ({"args": arguments(GPT, 2, position_embedding_type="rope", no_rope_freq=2)}, "no_rope_freq 2 is not supported"),
    ({"args": arguments(GPT, 2, num_layers=10**4)}, "describes a model of 10000 layers"),
    (
        {"args": arguments(GPT, 2, num_layers=10**9)},
        "describes no model: --num-layers 1000000000 is more than 10000",
    ),
    ({"args": arguments(GPT, 2, num_layers=3)}, "layers.2.attention_norm.weight"),
    ({"args": arguments(GPT, 2, hidden_size=28)}, "has shape"),
]


def test_unsupported_checkpoint_is_rejected_by_name(tmp_path):
    def open_with(changes: dict[str, Any]) -> None:
        shutil.rmtree(tmp_path)
        open_megatron(write_megatron(tmp_path, weights_of(GPT), GPT, tp=2, **changes), None)

    assert not_refused(REFUSED, open_with) == []


def map_tensors(function: Any, content: Any) -> Any:
    """Return a copy of nested dictionaries in which `function` has replaced all tensors of the model."""
    if isinstance(content, dict):
        return {key: each if key == "rng_state" else map_tensors(function, each) for key, each in content.items()}
    return function(content) if isinstance(content, torch.Tensor) else content


STORED: list[tuple[Any, str]] = [  # a change to the file of rank 1, as a function of its content, and the error
    (lambda content: content | {"iteration": 90}, "is of iteration 90, but .* is of iteration 100"),
    (functools.partial(map_tensors, torch.Tensor.double), "has the dtype torch.float64, but only F32, F16, BF16 can"),
    (functools.partial(map_tensors, torch.Tensor.char), "has the dtype torch.int8, but only F32, F16, BF16 can be"),
    (functools.partial(map_tensors, torch.Tensor.to_sparse), "with the layout torch.sparse_coo, which cannot be"),
    (functools.partial(map_tensors, lambda x: x.to("meta")), "is a tensor without values, which cannot be converted"),
    (
        functools.partial(map_tensors, torch.Tensor.bfloat16),
        "dtype torch.bfloat16, but the part in .* has torch.float32",
    ),
]


@pytest.mark.parametrize(("change", "message"), STORED)
def test_rank_whose_tensors_are_not_of_the_same_checkpoint_is_refused(tmp_path, change, message):
    """Change rank 1's file as in STORED, and check that the import rejects it.

    Otherwise rank 1's changed tensors would be joined with rank 0's, or be converted as if they were weights.
    """
    file = write_megatron(tmp_path, weights_of(GPT), GPT, tp=2) / "iter_0000100" / "mp_rank_01" / "model_optim_rng.pt"
    torch.save(change(torch.load(file, weights_only=False)), file)
    with pytest.raises(ValueError, match=message):
        open_megatron(tmp_path, None)


def test_pipeline_missing_rank_and_distributed_checkpoint_are_told_apart(tmp_path):
    for folder, name in (("rank", "mp_rank_02"), ("pipeline", "mp_rank_00_000")):
        checkpoint = write_megatron(tmp_path / folder, weights_of(GPT), GPT, tp=2) / "iter_0000100"
        (checkpoint / "mp_rank_00").rename(checkpoint / name)
    for file, content in (("rank/iter_0000300/.metadata", b""), ("tracker/latest_checkpointed_iteration.txt", b"\xff")):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_bytes(content)
    rows = [
        (tmp_path / "rank", 100, "has mp_rank_01, mp_rank_02, so the folder of a rank is missing"),
        (tmp_path / "rank", 200, "iter_0000200 contains no folder mp_rank_00"),
        (tmp_path / "rank", 300, "iter_0000300 is a distributed checkpoint"),
        (tmp_path / "pipeline", None, "mp_rank_00_000 belongs to a pipeline"),
        (tmp_path / "tracker", None, "is damaged: it says"),
    ]
    assert not_refused(rows, open_megatron) == []


@dataclasses.dataclass
class Malicious:
    """An object of which unpickling runs a shell command, as in a malicious checkpoint."""

    command: str

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_malicious_pickle_is_rejected_and_not_run(tmp_path):
    file, ran = tmp_path / "model_optim_rng.pt", tmp_path / "ran"
    for place in ("args", "model", "optimizer"):
        content = {"args": argparse.Namespace(a=1), "model": {"w": torch.ones(2)}}
        content[place] = Malicious(f"touch {ran}")
        torch.save(content, file)
        with pytest.raises(ValueError, match=r"refused, and nothing in it was run: it names posix.system") as caught:
            load_file(file)
        assert "\n" not in str(caught.value)
        torch.save(content, file, _use_new_zipfile_serialization=False)  # the format of torch before 1.6
        with pytest.raises(ValueError, match="is damaged or no checkpoint"):
            load_file(file)
        assert not ran.exists()


class ModelType(enum.Enum):
    encoder = 1


def test_megatrons_own_classes_are_not_needed(tmp_path, monkeypatch):
    names = [*itertools.accumulate(("megatron", ".core", ".enums"))]
    monkeypatch.setattr(ModelType, "__module__", names[-1])
    args = argparse.Namespace(num_layers=2, model_type=ModelType.encoder, params_dtype=torch.bfloat16)
    file, module = tmp_path / "model_optim_rng.pt", types.SimpleNamespace(ModelType=ModelType)
    with monkeypatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, module)
        torch.save({"args": args, "model": {"w": torch.ones(2)}}, file)
    found = load_file(file)
    assert (found["args"].num_layers, found["args"].params_dtype) == (2, torch.bfloat16)
    assert torch.equal(found["model"]["w"], torch.ones(2))


def test_junk_file_is_rejected(tmp_path):
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
        with pytest.raises(ValueError, match="contains no model"):
            load_file(file)
