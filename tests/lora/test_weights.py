"""Test reading of a LoRA run's checkpoint as whole weights."""

import torch
from helpers.training import Case

from megazpp.checkpoint.checksums import SummingWriter, write_checksums
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.lora.weights import AdaptedReader
from megazpp.parallel.timeline import Timeline


def test_merged_weights_are_rounded_to_their_stored_dtype(tmp_path):
    linear, (a, b) = "model.layers.0.mlp.fc1.", (torch.randn(4, 2), torch.randn(6, 2))
    base = {f"{linear}weight": torch.randn(6, 4).bfloat16()}
    for name, tensors in {"base": base, "own": {f"{linear}adapter.a": a, f"{linear}adapter.b": b}}.items():
        writer = SummingWriter(tmp_path / name, Timeline())
        writer.save(tensors, None)
        write_checksums(tmp_path / name, writer.sums)
    reader = AdaptedReader(SafeReader(tmp_path / "own"), SafeReader(tmp_path / "base"), Case().model, 3.0)
    target = {f"{linear}weight": torch.zeros(6, 4)}
    reader.fill(target, ())
    merged = reader.read_whole(f"{linear}weight")
    torch.testing.assert_close(merged, (base[f"{linear}weight"] + 3.0 * b @ a.t()).bfloat16())
    assert torch.equal(target[f"{linear}weight"], merged.float())
