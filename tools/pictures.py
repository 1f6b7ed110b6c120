"""matplotlib, which only pictures need: asked for before any work."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_MISSING = "needs matplotlib, which is not installed (pip install matplotlib)"


def check_matplotlib(what: str) -> None:
    """Look whether `what`, which was asked for, can be drawn.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if not _is_installed():
        raise ValueError(f"{what} {_MISSING}")


def can_draw(what: str) -> bool:
    """Whether `what`, which goes with other results, can be drawn; if not, a line on stderr says so."""
    if not _is_installed():
        print(f"{what} is left out: it {_MISSING}", file=sys.stderr, flush=True)
    return _is_installed()


def _is_installed() -> bool:
    return find_spec("matplotlib") is not None
