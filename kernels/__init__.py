"""Floor 0: pure tensor functions that never learn that ranks exist."""
