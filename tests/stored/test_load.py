"""A model of frozen weights out of a checkpoint computes what the model that was saved does, on any layout."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import Job, frozen_place, run
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import LLAMA_STYLE, Case, build_on_ranks, spec_of

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.read import find_weights, load_weights
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.parallel.dims import ParallelDims
from megazpp.stored.freeze import FrozenBytes, frozen_bytes
from megazpp.stored.frozen import FrozenUnits
from megazpp.stored.load import load_frozen_model
from megazpp.stored.packed import Bits

# 101 rows of the vocabulary are padded to a multiple of 8 with one tp rank, and of 16 with two
SAVED = Case(model=LLAMA_STYLE, tp=2, sequence_parallel=True)
OTHER = dataclasses.replace(SAVED, tp=1, sequence_parallel=False, seed=99)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Checkpoints of iterations 1 and 2, written by 4 ranks."""
    folder = str(tmp_path_factory.mktemp("checkpoints") / "save")
    ranks(4).run(run, Job(case=SAVED, steps=2, flags={"save": folder, "save_interval": 1}))
    return folder


def compare(
    case: Case, load: str, bits: Bits | None = None, step: int | None = None, vocab_size: int = 101
) -> dict[str, Any]:
    model, sharding, dims = build_on_ranks(case)
    source, record = find_weights(CheckpointFolder(load, "--load"), step)
    load_weights(model, sharding, dims, source, record, vocab_size=101, say=lambda line: None)
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        original = SafeReader.read_box

        def counted(reader: SafeReader, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
            read.append(box.numel())
            original(reader, key, offsets, box)

        patch.setattr(SafeReader, "read_box", counted)
        spec = dataclasses.replace(spec_of(case), vocab_size=vocab_size)
        frozen = load_frozen_model(spec, frozen_place(dims), source, record, bits=bits)
    batch = case.batch(0, dims.data_rank, 1)
    with torch.no_grad():
        expected, found = (m.eval()(batch.tokens, batch.labels) for m in (model, frozen.model))
    return {
        "equal": torch.equal(expected, found),
        "difference": float((expected - found).abs().max()),
        "checksum": frozen.checksum,
        "kept": frozen.units.kept_bytes,
        "planned": sum(planned.kept for planned in plan_units(frozen.units, dims, bits)),
        "elements": sum(read),
        "whole": sum(p.numel() for p in model.parameters()),
        "cross": dims.counter.sent_bytes("cross"),
    }


def plan_units(units: FrozenUnits, dims: ParallelDims, bits: Bits | None) -> list[FrozenBytes]:
    shapes = [{weight.placed.name: tuple(weight.weight.shape) for weight in unit.weights} for unit in units.units]
    return [frozen_bytes(each, dims.local.size, torch.float32, bits) for each in shapes]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (4, {"tp": 2, "nodes": 1, "sequence_parallel": True}),
        (4, {"tp": 1, "nodes": 2}),
        slow(1, {}),
        slow(4, {"tp": 4}),
        slow(2, {"tp": 1, "nodes": 2}),
    ],
    ids=["tp", "nodes", "one", "tp4", "nodes of one"],
)
def test_every_layout_reads_each_weight_once_per_node_and_computes_the_same_bits(
    load: str, world: int, layout: dict[str, Any]
):
    case = dataclasses.replace(OTHER, **layout)
    found = ranks(world).run(compare, case, load)
    (alone,) = ranks(1).run(compare, OTHER, load)
    assert all(result["equal"] for result in found)
    assert {result["checksum"] for result in found} == {alone["checksum"]}
    local = world // case.nodes // case.tp
    assert sum(result["elements"] for result in found) >= case.nodes * alone["elements"]
    for result in found:
        assert result["kept"] == result["planned"]
        assert result["elements"] < result["whole"] / local / case.tp * 1.2  # norms are whole on each tp rank


def test_other_weights_have_another_checksum(load: str):
    (first,), (second,) = (ranks(1).run(compare, OTHER, load, None, step) for step in (1, 2))
    assert first["checksum"] != second["checksum"]


def test_in_8_bits_the_losses_are_close(load: str):
    """int8 in blocks of 64: weights of std 0.02 to half a step of their block's largest over 127."""
    for result in ranks(4).run(compare, OTHER, load, 8):
        assert 0.0 < result["difference"] < 0.05
        assert result["kept"] == result["planned"]


def test_another_tokenizer_or_model_is_refused(load: str):
    with pytest.raises(AssertionError, match=r"the tokenizer has 100 tokens, that of .* had 101"):
        ranks(1).run(compare, OTHER, load, None, None, 100)


def test_a_damaged_file_is_named(load: str, tmp_path: Path):
    shutil.copytree(load, tmp_path / "copy")
    (path,) = (tmp_path / "copy/iter_0000002").glob("__0_*.distcp")
    values = bytearray(path.read_bytes())
    values[len(values) // 2] ^= 1
    path.write_bytes(values)
    with pytest.raises(AssertionError, match=path.name):
        ranks(1).run(damaged, str(tmp_path / "copy"))


def damaged(load: str) -> None:
    _, _, dims = build_on_ranks(OTHER)
    source, record = find_weights(CheckpointFolder(load, "--load"), None)
    load_frozen_model(spec_of(OTHER), frozen_place(dims), source, record)
