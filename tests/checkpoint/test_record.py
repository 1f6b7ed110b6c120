"""run.json: what a checkpoint says about its run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import Job, template
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case

from megazpp.base.files import DamagedError
from megazpp.checkpoint.folder import RECORD as NAME
from megazpp.checkpoint.record import (
    TrainingProgress,
    check_same_model,
    data_notes,
    found_from_anywhere,
    read_record,
    rows_problem,
)

WHERE = Path("iter_0000007")
RECORD = template(Job(case=Case(), steps=0, flags={}))


def test_a_record_is_read_as_it_was_written(tmp_path: Path):
    record = dataclasses.replace(
        RECORD, progress=TrainingProgress(iteration=3, consumed_samples=5), scaler={"scale": 2.0**16}
    )
    (tmp_path / NAME).write_text(record.as_json())
    assert read_record(tmp_path) == record


def test_a_record_that_cannot_be_read_is_damage_and_one_of_a_later_version_is_not(tmp_path: Path):
    for content in ("", "{", "[]", '{"format": 1}', '{"format": 1, "progress": {"x": 1}}', "\xff"):
        (tmp_path / NAME).write_text(content, encoding="latin-1")
        with pytest.raises(DamagedError, match=f"{tmp_path}/{NAME} cannot be read"):
            read_record(tmp_path)
    (tmp_path / NAME).write_text(RECORD.as_json().replace('"format": 2', '"format": 3'))
    with pytest.raises(ValueError, match="has format 3, this version knows 2"):
        read_record(tmp_path)


def test_a_run_may_pad_the_vocabulary_s_rows_and_a_conversion_has_its_own():
    converted = dataclasses.replace(RECORD, layout={})
    rows = (RECORD.vocab_size - 1, RECORD.vocab_size, RECORD.vocab_size + 27)
    assert [rows_problem(RECORD, count) is None for count in rows] == [False, True, True]
    assert [rows_problem(converted, count) is None for count in rows] == [False, True, False]


def test_a_model_of_another_shape_is_refused_by_its_flags():
    flags = json.loads(json.dumps(dataclasses.asdict(GPT2_STYLE)))
    check_same_model(flags, GPT2_STYLE, WHERE)
    message = "--hidden-size is 20, was 24 in iter_0000007; --use-checkpoint-args"
    with pytest.raises(ValueError, match=message):
        check_same_model(flags | {"hidden_size": 24, "kv_channels": 5}, GPT2_STYLE, WHERE)
    with pytest.raises(ValueError, match=r"-heads is 4, was 8.*--normalization is LayerNorm, was RMSNorm"):
        check_same_model(dataclasses.asdict(LLAMA_STYLE), GPT2_STYLE, WHERE)


def test_flags_that_come_to_the_same_shape_are_the_same():
    explicit = dataclasses.replace(GPT2_STYLE, ffn_hidden_size=80, kv_channels=5)
    implicit = dataclasses.replace(GPT2_STYLE, ffn_hidden_size=None, hidden_dropout=0.3)
    check_same_model(dataclasses.asdict(explicit), implicit, WHERE)


def test_a_checkpoint_of_one_variant_is_not_loaded_as_the_other():
    for name, value in (
        ("qk_layernorm", True),
        ("use_rope_scaling", True),
        ("window_size", "15,0"),
        ("add_qkv_bias", True),
    ):
        variant = dataclasses.replace(LLAMA_STYLE, **{name: value})
        check_same_model(dataclasses.asdict(variant), variant, WHERE)
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is"):
            check_same_model(dataclasses.asdict(LLAMA_STYLE), variant, WHERE)
        older = {key: kept for key, kept in dataclasses.asdict(LLAMA_STYLE).items() if key != name}
        check_same_model(older, LLAMA_STYLE, WHERE)  # from before there was such a flag


def test_other_data_gives_a_note_and_the_same_data_none():
    saved = {"seed": 1, "data_path": ["0.3", "a"], "train_iters": 10}
    now = {"seed": 1, "data_path": ("0.3", "a"), "train_iters": 10}
    assert data_notes(saved, now, WHERE) == []
    (note,) = data_notes(saved, now | {"seed": 2, "train_iters": 20}, WHERE)
    assert note.startswith("--seed is 2, was 1, --train-iters is 20, was 10 in iter_0000007: ")


def test_paths_of_data_and_tokenizer_are_kept_so_that_another_folder_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("my.model", "my_text_document.idx"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    flags = {
        "tokenizer_model": "my.model",
        "vocab_file": None,
        "merge_file": "gone.txt",
        "data_path": ("0.3", "my_text_document", "0.7", "sub/other"),
        "text_path": ("builtin:moby_dick",),
        "data_cache_path": "",
        "seed": 3,
        "load": "my.model",
    }
    kept = found_from_anywhere(flags)
    assert kept == flags | {
        "tokenizer_model": str(tmp_path / "my.model"),
        "data_path": ("0.3", str(tmp_path / "my_text_document"), "0.7", "sub/other"),
    }


def test_a_record_of_format_1_has_no_tokenizer_and_is_read(tmp_path: Path):
    values = json.loads(RECORD.as_json()) | {"format": 1}
    (tmp_path / NAME).write_text(json.dumps({k: v for k, v in values.items() if not k.startswith("tokenizer")}))
    record = read_record(tmp_path)
    assert (record.tokenizer, record.tokenizer_folder) == (None, None)
    assert record.flags == json.loads(RECORD.as_json())["flags"]


def test_a_record_of_another_iteration_than_the_folder_says_is_damage(tmp_path: Path):
    for folder, found in (("iter_0000009", True), ("iter_0000012", False)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / NAME).write_text(
            dataclasses.replace(RECORD, progress=TrainingProgress(iteration=9)).as_json()
        )
        if found:
            assert read_record(tmp_path / folder).progress.iteration == 9
        else:
            with pytest.raises(DamagedError, match=r"run.json is of iteration 9, the folder's name says 12"):
                read_record(tmp_path / folder)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"flags": {"hidden_size": "64"}}, "hidden_size is '64', not int"),
    ({"flags": {"num_layers": True}}, "num_layers is True, not int"),
    ({"flags": {"num_layers": 2.0}}, "num_layers is 2.0, not int"),
    ({"flags": {"norm_epsilon": None}}, "norm_epsilon is None, not float"),
    ({"flags": {"normalization": "Batch"}}, "normalization is 'Batch', not "),
    ({"flags": []}, r"flags is \[\], not dict"),
    ({"vocab_size": "101"}, "vocab_size is '101', not int"),
    ({"vocab_size": None}, "vocab_size is None, not int"),
    ({"tokenizer_folder": 3}, "tokenizer_folder is 3, not "),
    ({"scaler": 1}, "scaler is 1, not dict"),
    ({"groups": [1]}, r"groups is \[1\], not list"),
    ({"has_optimizer": 1}, "has_optimizer is 1, not bool"),
    ({"progress": {"iteration": "x"}}, "iteration is 'x', not int"),
    ({"progress": []}, "cannot be read"),
    ({"schedule": {}}, "cannot be read"),
    ({"schedule": None}, "cannot be read"),
    ({"format": "x"}, "cannot be read"),
]


def test_a_value_of_another_type_is_damage_and_named(tmp_path: Path):
    for changes, message in WRONG:
        (tmp_path / NAME).write_text(json.dumps(json.loads(RECORD.as_json()) | changes))
        with pytest.raises(DamagedError, match=f"{NAME}.*{message}"):
            read_record(tmp_path)
