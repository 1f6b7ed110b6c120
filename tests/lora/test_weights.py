"""Test reading a LoRA run's checkpoint as complete weights, into which the adapters are merged."""

from pathlib import Path

import torch
from helpers.training import MIXTURE_STYLE, Case

from megazpp.checkpoint.checksums import SummingWriter, write_checksums
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.lora.weights import AdaptedReader
from megazpp.model.config import GPTConfig
from megazpp.parallel.timeline import Timeline


def open_adapted(
    folder: Path, base: dict[str, torch.Tensor], adapters: dict[str, torch.Tensor], model: GPTConfig
) -> AdaptedReader:
    for name, tensors in {"base": base, "own": adapters}.items():
        writer = SummingWriter(folder / name, Timeline())
        writer.save(tensors, None)
        write_checksums(folder / name, writer.sums)
    return AdaptedReader(SafeReader(folder / "own"), SafeReader(folder / "base"), model, 3.0)


def test_merged_weights_are_rounded_to_their_stored_dtype(tmp_path):
    linear, (a, b) = "model.layers.0.mlp.fc1.", (torch.randn(4, 2), torch.randn(6, 2))
    base = {f"{linear}weight": torch.randn(6, 4).bfloat16()}
    reader = open_adapted(tmp_path, base, {f"{linear}adapter.a": a, f"{linear}adapter.b": b}, Case().model)
    target = {f"{linear}weight": torch.zeros(6, 4)}
    reader.fill(target, ())
    merged = reader.read_whole(f"{linear}weight")
    torch.testing.assert_close(merged, (base[f"{linear}weight"] + 3.0 * b @ a.t()).bfloat16())
    assert torch.equal(target[f"{linear}weight"], merged.float())


def test_bias_of_a_layer_with_an_adapter_is_read_unchanged(tmp_path):
    linear = "model.layers.0.attention.proj."
    base = {f"{linear}weight": torch.randn(6, 4), f"{linear}bias": torch.randn(6)}
    adapters = {f"{linear}adapter.a": torch.randn(4, 2), f"{linear}adapter.b": torch.randn(6, 2)}
    reader = open_adapted(tmp_path, base, adapters, Case().model)
    assert torch.equal(reader.read_whole(f"{linear}bias"), base[f"{linear}bias"])
    assert not torch.equal(reader.read_whole(f"{linear}weight"), base[f"{linear}weight"])


def test_each_expert_is_merged_with_its_own_adapter_in_any_part_of_the_weight(tmp_path):
    """Read the merged weights of experts in any ranges of rows, and compare with base + scale * B A of each expert.

    Ranges begin and end inside experts. The output matrices are stored transposed.
    """
    stem, (experts, hidden, inner, rank) = "model.layers.0.mlp.experts.", (3, 4, 5, 2)
    base = {f"{stem}{name}": torch.randn(experts * inner, hidden) for name in ("gate", "fc2")}
    rows, columns = torch.randn(2, experts, inner, rank), torch.randn(2, experts, hidden, rank)
    adapters = {
        f"{stem}adapter.gate.a": columns[0].flatten(0, 1),
        f"{stem}adapter.gate.b": rows[0].flatten(0, 1),
        f"{stem}adapter.fc2.a": rows[1].flatten(0, 1),
        f"{stem}adapter.fc2.b": columns[1].flatten(0, 1),
    }
    reader = open_adapted(tmp_path, base, adapters, MIXTURE_STYLE)
    for index, name in enumerate(("gate", "fc2")):
        expected = base[f"{stem}{name}"] + 3.0 * (rows[index] @ columns[index].mT).flatten(0, 1)
        torch.testing.assert_close(reader.read_whole(f"{stem}{name}"), expected)
        part = torch.empty(9, 2)
        reader.read_box(f"{stem}{name}", (3, 1), part)
        torch.testing.assert_close(part, expected[3:12, 1:3])
