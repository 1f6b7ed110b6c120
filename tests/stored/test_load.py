"""Models of stored weights out of a checkpoint compute what was saved, wherever the weights lie, on any layout."""

import dataclasses
import gc
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import frozen_place, run
from helpers.ranks import ranks
from helpers.refusals import not_refused
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
from megazpp.stored.load import (
    WeightsConfig,
    load_frozen_model,
    load_streamed_model,
    load_used_model,
    pack_where_they_stay,
)
from megazpp.stored.store import WeightStore
from megazpp.stored.streamed import plan_stream
from megazpp.zero.config import PrecisionConfig

# 101 rows of the vocabulary are padded to a multiple of 8 with one tp rank, and of 16 with two
SAVED = Case(model=dataclasses.replace(LLAMA_STYLE, init_method_std=0.5), tp=2)
TIED = Case(model=dataclasses.replace(GPT2_STYLE, init_method_std=0.5))
ALONE = dataclasses.replace(SAVED, tp=1, seed=99)
BF16 = PrecisionConfig(bf16=True)
PROMPTS = ((5, 1, 100), (7,), (2, 3, 5, 7, 11, 13))
GREEDY = SampleConfig(sample_tokens=4, sample_temperature=0.0)


def trained(factory: pytest.TempPathFactory, world: int, case: Case, steps: int) -> str:
    """The folder of the checkpoints of each of `steps` iterations."""
    folder = str(factory.mktemp("checkpoints") / "save")
    ranks(world).run(run, case, steps, save=folder, save_interval=1)
    return folder


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> str:
    return trained(tmp_path_factory, 4, SAVED, 2)


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> str:
    return trained(tmp_path_factory, 1, TIED, 1)


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


def load_frozen(case: Case, load: str, step: int | None = None) -> tuple[str, int]:
    """The checksum of the weights, and the elements that this rank reads of them."""
    trained, sharding, dims = build_on_ranks(case)
    load_weights(trained, sharding, dims, *found(load, step), vocab_size=101, say=lambda line: None)
    expected, read, original = losses_and_gradient(trained, case, dims), [], SafeReader.read_box

    def counted(reader: SafeReader, key: str, offsets: tuple[int, ...], box: torch.Tensor) -> None:
        read.append(box.numel())
        original(reader, key, offsets, box)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafeReader, "read_box", counted)
        model, units, digest = load_frozen_model(spec_of(case), frozen_place(dims), *found(load, step))
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
    "layout",
    [
        {"tp": 2, "sequence_parallel": True},
        {"nodes": 2, "precision": BF16},
        slow({"nodes": 2, "tp": 2, "float8": "hybrid"}),
        slow({"nodes": 2, "replicas": 2}),
    ],
    ids=["tp", "bf16", "float8", "copies"],
)
def test_every_layout_reads_each_weight_once_per_node_and_has_every_bit_of_a_trained_model_without_gradients(
    load, layout
):
    if "float8" in layout:
        pytest.importorskip("torchao")
    case = dataclasses.replace(ALONE, **layout)
    ((checksum, elements),), ((other, _),) = (ranks(1).run(load_frozen, ALONE, load, step) for step in (2, 1))
    results = ranks(4).run(load_frozen, case, load)
    assert {each for each, _ in results} == {checksum}
    assert checksum != other  # of other weights
    assert sum(read for _, read in results) >= case.nodes * elements


def test_so_has_a_model_with_biases_and_a_tied_embedding(tied):
    ranks(2).run(load_frozen, dataclasses.replace(TIED, tp=2, sequence_parallel=True), tied)


# ---- layers that stream ------------------------------------------------------------------------------------------


def stream(case: Case, load: str, config: WeightsConfig) -> dict[str, Any]:
    """What one rank's streamed model generates, its losses, what it fetched, and the lines it says."""
    dims, lines, read, original = dims_on_ranks(case), list[str](), [], WeightStore.read
    gc.freeze()  # no search among what is there already

    def counted(store: WeightStore, index: int, buffer: torch.Tensor) -> torch.Tensor:
        read.append(buffer.numel() if index > 0 else 0)  # 0 is what stays
        return original(store, index, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightStore, "read", counted)
        model, units = load_streamed_model(config, spec_of(case), frozen_place(dims, lines.append), *found(load))
        generated = generate(model, units, dims, PROMPTS, GREEDY, max_length=16, seed=1)
        batch = case.batch(0, 0, 2)
        lines.append(units.describe_speed(24, seconds=1.0))
        with torch.no_grad():
            losses = model.eval()(batch.tokens, batch.labels)
    planned = units.plan.device_bytes(config.prefetch_layers, fetched=config.weights_on == "disk")
    device_bytes = (planned, bytes_of_live_messages())
    gc.unfreeze()
    return {
        "tokens": generated.tokens,
        "losses": losses,
        "lines": lines,
        "cross": dims.counter.sent_bytes("cross"),
        "local": dims.counter.sent_bytes("local"),
        "pass_bytes": units.plan.pass_bytes,
        "fetched": sum(read),
        "device_bytes": device_bytes,
    }


def bytes_of_live_messages() -> int:
    """Bytes of the storages of all tensors of bytes, but for those that `gc.freeze` has put aside."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.uint8]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(
    ("world", "layout", "bits"),
    [(2, {"tp": 2}, 8), (4, {"nodes": 2}, None), slow(2, {}, 16), slow(4, {"nodes": 2, "tp": 2}, 4)],
)
def test_from_disk_come_the_same_tokens_and_losses_as_from_memory_on_every_layout(load, tmp_path, world, layout, bits):
    case, folder = dataclasses.replace(ALONE, **layout), str(tmp_path)
    on_disk = WeightsConfig(weights_on="disk", weight_bits=bits, weight_store=folder, prefetch_layers=0)
    configs = [WeightsConfig(weight_bits=bits), WeightsConfig(weights_on="host", weight_bits=bits)]
    configs += [on_disk, dataclasses.replace(on_disk, prefetch_layers=5)]

    device, *others = (ranks(world).run(stream, case, load, config) for config in configs)

    passes = GREEDY.sample_tokens
    for results in (device, *others):
        for expected, one in zip(device, results, strict=True):
            assert one["tokens"] == device[0]["tokens"]
            assert torch.equal(one["losses"], expected["losses"])
            assert one["cross"] == 0
            assert (one["local"] > 0) == (world // case.nodes // case.tp > 1)
            assert f" {passes} passes fetched {passes * one['pass_bytes']} bytes" in one["lines"][-1]
            assert one["device_bytes"][0] == one["device_bytes"][1]
    for one in (*others[1], *others[2]):  # the tokens, the losses, and what was fetched ahead for another pass
        assert passes + 1 <= one["fetched"] / one["pass_bytes"] < passes + 2
    assert [" wrote " in "".join(results[0]["lines"]) for results in others] == [False, True, False]
    assert len([*Path(folder).glob("*.weights")]) == world // case.nodes


def test_while_it_loads_a_model_is_never_in_memory_twice(monkeypatch):
    """Live bytes: messages where they stay (on a device: without memory, but counted), one more, and its pieces."""
    empty, calls = torch.empty, []

    def without_pinning(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        calls.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", without_pinning)
    model = nn.Sequential(*(nn.Linear(256, 256, device="meta") for _ in range(64)))
    plan = plan_stream(model, list(model), 1, 8, torch.bfloat16)

    def load(name: str, rows: slice) -> torch.Tensor:
        return torch.zeros(model.get_parameter(name)[rows].shape)

    for place, pin in (("meta", False), ("cpu", True)):
        with TraceRecorder() as recorder:
            found = pack_where_they_stay(plan, load, 0, torch.device(place), pin=pin)
        total = sum(len(message) for message in found)
        assert total == plan.pass_bytes + plan.kept.num_bytes > 2e6
        assert recorder.segments[FORWARD, 0].peak < 1.15 * total
        assert sum(calls) == 64 * pin


def resident(case: Case, load: str) -> tuple[list[list[int]], torch.Tensor]:
    """What the shards of a training give."""
    model, sharding, dims = build_on_ranks(case)
    load_weights(model, sharding, dims, *found(load), vocab_size=101, say=lambda line: None)
    tokens = generate(model, sharding, dims, PROMPTS, GREEDY, max_length=16, seed=1).tokens
    batch = case.batch(0, 0, 2)
    with torch.no_grad():
        return tokens, model.eval()(batch.tokens, batch.labels)


def test_the_losses_are_those_of_the_checkpoint_but_for_the_rounding_of_weights(tied, load):
    """Weights of std 0.5 in a model of three small layers: the loss moves with the relative error of the weights."""
    tolerances = {None: 0.0, 16: 0.1, 8: 0.3, 4: 3.0}
    half = dataclasses.replace(ALONE, precision=BF16)
    for case, folder, own_bits, bits_at_rest in (
        (TIED, tied, 32, tolerances),
        (ALONE, load, 32, tolerances),
        (half, load, 16, [None]),
    ):
        ((tokens, expected),) = ranks(1).run(resident, case, folder)
        for bits in bits_at_rest:
            config = WeightsConfig(weights_on="host", weight_bits=bits)  # type: ignore[arg-type]
            (one,) = ranks(1).run(stream, case, folder, config)
            assert torch.equal(one["losses"], expected) == (bits is None), config
            assert float((one["losses"] - expected).abs().mean()) <= tolerances[bits], config
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
        for layer in (*model.layers, *model.layers):
            losses.append(model(batch.tokens, batch.labels))
            hook = layer.mlp.register_forward_pre_hook(leave)
            with pytest.raises(KeyboardInterrupt):
                model(batch.tokens, batch.labels)
            hook.remove()
            losses.append(model(batch.tokens, batch.labels))
    return all(torch.equal(each, losses[0]) for each in losses)


def test_a_forward_that_was_left_does_not_mix_up_layers(load, tmp_path):
    for world, ahead in ((1, 0), (1, 1), (2, 2)):
        assert all(ranks(world).run(interrupted, load, disk(tmp_path, prefetch_layers=ahead)))


# ---- the store ---------------------------------------------------------------------------------------------------


def disk(store: Path, **options: Any) -> WeightsConfig:
    return WeightsConfig(**{"weights_on": "disk", "weight_bits": 8, "weight_store": str(store)} | options)


def use(load: str, config: WeightsConfig, *, case: Case = ALONE, step: int | None = None) -> str:
    """What is said while one rank's model is loaded and computes once, or the error that ends it."""
    dims, lines, tokens = dims_on_ranks(case), list[str](), case.batch(0, 0, 2).tokens
    try:
        place = frozen_place(dims, lines.append)
        model, _ = load_used_model(config, spec_of(case), place, *found(load, step))
        with torch.no_grad():
            model(tokens)
    except ValueError as error:
        return f"error: {error}"
    return "".join(lines)


@pytest.fixture(scope="module")
def written(load, tmp_path_factory) -> Path:
    """A store's only file."""
    folder = tmp_path_factory.mktemp("store")
    assert " wrote " in ranks(1).run(use, load, disk(folder))[0]
    (path,) = folder.glob("*.weights")
    return path


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    replace(path, content)


def cut(path: Path, place: float) -> None:
    content = path.read_bytes()
    replace(path, content[: int(len(content) * place)])


def replace(path: Path, content: bytes) -> None:
    """By another file: the model of the last run may still read this one ahead, and would remove it as damaged."""
    path.unlink()
    path.write_bytes(content)


def test_a_flipped_byte_or_a_cut_is_an_error_and_the_next_run_writes_the_store_anew(load, written):
    for damage, place in ((flip, 0.3), (flip, 0.7), (flip, 0.999), (cut, 0.0), (cut, 0.999)):
        damage(written, place)
        (said,) = ranks(1).run(use, load, disk(written.parent))
        assert "part0of1.weights is damaged: " in said, (damage, place)
        assert "is removed, and the next run writes it anew" in said
        assert not written.exists()
        (said,) = ranks(1).run(use, load, disk(written.parent))
        assert " wrote " in said


def test_other_weights_another_tokenizer_and_a_damaged_checkpoint_are_refused_and_the_store_stays(
    load, written, tmp_path
):
    shutil.copytree(load, tmp_path / "copy")
    (path,) = (tmp_path / "copy/iter_0000002").glob("__0_*.distcp")
    flip(path, 0.5)
    content, folder = written.read_bytes(), written.parent
    for words, from_, config, changes in (
        ("is the store of other weights (checkpoint: ", load, disk(folder), {"step": 1}),
        ("is the store of other weights (bits: 8, not 4", load, disk(folder, weight_bits=4), {}),
        (
            "the tokenizer has 100 tokens, that of",
            load,
            WeightsConfig(),
            {"case": dataclasses.replace(ALONE, vocab_size=100)},
        ),
        (path.name, str(tmp_path / "copy"), WeightsConfig(weight_bits=8), {}),
    ):
        (said,) = ranks(1).run(use, from_, config, **changes)
        assert said.startswith("error: ")
        assert words in said
    assert written.read_bytes() == content


def use_on_a_full_disk(load: str, config: WeightsConfig) -> str:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        return use(load, config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_an_error_that_leaves_nothing_and_what_a_killed_writer_left_is_written_over(load, tmp_path):
    (said,) = ranks(1).run(use_on_a_full_disk, load, disk(tmp_path))
    assert "needs 0.00 GB: File too large; nothing of it was kept" in said
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    left = tmp_path / "tp0of1-part0of1.weights.unfinished"
    left.write_bytes(b"x" * 10_000_000)
    (said,) = ranks(1).run(use, load, disk(tmp_path))
    assert " wrote " in said
    assert not left.exists()
    assert (tmp_path / "tp0of1-part0of1.weights").stat().st_size < 10_000_000


def test_a_store_has_its_name_after_its_bytes_are_on_disk(tmp_path, monkeypatch):
    path, seen, sync = tmp_path / "a.weights", [], store.sync

    def recorded(file: Any) -> None:
        seen.append(path.exists())
        sync(file)

    monkeypatch.setattr(store, "sync", recorded)
    store.write_store(path, {"of": 1}, [("one", 4096, [torch.arange(4096).to(torch.uint8)])])
    assert seen == [False]
    assert path.exists()


def test_flags_that_contradict_each_other_are_refused():
    rows = (
        ({"weight_store": "x"}, "--weight-store x needs --weights-on disk, not device"),
        ({"weights_on": "disk", "prefetch_layers": -1}, "--prefetch-layers -1 is negative"),
    )
    assert not not_refused(rows, lambda flags: WeightsConfig(**flags))
