"""The scaling study: model TFLOP/s per GPU of every scheme on more and more nodes, at fixed tokens per GPU.

    python tools/plan.py --nodes 8 32 128 --micro-batches 1 @configs/gpt_18b.args \
        --cluster-file configs/clusters/dgx_h100.yaml

All other flags are pretrain_gpt.py's (one run on one cluster: pretrain_gpt.py --plan). Nothing is started.
"""

from __future__ import annotations

from pathlib import Path

from megazpp.arguments import parse_run_config
from megazpp.parallel.launch import device_type
from megazpp.planner.scaling import Scaling, scaling_table
from megazpp.planner.variants import for_planning
from megazpp.program import flags_of, program
from megazpp.topology.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parent.parent


@program
def main(argv: list[str]) -> None:
    parser = flags_of(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", required=True, help="numbers of nodes of the cluster file")
    parser.add_argument("--micro-batches", type=int, default=1, help="of an optimizer step (default 1)")
    args, run_flags = parser.parse_known_args(argv)
    config = parse_run_config(run_flags, ROOT, program="plan.py").config
    path = config.cluster.cluster_file
    if path is None or config.tokenizer.vocab_size is None:
        raise ValueError("--cluster-file and --vocab-size are needed")
    config = for_planning(config, "plan.py")
    scaling = Scaling(config, read_cluster(path), micro_batches=args.micro_batches, device_type=device_type())
    print(scaling_table(list(scaling.points(args.nodes))))


if __name__ == "__main__":
    raise SystemExit(main())
