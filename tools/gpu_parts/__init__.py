"""The parts of tools/gpu_check.py: programs `python -m gpu_parts.<name>`, and what several of them use."""
