"""Test the flags of a program that loads a checkpoint.

Given flags have priority over the checkpoint's flags, and the checkpoint's flags over defaults.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from helpers.hf_tokenizers import definition
from helpers.refusals import not_refused

from megazpp.base.files import DamagedError
from megazpp.checkpoint.folder import CheckpointFolder, write_tokenizer
from megazpp.checkpoint.metadata import CheckpointMetadata
from megazpp.data.tokenizer import HFTokenizer, load_tokenizer
from megazpp.diloco.config import DilocoConfig
from megazpp.features import FEATURES
from megazpp.inference.config import SampleConfig
from megazpp.optim.schedule import TrainingProgress
from megazpp.run.arguments import ParsedRun, parse_run_config
from megazpp.run.checkpoint_flags import (
    with_checkpoint_flags,
    with_checkpoint_tokenizer,
    with_resumed_features,
    with_resumed_weight_delta,
)

SAVED = {
    "num_layers": 3, "hidden_size": 64, "seq_length": 48, "bf16": True, "seed": 77, "text_path": ["a.txt", "b.txt"],
    "nproc": 5, "tensor_model_parallel_size": 4, "zero_stage": 1, "sample_tokens": 9, "a_flag_of_another_version": 1,
    "add_special_tokens": False,
}  # fmt: skip


def parse(argv: str = "") -> ParsedRun:
    return parse_run_config(argv.split(), Path.cwd(), program="tool.py", features=FEATURES, default_file=None)


def record(tokenizer_folder: str | None = None, tokenizer: str = "", **flags: Any) -> CheckpointMetadata:
    empty = {"scaler": {}, "groups": [], "schedule": {}, "layout": {}, "progress": TrainingProgress()}
    names = {"tokenizer_folder": tokenizer_folder, "tokenizer": tokenizer}
    return CheckpointMetadata(**empty, **names, vocab_size=300, flags=SAVED | flags)


def resolve(argv: str = "", *, take: Any = with_checkpoint_flags, **flags: Any) -> ParsedRun:
    return take(parse(argv), record(**flags), CheckpointFolder("ck", "--load"))


def test_model_flags_come_from_checkpoint_and_launch_flags_do_not():
    config = resolve().config
    assert (config.model.num_layers, config.model.hidden_size, config.data.seq_length) == (3, 64, 48)
    assert (config.precision.bf16, config.launch.seed, config.data.text_path) == (True, 77, ("a.txt", "b.txt"))
    assert (config.launch.nproc, config.parallel.tensor_model_parallel_size, config.zero.stage) == (None, 1, 3)
    assert config.section(SampleConfig).sample_tokens == 0
    # If a checkpoint has no copy of the tokenizer, the tool takes the path of the tokenizer from the checkpoint's
    # flags.
    earlier = resolve(tokenizer_type="SentencePieceTokenizer", tokenizer_model="/my.model")
    assert earlier.config.tokenizer.tokenizer_model == "/my.model"


def test_given_flags_override_the_checkpoints_and_flags_they_exclude():
    parsed = resolve("--seq-length 24 --seed 3 --no-bf16")
    assert (parsed.config.data.seq_length, parsed.config.launch.seed, parsed.config.precision.bf16) == (24, 3, False)
    assert (parsed.origins["num_layers"], parsed.origins["seq_length"]) == ("checkpoint", "command line")
    assert "nproc" not in parsed.origins
    config = resolve("--fp16 --mock-data", grad_reduce_in_bf16=True).config
    assert (config.precision.fp16, config.precision.bf16, config.data.sources) == (True, False, ["--mock-data"])
    # float8 is not taken from the checkpoint, because some devices do not support it
    assert resolve(fp8_format="hybrid").config.model.fp8_format is None
    assert resolve("--fp8-format e4m3", fp8_format="hybrid").config.model.fp8_format == "e4m3"


def test_saved_flag_of_wrong_type_is_rejected_by_name():
    rows = [
        ({"seq_length": "48"}, "seq_length is '48', not "),
        ({"text_path": [1]}, "text_path is [1], not tuple"),
        ({"bf16": "yes"}, "bf16 is 'yes', not bool"),
        ({"seed": 1.5}, "seed is 1.5, not int"),
    ]
    rows = [(flags, f"ck/iter_0000000/run.json: {message}") for flags, message in rows]
    assert not not_refused(rows, lambda flags: resolve(**flags), DamagedError)


# ---- tokenizer of the checkpoint ----


WORDS = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, "<s>"))


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path, "--load")


@pytest.fixture
def beside(folder) -> str:
    """Write a tokenizer's files beside the checkpoints. Return the name of their folder."""
    return write_tokenizer(folder.path, HFTokenizer(definition(WORDS.to_str())).files)


def test_copied_tokenizer_is_preferred_to_the_training_path(folder, beside):
    saved = record(beside, tokenizer_type="SentencePieceTokenizer", tokenizer_model="/gone.model")
    parsed = with_checkpoint_flags(parse(), saved, folder)
    path, found = f"{folder.path}/{beside}", parsed.config.tokenizer
    assert (found.kind, found.tokenizer_model) == ("HuggingFaceTokenizer", path)
    assert (found.add_special_tokens, found.model_vocab_size) == (False, 300)
    assert parsed.origins["tokenizer_model"] == "checkpoint"
    for lines in (parsed.notices, with_checkpoint_tokenizer(parse(), saved, folder).notices):
        assert lines == (f"using the tokenizer of --load {folder.path}: {beside}",)


def test_tokenizer_given_by_flags_replaces_the_checkpoints_entirely(folder, beside):
    saved = record(beside, vocab_file="v", merge_file="m", tokenizer_type="GPT2BPETokenizer")
    WORDS.save(f"{folder.path}/other.json")
    for argv in (f"--tokenizer-model {folder.path}/other.json", "--tokenizer-type NullTokenizer"):
        given = parse(argv)
        for parsed in (with_checkpoint_flags(given, saved, folder), with_checkpoint_tokenizer(given, saved, folder)):
            assert (parsed.config.tokenizer, parsed.notices) == (given.config.tokenizer, ())


def test_special_tokens_and_vocab_size_come_from_checkpoint_or_flags(folder):
    """Load the tokenizer with the checkpoint's --add-special-tokens and vocabulary size, unless flags are given.

    The same holds if the flags name the checkpoint's own tokenizer.
    """
    marking = tokenizers.Tokenizer.from_str(WORDS.to_str())
    marking.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    for recorded, named in itertools.product((True, False), (False, True)):
        made = HFTokenizer(definition(marking.to_str()), add_special_tokens=recorded)
        beside = write_tokenizer(folder.path, made.files)
        saved = record(beside, made.identity, add_special_tokens=recorded)
        argv = f"--tokenizer-model {folder.path}/{beside}" if named else ""
        parsed = with_checkpoint_flags(parse(argv), saved, folder)
        loaded = load_tokenizer(parsed.config.tokenizer)
        assert loaded is not None
        assert (loaded.identity, loaded.vocab_size, loaded.encode("</s>")) == (made.identity, 300, made.encode("</s>"))
        other = parse(f"{argv} --{'no-' * recorded}add-special-tokens")
        resolved = with_checkpoint_flags(other, saved, folder).config.tokenizer
        assert (resolved.add_special_tokens, resolved.model_vocab_size) == (not recorded, 300)


def test_vocab_size_flag_alone_gives_way_to_checkpoint_with_a_notice(folder, beside):
    parsed = with_checkpoint_tokenizer(parse("--vocab-size 8000"), record(beside), folder)
    assert parsed.config.tokenizer.tokenizer_model == f"{folder.path}/{beside}"
    assert parsed.notices[1:] == ("--vocab-size 8000 gives way to the checkpoint's 300",)
    same = with_checkpoint_tokenizer(parse("--vocab-size 300"), record(beside), folder)
    assert len(same.notices) == 1


# ---- DiLoCo's flags of the checkpoint ----


def test_outer_optimizer_flags_are_kept_on_resume_unless_given():
    def rates(argv: str, **chosen: Any) -> tuple[Any, ...]:
        resolved = resolve(argv, take=with_resumed_features, **chosen)
        diloco = resolved.config.section(DilocoConfig)
        return diloco.diloco_outer_lr, diloco.diloco_outer_momentum, resolved.origins.get("diloco_outer_lr")

    chosen = {"diloco_outer_lr": 1.0, "diloco_outer_momentum": 0.0}
    assert rates("--diloco-steps 10", **chosen) == (1.0, 0.0, "checkpoint")
    assert rates("--diloco-steps 10 --diloco-outer-momentum 0.5", **chosen) == (1.0, 0.5, "checkpoint")
    # flags of DiLoCo are not taken over if this run or the checkpoint's run has no --diloco-steps
    assert rates("", **chosen) == rates("--diloco-steps 10") == (None, None, None)
    with pytest.raises(DamagedError, match=r"run\.json: .*outer.lr"):
        rates("--diloco-steps 10", diloco_outer_lr="a lot")


# ---- the checkpoint's format of weights between nodes ----


def test_resumed_run_keeps_the_weight_format_of_its_checkpoint():
    for argv, saved, kept in [
        ("--bf16 --zeropp", {"zeropp": True, "zero_weight_delta": "lossless"}, "lossless"),
        ("--bf16 --zeropp", {"zeropp": True, "zero_weight_delta": "none"}, "none"),
        ("--bf16 --zeropp --zero-weight-delta auto", {"zeropp": True, "zero_weight_delta": "none"}, "none"),
        # the checkpoint's run has chosen no format, because it had one node or another scheme
        ("--bf16 --zeropp", {"zeropp": True, "zero_weight_delta": "auto"}, "auto"),
        ("--bf16 --zeropp", {"zeropp": False, "zero_weight_delta": "auto"}, "auto"),
        # this run has no format to choose: it has no --zeropp, or it computes in fp32, or a flag sets the format
        ("--bf16", {"zeropp": True, "zero_weight_delta": "lossless"}, "auto"),
        ("--zeropp", {"zeropp": True, "zero_weight_delta": "lossless"}, "auto"),  # fp32 compute has no lossless deltas
        ("--bf16 --zeropp --zero-quantized-weights", {"zeropp": True, "zero_weight_delta": "lossless"}, "auto"),
        ("--bf16 --zeropp --zero-weight-delta none", {"zeropp": True, "zero_weight_delta": "lossless"}, "none"),
        ("--bf16 --zeropp --zero-weight-delta lossless", {"zeropp": True}, "lossless"),
    ]:
        resolved = resolve(argv, take=with_resumed_weight_delta, **saved)
        assert resolved.config.zero.zero_weight_delta == kept, (argv, saved)
        took = resolved.origins.get("zero_weight_delta") == "checkpoint"
        format_in_words = "lossless deltas" if kept == "lossless" else "int8 blocks"
        assert took == any(f"{format_in_words}, because the checkpoint" in line for line in resolved.notices), argv
    with pytest.raises(DamagedError, match=r"run\.json: zero_weight_delta is 'some'"):
        resolve("--bf16 --zeropp", take=with_resumed_weight_delta, zeropp=True, zero_weight_delta="some")
