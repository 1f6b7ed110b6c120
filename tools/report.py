"""Make one HTML page of what runs did: curves, throughput, memory, bytes, flags that differ, who had which rank.

    python tools/report.py runs/20261121-220000-gpt_tiny
    python tools/report.py runs/a runs/b --output compared.html

RUN is the folder that pretrain_gpt.py names at its end (--run-dir); the run may still be going on. The page needs no
server and nothing from the network: open it, or send it.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from megazpp.base.program import flags_of, program
from megazpp.report.page import write_report
from megazpp.report.runs import read_runs


@program
def main(argv: list[str]) -> None:
    parser = flags_of(__doc__)
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folder of a run")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="the page (default: report.html in the first folder)"
    )
    args = parser.parse_args(argv)
    output = args.output.expanduser() if args.output is not None else args.runs[0].expanduser() / "report.html"
    write_report(read_runs(args.runs), output, datetime.datetime.now())
    print(f"report: {output}")


if __name__ == "__main__":
    raise SystemExit(main())
