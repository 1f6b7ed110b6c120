"""Checkpoints: atomic saves, loading, resuming, and resharding to another layout."""
