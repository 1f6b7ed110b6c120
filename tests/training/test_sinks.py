"""Test the tracker of a run, and the files that wandb (offline) and TensorBoard write.

The tracker passes each row of numbers to the run folder and to all sinks. A sink that fails does not affect the others.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import psutil
import pytest
import wandb
from helpers.disks import small_disk
from helpers.pretended_run import Run
from helpers.refusals import not_refused
from helpers.wandb_files import offline_runs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megazpp.topology.cluster import Cluster
from megazpp.topology.plan import plan_layout
from megazpp.training import config as training_config
from megazpp.training import sinks
from megazpp.training.config import TrackingConfig, is_installed
from megazpp.training.context import RunFolder
from megazpp.training.metrics_logger import Sink, Tracker
from megazpp.training.sinks import TensorBoardSink, WandbSink, open_sinks


def test_records_go_to_the_folder_and_their_numbers_to_every_sink(tmp_path):
    sink = mock.Mock()
    tracker = Tracker(RunFolder(tmp_path), [sink])
    run = Run([0.0, math.nan, 2.0], tracker=tracker, eval_interval=3)
    values = {"iteration": 9, "final_loss": 1.0, "test_loss": None, "traffic": [{"axis": "shard", "sent_bytes": 7}]}
    tracker.summary(values)
    sink.summarize.assert_called_once_with({"iteration": 9, "final_loss": 1.0}, iteration=9)
    rows = {file.stem: [*map(json.loads, file.read_text().splitlines())] for file in tmp_path.glob("*.jsonl")}
    assert rows["metrics"][-1] == run.recorder.last_interval.fields
    assert rows["validation"] == [{"iteration": 3, "consumed_samples": 6, "lm_loss": 7.0}]
    # the rows of metrics come first: one after two steps, and one at the end of the run; the validation follows
    written = [("metrics", row) for row in rows["metrics"]] + [("validation", *rows["validation"])]
    for call, (name, row) in zip(sink.write.mock_calls, written, strict=True):
        numbers = {f"{name}/{key}": value for key, value in row.items() if value is not None}
        assert (call.args[0], call.kwargs) == (numbers, {"iteration": row["iteration"]})
    assert json.loads((tmp_path / "summary.json").read_text()) == values


def test_failing_sink_is_reported_once_and_other_sinks_continue(tmp_path, capsys):
    gone = {f"{use}.side_effect": RuntimeError("gone") for use in ("write", "summarize", "close")}
    broken, sink = mock.Mock(**gone), mock.Mock()
    broken.name = "wandb"
    with Tracker(RunFolder(tmp_path), [broken, sink]) as track:
        for iteration in (1, 2):
            track.record("metrics", {"iteration": iteration, "lm_loss": 1.0})
        track.summary({"iteration": 2})
    assert [use for use, *_ in sink.mock_calls] == ["write", "write", "summarize", "close"]
    assert [use for use, *_ in broken.mock_calls] == ["write", "close"]
    sink.close.assert_called_once_with(exit_code=0)
    assert capsys.readouterr().out == "warning: wandb: gone; it records no more values, and training continues\n"


def test_exception_marks_the_run_as_failed(tmp_path):
    sink = mock.Mock()
    with pytest.raises(RuntimeError), Tracker(RunFolder(tmp_path), [sink]):
        raise RuntimeError
    sink.close.assert_called_once_with(exit_code=1)


# TensorBoard's writer thread raises when the disk is full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_full_disk_does_not_end_training_and_is_used_again_later(tmp_path, capsys):
    with small_disk(tmp_path / "disk", "4m") as disk:
        with Tracker(RunFolder(disk / "run"), [TensorBoardSink(disk / "events")]) as track:
            with suppress(OSError), (disk / "fill").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            for _ in range(2):  # records other than metrics, like the completions of GRPO and a step's timeline
                track.folder.append("completions.jsonl", {"iteration": 1, "completion": "x" * 5000})
                with track.folder.surviving("timeline.json"):
                    track.folder.write_json("timeline.json", {"spans": "x" * 5000})
            for iteration in range(1, 5):
                if iteration == 4:
                    (disk / "fill").unlink()
                # writes more records than TensorBoard buffers, so that it has to write to the full disk
                for _ in range(2000):
                    track.record("metrics", {"iteration": iteration} | dict.fromkeys("abcd", 1.0))
            track.summary({"iteration": 4})
        rows = (disk / "run" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(rows[-1])["iteration"] == 4
        assert (disk / "run" / "summary.json").exists()
    out = capsys.readouterr().out
    assert out.count("warning: metrics.jsonl: [Errno 28] No space left on device; this record is left out") == 1
    assert [out.count(f"warning: {name}: ") for name in ("TensorBoard", "completions.jsonl", "timeline.json")] == [
        1
    ] * 3


def test_tags_describe_the_layout_of_the_run():
    cluster = Cluster(num_nodes=2, ranks_per_node=4)
    plain, split = plan_layout(cluster, tp=1, replicas=1), plan_layout(cluster, tp=2, replicas=2)
    assert sinks.run_tags(plain, zero_stage=3, zeropp=True) == ["zeropp", "2 nodes x 4 ranks"]
    assert sinks.run_tags(split, zero_stage=1, zeropp=False) == ["zero1", "2 nodes x 4 ranks", "tp2", "replicas2"]


def test_sinks_open_independently_and_import_only_on_request(tmp_path, monkeypatch, capsys):
    config = TrackingConfig(wandb_project="p", tensorboard_dir=str(tmp_path / "events"))
    monkeypatch.setitem(sys.modules, "wandb", None)  # None in sys.modules makes `import wandb` fail
    (sink,) = open_sinks(config, RunFolder(tmp_path / "run"), {})
    sink.close(exit_code=0)
    assert isinstance(sink, TensorBoardSink)
    warning = "warning: --wandb-project p: import of wandb halted; None in sys.modules; nothing is recorded there"
    assert capsys.readouterr().out == f"{warning}, and training continues\n"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    plain = RunFolder(tmp_path / "plain")
    assert open_sinks(TrackingConfig(), plain, {}) == []
    assert (list(plain.path.iterdir()), capsys.readouterr().out) == ([], "")


def test_wandb_without_tensorboard_receives_its_settings_and_flags(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr(sinks, "WandbSink", lambda tags, **settings: {"tags": tags, **settings})
    run, elsewhere = RunFolder(tmp_path / "the_run"), str(tmp_path / "elsewhere")
    for flags, name, folder in (
        ({}, "the_run", str(tmp_path / "the_run")),
        ({"wandb_exp_name": "mine", "wandb_save_dir": elsewhere}, "mine", elsewhere),
    ):
        config = TrackingConfig(wandb_project="p", wandb_entity="e", **flags)
        settings = {"project": "p", "entity": "e", "name": name, "dir": folder, "id": run.wandb_run_id()}
        assert open_sinks(config, run, {"lr": 0.1}, ["tp2"]) == [settings | {"config": {"lr": 0.1}, "tags": ["tp2"]}]


def test_invalid_tracking_flags_raise_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    bad, folder = str(tmp_path / "file" / "below"), RunFolder(tmp_path / "run")
    rows = [
        (TrackingConfig(tensorboard_dir=bad), f"--tensorboard-dir {bad}"),
        (TrackingConfig(wandb_project="p", wandb_save_dir=bad), f"--wandb-save-dir {bad}"),
    ]
    assert not not_refused(rows, lambda config: open_sinks(config, folder, {}))
    monkeypatch.setattr(training_config, "is_installed", lambda package: False)
    flags = [
        ({"tensorboard_dir": "tb"}, "--tensorboard-dir tb: tensorboard is not installed (pip install tensorboard)"),
        ({"wandb_project": "p"}, "--wandb-project p: wandb is not installed (pip install wandb)"),
    ]
    assert not not_refused(flags, lambda given: TrackingConfig(**given))


def test_packages_are_found_without_importing_them(tmp_path, monkeypatch):
    (tmp_path / "explodes.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("explodes")
    assert not is_installed("no_such_package_at_all")


# ---- wandb and TensorBoard themselves -------------------------------------------------------------------------------


@pytest.fixture
def logged_out(tmp_path, monkeypatch) -> Iterator[None]:
    """Remove wandb's settings and credentials during a test, and end wandb's service process after the test."""
    for name in [*os.environ]:
        if name == "NETRC" or name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    # wandb's socket needs a short path, so its folder is not in pytest's folder. If wandb's service is killed, it
    # leaves the socket there.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield
        with suppress(ConnectionError):  # wandb raises a ConnectionError if the test has killed its service process
            wandb.teardown()


def open_wandb(folder: Path) -> WandbSink:
    return WandbSink(["zeropp", "tp2"], project="p", name="n", dir=str(folder), id="abcd1234", config={"lr": 0.1})


def record_steps(sink: Sink, *iterations: int) -> None:
    for iteration in iterations:
        scalars = {"lm loss": 10.0 / iteration, "grad-norm": math.nan}
        sink.write(scalars, iteration=iteration)
    sink.summarize({"final_loss": 5.0, "stop_reason": "x"}, iteration=iterations[-1])
    sink.close(exit_code=0)


def wait_for_the_next_second() -> None:
    """Sleep until the next second, because wandb and TensorBoard name the files of a run by the second of its start."""
    time.sleep(1 - time.time() % 1)


@pytest.mark.slow
@pytest.mark.usefixtures("logged_out")
def test_wandb_without_credentials_is_offline_and_continues_on_restart(tmp_path, monkeypatch):
    record_steps(open_wandb(tmp_path), 1, 2)
    wandb.teardown()  # ends wandb's service, as at the end of a program, so that a restart begins without it
    wait_for_the_next_second()
    monkeypatch.setenv("WANDB_TAGS", "mine, tp2")
    record_steps(open_wandb(tmp_path), 3, 4, 3)  # a run that resumes an earlier checkpoint repeats iterations
    wandb.teardown()
    runs = offline_runs(tmp_path)
    assert [(r.run.run_id, r.run.display_name, r.run.project) for r in runs] == [("abcd1234", "n", "p")] * 2
    kept = [(row["_step"], row["lm loss"], row["iteration"]) for run in runs for row in run.history]
    assert kept == [(step, 10.0 / i, i) for step, i in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 3))]
    assert [run.config["lr"] for run in runs] == [0.1, 0.1]
    assert [list(run.run.tags) for run in runs] == [["zeropp", "tp2"], ["zeropp", "tp2", "mine"]]
    assert (runs[0].summary["final_loss"], runs[0].summary["stop_reason"]) == (5.0, "x")


@pytest.mark.usefixtures("logged_out")
def test_disabled_wandb_records_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    record_steps(open_wandb(tmp_path), 1, 2)
    assert list(tmp_path.glob("**/*.wandb")) == []


@pytest.mark.slow
@pytest.mark.usefixtures("logged_out")
def test_wandb_with_a_dead_service_raises_and_does_not_hang(tmp_path):
    # Services of earlier tests may still run, so only a new process counts. A service forks to start helpers. For a
    # moment such a fork has the service's name, so only direct children of this process count.
    before = {*psutil.Process().children()}
    sink = open_wandb(tmp_path)
    (service,) = (each for each in {*psutil.Process().children()} - before if each.name() == "wandb-core")
    service.kill()
    service.wait()
    for use in (
        lambda: [sink.write({"lm loss": 1.0}, iteration=i) for i in range(1, 9)],
        lambda: sink.summarize({"final_loss": 1.0}, iteration=8),
        lambda: sink.close(exit_code=0),
    ):
        with pytest.raises(ConnectionError):
            use()


@pytest.mark.slow
@pytest.mark.usefixtures("logged_out")
def test_unreachable_wandb_server_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    record_steps(open_wandb(tmp_path), 1, 2)
    assert "wandb: recording offline, because the server did not accept the run" in capsys.readouterr().out
    wandb.teardown()
    (run,) = offline_runs(tmp_path)
    assert len(run.history) == 2


@pytest.mark.usefixtures("logged_out")
def test_wandb_is_online_only_with_credentials(tmp_path):
    login, broken = tmp_path / "login", tmp_path / "broken"
    login.write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    broken.write_text("not a netrc file")
    for env, mode in (
        ({}, "offline"),
        ({"WANDB_MODE": "online"}, "offline"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, "disabled"),
        ({"WANDB_MODE": "offline", "WANDB_API_KEY": "k"}, "offline"),
        ({"WANDB_API_KEY": "k"}, "online"),
        ({"WANDB_API_KEY": ""}, "offline"),
        ({"WANDB_IDENTITY_TOKEN_FILE": "f"}, "online"),
        ({"NETRC": str(login)}, "online"),
        ({"NETRC": str(login), "WANDB_BASE_URL": "https://wandb.example.org"}, "offline"),
        ({"NETRC": str(broken)}, "offline"),
    ):
        with mock.patch.dict(os.environ, env):
            assert sinks.wandb_mode() == mode, env


def test_resumed_wandb_run_records_repeated_iterations_after_its_last_step(monkeypatch):
    history: list[tuple[int, int]] = []
    log = lambda row, step: history.append((step, row["iteration"]))  # noqa: E731
    init = lambda **settings: mock.Mock(starting_step=46, log=log)  # noqa: E731, the server has steps up to 45
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(init=init))
    monkeypatch.setattr(sinks, "wandb_mode", lambda: "online")
    sink = open_wandb(Path())
    for iteration in (31, 32, 32, 60):
        sink.write({"lm loss": 1.0}, iteration=iteration)
    assert history == [(47, 31), (48, 32), (49, 32), (60, 60)]


def test_tensorboard_has_every_scalar_by_iteration(tmp_path):
    for first in (1, 3):  # one writer writes steps 1 and 2; after a restart, another one writes steps 3 and 4
        record_steps(TensorBoardSink(tmp_path, first=first), first, first + 1)
        wait_for_the_next_second()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"lm loss", "grad-norm"}
    assert [e.step for e in events.Scalars("lm loss")] == [1, 2, 3, 4]
    assert [e.value for e in events.Scalars("lm loss")] == pytest.approx([10, 5, 10 / 3, 2.5])
    assert all(math.isnan(e.value) for e in events.Scalars("grad-norm"))
    first, _ = events.Tensors("summary/text_summary")
    text = first.tensor_proto.string_val[0].decode()
    assert (first.step, text) == (2, "| | value |\n| --- | --- |\n| final_loss | 5.0 |\n| stop_reason | x |")


def test_tensorboard_drops_lost_steps_and_keeps_earlier_ones(tmp_path):
    folders = {resumed: tmp_path / str(resumed) for resumed in (0, 2, 4)}
    for folder in folders.values():
        first = TensorBoardSink(folder)
        for iteration in range(1, 5):
            first.write({"lm loss": float(iteration)}, iteration=iteration)
        first.close(exit_code=1)
    wait_for_the_next_second()
    for resumed, folder in folders.items():
        second = TensorBoardSink(folder, first=resumed + 1)
        for iteration in (resumed + 1, resumed + 2):
            second.write({"lm loss": 7.0}, iteration=iteration)
        second.close(exit_code=0)
        expected = [(step, float(step)) for step in range(1, resumed + 1)] + [(resumed + 1, 7.0), (resumed + 2, 7.0)]
        events = EventAccumulator(str(folder)).Reload()
        assert [(e.step, e.value) for e in events.Scalars("lm loss")] == expected
