"""Test loading only the weights of a checkpoint (no optimizer), onto any parallel layout."""

import dataclasses
import re
import shutil

import pytest
import torch
from helpers.checkpoints import run
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.training import Case, build_on_ranks

from megazpp.checkpoint.checksums import read_checksums, sum_file, write_checksums
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.metadata import shape_of
from megazpp.checkpoint.read import find_weights, load_weights
from megazpp.model.config import GPTConfig

CASE = Case(tp=2, sequence_parallel=True)
OTHER = dataclasses.replace(CASE, tp=1, sequence_parallel=False, stage=0, seed=99)
SUMS = 1e-4  # absolute tolerance for logits of about 1, because layouts add fp32 numbers in different orders


def logits_on_ranks(case: Case, load: str, step: int | None = None, vocab_size: int = 101) -> tuple[int, torch.Tensor]:
    model, sharding, dims = build_on_ranks(case)
    source, record = find_weights(CheckpointFolder(load, "--load"), step)
    iteration = load_weights(model, sharding, dims, source, record, vocab_size=vocab_size, say=lambda line: None)
    with torch.no_grad():
        part = model.eval()(torch.arange(16).unsqueeze(0))[0]
    return iteration, dims.tp.all_gather(part.t()).t()[:, :101]


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> str:
    """Train CASE on two ranks with checkpoints of iterations 1 and 2. Return the folder."""
    folder = str(tmp_path_factory.mktemp("checkpoints") / "save")
    ranks(2).run(run, CASE, 2, save=folder, save_interval=1)
    return folder


def test_weights_give_the_same_logits_on_another_layout(load):
    (first, expected), *_ = ranks(2).run(logits_on_ranks, CASE, load)
    [(second, found)] = ranks(1).run(logits_on_ranks, OTHER, load)
    assert first == second == 2
    torch.testing.assert_close(found, expected, atol=SUMS, rtol=0)
    [(earlier, before)] = ranks(1).run(logits_on_ranks, OTHER, load, 1)
    assert earlier == 1
    assert (before - found).abs().max() > 100 * SUMS


def load_as_described(load: str) -> None:
    """Build a model of the shape that the flags in the checkpoint's run.json describe, and load the weights into it."""
    _, record = find_weights(CheckpointFolder(load, "--load"), None)
    logits_on_ranks(dataclasses.replace(OTHER, model=GPTConfig(**shape_of(record.flags))), load)


def test_other_tokenizer_model_or_missing_checkpoint_is_rejected(load, tmp_path):
    wider = dataclasses.replace(OTHER, model=dataclasses.replace(OTHER.model, hidden_size=24))
    rows = [
        (OTHER, load, None, 100, f"the tokenizer has 100 tokens, but the tokenizer of {load}/iter_0000002 had 101"),
        (wider, load, None, 101, "--hidden-size is 24, was 20"),
        (OTHER, str(tmp_path), None, 101, f"--load {tmp_path} has no checkpoint"),
    ]
    assert ranks(1).run(not_refused, rows, logits_on_ranks) == [[]]


def test_record_that_does_not_match_the_tensors_is_rejected(load, tmp_path):
    """Edit a flag in run.json so that it contradicts the tensors, and check that loading is rejected.

    The checksums are made valid, as if a user had combined the folder from two checkpoints.
    """
    rows = []
    for flag, value, problem in (
        ("num_layers", 1, "layers.1.attention.proj.bias is not in that model"),
        ("num_layers", 3, "layers.2.attention.proj.bias is missing"),
        ("ffn_hidden_size", 40, "layers.0.mlp.fc1.bias has shape (44,), not (40,)"),
        ("max_position_embeddings", 15, "embedding.position.weight has shape (16, 20), not (15, 20)"),
    ):
        copy = shutil.copytree(load, tmp_path / f"{flag} {value}")
        checkpoint, record = copy / "iter_0000002", copy / "iter_0000002/run.json"
        record.write_text(re.sub(f'"{flag}": \\d+', f'"{flag}": {value}', record.read_text()))
        write_checksums(checkpoint, {name: sum_file(checkpoint / name) for name in read_checksums(checkpoint)})
        rows.append((str(copy), f"the tensors are not of the model that run.json describes: model.{problem}"))
    assert ranks(1).run(not_refused, rows, load_as_described) == [[]]
