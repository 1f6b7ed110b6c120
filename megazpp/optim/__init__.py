"""Floor 3: optimizer, schedule, loss scale and gradient clipping."""
