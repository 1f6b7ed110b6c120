"""The top of the program: the config of a run and its checks, the start on ranks, the trainer."""
