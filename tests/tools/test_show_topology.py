"""The tool shows a file's cluster or a described one, with the program's own flags, and names mistakes."""

import re
from pathlib import Path

import show_topology

CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"


ISLANDS = "--nodes 4 --ranks-per-node 2 --diloco-steps 30"
SPLIT = "--nodes 2 --ranks-per-node 8 --tensor-model-parallel-size 2 --context-parallel-size 4"
SHOWN = [  # flags, a pattern of what is shown
    (
        f"--cluster-file {CLUSTERS}/nvlink_pairs.yaml --tensor-model-parallel-size 2",
        r"^4 node\(s\) x 4 rank\(s\) \(fastest wire among 2\): tensor parallel 2, shards 8",
    ),
    (f"--cluster-file {CLUSTERS}/nvlink_pairs.yaml", r"domain \(56.25 GB/s per rank\)"),
    (
        "@configs/gpt_13b.args --nodes 2 --ranks-per-node 8 --rank-order cyclic",
        r"ranks in the order 0 2 4 6 8 10 12 14 ...: tensor parallel 8, shards 2 \(2 across nodes x 1 inside\)",
    ),
    (f"{ISLANDS} --diloco-islands 2", r"^4 node.* shards 4 \(2 across nodes x 2 inside\), replicas 1, islands 2$"),
    (f"{ISLANDS} --diloco-islands 2", r"^island +2 +4 +network +0 4 +local steps"),
    (SPLIT, r"tensor parallel 2, context parallel 4, shards 8 \(2 across nodes x 4 inside\)"),
    (SPLIT, r"^cp +4 +4 +domain +0 2 4 6 +heads of attention"),
]
REFUSED = """
 | --cluster-file FILE, or --nodes N
--nodes 2 | which cluster
--nodes 0 --ranks-per-node 2 | --nodes 0 is not positive
--nodes 2 --cluster-file x.yaml | --cluster-file x.yaml and --nodes 2 both
--cluster-file nowhere.yaml | --cluster-file nowhere.yaml cannot be read
--nodes 2 --ranks-per-node 4 --tensor-model-parallel-size 3 | --tensor-model-parallel-size 3
--nodes 2 --ranks-per-node 4 --fast-domain 3 | fast_domain 3
--nodes 4 --ranks-per-node 4 --diloco-steps 5 --diloco-islands 3 | --diloco-islands 3 does not divide the 4
--nodes 2 --ranks-per-node 4 --tensor-parallel 2 | --tensor-parallel
"""


def test_what_is_asked_for_is_shown(capsys):
    for flags, pattern in SHOWN:
        assert show_topology.main(flags.split()) == 0
        out = capsys.readouterr().out
        assert re.search(pattern, out, re.M), (flags, out)


def test_a_mistake_is_named_and_nothing_is_shown(capsys):
    for flags, message in (line.split(" | ") for line in REFUSED.strip("\n").splitlines()):
        assert show_topology.main(flags.split()) == 2
        out, err = capsys.readouterr()
        assert out == "", flags
        assert message in err, (flags, err)
