"""The GPT model in the styles of GPT-2/3 and Llama."""
