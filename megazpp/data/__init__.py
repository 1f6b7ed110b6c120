"""Floor 3: tokenizers, indexed datasets, GPT samples and batches."""
