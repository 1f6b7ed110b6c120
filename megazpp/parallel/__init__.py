"""Process groups as mesh axes, and the start and end of a distributed job."""
