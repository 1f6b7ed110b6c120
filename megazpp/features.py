"""List of the optional features of MegaZ++, each with the features that it imports.

To remove a feature, delete its line in this list and its folder. Features that need the removed feature, also
indirectly, are then disabled. Features with a feature.py extend pretraining through the hooks of run/feature.py. Other
features only have separate programs.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from megazpp.run.feature import Feature

# For each optional feature, which is a folder of megazpp/, the features that it imports
NEEDS: dict[str, tuple[str, ...]] = {
    "convert": (),
    "diloco": (),
    "drop_in": (),
    "elastic": ("diloco",),
    "host_states": (),
    "inference": ("packed_weights",),
    "lora": ("convert", "packed_weights"),
    "packed_weights": (),
    "planner": ("diloco", "host_states", "packed_weights"),
    "post_training": ("convert", "inference", "lora", "packed_weights", "planner"),
    "report": (),
    "weight_patches": ("convert",),
}


def _load_features() -> tuple[Feature, ...]:
    """Import the feature.py of each optional feature, and return their `FEATURE` objects in the order of `NEEDS`.

    A feature is left out if another feature that it needs has been removed.
    """
    folder = Path(__file__).parent
    names = [name for name in NEEDS if _is_complete(name) and (folder / name / "feature.py").exists()]
    return tuple(import_module(f"megazpp.{name}.feature").FEATURE for name in names)


def _is_complete(name: str) -> bool:
    """Return True if a feature, and all features that it imports directly or indirectly, are in `NEEDS`."""
    return name in NEEDS and all(_is_complete(needed) for needed in NEEDS[name])


# Optional features that extend pretraining through their feature.py
FEATURES = _load_features()
