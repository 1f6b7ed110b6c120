"""Test models with packed weights.

Such a model computes the same as a trained model with the checkpoint's weights, on any layout, wherever its weights are
stored.
"""

import dataclasses
import functools
import gc
import resource
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.checkpoints import frozen_place, run
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.tiers import nightly, slow
from helpers.training import (
    BIASED_STYLE,
    GPT2_STYLE,
    LLAMA_STYLE,
    MIXTURE_STYLE,
    Case,
    build_on_ranks,
    dims_on_ranks,
    spec_of,
)
from torch import nn

from megazpp.base.command_line import FlagParser
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.metadata import CheckpointMetadata
from megazpp.checkpoint.read import LoadSource, find_weights, load_weights
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.inference.config import SampleConfig
from megazpp.inference.generate import generate
from megazpp.model.gpt import GPTModel
from megazpp.packed_weights.config import WeightsConfig
from megazpp.packed_weights.frozen import frozen_bytes
from megazpp.packed_weights.load import load_frozen_model, load_streamed_model, load_used_model, pack_where_they_stay
from megazpp.packed_weights.store import FetchRing
from megazpp.packed_weights.streamed import plan_stream
from megazpp.parallel.dims import ParallelDims
from megazpp.planner.trace import FORWARD, TraceRecorder
from megazpp.zero.config import PrecisionConfig

# The 101 rows of the vocabulary are padded to a multiple of 8 with one tensor-parallel rank, and of 16 with two.
SAVED = Case(model=dataclasses.replace(LLAMA_STYLE, init_method_std=0.5), tp=2)
TIED = Case(model=dataclasses.replace(GPT2_STYLE, init_method_std=0.5))
MIXTURE = Case(
    model=dataclasses.replace(
        MIXTURE_STYLE,
        num_layers=2,
        init_method_std=0.5,
        moe_shared_expert_intermediate_size=20,
        moe_shared_expert_gate=True,
    )
)
ALONE = dataclasses.replace(SAVED, tp=1, seed=99)
BF16 = PrecisionConfig(bf16=True)
PROMPTS = ((5, 1, 100), (7,), (2, 3, 5, 7, 11, 13))
GREEDY = SampleConfig(sample_tokens=4, sample_temperature=0.0)


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> str:
    """Train SAVED on two ranks with checkpoints of iterations 1 and 2. Return the folder."""
    folder = str(tmp_path_factory.mktemp("checkpoints") / "save")
    ranks(2).run(run, SAVED, 2, save=folder, save_interval=1)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("checkpoints") / "save")
    ranks(1).run(run, TIED, 1, save=folder)
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    """Save a checkpoint of a mixture of experts from two expert-parallel ranks. Return the folder."""
    folder = str(tmp_path_factory.mktemp("checkpoints") / "save")
    ranks(2).run(run, dataclasses.replace(MIXTURE, ep=2), 1, save=folder)
    return folder


def found(load: str, step: int | None = None) -> tuple[LoadSource, CheckpointMetadata]:
    return find_weights(CheckpointFolder(load, "--load"), step)


def build_trained(case: Case, load: str, step: int | None = None) -> tuple[GPTModel, Any, ParallelDims]:
    """Load the checkpoint as a training run does, into shards with gradients.

    Return the model, its sharding, and the mesh axes.
    """
    model, sharding, dims = build_on_ranks(case)
    load_weights(model, sharding, dims, *found(load, step), vocab_size=101, say=lambda line: None)
    return model, sharding, dims


def disk(folder: Path, **options: Any) -> WeightsConfig:
    return WeightsConfig(**{"weights_device": "disk", "weight_bits": 8, "weight_store": str(folder)} | options)


# ---- loading models into frozen units -----------------------------------------------------------------------------


def losses_and_gradient(model: GPTModel, case: Case, dims: ParallelDims) -> list[torch.Tensor]:
    """Return the losses of a batch, and their gradient by the embedding's output.

    The output is detached from the embedding, so its weights need no gradients.
    """
    outputs, (batch,) = list[torch.Tensor](), case.batches(0, dims)

    def cut(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        outputs.append(output.detach().requires_grad_())
        return outputs[-1]

    with model.embedding.register_forward_hook(cut):
        losses = model(batch.tokens, batch.labels)
    losses.sum().backward()
    return [losses.detach(), outputs[0].grad]


def load_frozen(case: Case, load: str, step: int | None = None) -> tuple[str, int]:
    """Compare losses and gradients of a frozen model with a trained model.

    Return the frozen model's checksum, and the number of elements that this rank read from the checkpoint.
    """
    trained, _, dims = build_trained(case, load, step)
    with mock.patch.object(SafeReader, "read_box", autospec=True, side_effect=SafeReader.read_box) as read_box:
        model, units, checksum = load_frozen_model(spec_of(case), frozen_place(dims), *found(load, step))
    elements = sum(box.numel() for (_, _, _, box), _ in read_box.call_args_list)
    expected, before = losses_and_gradient(trained, case, dims), dims.counter.table()

    # In a trained model, an expert multiplies the rows of all ep ranks together, which rounds differently than in a
    # frozen model.
    same = torch.equal if case.ep == 1 else functools.partial(torch.allclose, rtol=1e-4, atol=1e-6)
    assert all(map(same, losses_and_gradient(model, case, dims), expected))
    assert list(model.parameters()) == []
    wires = {wire for wire, _, _ in dims.counter.table().keys() - before.keys()}
    assert wires == ({"local"} if dims.local.size > 1 else set())
    shapes = [{placed.name: placed.shape for placed, _, _ in unit.weights} for unit in units.units]
    planned = [frozen_bytes(each, dims.local.size, case.precision.param_dtype) for each in shapes]
    assert units.kept_bytes == sum(each.kept for each in planned)
    share = sum(p.numel() for p in trained.parameters()) / (dims.local.size * case.tp)
    # a rank reads a little more than 1/ranks of the elements, because each tensor-parallel rank has all norms
    assert elements < 1.2 * share
    return checksum, elements


@pytest.mark.parametrize(
    "layout",
    [
        nightly({"tp": 2, "sequence_parallel": True}),
        {"nodes": 2, "precision": BF16},
        slow({"nodes": 2, "tp": 2, "float8": "hybrid"}),
        slow({"nodes": 2, "replicas": 2}),
    ],
    ids=["tp", "bf16", "float8", "copies"],
)
def test_frozen_model_reads_weights_once_per_node_and_is_bit_identical(load, layout):
    if "float8" in layout:
        pytest.importorskip("torchao")
    case = dataclasses.replace(ALONE, **layout)
    ((checksum, elements),), ((other, _),) = (ranks(1).run(load_frozen, ALONE, load, step) for step in (2, 1))
    results = ranks(4).run(load_frozen, case, load)
    assert {each for each, _ in results} == {checksum} != {other}
    assert sum(read for _, read in results) >= case.nodes * elements


def test_frozen_model_with_biases_and_tied_embedding_is_bit_identical(tied):
    ranks(2).run(load_frozen, dataclasses.replace(TIED, tp=2, sequence_parallel=True), tied)


def test_frozen_model_reads_the_biases_of_routers(tmp_path):
    """Load the biases of experts into a frozen model and into a streamed model, and compare with the trained model.

    An update of 0.25 makes the biases as large as the scores, so that they change the choice of experts.
    """
    case = Case(model=dataclasses.replace(BIASED_STYLE, moe_aux_loss_coeff=0.0, moe_router_bias_update_rate=0.25))
    ranks(1).run(run, case, 1, save=str(tmp_path))
    ranks(2).run(load_frozen, case, str(tmp_path))
    ((tokens, expected),) = ranks(1).run(resident, case, str(tmp_path))
    ((ours, losses, _),) = ranks(1).run(stream, case, str(tmp_path), WeightsConfig(weights_device="host"))
    assert ours == tokens
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", [nightly({"nodes": 2}), slow({"nodes": 2, "ep": 2})])
def test_frozen_experts_are_whole_and_bit_identical(mixture, layout):
    ranks(4).run(load_frozen, dataclasses.replace(MIXTURE, **layout), mixture)


def router_weights(case: Case, load: str) -> list[torch.Tensor]:
    """Load a frozen model in 4 bits; return first its routers' weights, and then the same weights in the checkpoint.

    Both must be equal, because packing must not round routers.
    """
    place = frozen_place(dims_on_ranks(case))
    model, units, _ = load_frozen_model(spec_of(case), place, *found(load), bits=4)
    reader = SafeReader(found(load)[0].checkpoint)
    with units.keep_unsharded(), torch.no_grad():
        model(case.batch(0, 0, 1).tokens)
        names = [f"layers.{index}.mlp.router" for index in range(case.model.layers)]
        ours = [model.get_submodule(name).weight.clone() for name in names]
        expert = model.layers[0].mlp.experts.fc1.clone()
    assert not torch.equal(expert, reader.read_whole("model.layers.0.mlp.experts.fc1"))
    return [*ours, *(reader.read_whole(f"model.{name}.weight") for name in names)]


def test_routers_are_never_quantized(mixture):
    for found in ranks(2).run(router_weights, dataclasses.replace(MIXTURE, tp=2), mixture):
        torch.testing.assert_close(found[:2], found[2:], rtol=0, atol=0)


# ---- models whose layers are streamed -----------------------------------------------------------------------------


def stream(case: Case, load: str, config: WeightsConfig) -> tuple[list[list[int]], torch.Tensor, list[str]]:
    """Generate with a streamed model.

    Return the tokens, the losses of a batch, and the lines that this rank printed.
    """
    dims, lines, passes = dims_on_ranks(case), list[str](), GREEDY.sample_tokens
    gc.freeze()  # from here on, `bytes_of_live_messages` ignores objects that exist already
    with mock.patch.object(FetchRing, "fetch", autospec=True, side_effect=FetchRing.fetch) as fetch:
        model, units = load_streamed_model(config, spec_of(case), frozen_place(dims, lines.append), *found(load))
        tokens = generate(model, units, dims, PROMPTS, GREEDY, max_length=16, seed=1).tokens
        fetched = f" {passes} passes fetched {passes * units.plan.pass_bytes} bytes"
        assert units.describe_speed(24, 1.0).startswith(f"{fetched}; 24.0 tokens/s; ")
        assert units.describe_speed(24, 0.0) == f"{fetched}; 0.0 tokens/s; 0% of the time spent waiting for weights"
        batch = case.batch(0, 0, 2)
        with torch.no_grad():
            losses = model.eval()(batch.tokens, batch.labels)
    on_disk = config.weights_device == "disk"
    assert bytes_of_live_messages() == units.plan.device_bytes(config.prefetch_layers, fetched=on_disk)
    assert dims.counter.sent_bytes("cross") == 0
    assert (dims.counter.sent_bytes("local") > 0) == (dims.local.size > 1)
    # Besides generation, the losses needed one pass over all layers. Afterwards the reader has already fetched one of
    # the two layers for a next pass, which does not take place.
    if on_disk:
        fetched = sum(units.plan.streamed[index].num_bytes for (_, index), _ in fetch.call_args_list)
        assert fetched == (passes + 1 + 0.5 * (config.prefetch_layers > 0)) * units.plan.pass_bytes
    return tokens, losses, lines


def bytes_of_live_messages() -> int:
    """Return the bytes of memory of all live uint8 tensors, as packed weights are.

    Tensors that `gc.freeze` has put aside do not count.
    """
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.uint8]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(
    ("world", "layout", "bits"),
    [(2, {"tp": 2}, 8), nightly(4, {"nodes": 2}, None), slow(2, {}, 16), slow(4, {"nodes": 2, "tp": 2}, 4)],
)
def test_disk_and_memory_give_equal_tokens_and_losses_on_all_layouts(load, tmp_path, world, layout, bits):
    case = dataclasses.replace(ALONE, **layout)
    configs = [WeightsConfig(weights_device=place, weight_bits=bits) for place in ("device", "host")]
    configs += [disk(tmp_path, weight_bits=bits, prefetch_layers=ahead) for ahead in (0, 5)]
    results = [ranks(world).run(stream, case, load, config) for config in configs]
    for of_ranks in results:
        for (tokens, losses, _), (_, expected, _) in zip(of_ranks, results[0], strict=True):
            assert tokens == results[0][0][0]
            assert torch.equal(losses, expected)
    wrote = [any(" wrote " in line for _, _, lines in of_ranks for line in lines) for of_ranks in results]
    assert wrote == [False, False, True, False]
    assert len([*tmp_path.glob("*.weights")]) == world // case.nodes


@pytest.mark.parametrize(
    ("world", "layout"),
    [nightly(2, {"tp": 2}), nightly(4, {"nodes": 2}), slow(4, {"nodes": 2, "tp": 2, "precision": BF16})],
)
def test_streamed_experts_give_the_tokens_and_losses_of_one_rank(mixture, tmp_path, world, layout):
    """Compare a streamed mixture of experts with a resident one: tokens, and fp32 losses.

    On two tensor-parallel ranks, fp32 sums in another order differ by up to 1e-5. bf16 losses are not compared.
    """
    case = dataclasses.replace(MIXTURE, **layout)
    ((tokens, expected),) = ranks(1).run(resident, dataclasses.replace(MIXTURE, precision=case.precision), mixture)
    for config in (WeightsConfig(weights_device="host"), disk(tmp_path, weight_bits=None)):
        for ours, losses, _ in ranks(world).run(stream, case, mixture, config):
            assert ours == tokens
            tolerance = 1e-5 if case.precision != BF16 else 1.0
            torch.testing.assert_close(losses, expected, rtol=0, atol=tolerance)


def test_model_is_never_in_memory_twice_while_it_loads(monkeypatch):
    """Measure the peak memory while a streamed model is loaded.

    At the peak, the packed messages are in their final memory, with one more message and the pieces of that message.
    Meta tensors count too.
    """
    empty, pinned = torch.empty, []

    def without_pinning(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", without_pinning)
    model = nn.Sequential(*(nn.Linear(256, 256, device="meta") for _ in range(64)))
    plan = plan_stream(model, list(model), 1, 8, torch.bfloat16)

    def load(name: str, rows: slice) -> torch.Tensor:
        return torch.zeros(model.get_parameter(name)[rows].shape)

    for place, pin in (("meta", False), ("cpu", True)):
        with TraceRecorder() as recorder:
            messages = pack_where_they_stay(plan, load, 0, torch.device(place), pin=pin)
        total = sum(map(len, messages))
        assert {message.device.type for message in messages} == {place}
        assert total == plan.pass_bytes + plan.kept.num_bytes > 2e6
        assert recorder.segments[FORWARD, 0].peak < 1.15 * total
        assert sum(pinned) == 64 * pin


def resident(case: Case, load: str) -> tuple[list[list[int]], torch.Tensor]:
    """Load the model as a training run does; return generated tokens, and the losses of a batch."""
    model, sharding, dims = build_trained(case, load)
    tokens = generate(model, sharding, dims, PROMPTS, GREEDY, max_length=16, seed=1).tokens
    batch = case.batch(0, 0, 2)
    with torch.no_grad():
        return tokens, model.eval()(batch.tokens, batch.labels)


@pytest.mark.slow
def test_packed_losses_match_the_checkpoint_up_to_rounding(tied, load):
    """Compare losses of streamed models in 32, 16, 8 and 4 bits with the checkpoint's.

    Weights have a standard deviation of 0.5, so the loss depends visibly on their relative error.
    """
    for case, folder, said, tolerances in (
        (TIED, tied, "32 bits", {8: 0.3}),
        (ALONE, load, "32 bits", {16: 0.1, 8: 0.3, 4: 3.0}),
        (dataclasses.replace(ALONE, precision=BF16), load, "16 bits", {}),
    ):
        ((tokens, expected),) = ranks(1).run(resident, case, folder)
        ((ours, losses, lines),) = ranks(1).run(stream, case, folder, WeightsConfig(weights_device="host"))
        assert ours == tokens
        assert torch.equal(losses, expected)
        assert f" weights: {said} from host; " in lines[-1]
        for bits, tolerance in tolerances.items():
            config = WeightsConfig(weights_device="host", weight_bits=bits)
            ((_, losses, lines),) = ranks(1).run(stream, case, folder, config)
            assert 0.0 < float((losses - expected).abs().mean()) <= tolerance, config
            assert f" weights: {bits} bits (rounded: tokens may differ) from host; " in lines[-1]


@torch.no_grad()
def leave_forwards(load: str, config: WeightsConfig) -> None:
    """Interrupt a streamed forward by an exception in each layer, twice.

    The losses of the next forward must be unchanged.
    """
    model, _ = load_streamed_model(config, spec_of(ALONE), frozen_place(dims_on_ranks(ALONE)), *found(load))
    batch = ALONE.batch(0, 0, 2)
    expected = model.eval()(batch.tokens, batch.labels)
    for layer in (*model.layers, *model.layers):
        leave = mock.Mock(side_effect=KeyboardInterrupt)
        with layer.mlp.register_forward_pre_hook(leave), pytest.raises(KeyboardInterrupt):
            model(batch.tokens, batch.labels)
        assert torch.equal(model(batch.tokens, batch.labels), expected)


def test_interrupted_forward_does_not_mix_up_layers(load, tmp_path):
    for world, ahead in ((1, 0), (1, 1), (2, 2)):
        ranks(world).run(leave_forwards, load, disk(tmp_path, prefetch_layers=ahead))


# ---- the store of packed weights on disk -------------------------------------------------------------------------


def use(load: str, config: WeightsConfig, *, case: Case = ALONE, step: int | None = None) -> str:
    """Load a streamed model with the settings `config`, and run it once.

    Return the printed lines, or "error: " with the message of the error that ended it.
    """
    dims, lines = dims_on_ranks(case), list[str]()
    try:
        place = frozen_place(dims, lines.append)
        model, _ = load_used_model(config, spec_of(case), place, *found(load, step))
        with torch.no_grad():
            model(case.batch(0, 0, 2).tokens)
    except ValueError as error:
        return f"error: {error}"
    return "".join(lines)


@pytest.fixture(scope="module")
def written(load, tmp_path_factory) -> Path:
    """Write a store of packed weights on disk. Return the path of its only file."""
    folder = tmp_path_factory.mktemp("store")
    assert " wrote " in ranks(1).run(use, load, disk(folder))[0]
    (path,) = folder.glob("*.weights")
    return path


def damage(path: Path, place: float, *, cut: bool = False) -> None:
    """Replace the store's file by a copy that has one flipped bit at the fraction `place`, or ends there.

    The model of an earlier test may still read the old file ahead, and would delete the path if it found damage there.
    So the copy is a new file with a new inode.
    """
    content = bytearray(path.read_bytes())
    at = int(len(content) * place)
    content[at] ^= 1
    path.unlink()
    path.write_bytes(content[:at] if cut else content)


def test_damaged_store_raises_an_error_and_is_written_again(load, written):
    for place, cut in ((0.3, False), (0.7, False), (0.999, False), (0.0, True), (0.999, True)):
        damage(written, place, cut=cut)
        (said,) = ranks(1).run(use, load, disk(written.parent))
        assert f"{written} is damaged: " in said, (place, cut)
        assert "is removed, and the next run writes it again" in said
        assert not written.exists()
        (said,) = ranks(1).run(use, load, disk(written.parent))
        assert " wrote " in said


def test_each_checkpoint_and_number_of_bits_has_its_own_store(load, written):
    content, folder = written.read_bytes(), written.parent
    for config, step in ((disk(folder), 1), (disk(folder, weight_bits=4), None)):
        assert [" wrote " in ranks(1).run(use, load, config, step=step)[0] for _ in range(2)] == [True, False]
    assert len(list(folder.glob("*.weights"))) == 3
    assert written.read_bytes() == content


def test_damaged_checkpoint_or_another_tokenizer_raise_errors(load, tmp_path):
    shutil.copytree(load, tmp_path / "copy")
    (path,) = (tmp_path / "copy/iter_0000002").glob("__0_*.distcp")
    damage(path, 0.5)
    smaller = dataclasses.replace(ALONE, vocab_size=100)
    for words, from_, config, changes in (
        ("the tokenizer has 100 tokens, but the tokenizer of", load, WeightsConfig(), {"case": smaller}),
        (path.name, str(tmp_path / "copy"), WeightsConfig(weight_bits=8), {}),
    ):
        (said,) = ranks(1).run(use, from_, config, **changes)
        assert said.startswith("error: ")
        assert words in said


def load_own_step(load: str, config: WeightsConfig) -> None:
    """Load another iteration's checkpoint on each rank, as on hosts with a stale copy, and check the error."""
    dims, step = dims_on_ranks(ALONE), 1 + dist.get_rank()
    with pytest.raises(ValueError, match="must have the same content on all ranks"):
        load_used_model(config, spec_of(ALONE), frozen_place(dims), *found(load, step))


def test_checkpoint_that_differs_between_hosts_is_rejected_also_with_a_store(load, tmp_path):
    for step in (1, 2):
        ranks(1).run(use, load, disk(tmp_path), step=step)
    for config in (WeightsConfig(), WeightsConfig(weight_bits=8), disk(tmp_path)):
        ranks(2).run(load_own_step, load, config)


def use_on_a_full_disk(load: str, config: WeightsConfig) -> str:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        return use(load, config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_leaves_no_store_and_unfinished_file_is_overwritten(load, tmp_path):
    (said,) = ranks(1).run(use_on_a_full_disk, load, disk(tmp_path))
    assert f"--weight-store: cannot write {tmp_path}/8bits-tp0of1-part0of1-" in said
    assert "File too large" in said
    (lock,) = tmp_path.iterdir()
    left = lock.with_suffix(".unfinished")
    left.write_bytes(b"x" * 10_000_000)
    (said,) = ranks(1).run(use, load, disk(tmp_path))
    assert " wrote " in said
    assert not left.exists()
    (path,) = tmp_path.glob("*.weights")
    assert path.stat().st_size < 10_000_000


def test_contradicting_flags_raise_an_error():
    rows = (
        ("--weight-store x", "--weight-store x needs --weights-device disk, not device"),
        ("--weights-device disk --prefetch-layers -1", "--prefetch-layers -1 is negative"),
    )
    parser = FlagParser([WeightsConfig], program="generate.py")
    assert not not_refused(rows, lambda flags: parser.read(flags.split(), Path(), {}))
