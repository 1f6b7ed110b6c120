"""fp32 weights, optimizer moments and gradients in host memory (--optimizer-cpu-offload)."""
