"""Floor 5: the training step and loop, evaluation, metrics and tracking."""
