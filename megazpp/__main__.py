"""Entry points of the installed commands `megazpp` (also `python -m megazpp`) and `megazpp-post-train`.

Each command runs a program file, as `python FILE` does.
"""

import runpy
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def pretrain() -> None:
    """Run pretrain_gpt.py with this process's arguments."""
    _run("pretrain_gpt.py", installed="programs/pretrain_gpt.py")


def post_train() -> None:
    """Run tools/post_train.py with this process's arguments."""
    _run("tools/post_train.py", installed="tools/post_train.py")


def _run(in_checkout: str, *, installed: str) -> None:
    """Run the file `installed` of an installed wheel or, if this package is in a checkout, the file `in_checkout`."""
    path = PACKAGE / installed
    runpy.run_path(str(path if path.exists() else PACKAGE.parent / in_checkout), run_name="__main__")


if __name__ == "__main__":
    pretrain()
