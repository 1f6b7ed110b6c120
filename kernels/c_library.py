"""Compile a C file with the system's compiler at first use, and load it with ctypes.

The shared library is cached in $XDG_CACHE_HOME/megazpp/libraries (~/.cache/megazpp/libraries). Its name contains a hash
over the source, the flags and the compiler's predefined macros. The macros reveal the compiler's version and every
instruction set that -march=native enables, so machines with different CPUs that share a home directory use different
libraries. Concurrent processes each compile in a temporary folder and rename the result, so none loads an incomplete
file.
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
from typing import Any, NamedTuple

# Results must equal the reference bit for bit, so -ffast-math and fused multiply-adds are off.
FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
COMPILERS = ("cc", "gcc", "clang")
SECONDS = 120  # timeout; a compilation takes about a second, but every rank of a machine may compile at the same time


class CLibraryError(Exception):
    """Raised if a library cannot be compiled or loaded."""


class CLibrary(NamedTuple):
    """A C library of this machine, which may be missing.

    Attributes:
        functions: the loaded `ctypes.CDLL`; None if the library is missing.
        compiler: the compiler that built it, such as "gcc 12.2.0".
        missing: reason why the library is missing, for the log's table of back ends; "" if it is loaded.
    """

    functions: Any = None
    compiler: str = ""
    missing: str = ""


@cache
def find_c_library(source: Path) -> CLibrary:
    """Return the library of `source`, or why it is missing. It is compiled and loaded once per process."""
    try:
        return load_c_library(source)
    except CLibraryError as error:
        return CLibrary(missing=str(error))


def load_c_library(source: Path) -> CLibrary:
    """Compile `source` for this machine, unless the cache has it, and load it.

    Raises:
        CLibraryError: the source cannot be compiled, the library cannot be stored or loaded, or there is no compiler.
    """
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
    except (OSError, RuntimeError) as error:  # Path.home raises RuntimeError without a home directory
        raise CLibraryError(f"{source.name}: {error}") from error


def find_compiler() -> list[str]:
    """Return the command in $CC, or the first known compiler on the PATH if $CC is not set.

    Raises:
        CLibraryError: no compiler was found.
    """
    asked = os.environ.get("CC")
    for command in [asked] if asked else COMPILERS:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise CLibraryError(f"CC={asked} is not found" if asked else "no C compiler found")


def _run(command: list[str], output: Path) -> Path:
    """Run the compiler to write `output`, without input, with its messages in a log file, and with a timeout."""
    log = output.with_suffix(".log")
    with log.open("wb") as messages:  # not a pipe: a child process of a killed compiler could keep a pipe open
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
        complaint = next((line for line in lines if "error:" in line), lines[0] if lines else f"exit {done.returncode}")
        raise CLibraryError(f"{command[0]} failed: {complaint[:120]}")
    return output


def _cache_folder() -> Path:
    """Return the folder of compiled libraries, and create it if necessary.

    It equals `megazpp.base.files.cache_folder`; kernels/ imports nothing else of megazpp, so it repeats the code.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "megazpp" / "libraries"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
