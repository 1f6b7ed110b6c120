"""Frozen weights packed in 16, 8 or 4 bits: sharded inside a node, or streamed from host memory or disk."""
