"""A process ends with the one that started it; what an error says is about the user's input, not about Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megazpp.base.program import in_words
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import raise_on_all_ranks

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import os, time
from megazpp.base.program import end_with
end_with(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_errors_are_in_words_and_reach_all_ranks_as_value_errors():
    for fails, said in (
        (lambda: json.loads("9" * 5000), "an integer has more digits than are read"),
        (lambda: yaml.safe_load("9" * 5000), "an integer has more digits than are read"),
        (lambda: json.loads("[" * 100_000), "it is nested too deeply"),
        (lambda: "a\ud800".encode(), r"'\ud800' is half of a surrogate pair, and no text"),
        (lambda: Path("/proc/x/y").read_text(), "/proc/x/y: No such file or directory"),
        (lambda: int("x"), "invalid literal for int() with base 10: 'x'"),
    ):
        with pytest.raises((ValueError, OSError, RecursionError)) as caught:
            fails()
        assert in_words(caught.value) == said
        if not isinstance(caught.value, RecursionError):
            with pytest.raises(ValueError, match=re.escape(said) + "$"):
                raise_on_all_ranks(MeshAxis("checkpoint"), fails)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"  # whom nobody has waited for yet
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux keeps the promise")
def test_a_child_ends_when_its_launcher_is_killed():
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert not ended(child)
        process.kill()
    deadline = time.monotonic() + 10
    while not ended(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended(child)


def test_a_child_whose_launcher_is_gone_already_ends_at_once():
    program = "from megazpp.base.program import end_with; end_with(1 << 30); print('still here')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, b"")
