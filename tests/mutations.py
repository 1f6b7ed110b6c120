"""Inject mistakes into the package one after another, and report those that their tests do not notice.

    python tests/mutations.py [--only NAME ...] [--timeout SECONDS]

mutations.toml lists the mistakes. Each has a name, a file, the text to replace (which occurs exactly once), its
replacement, and the tests to run. If no test can notice a mistake, its entry gives the reason in `survives`. The
program makes each mistake in a copy of the checkout. The exit status is 1 if any other mistake survives, so that all
its tests pass. CI does not run this program, because it starts pytest more than 200 times.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".*_cache", ".git", ".venv", "__pycache__", "build", "runs", "wandb", "*.egg-info")


class Change(NamedTuple):
    """One mistake to inject, as an entry of mutations.toml describes it.

    Attributes:
        name: name for --only and for the report.
        file: path of the source file.
        before: text of the file to replace.
        after: replacement.
        tests: arguments of pytest that should notice the mistake.
        survives: reason why no test can notice the mistake; "" if a test should.
    """

    name: str
    file: str
    before: str
    after: str
    tests: str
    survives: str = ""


def read_changes(path: Path = ROOT / "tests/mutations.toml") -> list[Change]:
    """Read and check the entries of mutations.toml, each of which is a mistake to inject.

    Args:
        path: path of mutations.toml.

    Raises:
        ValueError: an entry's `before` does not occur exactly once in its file or equals `after`, its tests do not
            exist, or two entries have the same name.
    """
    changes = [Change(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["change"]]
    for change in changes:
        times = (ROOT / change.file).read_text(encoding="utf-8").count(change.before)
        if times != 1 or change.before == change.after:
            raise ValueError(f"{change.name}: {change.before!r} occurs {times} times in {change.file}, not once")
        paths, _, selected = change.tests.partition(" -k ")
        tests = [path.partition("::") for path in paths.split() if path.startswith("tests/")]
        text = "".join((ROOT / file).read_text(encoding="utf-8") for file, *_ in tests).lower()
        words = [*(name for *_, name in tests), *selected.split()]
        if unknown := [word for word in words if word.partition("[")[0].lower() not in text]:
            raise ValueError(f"{change.name}: {change.tests} has no test with {' '.join(unknown)} in its name")
    if len({change.name for change in changes}) < len(changes):
        raise ValueError("two entries of mutations.toml have the same name; names must be unique")
    return changes


def outcome(change: Change, copy: Path, timeout: float) -> str:
    """Make one mistake in a copy of the checkout, run its tests, and undo the mistake.

    Args:
        change: the mistake.
        copy: folder of the copy.
        timeout: seconds that the tests may take.

    Returns:
        "noticed" if a test failed, "SURVIVED" if all tests passed, or "timeout".
    """
    file, env = copy / change.file, {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(change.before, change.after), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", *change.tests.split()]
    try:
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        file.write_text(whole, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{change.name}: pytest ended with {done.returncode}\n{done.stdout.decode()[-2000:]}")
    return "noticed" if done.returncode else "SURVIVED"


def main() -> int:
    """Inject all mistakes of mutations.toml, or only those that --only names; return 1 if one survives unexpectedly."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--timeout", type=float, default=300.0)
    given = parser.parse_args()
    changes = [change for change in read_changes() if not given.only or change.name in given.only]
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder) / "copy", symlinks=True, ignore=LEFT_OUT))
        for change in changes:
            found = outcome(change, copy, given.timeout)
            survived += [change.name] if found == "SURVIVED" and not change.survives else []
            print(f"{found:9} {change.name:24} {change.file}  {change.survives}", flush=True)
    print(f"{len(survived)} of {len(changes)} survived: {' '.join(survived) or 'none'}")
    return 1 if survived else 0


if __name__ == "__main__":
    raise SystemExit(main())
