"""Floor 3: the GPT model, GPT-2/3 and Llama style."""
