"""Conversion of models from Hugging Face and Megatron-LM, and to Hugging Face."""
