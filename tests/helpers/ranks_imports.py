"""Imports that the workers of ranks.py share, done in the process from which they are forked."""

import atexit
import gc

gc.disable()  # as in conftest.py
for name in ("pretrain_gpt", "torch._dynamo", "pytest", "hypothesis"):
    __import__(name)
gc.freeze()  # garbage collection in a worker then skips these objects, so their pages stay shared
gc.enable()
atexit.register(gc.unfreeze)
