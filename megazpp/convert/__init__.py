"""Floor 5: models from Hugging Face and Megatron-LM, and back out to Hugging Face."""
