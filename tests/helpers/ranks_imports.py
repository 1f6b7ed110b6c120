"""Import slow modules in the fork server, so that all forked worker processes of helpers/ranks.py share them."""

import atexit
import gc

gc.disable()  # no garbage collection during the imports, as in conftest.py
for name in ("pretrain_gpt", "torch._dynamo", "pytest", "hypothesis"):
    __import__(name)
gc.freeze()  # garbage collection in a worker then skips these objects, so the workers share their memory pages
gc.enable()
atexit.register(gc.unfreeze)
