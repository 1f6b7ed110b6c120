"""The tokenizer's files beside the checkpoints: once, whole, checked, and found again."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import record_of
from helpers.pairs import TEXT
from helpers.training import Case

from megazpp.base.files import DamagedError
from megazpp.checkpoint.checkpoints import write_checkpoint
from megazpp.checkpoint.folder import CheckpointFolder, read_tokenizer, write_tokenizer
from megazpp.checkpoint.record import TrainingProgress
from megazpp.data.text import train_sentencepiece
from megazpp.data.tokenizer import SentencePieceTokenizer, load_tokenizer
from megazpp.parallel.axis import MeshAxis


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(train_sentencepiece(iter([TEXT]), 288))


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Of every file below, and when it was written."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def save(path: Path, iteration: int, files: dict[str, bytes]) -> dict[str, object]:
    """A checkpoint of one process; its run.json."""
    folder = CheckpointFolder(path, "--save")
    folder.lock()
    record = record_of(Case(), progress=TrainingProgress(iteration=iteration))
    write_checkpoint(record, {"x": torch.zeros(2)}, folder, MeshAxis("all"), tokenizer=files)
    folder.unlock()
    return json.loads((folder.of(iteration) / "run.json").read_text())


def test_every_checkpoint_names_the_tokenizer_that_is_there_once(tmp_path, tokenizer):
    name = save(tmp_path, 1, tokenizer.files)["tokenizer_folder"]
    before = content(tmp_path / str(name))
    assert set(before) == {"tokenizer.model", "checksums.txt"}
    assert save(tmp_path, 2, tokenizer.files)["tokenizer_folder"] == name
    assert content(tmp_path / str(name)) == before
    other = SentencePieceTokenizer(train_sentencepiece(iter([TEXT]), 289))
    second = save(tmp_path, 3, other.files)["tokenizer_folder"]
    assert sorted(path.name for path in tmp_path.glob("tokenizer*")) == sorted([str(name), str(second)])
    assert content(tmp_path / str(name)) == before
    assert save(tmp_path, 4, {})["tokenizer_folder"] is None
    shutil.copytree(tmp_path, tmp_path / "elsewhere")
    found = load_tokenizer(read_tokenizer(tmp_path / "elsewhere", str(name)))
    assert found is not None
    assert (found.identity, found.files) == (tokenizer.identity, tokenizer.files)


def test_damage_is_named_and_the_next_save_keeps_it_aside(tmp_path, tokenizer):
    name = write_tokenizer(tmp_path, tokenizer.files)
    assert name is not None
    for number, file in enumerate(("tokenizer.model", "checksums.txt"), 1):
        damaged = tmp_path / name / file
        damaged.write_bytes(damaged.read_bytes()[:-3])
        with pytest.raises(DamagedError, match=f"{name}/{file} is damaged"):
            read_tokenizer(tmp_path, name)
        kept = content(tmp_path / name)
        assert write_tokenizer(tmp_path, tokenizer.files) == name
        read_tokenizer(tmp_path, name)
        assert content(tmp_path / f"{name}.replaced-{number}") == kept


def test_a_folder_that_is_missing_or_none_of_a_tokenizer_is_refused(tmp_path, tokenizer):
    name = write_tokenizer(tmp_path, tokenizer.files)
    assert name is not None
    shutil.move(tmp_path / name, tmp_path / "outside")
    with pytest.raises(DamagedError, match=f"{name} is missing.*--tokenizer-model"):
        read_tokenizer(tmp_path, name)
    for other in ("outside", "../x", str(tmp_path / "outside"), f"{name}/../outside"):
        with pytest.raises(DamagedError, match="is no folder of a tokenizer"):
            read_tokenizer(tmp_path, other)


def test_what_ends_half_way_leaves_nothing_that_counts(tmp_path, tokenizer, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            write_tokenizer(tmp_path, tokenizer.files)
    assert not list(tmp_path.iterdir())
    left = tmp_path / "tokenizer-0123456789abcdef.partial"  # of a process that was killed
    left.mkdir()
    assert CheckpointFolder(tmp_path, "--save").recover() == [f"removed {left}, which was not finished"]
