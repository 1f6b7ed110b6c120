"""The tables of tools/gpu_check.py, from what its parts have reported."""

from __future__ import annotations

from typing import Any


def describe(results: dict[str, Any]) -> str:
    """Markdown: a heading, a table with remarks for each part, and which parts came to what."""
    lines = [
        f"# {results['heading']}",
        "",
        f"torch {results['torch']}, CUDA {results['cuda']}, Triton {results['triton']}, commit {results['commit']}",
    ]
    for part in results["parts"]:
        lines += ["", f"## {part['name']}: {part['title']} ({part['status']}, {part['seconds']} s)", ""]
        lines += table(part["rows"])
        lines += [f"- {note}" for note in part["notes"]]
        lines += [f"- FAILED: {failure}" for failure in part["failures"]]
    words = [f"{part['name']} {part['status']}" for part in results["parts"]]
    return "\n".join([*lines, "", ", ".join(words) or "no part has run", results["heading"]]) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One per set of headings, in the order in which they come."""
    lines: list[str] = []
    headings: list[str] | None = None
    for row in rows:
        if list(row) != headings:
            headings = list(row)
            lines += [*([""] if lines else []), f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
        lines.append(f"| {' | '.join(str(cell) for cell in row.values())} |")
    return [*lines, ""] if lines else []
