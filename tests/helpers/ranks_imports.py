"""What the workers of ranks.py begin with: imported in the process that they are forked from."""

import atexit
import gc

gc.disable()  # as in conftest.py
for name in ("pretrain_gpt", "torch._dynamo", "pytest", "hypothesis"):
    __import__(name)
gc.freeze()  # a worker's own collections then leave these objects alone, and the pages that all workers share
gc.enable()
atexit.register(gc.unfreeze)
