"""Weights that stream compute the same bits wherever they lie, and close to the model that was saved, on any layout."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import Job, frozen_place, run
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, build_on_ranks, dims_on_ranks, spec_of

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.read import find_weights, load_weights
from megazpp.inference.generate import generate
from megazpp.inference.sample import SampleConfig
from megazpp.planner.trace import FORWARD, TraceRecorder
from megazpp.stored.load import WeightsConfig, load_streamed_model, pack_where_they_stay
from megazpp.stored.streamed import FetchedMessages, Speed, StreamedUnits, plan_stream
from megazpp.zero.precision import PrecisionConfig

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
    ranks(2).run(run, Job(case=SAVED, steps=2, flags={"save": folder, "save_interval": 1}))
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("checkpoints") / "save")
    ranks(1).run(run, Job(case=TIED, steps=1, flags={"save": folder}))
    return folder


def streamed(case: Case, load: str, config: WeightsConfig, step: int | None = None) -> dict[str, Any]:
    """What one rank's streamed model generates, its losses, what it fetched, and the lines it says."""
    dims = dims_on_ranks(case)
    source, record = find_weights(CheckpointFolder(load, "--load"), step)
    lines: list[str] = []
    model, units = load_streamed_model(config, spec_of(case), frozen_place(dims, lines.append), source, record)
    speed = Speed(units)
    before = units.passes
    generated = generate(model, units, dims, PROMPTS, GREEDY, max_length=16, seed=1)
    passes = units.passes - before
    lines.append(speed.reached(24))
    batch = case.batch(0, 0, 2)
    with torch.no_grad():
        losses = model.eval()(batch.tokens, batch.labels)
    return {
        "tokens": generated.tokens,
        "losses": losses,
        "passes": passes,
        "lines": lines,
        "cross": dims.counter.sent_bytes("cross"),
        "local": dims.counter.sent_bytes("local"),
        "pass_bytes": units.plan.pass_bytes,
        "device_bytes": (units.device_bytes, live_bytes(units)),
    }


def live_bytes(units: StreamedUnits) -> int:
    """Of all storages that hold packed weights."""
    messages = units._messages
    held = messages._ring if isinstance(messages, FetchedMessages) else messages._messages
    kept = [matrix.parts for matrix in units._kept]
    storages = [tensor.untyped_storage() for tensor in (*held, *units._gathered, *kept)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def resident(case: Case, load: str) -> tuple[list[list[int]], torch.Tensor]:
    """What the shards of a training give."""
    model, sharding, dims = build_on_ranks(case)
    source, record = find_weights(CheckpointFolder(load, "--load"), None)
    load_weights(model, sharding, dims, source, record, vocab_size=101, say=lambda line: None)
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
    case, store = dataclasses.replace(ALONE, **layout), str(tmp_path / "store")
    on_disk = WeightsConfig(weights_on="disk", weight_bits=bits, weight_store=store, prefetch_layers=0)
    configs = [WeightsConfig(weight_bits=bits), WeightsConfig(weights_on="host", weight_bits=bits)]
    configs += [on_disk, dataclasses.replace(on_disk, prefetch_layers=5)]

    device, *others = (ranks(world).run(streamed, case, load, config) for config in configs)

    for results in (device, *others):
        for expected, found in zip(device, results, strict=True):
            assert found["tokens"] == device[0]["tokens"]
            assert torch.equal(found["losses"], expected["losses"])
            assert found["cross"] == 0
            assert (found["local"] > 0) == (world // case.nodes // case.tp > 1)
            assert found["passes"] == GREEDY.sample_tokens
            assert found["device_bytes"][0] == found["device_bytes"][1]
    assert [" wrote " in "".join(results[0]["lines"]) for results in others] == [False, True, False]
    assert len([*Path(store).glob("*.weights")]) == world // case.nodes


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


@pytest.mark.parametrize(("bits", "tolerance"), [(16, 0.1), (8, 0.3), (4, 3.0)])
def test_the_losses_are_those_of_the_checkpoint_but_for_the_rounding_of_weights(
    tied: str, load: str, bits: Any, tolerance: float
):
    """Weights of std 0.5 in a model of three small layers: the loss moves with the relative error of the weights."""
    for case, folder in ((TIED, tied), (ALONE, load)):
        ((_, expected),) = ranks(1).run(resident, case, folder)
        (found,) = ranks(1).run(streamed, case, folder, WeightsConfig(weights_on="host", weight_bits=bits))
        difference = float((found["losses"] - expected).abs().mean())
        assert 0.0 < difference < tolerance
        assert " bits (rounded: tokens may differ) from host; " in found["lines"][-2]


def test_without_a_number_of_bits_the_tokens_and_losses_are_the_checkpoint_s_own(tied: str, load: str):
    for case, folder in ((TIED, tied), (ALONE, load), (dataclasses.replace(ALONE, precision=BF16), load)):
        ((tokens, expected),) = ranks(1).run(resident, case, folder)
        (found,) = ranks(1).run(streamed, case, folder, WeightsConfig(weights_on="host"))
        assert found["tokens"] == tokens
        assert torch.equal(found["losses"], expected)
        assert f" weights: {16 if case.precision is BF16 else 32} bits from host; " in found["lines"][-2]


def disk(store: Path, **options: Any) -> WeightsConfig:
    return WeightsConfig(weights_on="disk", weight_bits=8, weight_store=str(store), **options)


@pytest.fixture(scope="module")
def written(load: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    ranks(1).run(streamed, ALONE, load, disk(store))
    return store


def test_what_is_fetched_is_what_was_planned(load: str, written: Path):
    (found,) = ranks(1).run(streamed, ALONE, load, disk(written))
    assert f"8 passes fetched {8 * found['pass_bytes']} bytes" in found["lines"][-1]


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)


def cut(path: Path, place: float) -> None:
    os.truncate(path, int(path.stat().st_size * place))


def test_a_flipped_byte_or_a_cut_is_an_error_and_the_next_run_writes_the_store_anew(
    load: str, written: Path, tmp_path: Path
):
    store = tmp_path / "store"
    shutil.copytree(written, store)
    (path,) = store.glob("*.weights")
    for damage, place in ((flip, 0.3), (flip, 0.7), (flip, 0.999), (cut, 0.0), (cut, 0.999)):
        damage(path, place)
        with pytest.raises(AssertionError, match=r"part0of1.weights is damaged: .* is removed, and the next run"):
            ranks(1).run(streamed, ALONE, load, disk(store))
        assert not path.exists()
        (again,) = ranks(1).run(streamed, ALONE, load, disk(store))
        assert " wrote " in "".join(again["lines"])


def test_the_store_of_another_checkpoint_or_of_other_bits_is_refused_and_stays(load: str, written: Path):
    (path,) = written.glob("*.weights")
    content = path.read_bytes()
    with pytest.raises(AssertionError, match=r"is the store of other weights \(checkpoint: .*choose another"):
        ranks(1).run(streamed, ALONE, load, disk(written), 1)
    with pytest.raises(AssertionError, match=r"is the store of other weights \(bits: 8, not 4"):
        ranks(1).run(streamed, ALONE, load, dataclasses.replace(disk(written), weight_bits=4))
    assert path.read_bytes() == content


def on_a_full_disk(case: Case, load: str, config: WeightsConfig) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        streamed(case, load, config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_an_error_that_leaves_nothing(load: str, tmp_path: Path):
    with pytest.raises(AssertionError, match=r"needs 0.00 GB: File too large; nothing of it was kept"):
        ranks(1).run(on_a_full_disk, ALONE, load, disk(tmp_path / "store"))
    assert [path.suffix for path in (tmp_path / "store").iterdir()] == [".lock"]
    (again,) = ranks(1).run(streamed, ALONE, load, disk(tmp_path / "store"))
    assert " wrote " in "".join(again["lines"])


def test_what_a_killed_writer_left_is_written_over(load: str, tmp_path: Path):
    store = tmp_path / "store"
    store.mkdir()
    left = store / "tp0of1-part0of1.weights.unfinished"
    left.write_bytes(b"x" * 10_000_000)
    ranks(1).run(streamed, ALONE, load, disk(store))
    assert not left.exists()
    assert (store / "tp0of1-part0of1.weights").stat().st_size < 10_000_000


def test_flags_that_contradict_each_other_are_refused():
    for flags, message in (
        ({"weight_store": "x"}, "--weight-store x needs --weights-on disk, not device"),
        ({"weights_on": "disk", "prefetch_layers": -1}, "--prefetch-layers -1 is negative"),
    ):
        with pytest.raises(ValueError, match=message):
            WeightsConfig(**flags)


def interrupted(load: str, config: WeightsConfig) -> bool:
    """Whether the losses are the same after a forward that an exception has left."""
    dims = dims_on_ranks(ALONE)
    source, record = find_weights(CheckpointFolder(load, "--load"), None)
    model, _ = load_streamed_model(config, spec_of(ALONE), frozen_place(dims), source, record)
    batch, found = ALONE.batch(0, 0, 2), []
    model.eval()

    def leave(*args: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        for _ in range(3):
            found.append(model(batch.tokens, batch.labels))
            hook = model.layers[1].mlp.register_forward_pre_hook(leave)
            with pytest.raises(KeyboardInterrupt):
                model(batch.tokens, batch.labels)
            hook.remove()
            found.append(model(batch.tokens, batch.labels))
    return all(torch.equal(losses, found[0]) for losses in found)


def test_a_forward_that_was_left_does_not_mix_up_layers(load: str, tmp_path: Path):
    for world, ahead in ((1, 0), (1, 1), (2, 2)):
        assert all(ranks(world).run(interrupted, load, disk(tmp_path, prefetch_layers=ahead)))
