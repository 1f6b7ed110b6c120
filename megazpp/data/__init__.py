"""Tokenizers, indexed datasets, samples and batches."""
