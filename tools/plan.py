"""The scaling study: model TFLOP/s per GPU of every scheme on more and more nodes, at fixed tokens per GPU.

    python tools/plan.py --nodes 8 32 128 --micro-batches 1 @configs/gpt_18b.args \
        --cluster-file configs/clusters/dgx_h100.yaml

All other flags are pretrain_gpt.py's (one run on one cluster: pretrain_gpt.py --plan). Nothing is started.
"""

from __future__ import annotations

from pathlib import Path

from megazpp.arguments import parse_run_config
from megazpp.parallel.launch import device_type
from megazpp.planner.report import with_data
from megazpp.planner.scaling import scale, scaling_table
from megazpp.program import flags_of, program
from megazpp.topology.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parent.parent


@program
def main(argv: list[str]) -> None:
    parser = flags_of(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", required=True, help="numbers of nodes of the cluster file")
    parser.add_argument("--micro-batches", type=int, default=1, help="of an optimizer step (default 1)")
    args, run_flags = parser.parse_known_args(argv)
    config = with_data(parse_run_config(run_flags, ROOT, program="plan.py").config)
    if config.cluster.cluster_file is None or config.tokenizer.vocab_size is None:
        raise ValueError("--cluster-file and --vocab-size are needed")
    found = scale(
        config,
        read_cluster(config.cluster.cluster_file),
        args.nodes,
        micro_batches=args.micro_batches,
        vocab_size=config.tokenizer.vocab_size,
        device_type=device_type(),
    )
    print(scaling_table(list(found)))


if __name__ == "__main__":
    raise SystemExit(main())
