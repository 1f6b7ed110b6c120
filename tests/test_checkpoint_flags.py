"""Flags of a tool that uses a checkpoint: given ones first, then the checkpoint's, then the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megazpp.arguments import ParsedRun, parse_run_config
from megazpp.checkpoint.progress import Progress
from megazpp.checkpoint.record import RunRecord
from megazpp.checkpoint_flags import with_checkpoint_flags

SAVED = {
    "num_layers": 3,
    "hidden_size": 64,
    "seq_length": 48,
    "bf16": True,
    "seed": 77,
    "nproc": 5,
    "tensor_model_parallel_size": 4,
    "zero_stage": 1,
    "text_path": ["a.txt", "b.txt"],
    "sample_tokens": 9,
    "a_flag_of_another_version": 1,
}


def settle(*argv: str, **flags: Any) -> ParsedRun:
    parsed = parse_run_config(argv, Path.cwd(), program="tool.py", default_file=None)
    values = {"progress": Progress(), "scaler": {}, "groups": [], "schedule": {}, "vocab_size": 1, "layout": {}}
    return with_checkpoint_flags(parsed, RunRecord(**values, flags=SAVED | flags))


def test_model_data_tokenizer_precision_and_seed_are_the_checkpoint_s():
    config = settle().config
    assert (config.model.num_layers, config.model.hidden_size, config.data.seq_length) == (3, 64, 48)
    assert config.precision.bf16
    assert config.launch.seed == 77
    assert config.data.text_path == ("a.txt", "b.txt")


def test_where_and_how_the_tool_runs_is_not():
    config = settle().config
    assert config.launch.nproc is None
    assert config.parallel.tensor_model_parallel_size == 1
    assert config.zero.stage == 3
    assert config.sample.sample_tokens == 0


def test_given_flags_win_and_the_report_says_where_values_come_from():
    parsed = settle("--seq-length", "24", "--seed", "3", "--no-bf16")
    assert (parsed.config.data.seq_length, parsed.config.launch.seed, parsed.config.precision.bf16) == (24, 3, False)
    assert parsed.origins["num_layers"] == "checkpoint"
    assert parsed.origins["seq_length"] == "command line"
    assert "nproc" not in parsed.origins
