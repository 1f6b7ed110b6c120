"""Data of training runs: tokenizers, Megatron's indexed datasets, samples, and micro-batches."""
