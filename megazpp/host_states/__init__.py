"""fp32 weights, optimizer moments and gradients in host memory, chosen by --optimizer-cpu-offload."""
