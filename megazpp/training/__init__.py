"""The training step and loop, evaluation, metrics and tracking."""
