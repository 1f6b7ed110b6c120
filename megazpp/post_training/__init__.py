"""Post-training: SFT, reward models, DPO, GRPO and PPO."""
