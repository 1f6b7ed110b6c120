"""Weight patches: files with the 16-bit weights that each training step changes, for external inference engines."""
