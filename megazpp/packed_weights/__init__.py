"""Frozen (not trained) weights packed in 16, 8 or 4 bits: sharded inside a node, or streamed from host or disk."""
