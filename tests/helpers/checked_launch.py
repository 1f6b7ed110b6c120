"""Fake of `torchrun`, `srun` and `sbatch`: check all flags of the job that the command would start, and start nothing.

A test puts this program in place of the launchers, so that it can check the launch commands of the documentation.

python checked_launch.py torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --lr 1e-3 ...
"""

import itertools
import sys
from pathlib import Path

from megazpp.features import FEATURES
from megazpp.run.arguments import parse_run_config
from megazpp.run.checks import plan_run
from megazpp.topology.cluster import Cluster

NODES, RANKS = ("--nnodes", "--nodes", "-N"), ("--nproc-per-node", "--ntasks-per-node")
SCRIPTS = ("pretrain_gpt.py", "tools/slurm/pretrain.sbatch")
RANKS_OF_THE_BATCH_SCRIPT = 8


def main(launcher: str, *words: str) -> None:
    place = next(index for index, word in enumerate(words) if word in SCRIPTS)
    assert Path(words[place]).is_file()
    own = words[:place]
    options = dict(itertools.pairwise(own)) | dict(word.split("=", 1) for word in own if "=" in word)
    nodes = next((int(options[name].split(":")[-1]) for name in NODES if name in options), 1)
    ranks = next((int(options[name]) for name in RANKS if name in options), RANKS_OF_THE_BATCH_SCRIPT)
    config = parse_run_config(words[place + 1 :], Path.cwd(), features=FEATURES).config
    cluster = Cluster(num_nodes=nodes, ranks_per_node=ranks)
    if nodes == 1:  # the run's flag --emulate-nodes may split this node into several emulated nodes
        cluster = config.detect_cluster(ranks, {})
    plan = plan_run(config, cluster, device_type="cpu")
    print(f"{launcher}: {plan.layout.describe()}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"{sys.argv[1]}: error: {error}")
