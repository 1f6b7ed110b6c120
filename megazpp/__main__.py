"""The installed commands `megazpp` (also `python -m megazpp`) and `megazpp-post-train`: each runs a program by path."""

import runpy
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def pretrain() -> None:
    """Run pretrain_gpt.py."""
    _run("pretrain_gpt.py", installed="programs/pretrain_gpt.py")


def post_train() -> None:
    """Run tools/post_train.py."""
    _run("tools/post_train.py", installed="tools/post_train.py")


def _run(in_checkout: str, *, installed: str) -> None:
    """Run a file of the checkout that this package lies in; without one, the copy that the wheel holds."""
    path = PACKAGE / installed
    runpy.run_path(str(path if path.exists() else PACKAGE.parent / in_checkout), run_name="__main__")


if __name__ == "__main__":
    pretrain()
