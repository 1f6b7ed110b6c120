"""Optimizers (AdamW, Muon, SGD), the learning-rate schedule, loss scaling and gradient clipping."""
