"""The tracker: Megatron's names at the right times, each sink without the other, and clear refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import megazpp.training.tracking as tracking
from megazpp.training.metrics import Meter, RunShape, StepRecord
from megazpp.training.run_folder import RunFolder
from megazpp.training.sinks import TensorBoardSink
from megazpp.training.tracking import Tracker, TrackingConfig, check_tracking, open_sinks

SHAPE = RunShape(total_iterations=10, total_samples=80, seq_length=100, world_size=4, flops_per_token=2 * 10**9)
CPU = torch.device("cpu")


class Recorder:
    def __init__(self) -> None:
        self.written: list[tuple[dict[str, float], int, int]] = []
        self.exit_code: int | None = None

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        self.written.append((dict(scalars), iteration, consumed_samples))

    def close(self, *, exit_code: int) -> None:
        self.exit_code = exit_code


def step(iteration: int, **values: Any) -> StepRecord:
    defaults: dict[str, Any] = {
        "consumed_samples": 8 * iteration,
        "global_batch_size": 8,
        "lm_loss": 4.0,
        "grad_norm": 1.0,
        "learning_rate": 0.1,
        "seconds": 0.5,
    }
    return StepRecord(iteration=iteration, **{**defaults, **values})


def tracker(tmp_path: Path, **flags: Any) -> tuple[Tracker, Recorder]:
    sink = Recorder()
    return Tracker(TrackingConfig(**flags), RunFolder(tmp_path), [sink], world_size=4, device=CPU), sink


def test_a_step_is_written_under_megatrons_names(tmp_path: Path):
    track, sink = tracker(tmp_path)
    track.step(step(3))
    expected = {"learning-rate": 0.1, "batch-size": 8, "lm loss": 4.0, "grad-norm": 1.0, "loss-scale": 1.0}
    assert sink.written == [(expected, 3, 24)]


def test_optional_scalars_are_written_when_asked_for(tmp_path: Path):
    track, sink = tracker(
        tmp_path,
        log_loss_scale_to_tensorboard=False,
        log_world_size_to_tensorboard=True,
        log_memory_to_tensorboard=True,
    )
    track.step(step(1, num_zeros=3.0, params_norm=9.0, grad_norm=None))
    ((scalars, _, _),) = sink.written
    assert scalars == {
        "learning-rate": 0.1,
        "batch-size": 8,
        "lm loss": 4.0,
        "num-zeros": 3.0,
        "params-norm": 9.0,
        "world-size": 4,
    }


def test_steps_between_the_tensorboard_interval_are_left_out(tmp_path: Path):
    track, sink = tracker(tmp_path, tensorboard_log_interval=3)
    for iteration in range(1, 8):
        track.step(step(iteration))
    assert [iteration for _, iteration, _ in sink.written] == [3, 6]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, None),
        ({"log_throughput": True}, None),
        ({"log_timers_to_tensorboard": True}, {"iteration-time": 0.5}),
        (
            {"log_timers_to_tensorboard": True, "log_throughput": True},
            {"iteration-time": 0.5, "throughput": pytest.approx(0.8)},
        ),
    ],
)
def test_timings_need_the_flags_that_megatron_needs(
    tmp_path: Path, flags: dict[str, bool], expected: dict[str, float] | None
):
    track, sink = tracker(tmp_path, **flags)
    meter = Meter(SHAPE)
    meter.add(step(2))
    track.interval(meter.interval())
    assert sink.written == ([] if expected is None else [(expected, 2, 16)])
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["iteration"] == 2


def test_validation_loss_and_perplexity(tmp_path: Path):
    track, sink = tracker(tmp_path, log_validation_ppl_to_tensorboard=True)
    track.validation(0.0, iteration=5, consumed_samples=40)
    assert sink.written == [({"lm loss validation": 0.0, "lm loss validation ppl": 1.0}, 5, 40)]


def test_an_exception_marks_the_run_as_failed_and_the_summary_is_written(tmp_path: Path):
    track, sink = tracker(tmp_path)
    with track:
        track.summary({"final_loss": 1.0})
    assert sink.exit_code == 0
    with pytest.raises(RuntimeError), track:
        raise RuntimeError
    assert sink.exit_code == 1
    assert json.loads((tmp_path / "summary.json").read_text()) == {"final_loss": 1.0}


def test_nothing_is_opened_or_imported_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)  # makes an import fail
    assert open_sinks(TrackingConfig(), RunFolder(tmp_path), {}) == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_works_without_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = TrackingConfig(tensorboard_dir=str(tmp_path / "events"))
    (sink,) = open_sinks(config, RunFolder(tmp_path), {})
    assert isinstance(sink, TensorBoardSink)
    sink.close(exit_code=0)


@pytest.mark.parametrize(
    ("flags", "name", "folder"),
    [({}, "the_run", "the_run"), ({"wandb_exp_name": "mine", "wandb_save_dir": "{}/elsewhere"}, "mine", "elsewhere")],
)
def test_wandb_works_without_tensorboard_and_is_told_run_id_name_folder_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], name: str, folder: str
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    opened: list[dict[str, Any]] = []
    monkeypatch.setattr(tracking, "WandbSink", lambda **arguments: opened.append(arguments))
    run = RunFolder(tmp_path / "the_run")
    flags = {key: value.format(tmp_path) for key, value in flags.items()}
    open_sinks(TrackingConfig(wandb_project="p", wandb_entity="e", **flags), run, {"lr": 0.1})
    assert opened == [
        {
            "project": "p",
            "entity": "e",
            "name": name,
            "folder": tmp_path / folder,
            "run_id": run.wandb_run_id(),
            "config": {"lr": 0.1},
        }
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"log_interval": 0}, "--log-interval 0 is not positive"),
        ({"tensorboard_log_interval": -1}, "--tensorboard-log-interval -1 is not positive"),
        ({"tensorboard_dir": "tb"}, r"--tensorboard-dir tb: tensorboard is not installed \(pip install tensorboard\)"),
        ({"wandb_project": "p"}, r"--wandb-project p: wandb is not installed \(pip install wandb\)"),
    ],
)
def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], message: str):
    check_tracking(TrackingConfig(tensorboard_dir="tb", wandb_project="p"))
    monkeypatch.setattr(tracking, "is_installed", lambda package: False)
    with pytest.raises(ValueError, match=message):
        check_tracking(TrackingConfig(**flags))


def test_folders_that_cannot_be_written_to_are_refused_by_flag(tmp_path: Path):
    (tmp_path / "file").touch()
    bad, folder = str(tmp_path / "file" / "below"), RunFolder(tmp_path / "run")
    with pytest.raises(ValueError, match=r"--tensorboard-dir .*file/below"):
        open_sinks(TrackingConfig(tensorboard_dir=bad), folder, {})
    with pytest.raises(ValueError, match=r"--wandb-save-dir .*file/below"):
        open_sinks(TrackingConfig(wandb_project="p", wandb_save_dir=bad), folder, {})
