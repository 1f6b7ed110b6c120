"""Print the estimated model TFLOP/s per GPU of each sharding scheme for several cluster sizes (weak scaling).

    python tools/plan.py --nodes 8 32 128 --micro-batches 1 @configs/gpt_18b.args \\
        --cluster-file configs/clusters/dgx_h100.yaml

The number of tokens per GPU is the same for all sizes. A figure is in brackets if the run does not fit into memory. All
other flags are the flags of pretrain_gpt.py, whose --plan estimates one run on one cluster. No worker is started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from megazpp.base.flags import Config, flag
from megazpp.base.program import answer_flags, markdown, program, say_notices
from megazpp.features import FEATURES
from megazpp.run.arguments import ParsedRun, RunConfig, parse_run_config
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(Config):
    """Weak scaling.

    The sizes for which the schemes are estimated.

    Attributes:
        nodes: numbers of nodes, instead of the cluster file's number.
        micro_batches: number of micro-batches per optimizer step.
    """

    nodes: tuple[int, ...] = flag(None, required=True, must_be="positive")
    micro_batches: int = flag(1, must_be="positive")


def parse(argv: list[str]) -> tuple[ParsedRun, Cluster]:
    """Return the flags of the command line, and the cluster of --cluster-file."""
    options: dict[str, Any] = {"description": __doc__, "extra": (ScalingConfig,), "common": ()}
    parsed = parse_run_config(argv, ROOT, features=FEATURES, program="plan.py", **options)
    config = parsed.config
    if config.cluster.cluster_file is None or config.tokenizer.known_vocab_size is None:
        raise ValueError("plan.py requires --cluster-file and --vocab-size: add them to the flags")
    if config.batches.micro_batch_size is None:
        raise ValueError("--micro-batch-size is required, because all cluster sizes use the same micro-batch size")
    return parsed, read_cluster(config.cluster.cluster_file)


answer_flags(__name__, parse)  # answers --help and rejects wrong flags before the imports below, which take seconds

from megazpp.parallel.launch import device_type
from megazpp.planner.estimate import Estimate, Estimator
from megazpp.planner.variants import changed, for_planning, schemes


@program
def main(argv: list[str]) -> None:
    """Print a Markdown table with a row per cluster size and a column per scheme."""
    parsed, cluster = parse(argv)
    config, (scaling,) = for_planning(parsed.config, "plan.py"), parsed.extra
    say_notices(parsed.notices)
    rows = {}
    for nodes in scaling.nodes:
        larger = dataclasses.replace(cluster, num_nodes=nodes, order=None)
        rows[larger.world_size] = estimate_schemes(config, larger, micro_batches=scaling.micro_batches)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    cells = [[str(gpus), *(_cell(row.get(name)) for name in names)] for gpus, row in rows.items()]
    print("\n".join(markdown(["GPUs", *names], cells)))


def _cell(found: Estimate | None) -> str:
    """Return an estimate's model TFLOP/s per GPU as a cell of the table, in brackets if the memory is too small."""
    text = "-" if found is None else f"{found.teraflops:.3g}"
    return text if found is None or found.fits else f"({text})"


def estimate_schemes(config: RunConfig, cluster: Cluster, *, micro_batches: int) -> dict[str, Estimate]:
    """Return the estimate of each sharding scheme by its name, without schemes that cannot run on the cluster.

    For example, HSDP cannot run on a single node.

    Args:
        config: flags of the run.
        cluster: nodes and ranks, with the device and links of the cluster file.
        micro_batches: number of micro-batches per optimizer step.
    """
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
