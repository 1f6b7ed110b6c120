"""GPT model with the architectures of GPT-2/3, Llama and related models."""
