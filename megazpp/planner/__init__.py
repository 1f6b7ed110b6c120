"""Estimates of a run's memory, traffic and time, made from its config before anything is allocated."""
