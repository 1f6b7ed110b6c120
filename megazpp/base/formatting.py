"""Figures and tables in text: units in powers of ten, columns of equal width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MEGA, GIGA, TERA = 1e6, 1e9, 1e12


def times_fewer(sent_bytes: float, other_bytes: float) -> str:
    """Say "7.7 x fewer" than `other_bytes`; nothing where nothing was sent, or less than 5 % was saved."""
    return f"{other_bytes / sent_bytes:.1f} x fewer" if sent_bytes and other_bytes > 1.05 * sent_bytes else ""


def aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """A line for each row; every column is as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
