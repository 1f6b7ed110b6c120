"""LoRA: low-rank adapters on a frozen base, their checkpoints, and PEFT's files."""
