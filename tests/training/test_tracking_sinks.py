"""Real offline wandb runs and TensorBoard events, written and read back."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.wandb_files import offline_runs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megazpp.training.tracking import TensorBoardSink, is_installed, wandb_mode

ROOT = Path(__file__).resolve().parents[2]

WRITE_A_RUN = """
import sys
from pathlib import Path
from megazpp.training.tracking import WandbSink

folder, first = Path(sys.argv[1]), int(sys.argv[2])
sink = WandbSink(
    ["zeropp", "tp2"], project="p", name="n", dir=str(folder), id="abcd1234", config={"lr": 0.1}
)
for iteration in (first, first + 1):
    sink.write({"lm loss": 10.0 / iteration}, iteration=iteration, consumed_samples=8 * iteration)
sink.summarize({"final_loss": 5.0, "stop_reason": "x"}, iteration=iteration)
sink.close(exit_code=0)
"""

LOSE_WANDB = """
import os, signal, sys
from pathlib import Path
from megazpp.training.tracking import WandbSink

sink = WandbSink([], project="p", name="n", dir=sys.argv[1], id="abcd1234", config={})
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
(service,) = (pid for pid in children if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes())
os.kill(int(service), signal.SIGKILL)
while Path(f"/proc/{service}/stat").read_text().split()[2] != "Z":
    pass
for use in (
    lambda: [sink.write({"lm loss": 1.0}, iteration=i, consumed_samples=8) for i in range(1, 9)],
    lambda: sink.summarize({"final_loss": 1.0}, iteration=8),
    lambda: sink.close(exit_code=0),
):
    try:
        use()
    except Exception as error:
        print("caught", error)
"""


def run_python(program: str, folder: Path, *arguments: object, **env: str) -> str:
    """Its output, in a process of its own, with no wandb setting and no credentials but `env`, and no terminal."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") and name != "NETRC"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), *map(str, arguments)],
        env={**clean, "HOME": str(folder), "PYTHONPATH": str(ROOT), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_without_credentials_wandb_records_offline_and_a_restart_continues_the_run_with_config_tags_and_summary(
    tmp_path,
):
    run_python(WRITE_A_RUN, tmp_path, 1)
    run_python(WRITE_A_RUN, tmp_path, 3, WANDB_TAGS="mine, tp2")
    runs = offline_runs(tmp_path)
    assert [(r.run.run_id, r.run.display_name, r.run.project) for r in runs] == [("abcd1234", "n", "p")] * 2
    kept = [(row["_step"], row["lm loss"], row["samples"]) for run in runs for row in run.history]
    assert kept == [(i, 10.0 / i, 8 * i) for i in (1, 2, 3, 4)]
    assert [run.config["lr"] for run in runs] == [0.1, 0.1]
    assert [list(run.run.tags) for run in runs] == [["zeropp", "tp2"], ["zeropp", "tp2", "mine"]]
    assert (runs[0].summary["final_loss"], runs[0].summary["stop_reason"]) == (5.0, "x")


@pytest.mark.slow
def test_a_wandb_that_is_switched_off_records_nothing_and_one_whose_service_dies_raises_and_does_not_hang(tmp_path):
    """What the tracker does with that: test_tracking.py."""
    run_python(WRITE_A_RUN, tmp_path, 1, WANDB_MODE="disabled", WANDB_API_KEY="0" * 40)
    assert list(tmp_path.glob("**/*.wandb")) == []
    assert run_python(LOSE_WANDB, tmp_path).count("caught ") == 3


@pytest.mark.slow
def test_a_server_that_cannot_be_reached_does_not_stop_the_run(tmp_path):
    server = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "1"}
    output = run_python(WRITE_A_RUN, tmp_path, 1, WANDB_API_KEY="0" * 40, **server)
    assert "wandb: recording offline, the server did not take the run" in output
    (run,) = offline_runs(tmp_path)
    assert len(run.history) == 2


def test_wandb_is_online_only_with_credentials(tmp_path, monkeypatch):
    login, broken = str(tmp_path / "login"), str(tmp_path / "broken")
    Path(login).write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    Path(broken).write_text("not a netrc file")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for env, mode in (
        ({}, "offline"),
        ({"WANDB_MODE": "online"}, "offline"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, "disabled"),
        ({"WANDB_MODE": "offline", "WANDB_API_KEY": "k"}, "offline"),
        ({"WANDB_API_KEY": "k"}, "online"),
        ({"WANDB_API_KEY": ""}, "offline"),
        ({"WANDB_IDENTITY_TOKEN_FILE": "f"}, "online"),
        ({"NETRC": login}, "online"),
        ({"NETRC": login, "WANDB_BASE_URL": "https://wandb.example.org"}, "offline"),
        ({"NETRC": broken}, "offline"),
    ):
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            assert wandb_mode() == mode, env


def test_tensorboard_has_every_scalar_by_iteration_and_by_samples(tmp_path):
    for first in (1, 3):  # the second writer is a restart
        sink = TensorBoardSink(tmp_path)
        for iteration in (first, first + 1):
            sink.write({"lm loss": 10.0 / iteration}, iteration=iteration, consumed_samples=8 * iteration)
        sink.write({"grad-norm": math.nan}, iteration=first + 1, consumed_samples=8 * first + 8)
        sink.summarize({"final_loss": 5.0}, iteration=first + 1)
        sink.close(exit_code=0)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"lm loss", "lm loss vs samples", "grad-norm", "grad-norm vs samples"}
    assert [e.step for e in events.Scalars("lm loss")] == [1, 2, 3, 4]
    assert [e.step for e in events.Scalars("lm loss vs samples")] == [8, 16, 24, 32]
    assert [e.value for e in events.Scalars("lm loss")] == pytest.approx([10, 5, 10 / 3, 2.5])
    assert all(math.isnan(e.value) for e in events.Scalars("grad-norm"))
    texts = [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors("summary/text_summary")]
    assert texts[0] == (2, "| | value |\n| --- | --- |\n| final_loss | 5.0 |")


def test_packages_are_found_without_importing_them(tmp_path, monkeypatch):
    (tmp_path / "explodes.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("explodes")
    assert not is_installed("no_such_package_at_all")
