"""Floor 2: data-parallel sharding of any model, on FSDP2."""
