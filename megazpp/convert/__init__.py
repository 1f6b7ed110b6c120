"""Floor 5: checkpoints from and to Hugging Face, from Megatron-LM; the engine is `tools/convert_checkpoint.py`'s."""
