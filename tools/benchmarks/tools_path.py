"""Importing this puts tools/ on the module path, where a benchmark that is run as a script finds what tools share."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
