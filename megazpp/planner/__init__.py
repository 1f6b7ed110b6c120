"""Estimates of a run's memory, communication and time, computed from its config before anything is allocated."""
