"""Write run folders in the format of training, with chosen values, for tests of reports and of other readers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def row(iteration: int, **values: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl that covers two steps of one second each; `values` replaces its entries."""
    defaults: dict[str, Any] = {
        "iteration": iteration, "lm_loss": 5.0, "grad_norm": 1.0, "learning_rate": 1e-3,
        "consumed_samples": 10 * iteration, "consumed_tokens": 100 * iteration, "steps": 2, "step_seconds": 1.0,
        "tokens_per_second": 100.0, "skipped": 0, "tp_bytes": 0, "cross_bytes": 4_000_000, "local_bytes": 0,
        "peak_memory_bytes": 3_000_000_000,
    }  # fmt: skip
    return defaults | values


def make_run(folder: Path, rows: Sequence[dict[str, Any]] = (), *, tail: str = "", **files: Any) -> Path:
    """Write a run folder with the given records, and return it.

    Args:
        folder: folder to create.
        rows: lines of metrics.jsonl.
        tail: text at the end of metrics.jsonl, such as a line that is cut off.
        files: for the names "validation" and "completions", the lines of NAME.jsonl; for other names, the content of
            NAME.json.
    """
    folder.mkdir(parents=True)
    for name, lines in [("metrics", rows), *((name, files.pop(name, ())) for name in ("validation", "completions"))]:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(tail)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
