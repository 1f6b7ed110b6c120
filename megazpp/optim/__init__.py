"""Optimizers (AdamW, Muon, SGD), learning-rate schedule, loss scaling and gradient clipping."""
