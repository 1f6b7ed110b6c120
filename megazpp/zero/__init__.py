"""Data-parallel sharding with FSDP2, with ZeRO++'s quantized two-hop collectives as an option.

`shard_model` in sharding.py shards a model that this project's own program trains. The folder drop_in/ adds ZeRO++ to
FSDP2 training loops of other programs.
"""
