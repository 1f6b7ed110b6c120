"""Floor 1: the machine and who gets which rank, in plain integers."""
