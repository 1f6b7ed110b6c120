"""The top layer of the core: configuration of a run, its checks, the start of workers, and the trainer."""
