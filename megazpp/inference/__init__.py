"""Floor 5: text from a trained model."""
