"""Test run.json, the file in a checkpoint that describes the run which wrote it."""

import dataclasses
import functools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import record_of
from helpers.refusals import not_refused
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case

from megazpp.base.files import DamagedError
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import RECORD as NAME
from megazpp.checkpoint.metadata import (
    CheckpointMetadata,
    agreed_schedule,
    batch_size_of,
    check_same_model,
    data_notes,
    describe_sizes,
    flag_notes,
    found_from_anywhere,
    read_record,
    rows_problem,
    schedule_ratio,
)
from megazpp.optim.config import ScheduleConfig
from megazpp.optim.schedule import Schedule, TrainingProgress, build_schedule

WHERE = Path("iter_0000007")
RECORD = record_of(Case())


def write(folder: Path, **values: Any) -> None:
    """Write run.json into `folder`: RECORD's JSON with `values` in place of the fields of these names."""
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(json.dumps(json.loads(RECORD.as_json()) | values))


def test_record_round_trips_and_another_format_is_refused(tmp_path):
    progress = TrainingProgress(iteration=3, consumed_samples=5, token_offset=-7)
    record = dataclasses.replace(RECORD, progress=progress, scaler={"scale": 2.0**16})
    (tmp_path / NAME).write_text(record.as_json())
    assert read_record(tmp_path) == record
    write(tmp_path, format=3)
    with pytest.raises(ValueError, match="has format 3, but this version reads only format 2") as caught:
        read_record(tmp_path)
    assert not isinstance(caught.value, DamagedError)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"flags": {"hidden_size": "64"}}, ": hidden_size is '64', not int"),
    ({"flags": {"num_layers": True}}, ": num_layers is True, not int"),
    ({"flags": {"num_layers": 2.0}}, ": num_layers is 2.0, not int"),
    ({"flags": {"norm_epsilon": None}}, ": norm_epsilon is None, not float"),
    ({"flags": {"normalization": "Batch"}}, ": normalization is 'Batch', not "),
    ({"flags": []}, ": flags is [], not dict"),
    ({"vocab_size": None}, ": vocab_size is None, not int"),
    ({"tokenizer_folder": 3}, ": tokenizer_folder is 3, not "),
    ({"groups": [1]}, ": groups is [1], not list"),
    ({"has_optimizer": 1}, ": has_optimizer is 1, not bool"),
    ({"progress": {"iteration": "x"}}, ": iteration is 'x', not int"),
    ({"progress": {"iteration": 9}}, " is of iteration 9, but the folder's name says 7"),
    ({"progress": {"iteration": -1}}, ": iteration is -1"),
    ({"progress": {"iteration": 7, "consumed_samples": 10**40}}, ": consumed_samples is 1000"),
    ({"progress": {"iteration": 7, "micro_batches": -(10**18)}}, ": micro_batches is -1000"),
    ({"progress": {"iteration": 7, "token_offset": -(10**19)}}, ": token_offset is -1000"),
    ({"progress": []}, " cannot be read"),
    ({"schedule": {}}, " cannot be read"),
    ({"schedule": None}, " cannot be read"),
    ({"format": "x"}, " cannot be read"),
    ({"format": math.inf}, " cannot be read"),
]


def test_unreadable_record_or_value_of_wrong_type_is_named_as_damage(tmp_path):
    checkpoint = tmp_path / WHERE
    write(checkpoint, progress={"iteration": 7})
    assert read_record(checkpoint).progress.iteration == 7

    def read(content: dict[str, Any] | str) -> None:
        if isinstance(content, dict):
            write(checkpoint, **content)
        else:
            (checkpoint / NAME).write_text(content, encoding="latin-1")
        read_record(checkpoint)

    junk = ("", "{", "[]", '{"format": 2}', '{"format": 2, "progress": {"x": 1}}', "\xff", "[" * 100_000)
    rows = [*((content, " cannot be read") for content in junk), *WRONG]
    named = [(content, f"{checkpoint}/{NAME}{message}") for content, message in rows]
    assert not_refused(named, read, DamagedError) == []


def test_run_may_pad_vocabulary_rows_but_a_converted_model_may_not():
    converted = dataclasses.replace(RECORD, layout={})
    rows = (RECORD.vocab_size - 1, RECORD.vocab_size, RECORD.vocab_size + 27)
    assert [rows_problem(RECORD, count) is None for count in rows] == [False, True, True]
    assert [rows_problem(converted, count) is None for count in rows] == [False, True, False]


def test_model_of_another_shape_is_rejected_by_its_flags():
    gpt, llama = (dataclasses.asdict(config) for config in (GPT2_STYLE, LLAMA_STYLE))
    check, other = functools.partial(check_same_model, where=WHERE), functools.partial(dataclasses.replace, GPT2_STYLE)
    check(gpt, other(hidden_dropout=0.3))
    check(dataclasses.asdict(other(ffn_hidden_size=80, kv_channels=5)), other(ffn_hidden_size=None))
    rows = [
        (gpt | {"hidden_size": 24, "kv_channels": 5}, GPT2_STYLE, "--hidden-size is 20, was 24 in iter_0000007; "),
        (llama, GPT2_STYLE, "--normalization is LayerNorm, was RMSNorm"),
    ]
    flags = {"qk_layernorm": True, "use_rope_scaling": True, "window_size": "15,0", "add_qkv_bias": True}
    flags |= {"no_rope_freq": "2", "rope_type": "yarn", "rotary_seq_len_interpolation_factor": 2.0}
    flags |= {"qk_layernorm_all_heads": True, "norm_after_block": True}
    flags |= {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 3.0,
    }
    for name, value in flags.items():
        variant = dataclasses.replace(LLAMA_STYLE, **{name: value})
        check(dataclasses.asdict(variant), variant)
        # run.json of a version that did not have this flag lacks the key, and must be accepted
        check({key: kept for key, kept in llama.items() if key != name}, LLAMA_STYLE)
        rows.append((llama, variant, f"--{name.replace('_', '-')} is"))
    assert not_refused(rows, check) == []


def test_other_data_gives_a_note_and_the_same_data_none():
    saved = {"seed": 1, "data_path": ["0.3", "a"], "train_iters": 10}
    now = {"seed": 1, "data_path": ("0.3", "a"), "train_iters": 10}
    assert data_notes(saved, now, WHERE) == []
    (note,) = data_notes(saved, now | {"seed": 2, "train_iters": 20}, WHERE)
    assert note.startswith("--seed is 2, was 1, --train-iters is 20, was 10 in iter_0000007: ")


def test_changed_flags_of_training_give_a_note_unless_they_are_compared_elsewhere():
    saved = {"beta": 0.1, "zero_gradient_bits": [8, 4], "diloco_steps": 2, "seed": 1, "swiglu": True, "weight_decay": 0}
    same = saved | {"zero_gradient_bits": (8, 4), "lora_r": 8}  # run.json of an older version lacks --lora-r
    assert flag_notes(saved, same, same, WHERE) == []
    other = same | {"seed": 2, "swiglu": False, "weight_decay": 1}
    assert flag_notes(saved, other, other, WHERE) == []
    for name, now, said in (
        ("beta", 0.5, "--beta is 0.5, was 0.1"),
        ("zero_gradient_bits", (8, 16), "--zero-gradient-bits is (8, 16), was [8, 4]"),
        ("diloco_steps", None, "--diloco-steps is None, was 2"),
    ):
        (note,) = flag_notes(saved, same | {name: now}, same, WHERE)
        assert note == f"{said} in iter_0000007: training continues with the values of this run"


def test_flags_that_change_text_are_compared_unless_tokens_are_equal():
    def described(digest: str) -> dict[str, Any]:
        sources = [["a", digest, 1.0, 10, digest]]
        return {
            "samples": {"order": digest, "sources": sources, "valid": None, "test": None, "per_prompt": 1, "count": 9}
        }

    flags = ("chat_template", "chat_template_kwargs", "system_prompt", "eos_token", "add_special_tokens")
    for name in flags:
        saved, now = {name: "x"} | described("one"), {name: None}
        # the flag differs, but both runs made equal tokens, so there is no note
        assert data_notes(saved, now | described("one"), WHERE) == []
        (note,) = data_notes(saved, now | described("two"), WHERE)
        assert note.startswith(f"--{name.replace('_', '-')} is None, was x, the tokens of a are not the same")


def test_batch_size_is_the_recorded_one_and_unknown_for_a_converted_model():
    assert batch_size_of(dataclasses.replace(RECORD, flags={"samples": {"global_batch_size": 7}})) == 7
    assert batch_size_of(dataclasses.replace(RECORD, flags={})) is None


STEPS = {"train_iters": 100, "train_samples": None}
IN_SAMPLES = {"train_iters": None, "train_samples": 320}


def of_batch(size: int, length: dict[str, Any], progress: TrainingProgress = TrainingProgress()) -> CheckpointMetadata:  # noqa: B008
    return dataclasses.replace(RECORD, progress=progress, flags={**length, "samples": {"global_batch_size": size}})


def test_position_on_a_schedule_counts_its_steps_or_samples():
    # 30 steps of 16 samples, of which one was skipped, so the schedule advanced by 464 samples
    at = TrainingProgress(30, 480, 464)
    assert schedule_ratio(of_batch(16, STEPS, at), of_batch(8, STEPS)) == Fraction(8, 16)
    assert schedule_ratio(of_batch(16, STEPS, at), of_batch(16, STEPS)) == 1
    assert schedule_ratio(of_batch(16, IN_SAMPLES, at), of_batch(8, IN_SAMPLES)) == 1
    # Ten more steps with a batch size of 8, of which one was skipped: 464 * 8 / 16 + 9 * 8 samples of the schedule
    twice = TrainingProgress(40, 560, 304)
    assert schedule_ratio(of_batch(8, STEPS, twice), of_batch(8, STEPS)) == 1
    assert schedule_ratio(of_batch(8, STEPS, twice), of_batch(8, IN_SAMPLES)) * (40 * 8) == 560
    assert schedule_ratio(of_batch(8, IN_SAMPLES, twice), of_batch(8, STEPS)) * 560 == 40 * 8
    converted = dataclasses.replace(RECORD, progress=at, flags={}, layout={})
    assert schedule_ratio(converted, of_batch(8, STEPS)) == 1
    # before the first step the schedule has not advanced, so another batch size does not rescale its position
    assert schedule_ratio(of_batch(16, STEPS), of_batch(8, STEPS)) == 1


@pytest.mark.parametrize("warmup", [{}, {"lr_warmup_iters": 7}, {"lr_warmup_fraction": 0.15}])
def test_schedule_of_steps_ends_with_the_last_step_at_any_batch_size(warmup):
    def scheduled(size: int) -> Schedule:
        rates = ScheduleConfig(
            lr=1.0,
            lr_decay_style="WSD",
            lr_wsd_decay_iters=50,
            start_weight_decay=0.0,
            end_weight_decay=0.1,
            weight_decay_incr_style="linear",
            **warmup,
        )
        return build_schedule(rates, weight_decay=0.1, **STEPS, global_batch_size=size)

    before, own, ratio = scheduled(16), scheduled(6), Fraction(6, 16)
    agree = functools.partial(agreed_schedule, before.state_dict(), own, where=WHERE, ratio=ratio)
    with pytest.raises(ValueError, match=r"a step of the schedule has 0\.375 times the samples that it had in iter_"):
        agree(CheckpointConfig())
    for flag in ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"):
        found = agree(CheckpointConfig(load="x", **{flag: True}))
        for step in range(101):
            assert found.learning_rate(step * 6) == pytest.approx(before.learning_rate(step * 16)), (flag, step)
            assert found.weight_decay(step * 6) == pytest.approx(before.weight_decay(step * 16)), (flag, step)


def test_twice_the_steps_at_half_the_batch_size_are_another_schedule():
    rates = ScheduleConfig(lr=1.0)
    one, two = (
        build_schedule(rates, weight_decay=0.0, train_iters=steps, train_samples=None, global_batch_size=size)
        for steps, size in ((100, 16), (200, 8))
    )
    assert one == two  # both schedules are equal if they are measured in samples: 100 * 16 = 200 * 8
    with pytest.raises(ValueError, match=r"0\.5 times the samples"):
        agreed_schedule(one.state_dict(), two, CheckpointConfig(), WHERE, ratio=Fraction(8, 16))


def test_data_and_tokenizer_paths_are_saved_as_absolute_paths(tmp_path, monkeypatch):
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
    assert found_from_anywhere(flags) == flags | {
        "tokenizer_model": str(tmp_path / "my.model"),
        "data_path": ("0.3", str(tmp_path / "my_text_document"), "0.7", "sub/other"),
    }


def test_changed_schedule_is_explained_by_ranks_and_batch_sizes():
    flags = {"micro_batch_size": 8, "global_batch_size": None}
    layouts = ({"replicate": 1, "cross": 1, "local": ranks, "tp": 1} for ranks in (1, 2))
    one, two = (dataclasses.replace(RECORD, flags=flags, layout=layout) for layout in layouts)
    assert describe_sizes(two) == "2 rank(s), --micro-batch-size 8, --global-batch-size None"
    now = build_schedule(
        ScheduleConfig(lr=1.0), weight_decay=0.0, train_iters=40, train_samples=None, global_batch_size=16
    )
    saved = now.state_dict() | {"decay_samples": 320}
    sizes = f"this run has {describe_sizes(two)}; {WHERE} had {describe_sizes(one)}"
    message = "decay samples is 640, in .* 320\nthis run has 2 rank.*had 1 rank.*\n--override"
    with pytest.raises(ValueError, match=message):
        agreed_schedule(saved, now, CheckpointConfig(), WHERE, sizes=sizes)
