"""A study of a small model: points, choices and the plot; and the flags of the shipped ones fit their clusters."""

from __future__ import annotations

from pathlib import Path

import pytest
from scaling_study import ROOT, STUDIES, Study, draw, run

from megazpp.arguments import parse_run_config
from megazpp.planner.search import COMPARED


@pytest.mark.slow
def test_a_study_has_every_scheme_at_every_size_and_a_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    study = Study(
        "tiny on laptops, 1 Gbit/s", "two_laptops", "@configs/gpt_tiny.args --vocab-size 512 --micro-batch-size 4"
    )
    found = run(study, [2, 8])
    assert [(point.gpus, point.scheme) for point in found.points] == [(n, name) for n in (2, 8) for name in COMPARED]
    assert [choice.gpus for choice in found.choices if choice] == [2, 8]
    draw([found], tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert all(label in text for label in (*COMPARED, "chosen", "tiny on laptops", "1 Gbit/s"))


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.cluster)
def test_the_shipped_studies_say_how_many_tokens_a_gpu_has(study: Study):
    config = parse_run_config(study.flags.split(), ROOT, program="test").config
    assert config.data.seq_length is not None
    tokens = config.data.seq_length * (config.batches.micro_batch_size or 0)
    assert f", {tokens} tokens per GPU" in study.title
    assert config.parallel.tensor_model_parallel_size == 1
