"""Coordinate elastic DiLoCo: the membership of replica groups, the steps that each version merges, and the data.

    head -c 32 /dev/urandom | base64 > run7.secret; chmod 600 run7.secret     # copy it to each site
    python tools/coordinate.py --folder /data/run7 --listen 10.8.0.1:29700 --secret-file run7.secret

The program needs neither torch nor a GPU and holds no weights. Start it once per run, at an address that all groups can
reach. The coordinator may be killed and started again at any time. Without the coordinator, the groups finish their
current interval, and then wait. The journal in FOLDER/coordinator has one line per event of the run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from megazpp.base.address import is_loopback, parse_address
from megazpp.base.flags import checked_path
from megazpp.base.program import flags_of, lasting_output, program
from megazpp.elastic.coordinator import Coordinator, serve_until_ended
from megazpp.elastic.wire import read_secret


@program
def main(argv: list[str]) -> int:
    """Run the coordinator until a signal ends it, or another coordinator takes over its folder."""
    parser = flags_of(__doc__)
    parser.add_argument(
        "--folder", metavar="FOLDER", type=checked_path, required=True, help="folder of the run's journal"
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default="127.0.0.1:29700", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        type=checked_path,
        help="file with the secret of the run, readable only by its owner (default: none, if --listen is on 127.0.0.1)",
    )
    parser.add_argument(
        "--take-over", action="store_true", help="replace a coordinator whose host cannot be reached any more"
    )
    args = parser.parse_args(argv)
    address = parse_address(args.listen, "--listen", any_port=True)
    if args.secret_file is None and not is_loopback(address.host):
        raise ValueError(f"--listen {args.listen} accepts connections from other machines: give --secret-file as well")
    secret = read_secret(args.secret_file, "--secret-file")

    def say(line: str) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)

    with lasting_output(lambda: None):  # keep running without readers of the output: groups need the coordinator
        coordinator = Coordinator(args.folder.expanduser(), address, secret, say=say, take_over=args.take_over)
        return serve_until_ended(coordinator)


if __name__ == "__main__":
    raise SystemExit(main())
