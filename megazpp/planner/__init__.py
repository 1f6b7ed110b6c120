"""Floor 7: what a run will need and how fast it will be, from its very configs, before anything is allocated."""
