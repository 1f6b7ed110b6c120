"""MegaZ++: GPT pretraining with tensor parallelism and ZeRO++ sharding."""

__version__ = "0.1.0"
