"""Write an HTML report on one or several runs: curves, throughput, memory, traffic, differing flags, rank placement.

    python tools/report.py runs/20261121-220000-gpt_tiny
    python tools/report.py runs/a runs/b --output compared.html

RUN is a run folder (--run-dir), whose path pretrain_gpt.py prints at its end. The run may still be in progress. The
report is a single file that needs neither a server nor network access.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from megazpp.base.flags import checked_path
from megazpp.base.program import flags_of, program
from megazpp.report.groups import read_rounds
from megazpp.report.page import write_report
from megazpp.report.runs import read_runs


@program
def main(argv: list[str]) -> None:
    """Write the HTML report on the given runs, and print its path."""
    parser = flags_of(__doc__)
    parser.add_argument("runs", metavar="RUN", type=checked_path, nargs="+", help="run folder")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=checked_path,
        help="path of the HTML file (default: report.html in the first folder)",
    )
    parser.add_argument(
        "--rounds",
        metavar="FILE",
        type=checked_path,
        help="rounds.jsonl of the coordinator of an elastic run, for its groups",
    )
    args = parser.parse_args(argv)
    output = args.output.expanduser() if args.output is not None else args.runs[0].expanduser() / "report.html"
    rounds = read_rounds(args.rounds.expanduser()) if args.rounds is not None else []
    write_report(read_runs(args.runs), output, datetime.datetime.now(), rounds)
    print(f"report: {output}")


if __name__ == "__main__":
    raise SystemExit(main())
