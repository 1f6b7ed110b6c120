"""Test the description of a run's samples, which shows whether a resumed run has the same data and order.

Also test the estimate of samples that a resumed run repeats.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazpp.data.config import DataConfig, Splits
from megazpp.data.dataset import build_datasets
from megazpp.data.identity import data_changes, describe_samples, same_sources, what_follows
from megazpp.data.indexed_builder import IndexedDatasetBuilder
from megazpp.data.indexed_dataset import _DIGEST_BYTES, IndexedDataset
from megazpp.data.tokenizer import ByteTokenizer

COUNTS = Splits(300, 8, 8)


def write(prefix: Path, *, seed: int = 0, documents: int = 200, shift: int = 0) -> Path:
    """Write a .bin/.idx pair of random documents with 1 to 99 token ids each.

    `shift` is added to every id, modulo 256.
    """
    draw = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for size in draw.integers(1, 100, size=documents):
            builder.add_document((draw.integers(0, 256, size=size) + shift) % 256)
        builder.finalize()
    return prefix


@pytest.fixture
def describe(tmp_path):
    for seed, name in enumerate("ab"):
        write(tmp_path / name, seed=seed)

    def built(*paths: str, counts: Splits[int] = COUNTS, seed: int = 1, **data: Any) -> Splits[Any]:
        data = {"seq_length": 32, "split": "90,5,5", "data_cache_path": str(tmp_path / "cache"), **data}
        prefixes = tuple(str(tmp_path / path) if path.isalpha() else path for path in paths)
        config = DataConfig(data_path=prefixes, **data)
        return build_datasets(config, ByteTokenizer(65000), num_samples=counts, seed=seed, log=lambda line: None)

    def described(*paths: str, counts: Splits[int] = COUNTS, **data: Any) -> dict[str, Any]:
        return describe_samples(built(*paths, counts=counts, **data), counts)

    described.built = built
    return described


def test_held_out_data_is_described_without_training_data(describe):
    """Describe data of a run without training samples (--skip-train).

    Ranks still compare their validation data by this description.
    """
    no_train = Splits(0, 8, 8)
    found, other = (describe(name, counts=no_train) for name in "ab")
    assert "order" not in found
    assert found["valid"] == describe("a")["valid"] != other["valid"]


def follows(before: dict[str, Any], now: dict[str, Any], consumed: int = 100) -> str:
    return what_follows(before, now, consumed)


SAME = "the samples come in the same order: none repeats, and none is skipped"


def test_moved_copied_and_renamed_data_is_the_same(describe, tmp_path):
    before = describe("a")
    for kind in (".bin", ".idx"):
        shutil.copy(tmp_path / f"a{kind}", tmp_path / f"moved{kind}")
        os.utime(tmp_path / f"a{kind}", (1, 1))
    for now in (describe("a"), describe("moved")):
        assert same_sources(before, now)
        assert data_changes(before, now, []) == []
        assert follows(before, now) == SAME


@pytest.mark.parametrize("kind", ["other documents", "one more document", "other ids of the same lengths"])
def test_changed_data_under_the_same_name_is_noticed(describe, tmp_path, kind):
    before = describe("a")
    options = {"other documents": {"seed": 9}, "one more document": {"documents": 201}}
    write(tmp_path / "a", **options.get(kind, {"shift": 1}))
    now = describe("a")
    assert not same_sources(before, now)
    name = f"{tmp_path / 'a'} (train)"
    assert data_changes(before, now, []) == [f"the tokens of {name} are not the same"]
    unknown = f"samples of {name} may repeat or be skipped, how many is not known"
    held_out = "; validation is over other samples; the test is over other samples"
    assert follows(before, now) == f"from here on samples come in another order: {unknown}{held_out}"


@pytest.mark.slow
def test_large_file_is_identified_by_its_size_and_pieces(tmp_path):
    ids = np.arange(_DIGEST_BYTES, dtype=np.uint16)  # the file has twice as many bytes as the digest reads
    digests = set()
    # The digest reads pieces of the file. The middle of the ids lies between two pieces, so the change around it must
    # be wide enough to reach the pieces.
    for at in (None, 0, _DIGEST_BYTES // 2, _DIGEST_BYTES - 1):
        changed = ids.copy()
        if at is not None:
            changed[max(0, at - 600_000) : at + 600_000] += 1
        with IndexedDatasetBuilder(tmp_path / "large", np.uint16) as builder:
            builder.add_document(changed)
            builder.finalize()
        digests.add(IndexedDataset(tmp_path / "large").digest())
    assert len(digests) == 4


def test_number_of_samples_changes_the_order_only_by_epochs(describe):
    """Samples are shuffled by epochs, so the length of a run changes their order only with its number of epochs."""
    epoch = describe("a")["sources"][0][3]
    assert 250 < epoch < 300
    counts = [COUNTS._replace(train=count) for count in (epoch - 50, epoch - 1, epoch + 1, 2 * epoch)]
    one, same, two, other = (describe("a", counts=each) for each in counts)
    assert follows(one, same) == SAME
    assert one["order"] != two["order"] != other["order"]
    assert "samples to come repeat earlier ones; others are skipped" in follows(one, two)


@pytest.mark.parametrize(
    ("change", "consumed"), [({"seed": 2}, 150), ({"seq_length": 24}, 200), ({"seed": 2, "count": 500}, 400)]
)
def test_estimate_of_repeated_samples_is_close_to_the_count(describe, tmp_path, change, consumed):
    draw, place = np.random.default_rng(0), 0
    # each token id is its own position, so equal samples have equal ids
    with IndexedDatasetBuilder(tmp_path / "places", np.uint16) as builder:
        for size in draw.integers(1, 100, size=300):
            builder.add_document(np.arange(place, place + size))
            place += size
        builder.finalize()
    flags = [{"seed": 1, "seq_length": 32, "count": 430} | each for each in ({}, change)]
    descriptions, served = [], []
    for each in flags:
        options = {"seed": each["seed"], "seq_length": each["seq_length"], "split": "100,0,0"}
        counts = Splits(each["count"], 0, 0)
        descriptions.append(describe("places", counts=counts, **options))
        train = describe.built("places", counts=counts, **options).train
        served.append([train[number][:-1] for number in range(each["count"])])
    seen, coming = np.concatenate(served[0][:consumed]), np.concatenate(served[1][consumed:])
    left = flags[1]["count"] - consumed
    text = follows(*descriptions, consumed)
    assert f"of the {left} samples to come repeat earlier ones; others are skipped" in text
    repeated = int(text.split("about ")[1].split()[0])
    assert repeated == pytest.approx(np.isin(coming, seen).mean() * left, abs=0.1 * left)


def test_other_blend_weights_continue_elsewhere_in_each_dataset(describe):
    before, now = describe("0.5", "a", "0.5", "b"), describe("0.25", "a", "0.75", "b")
    assert follows(before, describe("1", "a", "1", "b")) == SAME
    assert follows(before, now) == (
        "from here on samples come in another order: about 25 of the 200 samples to come repeat earlier ones; about 25 "
        "samples are skipped; validation is over other samples; the test is over other samples"
    )
    text = follows(describe("a"), before)
    assert "may repeat or be skipped, how many is not known" in text


def test_held_out_samples_are_compared_too(describe):
    before, now = describe("a"), describe("a", counts=Splits(300, 4, 8))
    assert follows(before, now) == f"{SAME}; validation is over 4 samples, was over 8"
    split = describe("a", split="90,10,0", counts=Splits(300, 8, 0))
    assert not same_sources(before, split)
    assert data_changes(before, split, []) == ["the data for valid and test is not the same"]
    assert data_changes(before, split, ["--split is ..."]) == []


def test_prompts_continue_by_the_number_of_completions():
    """Resume at 160 completions, and change the number of completions per prompt from 4 to 8 or 2.

    The 160 completions are then of 20 or 80 prompts instead of 40, so 20 prompts repeat, or 40 are skipped.
    """
    one = {"count": 50, "order": "x", "sources": [["p", "d", 1.0, 20, "x"]], "per_prompt": 4}
    assert follows(one, one | {"per_prompt": 8}, 160) == "20 prompts repeat"
    assert follows(one, one | {"per_prompt": 2}, 160) == "40 prompts are skipped"
    assert follows(one, one | {"per_prompt": 8}, 0) == SAME


def test_checkpoint_without_identity_may_have_another_order():
    assert follows({}, {"order": "x"}, 1234) == (
        "from here on samples may come in another order: some of the 1,234 samples consumed so far may repeat, and "
        "others may be skipped"
    )
    assert data_changes({}, {"order": "x"}, []) == []
    assert not same_sources({}, {"order": "x"})
