"""run.json: what a checkpoint says about its run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import record_of
from helpers.refusals import not_refused
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
RECORD = record_of(Case())


def write(folder: Path, **values: Any) -> None:
    """A record in which these values are other ones."""
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(json.dumps(json.loads(RECORD.as_json()) | values))


def test_a_record_is_read_as_it_was_written(tmp_path):
    progress = TrainingProgress(iteration=3, consumed_samples=5)
    record = dataclasses.replace(RECORD, progress=progress, scaler={"scale": 2.0**16})
    (tmp_path / NAME).write_text(record.as_json())
    assert read_record(tmp_path) == record


def test_a_record_of_format_1_has_no_tokenizer_and_a_later_one_is_refused(tmp_path):
    write(tmp_path, format=1)
    values = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps({k: v for k, v in values.items() if not k.startswith("tokenizer")}))
    record = read_record(tmp_path)
    assert (record.tokenizer, record.tokenizer_folder) == (None, None)
    assert record.flags == values["flags"]
    write(tmp_path, format=3)
    with pytest.raises(ValueError, match="has format 3, this version knows 2") as caught:
        read_record(tmp_path)
    assert not isinstance(caught.value, DamagedError)


def test_a_record_that_cannot_be_read_or_is_of_another_iteration_than_its_folder_is_damage(tmp_path):
    for content in ("", "{", "[]", '{"format": 1}', '{"format": 1, "progress": {"x": 1}}', "\xff"):
        (tmp_path / NAME).write_text(content, encoding="latin-1")
        with pytest.raises(DamagedError, match=f"{tmp_path}/{NAME} cannot be read"):
            read_record(tmp_path)
    for folder in ("iter_0000009", "iter_0000012"):
        write(tmp_path / folder, progress={"iteration": 9})
    assert read_record(tmp_path / "iter_0000009").progress.iteration == 9
    with pytest.raises(DamagedError, match=r"run.json is of iteration 9, the folder's name says 12"):
        read_record(tmp_path / "iter_0000012")


def test_a_run_may_pad_the_vocabulary_s_rows_and_a_conversion_has_its_own():
    converted = dataclasses.replace(RECORD, layout={})
    rows = (RECORD.vocab_size - 1, RECORD.vocab_size, RECORD.vocab_size + 27)
    assert [rows_problem(RECORD, count) is None for count in rows] == [False, True, True]
    assert [rows_problem(converted, count) is None for count in rows] == [False, True, False]


def test_a_model_of_another_shape_is_refused_by_its_flags_whatever_they_come_from():
    flags = json.loads(json.dumps(dataclasses.asdict(GPT2_STYLE)))
    check_same_model(flags, GPT2_STYLE, WHERE)
    explicit = dataclasses.replace(GPT2_STYLE, ffn_hidden_size=80, kv_channels=5)
    check_same_model(dataclasses.asdict(explicit), dataclasses.replace(GPT2_STYLE, ffn_hidden_size=None), WHERE)
    check_same_model(flags, dataclasses.replace(GPT2_STYLE, hidden_dropout=0.3), WHERE)
    other = dataclasses.asdict(LLAMA_STYLE)
    rows = [
        (flags | {"hidden_size": 24, "kv_channels": 5}, "--hidden-size is 20, was 24 in iter_0000007; --use-check"),
        (other, "-heads is 4, was 8"),
        (other, "--normalization is LayerNorm, was RMSNorm"),
    ]
    assert not_refused(rows, lambda saved: check_same_model(saved, GPT2_STYLE, WHERE)) == []


def test_a_checkpoint_of_one_variant_is_not_loaded_as_the_other():
    plain = dataclasses.asdict(LLAMA_STYLE)
    flags = {"qk_layernorm": True, "use_rope_scaling": True, "window_size": "15,0", "add_qkv_bias": True}
    for name, value in flags.items():
        variant = dataclasses.replace(LLAMA_STYLE, **{name: value})
        check_same_model(dataclasses.asdict(variant), variant, WHERE)
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is"):
            check_same_model(plain, variant, WHERE)
        older = {key: kept for key, kept in plain.items() if key != name}
        check_same_model(older, LLAMA_STYLE, WHERE)  # from before there was such a flag


def test_other_data_gives_a_note_and_the_same_data_none():
    saved = {"seed": 1, "data_path": ["0.3", "a"], "train_iters": 10}
    now = {"seed": 1, "data_path": ("0.3", "a"), "train_iters": 10}
    assert data_notes(saved, now, WHERE) == []
    (note,) = data_notes(saved, now | {"seed": 2, "train_iters": 20}, WHERE)
    assert note.startswith("--seed is 2, was 1, --train-iters is 20, was 10 in iter_0000007: ")


def test_paths_of_data_and_tokenizer_are_kept_so_that_another_folder_finds_them(tmp_path, monkeypatch):
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


def test_a_value_of_another_type_is_damage_and_named(tmp_path):
    for changes, message in WRONG:
        write(tmp_path, **changes)
        with pytest.raises(DamagedError, match=f"{NAME}.*{message}"):
            read_record(tmp_path)
