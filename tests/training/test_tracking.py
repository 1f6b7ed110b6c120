"""The tracker: Megatron's names at the right times, each sink without the other, and clear refusals."""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.disks import small_disk
from helpers.metrics import meter, step
from helpers.refusals import not_refused

import megazpp.training.tracking as tracking
from megazpp.checkpoint.record import TrainingProgress
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import plan_layout
from megazpp.training.context import RunFolder
from megazpp.training.tracking import TensorBoardSink, Tracker, TrackingConfig, open_sinks, run_tags

CPU = torch.device("cpu")


class Recorder:
    name = "recorder"

    def __init__(self) -> None:
        self.summaries: list[tuple[dict[str, Any], int]] = []
        self.written: list[tuple[dict[str, float], int, int]] = []
        self.exit_code: int | None = None

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        self.written.append((dict(scalars), iteration, consumed_samples))

    def summarize(self, values: Mapping[str, Any], *, iteration: int) -> None:
        self.summaries.append((dict(values), iteration))

    def close(self, *, exit_code: int) -> None:
        self.exit_code = exit_code


class Broken(Recorder):
    """Fails at every use, as a package does whose server or disk is gone."""

    uses = 0

    def write(self, *_: Any, **__: Any) -> None:
        self.uses += 1
        raise RuntimeError("gone")

    summarize = close = write


def tracker(tmp_path: Path, **flags: Any) -> tuple[Tracker, Recorder]:
    sink = Recorder()
    return Tracker(TrackingConfig(**flags), RunFolder(tmp_path), [sink], device=CPU), sink


def test_a_step_is_written_under_megatrons_names_with_what_there_is(tmp_path):
    track, sink = tracker(tmp_path)
    track.step(step(3))
    track.step(step(4, num_zeros=3.0, params_norm=9.0, grad_norm=None))
    always = {"train/learning_rate": 1.5e-4, "train/batch_size": 8, "train/loss": 10.0, "train/loss_scale": 1.0}
    first, second = {"train/grad_norm": 1.0}, {"train/num_zeros": 3.0, "train/params_norm": 9.0}
    assert sink.written == [({**always, **first}, 3, 24), ({**always, **second}, 4, 32)]


def test_intervals_validations_and_results_go_to_the_folder_and_their_numbers_to_every_sink(tmp_path):
    track, sink = tracker(tmp_path, tensorboard_log_interval=3)
    track.step(step(1))  # between its intervals
    track.interval(meter(step(2)).interval())
    track.validation(0.0, TrainingProgress(iteration=5, consumed_samples=40))
    values = {"iteration": 9, "final_loss": 1.0, "test_loss": None, "traffic": [{"axis": "shard", "sent_bytes": 7}]}
    track.summary(values)
    (scalars, *where), validation = sink.written
    assert where == [2, 16]
    assert (scalars["perf/step_seconds"], scalars["perf/tflops"]) == (0.5, pytest.approx(0.8))
    assert {"perf/tokens_per_s", "comm/cross_bytes", "comm/local_bytes"} <= scalars.keys()
    assert validation == ({"eval/loss": 0.0, "eval/perplexity": 1.0}, 5, 40)
    assert sink.summaries == [({"iteration": 9, "final_loss": 1.0}, 9)]
    interval, validated, summary = (
        json.loads((tmp_path / name).read_text()) for name in ("metrics.jsonl", "validation.jsonl", "summary.json")
    )
    assert interval["iteration"] == 2
    assert validated == {"iteration": 5, "consumed_samples": 40, "lm_loss": 0.0}
    assert summary == values


def test_a_sink_that_fails_is_said_once_and_only_closed_while_the_others_go_on(tmp_path, capsys):
    broken, sink = Broken(), Recorder()
    broken.name = "wandb"
    with Tracker(TrackingConfig(), RunFolder(tmp_path), [broken, sink], device=CPU) as track:
        for iteration in (1, 2):
            track.step(step(iteration))
        track.summary({"iteration": 2})
    assert [iteration for _, iteration, _ in sink.written] == [1, 2]
    assert (len(sink.summaries), sink.exit_code, broken.uses) == (1, 0, 2)
    assert capsys.readouterr().out == "warning: wandb: gone; no more is recorded there, and training goes on\n"


def test_a_sink_that_cannot_be_opened_is_said_and_training_goes_on_without_it(tmp_path, monkeypatch, capsys):
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such server")

    monkeypatch.setattr(tracking, "WandbSink", refuse)
    assert open_sinks(TrackingConfig(wandb_project="p"), RunFolder(tmp_path), {}) == []
    assert "warning: --wandb-project p: no such server; nothing is recorded there" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_disk_that_fills_ends_no_training_and_is_used_again_when_it_has_room(tmp_path, capsys):
    with small_disk(tmp_path / "disk", "4m") as disk:
        config = TrackingConfig(tensorboard_dir=str(disk / "events"))
        folder = RunFolder(disk / "run")
        with Tracker(config, folder, open_sinks(config, folder, {}), device=CPU) as track:
            with suppress(OSError), (disk / "fill").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            for iteration in range(1, 5):
                if iteration == 4:
                    (disk / "fill").unlink()
                for _ in range(2000):  # more than TensorBoard buffers
                    track.step(step(iteration))
                track.interval(meter(step(iteration)).interval())
            track.summary({"iteration": 4})
        rows = (disk / "run" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(rows[-1])["iteration"] == 4
        assert (disk / "run" / "summary.json").exists()
    out = capsys.readouterr().out
    assert out.count("warning: metrics.jsonl: [Errno 28] No space left on device; the log has its values") == 1
    assert out.count("warning: TensorBoard: ") == 1


def test_tags_say_how_the_run_is_spread():
    cluster = Cluster(num_nodes=2, ranks_per_node=4)
    plain, split = plan_layout(cluster, tp=1, replicas=1), plan_layout(cluster, tp=2, replicas=2)
    assert run_tags(plain, zero_stage=3, zeropp=True) == ["zeropp", "2 nodes x 4 ranks"]
    assert run_tags(split, zero_stage=1, zeropp=False) == ["zero1", "2 nodes x 4 ranks", "tp2", "replicas2"]


def test_an_exception_marks_the_run_as_failed(tmp_path):
    track, sink = tracker(tmp_path)
    with pytest.raises(RuntimeError), track:
        raise RuntimeError
    assert sink.exit_code == 1


def test_nothing_is_imported_unless_asked_for_and_tensorboard_works_without_wandb(tmp_path, monkeypatch):
    config, folder = TrackingConfig(tensorboard_dir=str(tmp_path / "events")), RunFolder(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes an import fail
    (sink,) = open_sinks(config, folder, {})
    assert isinstance(sink, TensorBoardSink)
    sink.close(exit_code=0)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert open_sinks(TrackingConfig(), folder, {}) == []
    assert list(folder.path.iterdir()) == []


def test_wandb_works_without_tensorboard_and_is_told_run_id_name_folder_and_flags(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr(tracking, "WandbSink", lambda tags, **settings: {"tags": tags, **settings})
    run, elsewhere = RunFolder(tmp_path / "the_run"), str(tmp_path / "elsewhere")
    for flags, name, folder in (
        ({}, "the_run", str(tmp_path / "the_run")),
        ({"wandb_exp_name": "mine", "wandb_save_dir": elsewhere}, "mine", elsewhere),
    ):
        config = TrackingConfig(wandb_project="p", wandb_entity="e", **flags)
        settings = {"project": "p", "entity": "e", "name": name, "dir": folder, "id": run.wandb_run_id()}
        assert open_sinks(config, run, {"lr": 0.1}, ["tp2"]) == [settings | {"config": {"lr": 0.1}, "tags": ["tp2"]}]


def test_what_cannot_work_is_refused(monkeypatch):
    TrackingConfig(tensorboard_dir="tb", wandb_project="p")
    monkeypatch.setattr(tracking, "is_installed", lambda package: False)
    rows = [
        ({"log_interval": 0}, "--log-interval 0 is not positive"),
        ({"tensorboard_log_interval": -1}, "--tensorboard-log-interval -1 is not positive"),
        ({"tensorboard_dir": "tb"}, "--tensorboard-dir tb: tensorboard is not installed (pip install tensorboard)"),
        ({"wandb_project": "p"}, "--wandb-project p: wandb is not installed (pip install wandb)"),
    ]
    assert not not_refused(rows, lambda flags: TrackingConfig(**flags))


def test_folders_that_cannot_be_written_to_are_refused_by_flag(tmp_path):
    (tmp_path / "file").touch()
    bad, folder = str(tmp_path / "file" / "below"), RunFolder(tmp_path / "run")
    rows = [
        (TrackingConfig(tensorboard_dir=bad), f"--tensorboard-dir {bad}"),
        (TrackingConfig(wandb_project="p", wandb_save_dir=bad), f"--wandb-save-dir {bad}"),
    ]
    assert not not_refused(rows, lambda config: open_sinks(config, folder, {}))
