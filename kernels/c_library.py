"""A C file, compiled by the system's compiler when it is first needed, and loaded.

The shared library is kept in $XDG_CACHE_HOME/megazpp/libraries (~/.cache/megazpp/libraries) under a hash of the source,
the flags and the compiler's predefined macros, which name its version and every instruction set that -march=native
stands for: a home that another CPU shares gets a library of its own. Processes that compile at the same time each write
in a folder of their own and rename the file, so that none ever loads half a library.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Bits are sacred: no -ffast-math, and no multiply and add contracted into one rounding
FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
COMPILERS = ("cc", "gcc", "clang")
SECONDS = 120  # a compilation takes about one; this one waits behind as many as the machine has ranks


class CLibraryError(Exception):
    """There is no library; says why, for the table of back ends."""


class CLibrary(NamedTuple):
    """A loaded library, and the compiler that made it ("gcc 12.2.0")."""

    functions: ctypes.CDLL
    compiler: str


@cache
def find_c_library(source: Path) -> CLibrary | CLibraryError:
    """Return the library of `source`, or why there is none; each is compiled and loaded once per process."""
    try:
        return load_c_library(source)
    except CLibraryError as error:
        return error


def load_c_library(source: Path) -> CLibrary:
    """Load `source`, compiled for this machine; CLibraryError where it cannot be compiled, kept or loaded."""
    compiler = find_compiler()
    try:
        cache = _cache_folder()
        with tempfile.TemporaryDirectory(prefix=".compiling-", dir=cache) as folder:
            macros = _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull], Path(folder) / "macros.h")
            key = hashlib.sha256(source.read_bytes() + repr(FLAGS).encode() + macros.read_bytes()).hexdigest()[:32]
            library = cache / f"{source.stem}-{key}.so"
            if not library.exists():
                os.replace(_run([*compiler, *FLAGS, "-shared", "-fPIC", str(source)], Path(folder) / "new.so"), library)
            known = macros.read_text()
            version = re.search(r'__VERSION__ "\D*([\d.]+)', known)
            name = "clang" if "__clang__" in known else "gcc"
            return CLibrary(ctypes.CDLL(str(library)), f"{name} {version[1] if version else 'of unknown version'}")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise CLibraryError(f"{source.name}: {error}") from error


def find_compiler() -> list[str]:
    """The command of $CC, else of the first compiler on the PATH."""
    asked = os.environ.get("CC")
    for command in [asked] if asked else COMPILERS:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise CLibraryError(f"CC={asked} is not found" if asked else "no C compiler found")


def _run(command: list[str], output: Path) -> Path:
    """Write `output` by a compiler that may neither ask, nor print, nor hang."""
    log = output.with_suffix(".log")
    with log.open("wb") as messages:  # a file: a pipe could be held open by a child of a compiler that was killed
        try:
            done = subprocess.run(
                [*command, "-o", str(output)],
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                env={**os.environ, "LC_ALL": "C"},
            )
        except subprocess.TimeoutExpired as error:
            raise CLibraryError(f"{command[0]} took longer than {SECONDS} s") from error
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        complaint = next((line for line in lines if "error" in line), lines[0] if lines else f"exit {done.returncode}")
        raise CLibraryError(f"{command[0]} failed: {complaint[:120]}")
    return output


def _cache_folder() -> Path:
    """The same as `megazpp.base.files.cache_folder`; kernels/ stands alone, so it has the line itself."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "megazpp" / "libraries"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
