"""The GPT model, which covers the architectures of GPT-2/3, Llama, mixtures of experts and related models."""
