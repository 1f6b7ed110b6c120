"""Training states in host memory (--optimizer-cpu-offload)."""
