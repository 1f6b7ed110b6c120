"""Floor 5: local steps between islands: flags and plan, outer weights, the part of the training loop, checkpoints."""
