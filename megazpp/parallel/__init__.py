"""Floor 1: process groups as axes, and the start and end of a distributed job."""
