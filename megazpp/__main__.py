"""Entry points of the installed commands `megazpp` (also `python -m megazpp`) and `megazpp-post-train`.

Each command runs a program file, such as pretrain_gpt.py, in this process, as `python FILE` does.
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
    """Run a program file as the main module, with this process's arguments.

    Args:
        in_checkout: path of the file in a checkout, relative to its root.
        installed: path of the file in an installed wheel, relative to the package megazpp.
    """
    path = PACKAGE / installed
    runpy.run_path(str(path if path.exists() else PACKAGE.parent / in_checkout), run_name="__main__")


if __name__ == "__main__":
    pretrain()
