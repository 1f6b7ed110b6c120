"""Models of stored weights out of a checkpoint compute what was saved, wherever the weights lie, on any layout."""

from __future__ import annotations

import dataclasses
import gc
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import Job, frozen_place, run
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, build_on_ranks, dims_on_ranks, spec_of
from torch import nn

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.read import LoadSource, find_weights, load_weights
from megazpp.checkpoint.record import RunRecord
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.inference.generate import generate
from megazpp.inference.sample import SampleConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.planner.trace import FORWARD, TraceRecorder
from megazpp.stored import store
from megazpp.stored.frozen import frozen_bytes
from megazpp.stored.load import WeightsConfig, load_frozen_model, load_streamed_model, pack_where_they_stay
from megazpp.stored.store import WeightStore
from megazpp.stored.streamed import plan_stream
from megazpp.zero.config import PrecisionConfig

# 101 rows of the vocabulary are padded to a multiple of 8 with one tp rank, and of 16 with two
SAVED = Case(model=dataclasses.replace(LLAMA_STYLE, init_method_std=0.5), tp=2)
TIED = Case(model=dataclasses.replace(GPT2_STYLE, init_method_std=0.5))
ALONE = dataclasses.replace(SAVED, tp=1, seed=99)
BF16 = PrecisionConfig(bf16=True)
PROMPTS = ((5, 1, 100), (7,), (2, 3, 5, 7, 11, 13))
GREEDY = SampleConfig(sample_tokens=8, sample_temperature=0.0)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Checkpoints of iterations 1 and 2."""
    folder = str(tmp_path_factory.mktemp("checkpoints") / "save")
    ranks(4).run(run, Job(case=SAVED, steps=2, flags={"save": folder, "save_interval": 1}))
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("checkpoints") / "save")
    ranks(1).run(run, Job(case=TIED, steps=1, flags={"save": folder}))
    return folder


def found(load: str, step: int | None = None) -> tuple[LoadSource, RunRecord]:
    return find_weights(CheckpointFolder(load, "--load"), step)


# ---- frozen units -------------------------------------------------------------------------------------------------


def losses_and_gradient(model: GPTModel, case: Case, dims: ParallelDims) -> list[torch.Tensor]:
    """Two batches' losses and the gradient of what comes out of the embedding, which nothing is trained below."""
    found: list[torch.Tensor] = []

    def cut(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        found.append(output.detach().requires_grad_())
        return found[-1]

    hook, size, results = model.embedding.register_forward_hook(cut), case.global_batch // dims.data_size, []
    for step in range(2):
        batch = case.batch(step, dims.data_rank * size, size)
        losses = model(batch.tokens, batch.labels, position_ids=batch.position_ids)
        losses.sum().backward()
        results += [losses.detach(), found[-1].grad]
    hook.remove()
    return results


def load_frozen(case: Case, load: str, step: int | None = None, vocab_size: int = 101) -> tuple[str, int]:
    """The checksum of the weights, and the elements that this rank reads of them."""
    trained, sharding, dims = build_on_ranks(case)
    load_weights(trained, sharding, dims, *found(load, step), vocab_size=101, say=lambda line: None)
    expected, read, original = losses_and_gradient(trained, case, dims), [], SafeReader.read_box

    def counted(reader: SafeReader, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        read.append(box.numel())
        original(reader, key, offsets, box)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafeReader, "read_box", counted)
        spec = dataclasses.replace(spec_of(case), vocab_size=vocab_size)
        model, units, digest = load_frozen_model(spec, frozen_place(dims), *found(load, step))
    before = {wire: dims.counter.sent_bytes(wire) for wire in ("local", "cross")}
    results = losses_and_gradient(model, case, dims)

    assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))
    assert list(model.parameters()) == []
    assert dims.counter.sent_bytes("cross") == before["cross"]
    assert (dims.counter.sent_bytes("local") > before["local"]) == (dims.local.size > 1)
    shapes = [{placed.name: placed.shape for placed, _, _ in unit.weights} for unit in units.units]
    planned = [frozen_bytes(each, dims.local.size, case.precision.param_dtype) for each in shapes]
    assert units.kept_bytes == sum(each.kept for each in planned)
    parts = dims.local.size * case.tp
    assert sum(read) < sum(p.numel() for p in trained.parameters()) / parts * 1.2  # norms are whole on each tp rank
    return digest, sum(read)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (4, {"tp": 2, "sequence_parallel": True}),
        (4, {"nodes": 2, "precision": BF16}),
        slow(8, {"nodes": 2, "tp": 2, "precision": BF16}),
        slow(4, {"nodes": 2, "tp": 2, "float8": "hybrid"}),
        slow(8, {"nodes": 2, "replicas": 2}),
        slow(4, {"tp": 4}),
        slow(2, {"nodes": 2}),
    ],
    ids=["tp", "bf16", "tp-nodes", "float8", "copies", "tp4", "nodes of one"],
)
def test_every_layout_reads_each_weight_once_per_node_and_has_every_bit_of_a_trained_model_without_gradients(
    load: str, world: int, layout: dict[str, Any]
):
    if "float8" in layout:
        pytest.importorskip("torchao")
    case = dataclasses.replace(ALONE, **layout)
    ((checksum, elements),) = ranks(1).run(load_frozen, ALONE, load)
    results = ranks(world).run(load_frozen, case, load)
    assert {each for each, _ in results} == {checksum}
    assert sum(read for _, read in results) >= case.nodes * elements


def test_so_has_a_model_with_biases_and_a_tied_embedding(tied: str):
    ranks(2).run(load_frozen, dataclasses.replace(TIED, tp=2, sequence_parallel=True), tied)


def test_other_weights_have_another_checksum(load: str):
    ((first, _),), ((second, _),) = (ranks(1).run(load_frozen, ALONE, load, step) for step in (1, 2))
    assert first != second


def test_another_tokenizer_or_a_damaged_file_is_refused(load: str, tmp_path: Path):
    with pytest.raises(AssertionError, match=r"the tokenizer has 100 tokens, that of .* had 101"):
        ranks(1).run(load_frozen, ALONE, load, None, 100)
    shutil.copytree(load, tmp_path / "copy")
    (path,) = (tmp_path / "copy/iter_0000002").glob("__0_*.distcp")
    flip(path, 0.5)
    with pytest.raises(AssertionError, match=path.name):
        ranks(1).run(stream, ALONE, str(tmp_path / "copy"), WeightsConfig(weight_bits=8))


# ---- layers that stream ------------------------------------------------------------------------------------------


def stream(case: Case, load: str, config: WeightsConfig, step: int | None = None) -> dict[str, Any]:
    """What one rank's streamed model generates, its losses, what it fetched, and the lines it says."""
    dims, lines, read, original = dims_on_ranks(case), list[str](), [], WeightStore.read
    before = live_messages()  # kept: what earlier tests have left in this process does not go meanwhile

    def counted(store: WeightStore, index: int, buffer: torch.Tensor) -> torch.Tensor:
        read.append(buffer.numel() if index > 0 else 0)  # 0 is what stays
        return original(store, index, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightStore, "read", counted)
        model, units = load_streamed_model(config, spec_of(case), frozen_place(dims, lines.append), *found(load, step))
        started = time.perf_counter()
        generated = generate(model, units, dims, PROMPTS, GREEDY, max_length=16, seed=1)
        passes, batch = units.passes, case.batch(0, 0, 2)
        lines.append(units.describe_speed(24, time.perf_counter() - started))
        with torch.no_grad():
            losses = model.eval()(batch.tokens, batch.labels)
    on_disk = config.weights_on == "disk"
    return {
        "tokens": generated.tokens,
        "losses": losses,
        "passes": passes,
        "lines": lines,
        "cross": dims.counter.sent_bytes("cross"),
        "local": dims.counter.sent_bytes("local"),
        "pass_bytes": units.plan.pass_bytes,
        "fetched": sum(read),
        "device_bytes": (
            units.plan.device_bytes(config.prefetch_layers, fetched=on_disk),
            storage_bytes(live_messages()) - storage_bytes(before),
        ),
    }


def live_messages() -> list[torch.Tensor]:
    """All tensors of bytes."""
    gc.collect()
    return [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.uint8]


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def resident(case: Case, load: str) -> tuple[list[list[int]], torch.Tensor]:
    """What the shards of a training give."""
    model, sharding, dims = build_on_ranks(case)
    load_weights(model, sharding, dims, *found(load), vocab_size=101, say=lambda line: None)
    tokens = generate(model, sharding, dims, PROMPTS, GREEDY, max_length=16, seed=1).tokens
    batch = case.batch(0, 0, 2)
    with torch.no_grad():
        return tokens, model.eval()(batch.tokens, batch.labels)


@pytest.mark.parametrize(
    ("world", "layout", "bits"),
    [
        (1, {}, None),
        (2, {"tp": 2}, 8),
        (4, {"nodes": 2}, None),
        slow(2, {"nodes": 1}, 16),
        slow(4, {"nodes": 2, "tp": 2}, 4),
    ],
)
def test_from_disk_come_the_same_tokens_and_losses_as_from_memory_on_every_layout(
    load: str, tmp_path: Path, world: int, layout: dict[str, Any], bits: Any
):
    case, folder = dataclasses.replace(ALONE, **layout), str(tmp_path)
    on_disk = WeightsConfig(weights_on="disk", weight_bits=bits, weight_store=folder, prefetch_layers=0)
    configs = [WeightsConfig(weight_bits=bits), WeightsConfig(weights_on="host", weight_bits=bits)]
    configs += [on_disk, dataclasses.replace(on_disk, prefetch_layers=5)]

    device, *others = (ranks(world).run(stream, case, load, config) for config in configs)

    for results in (device, *others):
        for expected, one in zip(device, results, strict=True):
            assert one["tokens"] == device[0]["tokens"]
            assert torch.equal(one["losses"], expected["losses"])
            assert one["cross"] == 0
            assert (one["local"] > 0) == (world // case.nodes // case.tp > 1)
            assert one["passes"] == GREEDY.sample_tokens
            assert one["device_bytes"][0] == one["device_bytes"][1]
    for one in (*others[1], *others[2]):  # 8 tokens, the losses, and what was fetched ahead for another pass
        assert 9 <= one["fetched"] / one["pass_bytes"] < 10
    assert [" wrote " in "".join(results[0]["lines"]) for results in others] == [False, True, False]
    assert len([*Path(folder).glob("*.weights")]) == world // case.nodes


@pytest.mark.parametrize("pin", [True, False])
def test_while_it_loads_a_model_is_never_in_memory_twice(pin: bool, monkeypatch: pytest.MonkeyPatch):
    """Live bytes: messages where they stay (on a device: without memory, but counted), one more, and its pieces."""
    empty, calls = torch.empty, []

    def without_pinning(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        calls.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", without_pinning)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, device="meta") for _ in range(64)))
    plan = plan_stream(model, list(model), 1, 8, torch.bfloat16)

    def load(name: str, rows: slice) -> torch.Tensor:
        return torch.zeros(model.get_parameter(name)[rows].shape)

    with TraceRecorder() as recorder:
        place = torch.device("cpu" if pin else "meta")
        found = pack_where_they_stay(plan, load, 0, place, pin=pin)
    total = sum(len(message) for message in found)
    assert total == plan.pass_bytes + plan.kept.num_bytes > 2e6
    assert recorder.segments[FORWARD, 0].peak < 1.15 * total
    assert sum(calls) == (64 if pin else 0)


@pytest.mark.parametrize(("bits", "tolerance"), [(None, 0.0), (16, 0.1), (8, 0.3), (4, 3.0)])
def test_the_losses_are_those_of_the_checkpoint_but_for_the_rounding_of_weights(
    tied: str, load: str, bits: Any, tolerance: float
):
    """Weights of std 0.5 in a model of three small layers: the loss moves with the relative error of the weights."""
    cases = [(TIED, tied), (ALONE, load), (dataclasses.replace(ALONE, precision=BF16), load)]
    for case, folder in cases if bits is None else cases[:2]:
        ((tokens, expected),) = ranks(1).run(resident, case, folder)
        (one,) = ranks(1).run(stream, case, folder, WeightsConfig(weights_on="host", weight_bits=bits))
        own_bits = 16 if case.precision is BF16 else 32
        assert torch.equal(one["losses"], expected) == (bits is None)
        assert float((one["losses"] - expected).abs().mean()) <= tolerance
        assert one["tokens"] == tokens or bits is not None
        rounded = "" if bits is None else " (rounded: tokens may differ)"
        assert f" weights: {bits or own_bits} bits{rounded} from host; " in one["lines"][-2]


def interrupted(load: str, config: WeightsConfig) -> bool:
    """Whether the losses are the same after a forward that an exception has left."""
    dims = dims_on_ranks(ALONE)
    model, _ = load_streamed_model(config, spec_of(ALONE), frozen_place(dims), *found(load))
    batch, losses = ALONE.batch(0, 0, 2), []
    model.eval()

    def leave(*args: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        for _ in range(3):
            losses.append(model(batch.tokens, batch.labels))
            hook = model.layers[1].mlp.register_forward_pre_hook(leave)
            with pytest.raises(KeyboardInterrupt):
                model(batch.tokens, batch.labels)
            hook.remove()
            losses.append(model(batch.tokens, batch.labels))
    return all(torch.equal(each, losses[0]) for each in losses)


def test_a_forward_that_was_left_does_not_mix_up_layers(load: str, tmp_path: Path):
    for world, ahead in ((1, 0), (1, 1), (2, 2)):
        assert all(ranks(world).run(interrupted, load, disk(tmp_path, prefetch_layers=ahead)))


# ---- the store ---------------------------------------------------------------------------------------------------


def disk(store: Path, **options: Any) -> WeightsConfig:
    return WeightsConfig(weights_on="disk", weight_bits=8, weight_store=str(store), **options)


def writes(load: str, config: WeightsConfig) -> bool:
    """Whether a run with this store writes it."""
    (one,) = ranks(1).run(stream, ALONE, load, config)
    assert f"8 passes fetched {8 * one['pass_bytes']} bytes" in one["lines"][-1]
    return " wrote " in "".join(one["lines"])


@pytest.fixture(scope="module")
def written(load: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store's only file."""
    folder = tmp_path_factory.mktemp("store")
    assert writes(load, disk(folder))
    (path,) = folder.glob("*.weights")
    return path


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)


def cut(path: Path, place: float) -> None:
    os.truncate(path, int(path.stat().st_size * place))


def test_a_flipped_byte_or_a_cut_is_an_error_and_the_next_run_writes_the_store_anew(load: str, written: Path):
    for damage, place in ((flip, 0.3), (flip, 0.7), (flip, 0.999), (cut, 0.0), (cut, 0.999)):
        damage(written, place)
        with pytest.raises(AssertionError, match=r"part0of1.weights is damaged: .* is removed, and the next run"):
            ranks(1).run(stream, ALONE, load, disk(written.parent))
        assert not written.exists()
        assert writes(load, disk(written.parent))


def test_the_store_of_another_checkpoint_or_of_other_bits_is_refused_and_stays(load: str, written: Path):
    content = written.read_bytes()
    with pytest.raises(AssertionError, match=r"is the store of other weights \(checkpoint: .*choose another"):
        ranks(1).run(stream, ALONE, load, disk(written.parent), 1)
    with pytest.raises(AssertionError, match=r"is the store of other weights \(bits: 8, not 4"):
        ranks(1).run(stream, ALONE, load, dataclasses.replace(disk(written.parent), weight_bits=4))
    assert written.read_bytes() == content


def on_a_full_disk(case: Case, load: str, config: WeightsConfig) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        stream(case, load, config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_an_error_that_leaves_nothing_and_what_a_killed_writer_left_is_written_over(
    load: str, tmp_path: Path
):
    with pytest.raises(AssertionError, match=r"needs 0.00 GB: File too large; nothing of it was kept"):
        ranks(1).run(on_a_full_disk, ALONE, load, disk(tmp_path))
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    left = tmp_path / "tp0of1-part0of1.weights.unfinished"
    left.write_bytes(b"x" * 10_000_000)
    assert writes(load, disk(tmp_path))
    assert not left.exists()
    assert (tmp_path / "tp0of1-part0of1.weights").stat().st_size < 10_000_000


def test_a_store_has_its_name_after_its_bytes_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, seen, sync = tmp_path / "a.weights", [], store.sync

    def recorded(file: Any) -> None:
        seen.append(path.exists())
        sync(file)

    monkeypatch.setattr(store, "sync", recorded)
    store.write_store(path, {"of": 1}, [("one", 4096, [torch.arange(4096).to(torch.uint8)])])
    assert seen == [False]
    assert path.exists()


def test_flags_that_contradict_each_other_are_refused():
    for flags, message in (
        ({"weight_store": "x"}, "--weight-store x needs --weights-on disk, not device"),
        ({"weights_on": "disk", "prefetch_layers": -1}, "--prefetch-layers -1 is negative"),
    ):
        with pytest.raises(ValueError, match=message):
            WeightsConfig(**flags)
