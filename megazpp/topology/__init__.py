"""The cluster and the placement of ranks, in plain integers."""
