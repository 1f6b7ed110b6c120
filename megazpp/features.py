"""The optional features, one line each, with the features whose code they use.

Removing a line and its folder removes the feature, and those that need it are left out. Features with a feature.py
enter pretraining through its hooks; the others enter through their own programs only.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from megazpp.run.feature import Feature

NEEDS: dict[str, tuple[str, ...]] = {
    "convert": (),
    "diloco": (),
    "inference": (),
    "packed_weights": (),
    "planner": ("diloco", "packed_weights"),
    "post_training": ("convert", "inference", "packed_weights", "planner"),
    "report": (),
    "weight_patches": ("convert",),
}


def _load_features() -> tuple[Feature, ...]:
    """Return the hooks of the listed features in their order."""
    names = [name for name, needed in NEEDS.items() if all(other in NEEDS for other in needed)]
    modules = [f"megazpp.{name}.feature" for name in names]
    return tuple(import_module(module).FEATURE for module in modules if find_spec(module) is not None)


FEATURES = _load_features()
