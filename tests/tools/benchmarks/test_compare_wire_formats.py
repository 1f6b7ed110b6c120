"""Test the table of compare_wire_formats.py, and the steps in which a run reaches the loss of another run."""

import json
import subprocess
from pathlib import Path
from typing import Any

from compare_wire_formats import LAST_STEPS, read, steps_to, table, train


def read_run(folder: Path, *, valid: float, sent: int = 0, above: float = 0.0, **fields: Any) -> dict[str, Any]:
    """Write a run's records, and return what the tool reads from them. The loss falls by 1 per step to 4.

    Every other step has `above` added to its loss. The run was interrupted once, so its file has the first step twice.
    """
    folder.mkdir(exist_ok=True)
    summary = {"validation_loss": valid, "cross_bytes_per_step": sent, "cpu_seconds_per_token": 1e-4, **fields}
    (folder / "summary.json").write_text(json.dumps(summary))
    losses = [loss + above * (loss % 2) for loss in range(4 + LAST_STEPS, 3, -1)]
    rows = [{"iteration": 1, "lm_loss": 9.0}, *({"iteration": i, "lm_loss": x} for i, x in enumerate(losses, 1))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read(folder)


def test_differences_are_paired_by_seed_and_replica_group_losses_left_out(tmp_path):
    zero3 = [read_run(tmp_path, valid=4.0 + i, sent=2_000_000) for i in range(3)]
    local_steps = [read_run(tmp_path, valid=4.0 + 1.1 * i, sent=50_000, synchronizations=10) for i in range(3)]
    rows = table({"ZeRO-3": zero3, "local steps": local_steps}).splitlines()
    train = sum(range(4, 4 + LAST_STEPS)) / LAST_STEPS
    assert rows[2] == f"| ZeRO-3 | {train:.4f} | 0.0000 | 5.0000 | +0.0000 ± 0.0000 (+0.00 %) | 2.000 | - |"
    # The differences of the three seeds are 0, 0.1 and 0.2. Their standard deviation is 0.1, so the
    # standard error of their mean is 0.1 / sqrt(3).
    assert rows[3] == "| local steps | - | - | 5.1000 | +0.1000 ± 0.0577 (+1.96 %) | 0.050 | - |"


def test_steps_to_a_loss_need_a_validation_that_every_seed_has(tmp_path):
    runs = []
    # each run has a validation loss at every tenth step
    for valid, losses in ((4.0, (6.0, 4.0, 3.0)), (5.0, (6.0, 5.5, 5.0))):
        lines = [json.dumps({"iteration": 10 * i, "lm_loss": loss}) for i, loss in enumerate(losses, 1)]
        (tmp_path / "validation.jsonl").write_text("\n".join(lines))
        runs.append(read_run(tmp_path, valid=valid))
    assert steps_to(runs, runs) == "25"
    del runs[1]["evaluations"][30]
    assert steps_to(runs, runs) == "-"


def test_finished_run_is_announced_by_its_loss_whatever_its_log_says(tmp_path, monkeypatch, capsys):
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        read_run(Path(command[command.index("--run-dir") + 1]), valid=4.5)
        return subprocess.CompletedProcess(command, 0, "one line\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    train(tmp_path / "ZeRO-3-seed1", [])
    assert capsys.readouterr().err == "ZeRO-3-seed1: validation loss 4.5\n"


def test_loss_distance_does_not_cancel_over_steps_or_seeds(tmp_path):
    zero3 = [read_run(tmp_path, valid=4.0) for _ in range(2)]
    other = [read_run(tmp_path, valid=4.0, above=above) for above in (0.2, -0.2)]
    distance = 0.2 * (LAST_STEPS // 2) / (LAST_STEPS + 1)
    assert table({"ZeRO-3": zero3, "other": other}).splitlines()[3].split(" | ")[2] == f"{distance:.4f}"
