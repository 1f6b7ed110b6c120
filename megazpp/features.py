"""List of the optional features, each with the features that it imports.

To remove a feature, delete its line and its folder. Features that need it, also indirectly, are then disabled. Features
with a feature.py extend pretraining through the hooks of run/feature.py. The others only have separate programs.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from megazpp.run.feature import Feature

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
    """Return the `FEATURE` of each feature.py, in the order of the list, without features that lack one they need."""
    folder = Path(__file__).parent
    names = [name for name in NEEDS if _is_complete(name) and (folder / name / "feature.py").exists()]
    return tuple(import_module(f"megazpp.{name}.feature").FEATURE for name in names)


def _is_complete(name: str) -> bool:
    return name in NEEDS and all(_is_complete(needed) for needed in NEEDS[name])


FEATURES = _load_features()
