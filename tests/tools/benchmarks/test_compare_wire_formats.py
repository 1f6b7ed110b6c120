import json
from pathlib import Path
from typing import Any

from compare_wire_formats import LAST_STEPS, read, steps_to, table


def write_run(folder: Path, *, valid: float, sent: int, above: float = 0.0, **fields: Any) -> Path:
    """A run folder whose training loss falls by 1 per step, down to 4, and is `above` that in every other step."""
    folder.mkdir()
    summary = {"validation_loss": valid, "cross_bytes_per_step": sent, "cpu_seconds_per_token": 1e-4, **fields}
    (folder / "summary.json").write_text(json.dumps(summary))
    losses = [loss + above * (loss % 2) for loss in range(4 + LAST_STEPS, 3, -1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"lm_loss": loss}) + "\n" for loss in losses))
    return folder


def test_differences_are_paired_by_seed_and_an_islands_own_losses_are_not_shown(tmp_path):
    results = {
        "ZeRO-3": [read(write_run(tmp_path / f"a{i}", valid=4.0 + i, sent=2_000_000)) for i in range(3)],
        "local steps": [
            read(write_run(tmp_path / f"b{i}", valid=4.0 + 1.1 * i, sent=50_000, synchronizations=10)) for i in range(3)
        ],
    }
    rows = table(results).splitlines()
    train = sum(range(4, 4 + LAST_STEPS)) / LAST_STEPS
    assert rows[2] == f"| ZeRO-3 | {train:.4f} | 0.0000 | 5.0000 | +0.0000 ± 0.0000 (+0.00 %) | 2.000 | - |"
    # differences 0, 0.1 and 0.2: standard deviation 0.1, and that of their mean 0.1 / sqrt(3)
    assert rows[3] == "| local steps | - | - | 5.1000 | +0.1000 ± 0.0577 (+1.96 %) | 0.050 | - |"


def test_steps_to_a_loss_are_those_of_the_first_validation_that_has_it_in_every_seed(tmp_path):
    runs = []
    for name in ("a", "b"):
        folders = [write_run(tmp_path / f"{name}{seed}", valid=4.0 + seed, sent=0) for seed in range(2)]
        for folder, losses in zip(folders, ((6.0, 4.0, 3.0), (6.0, 5.5, 5.0)), strict=True):
            lines = [json.dumps({"iteration": 10 * i, "lm_loss": loss}) for i, loss in enumerate(losses, 1)]
            (folder / "validation.jsonl").write_text("\n".join(lines))
        runs.append([read(folder) for folder in folders])
    assert steps_to(runs[1], runs[0]) == "25"
    runs[1][1]["evaluations"].pop(30)
    assert steps_to(runs[1], runs[0]) == "-"


def test_the_distance_of_losses_does_not_cancel_over_steps_or_seeds(tmp_path):
    results = {
        "ZeRO-3": [read(write_run(tmp_path / f"a{i}", valid=4.0, sent=0)) for i in range(2)],
        "other": [read(write_run(tmp_path / f"b{i}", valid=4.0, sent=0, above=0.2 - 0.4 * i)) for i in range(2)],
    }
    distance = 0.2 * (LAST_STEPS // 2) / (LAST_STEPS + 1)
    assert table(results).splitlines()[3].split(" | ")[2] == f"{distance:.4f}"
