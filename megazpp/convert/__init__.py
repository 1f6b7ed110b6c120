"""Conversion of models from Hugging Face and Megatron-LM to MegaZ++ checkpoints, and from these to Hugging Face."""
