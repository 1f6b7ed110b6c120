"""Print model TFLOP/s per GPU of every scheme on more and more nodes, at fixed tokens per GPU (in brackets: too large).

    python tools/plan.py --nodes 8 32 128 --micro-batches 1 @configs/gpt_18b.args \
        --cluster-file configs/clusters/dgx_h100.yaml

All other flags are pretrain_gpt.py's (one run on one cluster: pretrain_gpt.py --plan). Nothing is started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from megazpp.base.program import flags_of, program
from megazpp.features import FEATURES
from megazpp.parallel.launch import device_type
from megazpp.planner.estimate import Estimate, Estimator
from megazpp.planner.variants import changed, for_planning, schemes
from megazpp.run.arguments import RunConfig, parse_run_config
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parent.parent


@program
def main(argv: list[str]) -> None:
    parser = flags_of(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", required=True, help="numbers of nodes of the cluster file")
    parser.add_argument("--micro-batches", type=int, default=1, help="of an optimizer step (default 1)")
    args, run_flags = parser.parse_known_args(argv)
    config = parse_run_config(run_flags, ROOT, features=FEATURES, program="plan.py").config
    path = config.cluster.cluster_file
    if path is None or config.tokenizer.vocab_size is None:
        raise ValueError("--cluster-file and --vocab-size are needed")
    if config.batches.micro_batch_size is None:
        raise ValueError("--micro-batch-size is required: it is what stays the same on more nodes")
    config, cluster = for_planning(config, "plan.py"), read_cluster(path)
    rows = {}
    for nodes in args.nodes:
        larger = dataclasses.replace(cluster, num_nodes=nodes, order=None)
        rows[larger.world_size] = estimate_schemes(config, larger, micro_batches=args.micro_batches)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"| {' | '.join(['GPUs', *names])} |", "|---" * (len(names) + 1) + "|", sep="\n")
    for gpus, row in rows.items():
        texts = {name: f"{found.teraflops:.3g}" for name, found in row.items()}
        cells = [texts.get(name, "-") if name not in row or row[name].fits else f"({texts[name]})" for name in names]
        print(f"| {' | '.join([str(gpus), *cells])} |")


def estimate_schemes(config: RunConfig, cluster: Cluster, *, micro_batches: int) -> dict[str, Estimate]:
    """Estimates by scheme, of schemes that can run there (HSDP not on one node)."""
    assert config.batches.micro_batch_size is not None
    parallel = config.parallel
    ranks = cluster.world_size // (parallel.tensor_model_parallel_size * parallel.context_parallel_size)
    samples = config.batches.micro_batch_size * ranks * micro_batches
    estimator, found = Estimator(cluster, device_type=device_type()), {}
    sized = changed(config, batches={"global_batch_size": samples, "rampup_batch_size": None})
    for name, run in schemes(sized).items():
        with contextlib.suppress(ValueError):
            found[name] = estimator.estimate(run)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
