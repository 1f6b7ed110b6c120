"""Training: the step, the loop, evaluation, metrics, and the run's records."""
