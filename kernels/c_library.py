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

# C must produce the same bits as the implementations in Python and Triton. So -ffast-math and fused multiply-adds are
# off. -fno-math-errno and -fno-trapping-math change no result, and let the compiler vectorize more loops.
FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
COMPILERS = ("cc", "gcc", "clang")
# Timeout of the compiler in seconds. One compilation takes about a second, but all ranks of a machine may compile at
# once.
SECONDS = 120


class CLibraryError(Exception):
    """Raised if a C file of the kernels cannot be compiled, or its shared library cannot be stored or loaded."""


class CLibrary(NamedTuple):
    """The shared library that a C file of the kernels is compiled to on this machine, if that was possible.

    Attributes:
        functions: the loaded `ctypes.CDLL`; None if compiling or loading failed.
        compiler: name and version of the compiler that built the library, such as "gcc 12.2.0".
        missing: reason why compiling or loading failed, for the log's table of back ends; "" if the library is loaded.
    """

    functions: Any = None
    compiler: str = ""
    missing: str = ""


@cache
def find_c_library(source: Path) -> CLibrary:
    """Return the shared library of the C file `source`, or the reason why there is none; never raises CLibraryError.

    A process compiles and loads each file once, at the first call.
    """
    try:
        return load_c_library(source)
    except CLibraryError as error:
        return CLibrary(missing=str(error))


def load_c_library(source: Path) -> CLibrary:
    """Compile the C file `source` for this machine, unless the cache folder has its library, and load the library.

    Raises:
        CLibraryError: there is no compiler, the file cannot be compiled, or the library cannot be stored or loaded.
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
    except (OSError, RuntimeError) as error:  # Path.home raises RuntimeError if the user has no home directory
        raise CLibraryError(
            f"{source.name}: its compiled library cannot be stored or loaded: {error}; set XDG_CACHE_HOME to a folder "
            "that this user can write to and that is not mounted noexec"
        ) from error


def find_compiler() -> list[str]:
    """Find a C compiler, and return its command as a list of words.

    If $CC is set, the command is the value of $CC, such as "ccache gcc". Otherwise it is the first of cc, gcc and clang
    on the PATH.

    Raises:
        CLibraryError: the command in $CC is not found, or $CC is not set and no compiler is on the PATH.
    """
    asked = os.environ.get("CC")
    for command in [asked] if asked else COMPILERS:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise CLibraryError(
        f"the compiler CC={asked} is not found: correct or unset the environment variable CC"
        if asked
        else "no C compiler found (cc, gcc or clang): install one, or name one in the environment variable CC"
    )


def _run(command: list[str], output: Path) -> Path:
    """Run a compiler's command to write the file `output`, and return `output`.

    The compiler gets no standard input. Its messages go to a log file next to `output`. If the compiler fails, the
    CLibraryError quotes the first error in this log file.

    Raises:
        CLibraryError: the compiler failed, or took longer than SECONDS.
    """
    log = output.with_suffix(".log")
    with log.open("wb") as messages:  # not a pipe, which children of a killed compiler could keep open after a timeout
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
            raise CLibraryError(
                f"the compiler {command[0]} took longer than {SECONDS} s, and was stopped: restart the run when this"
                " machine is less busy"
            ) from error
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        complaint = next((line for line in lines if "error:" in line), lines[0] if lines else f"exit {done.returncode}")
        raise CLibraryError(
            f"the compiler {command[0]} failed: {complaint[:120]}; name another compiler in the environment variable CC"
        )
    return output


def _cache_folder() -> Path:
    """Return the folder that caches compiled C libraries, and create it if it does not exist.

    `megazpp.base.files.cache_folder` returns the same path for "libraries". This function repeats the code of
    `cache_folder`, because files in kernels/ import nothing from the rest of megazpp.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "megazpp" / "libraries"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
