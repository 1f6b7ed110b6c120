"""matplotlib, which only pictures need: asked for before any work."""

from __future__ import annotations

from importlib.util import find_spec


def check_matplotlib(what: str) -> None:
    """Look whether `what` can be drawn.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(f"{what} needs matplotlib, which is not installed (pip install matplotlib)")
