"""Make one HTML page of what runs did: curves, throughput, memory, bytes, flags that differ, who had which rank.

    python tools/report.py runs/20261121-220000-gpt_tiny
    python tools/report.py runs/a runs/b --output compared.html

RUN is the folder that pretrain_gpt.py names at its end (--run-dir); the run may still be going on. The page needs no
server and nothing from the network: open it, or send it.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

from entry import leave_with, one_line_errors

from megazpp.report.page import write_report
from megazpp.report.runs import read_runs


@one_line_errors
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folder of a run")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="the page (default: report.html in the first folder)"
    )
    args = parser.parse_args(argv)
    output = args.output.expanduser() if args.output is not None else args.runs[0].expanduser() / "report.html"
    write_report(read_runs(args.runs), output, datetime.datetime.now())
    print(f"report: {output}")


if __name__ == "__main__":
    leave_with(lambda: main(sys.argv[1:]))
