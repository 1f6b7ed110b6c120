"""Weight patches: the changed 16-bit weights of every step, for engines that generate with the policy."""
