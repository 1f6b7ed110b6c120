"""The tokenizer of a folder's checkpoints: its files lie beside them, once, under a name that says what they hold.

    iter_0000100/run.json          "tokenizer_folder": "tokenizer-0123456789abcdef"
    tokenizer-0123456789abcdef/    tokenizer.model, ..., checksums.txt

The name is a hash of the files. A run that goes on with the same tokenizer finds it there; one that begins with the
weights alone and another tokenizer (--finetune) puts its own beside it, and each checkpoint names the right one.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from megazpp.base.files import first_free, remove, renamed_when_done
from megazpp.checkpoint.checksums import DamagedError, verify_files, write_checksums, write_durably
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.data.tokenizer_folder import find_tokenizer

_NAME = re.compile("tokenizer-[0-9a-f]{16}")


def write_tokenizer(save: Path, files: Mapping[str, bytes]) -> str | None:
    """Have a tokenizer's files on disk below `save`, whole or not at all; the name of their folder, None without files.

    Nothing is written where they are already. What has that name and is damaged keeps its files under another one.
    """
    if not files:
        return None
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    folder = save / f"tokenizer-{digest.hexdigest()[:16]}"
    with contextlib.suppress(DamagedError):
        verify_files(folder)
        return folder.name
    partial = folder.with_name(f"{folder.name}.partial")
    remove(partial)  # of a save that was killed here
    with renamed_when_done(partial, folder):
        partial.mkdir()
        write_checksums(partial, {name: write_durably(partial / name, content) for name, content in files.items()})
        if folder.exists():
            folder.rename(first_free(lambda number: folder.with_name(f"{folder.name}.replaced-{number}")))
    return folder.name


def read_tokenizer(save: Path, name: str) -> TokenizerConfig:
    """The flags of the tokenizer in `save`/`name`; raises DamagedError if a file is missing or was changed."""
    folder = save / name
    if not _NAME.fullmatch(name):
        raise DamagedError(f"{save}: {name!r} is no folder of a tokenizer")
    if not folder.is_dir():
        raise DamagedError(
            f"{folder} is missing, the tokenizer of these checkpoints: copy it too, or name one with --tokenizer-model"
        )
    verify_files(folder)
    found = find_tokenizer(folder.absolute())
    if found == TokenizerConfig():
        raise DamagedError(f"{folder} holds no tokenizer")
    return found
