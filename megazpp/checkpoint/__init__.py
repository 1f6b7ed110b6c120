"""Floor 4: checkpoints: what a run is at one step, written so that nothing that happens later can spoil it."""
