"""Data-parallel sharding with FSDP2, with ZeRO++'s quantized two-hop collectives as an option.

`shard_model` in sharding.py shards a model of this project's training. drop_in/ adds ZeRO++ to FSDP2 loops of other
programs.
"""
