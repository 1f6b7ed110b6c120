"""Post-training: SFT, reward models, DPO, GRPO, PPO and LoRA."""
