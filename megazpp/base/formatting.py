"""Figures and tables in text: units in powers of ten, columns of equal width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MEGA, GIGA, TERA = 1e6, 1e9, 1e12


def aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """A line for each row; every column is as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
