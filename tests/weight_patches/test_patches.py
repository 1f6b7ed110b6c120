"""Test weight patches: a file of all weights, and the patches after it, give each step's weights bit for bit."""

import dataclasses
import json
import math
import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.program import run_forked
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.small_run import ROOT, SMALL, check, parse
from helpers.tiers import slow
from helpers.training import BIASED_STYLE, GPT2_STYLE, LLAMA_STYLE, MIXTURE_STYLE, Case, build_step
from safetensors.torch import load_file

from megazpp.base.files import DamagedError
from megazpp.base.program import UserError
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.convert.huggingface import choose_architecture, to_files
from megazpp.convert.model import OUTPUT, WORDS, held, split_all
from megazpp.convert.safetensors_file import read_metadata
from megazpp.data.tokenizer import ByteTokenizer
from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.weight_patches.feature import FEATURE
from megazpp.weight_patches.patches import WeightPatches, check_shared, take_patches_folder
from megazpp.weight_patches.reader import PatchReader, newest_step
from megazpp.zero.config import PrecisionConfig, ZeroConfig

LOSSLESS = ZeroConfig(zeropp=True, zero_weight_delta="lossless")
GLM = dataclasses.replace(BIASED_STYLE, moe_shared_expert_intermediate_size=20, moe_aux_loss_coeff=0.0)
# Phi-3's architecture, the only family whose files join the gate and up matrices
PHI3 = dataclasses.replace(LLAMA_STYLE, rotary_percent=0.5)
Bits = dict[str, torch.Tensor]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def train(case: Case, folder: Path, restart_after: int) -> tuple[list[Bits], int]:
    """Train, and write weight patches after each step; a new chain begins after step `restart_after`.

    Return each step's weights as an exported checkpoint in 16 bits has them, and the bytes that this rank sent to write
    all patches.
    """
    step, dims = build_step(case)
    family, expected, patches, sent = choose_architecture(case.model), [], None, 0
    pieces = family.pieces(case.model)
    for index in range(case.steps):
        if patches is None or index == restart_after:
            options = {"dtype": torch.bfloat16, "tokenizer": ByteTokenizer(999)}
            patches = WeightPatches(folder, 4, step.model, step.sharding, dims, **options)
        step(case.batches(index, dims), learning_rate=1e-3, weight_decay=0.01)
        before = sum(entry.sent_bytes for entry in dims.counter.table().values())
        patches.write(TrainingProgress(iteration=index + 1))
        sent += sum(entry.sent_bytes for entry in dims.counter.table().values()) - before
        ours = {name: p.full_tensor().detach().bfloat16() for name, p in step.model.named_parameters()}
        # buffers stay in fp32, as in transformers
        ours |= {name: buffer.clone() for name, buffer in step.model.named_buffers()}
        ours |= {name: ours[name][: step.model.vocab_size] for name in (WORDS, OUTPUT) if name in ours}
        theirs = to_files(family, split_all(pieces, {name: held(tensor) for name, tensor in ours.items()}))
        expected.append({name: bits_of(entry.read()) for name, entry in theirs.items()})
    # a collective, so that no rank returns before all ranks have written the files that the test reads
    dims.world.all_reduce_(torch.zeros(1))
    return expected, sent


def bits_from(reader: PatchReader) -> Bits:
    return {name: bits_of(weight) for name, weight in reader.weights()}


CASES: list[Any] = [
    (2, {"nodes": 2, "zero": LOSSLESS, "model": LLAMA_STYLE}),
    slow(4, {"nodes": 2, "tp": 2, "zero": LOSSLESS, "model": GPT2_STYLE, "micro_batches": 2}),
    slow(2, {"zero": ZeroConfig(), "model": GLM}),
    slow(4, {"tp": 2, "zero": ZeroConfig(), "model": LLAMA_STYLE}),
    slow(2, {"nodes": 2, "zero": LOSSLESS, "model": PHI3}),
    slow(4, {"ep": 2, "nodes": 2, "zero": LOSSLESS, "model": MIXTURE_STYLE}),
    slow(2, {"zero": ZeroConfig(zero_stage=0), "stage": 0, "model": LLAMA_STYLE}),
]


@pytest.mark.parametrize(("world", "case"), CASES)
def test_patches_after_all_weights_rebuild_each_step_bit_for_bit(world, case, tmp_path):
    """Rebuild the weights of each of six steps from the files.

    All weights are written at the first step and at every fourth step. A restart begins another chain.
    """
    results = ranks(world).run(train, Case(**case, precision=PrecisionConfig(bf16=True), steps=6), tmp_path, 5)
    expected = results[0][0]
    assert [sent for _, sent in results] == [0] * world  # each rank writes its own shards, so writing sends nothing
    files = {path.name[:14] for path in (tmp_path / "0001").iterdir()}
    assert files == {"weights-000001", "weights-000004", *(f"patch-00000{step}-0" for step in (2, 3, 4, 5))}
    # ---- one reader that follows the run, and new readers that start from the newest file of all weights
    (tmp_path / "0002").rename(tmp_path / "later")
    reader = PatchReader(tmp_path)
    for step in range(1, 6):
        assert reader.advance(step) == step
        torch.testing.assert_close(bits_from(reader), expected[step - 1], rtol=0, atol=0)
    assert newest_step(tmp_path) == 5
    fresh = PatchReader(tmp_path)
    assert fresh.advance() == 5
    torch.testing.assert_close(bits_from(fresh), expected[4], rtol=0, atol=0)
    assert reader.advance(3) == 3  # a reader may go back to an earlier step
    torch.testing.assert_close(bits_from(reader), expected[2], rtol=0, atol=0)
    (tmp_path / "later").rename(tmp_path / "0002")
    assert reader.advance() == newest_step(tmp_path) == 6
    torch.testing.assert_close(bits_from(reader), expected[5], rtol=0, atol=0)
    # ---- the files of all ranks together have every element once
    paths = list((tmp_path / "0002").glob("weights-*"))
    stored = [load_file(path) for path in paths]
    assert {name for tensors in stored for name in tensors} == set(
        choose_architecture(case["model"]).pieces(case["model"])
    )
    shapes: dict[str, list[int]] = {}
    for path in paths:
        shapes |= {name: place[0] for name, place in json.loads(read_metadata(path)["model"])["places"].items()}
    count = sum(tensor.numel() for tensors in stored for tensor in tensors.values())
    assert count == sum(math.prod(shape) for shape in shapes.values())


@pytest.fixture(scope="module")
def small_chain(tmp_path_factory) -> tuple[Path, list[Bits]]:
    """Write weight patches of a run of five steps on two ranks. Return the folder and each step's weights."""
    folder = tmp_path_factory.mktemp("patches")
    case = Case(zero=ZeroConfig(), model=LLAMA_STYLE, precision=PrecisionConfig(bf16=True), steps=5)
    return folder, ranks(2).run(train, case, folder, 9)[0][0]


@pytest.fixture
def chain(small_chain, tmp_path) -> Path:
    folder = tmp_path / "0001"
    folder.mkdir()
    for path in (small_chain[0] / "0001").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_damaged_or_foreign_patch_is_refused_and_changes_nothing(chain, small_chain):
    second, third = (chain / f"patch-00000{step}-00001-of-00002.safetensors" for step in (2, 3))
    whole = second.read_bytes()
    for content, message in [
        (whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "the checksum with its changes is"),
        (whole[: len(whole) // 2], "cannot be read as a safetensors file"),
        (third.read_bytes(), "changes weights with the checksum"),
    ]:
        second.write_bytes(content)
        reader = PatchReader(chain.parent)
        assert reader.advance(1) == 1
        with pytest.raises(DamagedError, match=message):
            reader.advance(2)
        assert reader.step == 1
        torch.testing.assert_close(bits_from(reader), small_chain[1][0], rtol=0, atol=0)
    second.write_bytes(whole)
    assert reader.advance(3) == 3
    torch.testing.assert_close(bits_from(reader), small_chain[1][2], rtol=0, atol=0)


def test_damaged_weights_are_refused(chain):
    path = chain / "weights-000001-00000-of-00002.safetensors"
    content = path.read_bytes()
    place = content.index(b"[[64, 24], [0, 0]]") + 12  # a byte of a shard's position in its tensor
    for damaged, value in ((len(content) - 5, content[-5] ^ 64), (place, ord("2"))):
        path.write_bytes(content[:damaged] + bytes([value]) + content[damaged + 1 :])
        with pytest.raises(DamagedError, match="its content has the checksum"):
            PatchReader(chain.parent).advance(2)


def test_incomplete_files_are_not_read(chain):
    """Remove one rank's weight patch, as if this rank were still writing it.

    The reader must use only steps of which the files of all ranks exist.
    """
    (chain / "patch-000005-00000-of-00002.safetensors").unlink()
    reader = PatchReader(chain.parent)
    assert reader.advance() == newest_step(chain.parent) == 4
    with pytest.raises(ValueError, match="not have all files that lead to the weights of step 5"):
        reader.advance(5)
    (chain / "weights-000004-00000-of-00002.safetensors").unlink()
    (chain / "patch-000002-00001-of-00002.safetensors").unlink()
    assert PatchReader(chain.parent).advance() == newest_step(chain.parent) == 1
    assert PatchReader(chain / "none").advance() is newest_step(chain / "none") is None


def test_follower_continues_at_newer_weights_when_old_patches_are_gone(chain, small_chain):
    reader = PatchReader(chain.parent)
    assert reader.advance(1) == 1
    for path in chain.glob("patch-00000[234]-*"):
        path.unlink()
    assert reader.advance() == 5
    torch.testing.assert_close(bits_from(reader), small_chain[1][4], rtol=0, atol=0)


def test_follower_reads_the_weights_of_a_run_that_has_made_its_folder_again(chain, small_chain):
    """Replace the files of a reader's folder by the files of another run, whose steps are 4 higher.

    The other run's first weights are of step 5, which is the step that the reader already has. The reader must read
    them, and not keep the weights of the old run.
    """
    reader, files = PatchReader(chain.parent), {path.name: path.read_bytes() for path in chain.iterdir()}
    assert reader.advance() == 5
    for path in chain.iterdir():
        path.unlink()
    for newest in (1, 5):
        for name, content in files.items():
            if (step := int(name.split("-")[1])) <= newest:
                (chain / name.replace(f"-{step:06d}-", f"-{step + 4:06d}-")).write_bytes(content)
        assert reader.advance() == newest + 4
        torch.testing.assert_close(bits_from(reader), small_chain[1][newest - 1], rtol=0, atol=0)


def test_saved_folder_is_transformers_model(chain, small_chain, tmp_path):
    transformers = pytest.importorskip("transformers")
    reader = PatchReader(chain.parent)
    for step in (4, 5):  # saving step 5 replaces the folder with step 4
        assert reader.advance(step) == step
        reader.save(tmp_path / "policy")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.bfloat16)
        found = {name: bits_of(x) for name, x in model.state_dict().items() if name in small_chain[1][step - 1]}
        torch.testing.assert_close(found, small_chain[1][step - 1], rtol=0, atol=0)
        assert (model.config.bos_token_id, model.config.eos_token_id) == (999, 999)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0001", "policy"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"mine has files that PatchReader\.save has not written"):
        reader.save(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.json"]


def test_unsupported_weights_are_rejected_by_flag():
    rows = [
        ("", "--save-weight-patches needs --bf16 or --fp16"),
        ("--bf16 --zeropp --zero-weight-delta none", "--zero-weight-delta lossless"),
        ("--bf16 --diloco-steps 2", "--save-weight-patches cannot be combined with --diloco-steps"),
        (
            "--bf16 --diloco-coordinator 127.0.0.1:1 --diloco-steps 2 --diloco-replica-groups 2",
            "--save-weight-patches cannot be combined with --diloco-steps",
        ),
        ("--bf16 --swiglu", "--swiglu"),
    ]
    flags = [(f"--save-weight-patches patches {flags}", message) for flags, message in rows]
    assert not_refused(flags, lambda flags: check(flags, nodes=2, ranks_per_node=2)) == []


def test_folder_that_cannot_be_written_to_is_named_before_training(tmp_path):
    (tmp_path / "file").touch()
    config = parse(f"{SMALL} --bf16 --save-weight-patches {tmp_path}/file/patches").config
    context = SimpleNamespace(dims=SimpleNamespace(world=MeshAxis("world")))
    trainer: Any = SimpleNamespace(run=SimpleNamespace(config=config, context=context))
    with pytest.raises(ValueError, match=r"--save-weight-patches .*/file/patches is not a folder that can be written"):
        FEATURE.attach(trainer)


def test_only_one_job_writes_weight_patches_into_a_folder(tmp_path, monkeypatch):
    """Check that a second job is refused.

    Its chain would be the newest one, so engines would load the weights of the second job.
    """
    monkeypatch.setattr("megazpp.base.files.LOCK_SECONDS", 0.1)
    CheckpointFolder(tmp_path / "patches", "--save").lock()  # --save may name the same folder, as it has its own lock
    folder, lock = take_patches_folder(str(tmp_path / "patches"), 0)
    with pytest.raises(ValueError, match=rf"--save-weight-patches {folder} is in use by process {os.getpid()} on"):
        take_patches_folder(str(folder), 0)
    assert take_patches_folder(str(folder), 1) == (folder, None)
    lock.close()
    take_patches_folder(str(folder), 0)[1].close()


def check_folders(shared: Path, separate: Path) -> None:
    """Check that two ranks may write weight patches into a common folder, but not into two folders."""
    world = ParallelDims(
        plan_dims(ParallelConfig(), Cluster(num_nodes=2, ranks_per_node=1), zero_stage=3), device_type="cpu"
    ).world
    check_shared(shared, world)
    own = separate / str(world.rank)
    own.mkdir()
    with pytest.raises(
        ValueError, match=r"--save-weight-patches .* is a separate folder on each host: choose a folder"
    ):
        check_shared(own, world)
    assert not [*shared.iterdir(), *own.iterdir()]


def test_separate_folders_of_two_hosts_are_refused_before_training(tmp_path):
    folders = tmp_path / "shared", tmp_path / "separate"
    for folder in folders:
        folder.mkdir()
    ranks(2).run(check_folders, *folders)


def test_chain_that_cannot_be_created_ends_the_run_with_its_name(tmp_path):
    (tmp_path / "file").touch()
    world = MeshAxis("world")
    dims: Any = SimpleNamespace(shard=world, tp=world, world=world, counter=world.counter)
    patches = WeightPatches(tmp_path / "file", 1, dims, dims, dims, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"--save-weight-patches: .*/file/0001 cannot be created: Not a directory"):
        patches._begin_chain()


def test_file_that_cannot_be_written_ends_the_run_with_its_name(tmp_path):
    axis = MeshAxis("alone")
    patches = WeightPatches(tmp_path, 1, *[SimpleNamespace(shard=axis, tp=axis)] * 3, dtype=torch.bfloat16)
    patches._chain_folder, patches._step = tmp_path / "gone", 1
    with pytest.raises(UserError, match=r"--save-weight-patches: .*/gone/patch-000001.* cannot be written: "):
        patches._write("patch", {"x": torch.zeros(1)}, {})


@pytest.mark.slow
def test_run_writes_weights_and_patches_at_the_interval(tmp_path):
    flags = "--bf16 --nproc 1 --save-weight-patches patches --weight-anchor-interval 3 --train-iters 4"
    words = shlex.split(f"{SMALL} {flags} --num-layers 1 --tokenizer-type NullTokenizer --vocab-size 256")
    code, output = run_forked(str(ROOT / "pretrain_gpt.py"), *words, folder=tmp_path, cwd=tmp_path)
    assert code == 0, output
    names = sorted(path.name[:14] for path in (tmp_path / "patches" / "0001").iterdir())
    assert names == ["patch-000002-0", "patch-000003-0", "patch-000004-0", "weights-000001", "weights-000003"]
    assert PatchReader(tmp_path / "patches").advance() == 4
