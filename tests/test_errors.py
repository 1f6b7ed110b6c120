"""A process ends with the one that started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHILD = """
import os, time
from megazpp.errors import end_with
end_with(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""


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
    program = "from megazpp.errors import end_with; end_with(1 << 30); print('still here')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, b"")
