"""Floor 8: from a pretrained model to one that answers: SFT, reward models, DPO, GRPO, PPO."""
