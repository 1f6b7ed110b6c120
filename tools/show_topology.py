"""Print the placement of ranks on a cluster, and the links that each parallel axis uses.

    python tools/show_topology.py --cluster-file configs/clusters/nvlink_pairs.yaml --tensor-model-parallel-size 2
    python tools/show_topology.py --nodes 4 --ranks-per-node 8 --rank-order cyclic --hsdp
    python tools/show_topology.py @configs/gpt_13b.args --cluster-file configs/clusters/gb200_nvl72.yaml

Describe the cluster with --cluster-file, or with --nodes and --ranks-per-node. All other flags are the flags of
pretrain_gpt.py; only those that affect the layout matter. No worker is started.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # before the imports below, in which Ctrl-C would print a traceback

from megazpp.base.program import answer_flags, flags_of, program, say_notices
from megazpp.features import FEATURES
from megazpp.run.arguments import ParsedRun, parse_run_config

ROOT = Path(__file__).resolve().parent.parent


def parse(argv: list[str]) -> tuple[argparse.Namespace, ParsedRun]:
    """Return the flags of this program, and the flags of pretrain_gpt.py, from the command line."""
    parser = flags_of(__doc__)
    parser.add_argument("--nodes", type=int, help="number of nodes")
    parser.add_argument("--ranks-per-node", type=int, help="number of ranks on each node")
    parser.add_argument(
        "--fast-domain", type=int, help="number of ranks that the fastest links connect (default: the ranks of a node)"
    )
    parser.add_argument(
        "--rank-order",
        choices=["block", "cyclic"],
        default="block",
        help="numbering of the ranks: node by node (block), or in turn over all nodes (cyclic) (default: block)",
    )
    args, run_flags = parser.parse_known_args(argv)
    return args, parse_run_config(run_flags, ROOT, features=FEATURES, program="show_topology.py")


answer_flags(__name__, parse)  # before the imports below, which take seconds

from megazpp.run.checks import lay_out
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import cyclic_order, read_cluster
from megazpp.topology.show import topology_text


@program
def main(argv: list[str]) -> None:
    """Print the layout of ranks and parallel axes that the flags give."""
    args, parsed = parse(argv)
    config = parsed.config
    say_notices(parsed.notices)
    cluster = choose_cluster(args, config.cluster.cluster_file)
    print(topology_text(lay_out(config, cluster)))


def choose_cluster(args: argparse.Namespace, cluster_file: str | None) -> Cluster:
    """Return the cluster that the cluster file or the flags --nodes and --ranks-per-node describe.

    Args:
        args: the flags of this program.
        cluster_file: path of the cluster file, if one is given.
    Raises:
        ValueError: neither the file nor flags describe the cluster, or both do, or a size is not positive.
    """
    sizes = {"--nodes": args.nodes, "--ranks-per-node": args.ranks_per_node, "--fast-domain": args.fast_domain}
    given = [f"{flag} {value}" for flag, value in sizes.items() if value is not None]
    if cluster_file is not None:
        if given:
            raise ValueError(f"--cluster-file {cluster_file} and {given[0]} both describe the cluster; give only one")
        return read_cluster(cluster_file)
    if args.nodes is None or args.ranks_per_node is None:
        raise ValueError("no cluster is given; use --cluster-file FILE, or --nodes N and --ranks-per-node R")
    for flag, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{flag} {value} is not positive")
    return Cluster(
        num_nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        domain_size=args.fast_domain,
        order=cyclic_order(args.nodes, args.ranks_per_node) if args.rank_order == "cyclic" else None,
    )


if __name__ == "__main__":
    raise SystemExit(main())
