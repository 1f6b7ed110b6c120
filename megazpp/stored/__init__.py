"""Floor 6: weights at rest, in 16, 8 or 4 bits: frozen units of a node, and layers that stream from host or disk."""
