"""Print the placement of ranks on a cluster, and the links that each parallel axis uses.

    python tools/show_topology.py --cluster-file configs/clusters/nvlink_pairs.yaml --tensor-model-parallel-size 2
    python tools/show_topology.py --nodes 4 --ranks-per-node 8 --rank-order cyclic --hsdp
    python tools/show_topology.py @configs/gpt_13b.args --cluster-file configs/clusters/gb200_nvl72.yaml

Describe the cluster with --cluster-file, or with --nodes and --ranks-per-node. All other flags are the flags of
pretrain_gpt.py; only those that affect the layout matter. No worker is started.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from megazpp.base.flags import Config, flag
from megazpp.base.program import answer_flags, program, say_notices
from megazpp.features import FEATURES
from megazpp.run.arguments import ParsedRun, parse_run_config
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import cyclic_order, read_cluster

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class TopologyConfig(Config):
    """Topology.

    The cluster, unless --cluster-file describes it.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: number of ranks on each node.
        fast_domain: number of ranks that the fastest links connect (default: the ranks of a node).
        rank_order: numbering of the ranks: node by node (block), or in turn over all nodes (cyclic).
    """

    nodes: int | None = flag(None, must_be="positive")
    ranks_per_node: int | None = flag(None, must_be="positive")
    fast_domain: int | None = flag(None, must_be="positive")
    rank_order: Literal["block", "cyclic"] = flag("block")


def parse(argv: list[str]) -> tuple[ParsedRun, Cluster]:
    """Return the flags of the command line, and the cluster that they describe."""
    options: dict[str, Any] = {"description": __doc__, "extra": (TopologyConfig,), "common": ()}
    parsed = parse_run_config(argv, ROOT, features=FEATURES, program="show_topology.py", **options)
    return parsed, choose_cluster(parsed.extra[0], parsed.config.cluster.cluster_file)


def choose_cluster(flags: TopologyConfig, cluster_file: str | None) -> Cluster:
    """Return the cluster that the cluster file or the flags --nodes and --ranks-per-node describe.

    Args:
        flags: the flags of this program.
        cluster_file: path of the cluster file, if one is given.
    Raises:
        ValueError: neither the file nor flags describe the cluster, or both do.
    """
    sizes = {"--nodes": flags.nodes, "--ranks-per-node": flags.ranks_per_node, "--fast-domain": flags.fast_domain}
    given = [f"{name} {size}" for name, size in sizes.items() if size is not None]
    if cluster_file is not None:
        if given:
            raise ValueError(f"--cluster-file {cluster_file} and {given[0]} both describe the cluster; give only one")
        return read_cluster(cluster_file)
    if flags.nodes is None or flags.ranks_per_node is None:
        raise ValueError("no cluster is given; use --cluster-file FILE, or --nodes N and --ranks-per-node R")
    return Cluster(
        num_nodes=flags.nodes,
        ranks_per_node=flags.ranks_per_node,
        domain_size=flags.fast_domain,
        order=cyclic_order(flags.nodes, flags.ranks_per_node) if flags.rank_order == "cyclic" else None,
    )


answer_flags(__name__, parse)  # answers --help and rejects wrong flags before the imports below, which take seconds

from megazpp.run.checks import lay_out
from megazpp.topology.show import topology_text


@program
def main(argv: list[str]) -> None:
    """Print the layout of ranks and parallel axes that the flags give."""
    parsed, cluster = parse(argv)
    say_notices(parsed.notices)
    print(topology_text(lay_out(parsed.config, cluster)))


if __name__ == "__main__":
    raise SystemExit(main())
