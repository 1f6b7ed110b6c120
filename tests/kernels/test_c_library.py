"""Test the compilation of a C file at its first use.

The compilation happens once per machine, is safe for concurrent processes, and has readable errors.
"""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megazpp.kernels import c_library
from megazpp.kernels.c_library import CLibraryError, load_c_library

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, c_library.COMPILERS)), reason="needs a C compiler")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "megazpp" / "libraries"


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


def reason(source: Path) -> str:
    with pytest.raises(CLibraryError) as caught:
        load_c_library(source)
    return str(caught.value)


@needs_compiler
def test_library_is_compiled_once_per_source_and_compiler(cache, source, monkeypatch):
    first = load_c_library(source)
    assert first.functions.answer() == 42
    assert first.compiler.startswith(("gcc ", "clang "))
    (compiled,) = cache.iterdir()
    written = compiled.stat().st_mtime_ns
    load_c_library(source)
    assert [(path, path.stat().st_mtime_ns) for path in cache.iterdir()] == [(compiled, written)]
    monkeypatch.setenv("CC", "cc -DANOTHER_CPU=1")
    load_c_library(source)
    assert len(list(cache.iterdir())) == 2
    source.write_text("int answer(void) { return 43; }\n")
    assert load_c_library(source).functions.answer() == 43
    assert len(list(cache.iterdir())) == 3


@needs_compiler
def test_threads_may_compile_the_same_library_at_once(cache, source):
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(load_c_library, [source] * 8))
    assert [library.functions.answer() for library in libraries] == [42] * 8
    assert [path.suffix for path in cache.iterdir()] == [".so"], "the cache must have one library and no partial file"


def test_missing_compiler_is_named_in_the_error(cache, source, monkeypatch):
    monkeypatch.setenv("PATH", str(source.parent))
    assert reason(source).startswith("no C compiler found (cc, gcc or clang): install one")
    monkeypatch.setenv("CC", "icx-2042 -O3")
    assert reason(source).startswith("the compiler CC=icx-2042 -O3 is not found: correct or unset")
    assert not cache.exists()


@needs_compiler
def test_compiler_error_is_reported_and_no_file_is_kept(cache, source, capfd):
    source.write_text("int answer(void) { return fourty_two; }\n")
    assert re.search(r"failed: .*error.*fourty_two", reason(source))
    assert list(cache.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_hanging_compiler_is_stopped_with_an_error(cache, source, monkeypatch):
    monkeypatch.setenv("CC", "sh -c 'exec sleep 60'")
    monkeypatch.setattr(c_library, "SECONDS", 0.2)
    assert reason(source).startswith("the compiler sh took longer than 0.2 s, and was stopped")


@needs_compiler
def test_unwritable_cache_is_named_in_the_error(tmp_path, source, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert re.match(r"answer\.c: .*file", reason(source))


@needs_compiler
def test_damaged_library_is_named_in_the_error(cache, source, tmp_path, monkeypatch):
    load_c_library(source)
    (compiled,) = cache.iterdir()
    # The damaged library gets a new path, because this process has already loaded the intact library from the old path.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    damaged = tmp_path / "other" / "megazpp" / "libraries" / compiled.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no library")
    assert re.match(r"answer\.c: .*answer-", reason(source))
