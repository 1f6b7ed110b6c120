"""Time training steps of ZeRO-3, its parts of ZeRO++ and all of it, on nodes whose links are really slow.

    python tools/benchmarks/benchmark_cluster.py --out runs/cluster                 2 nodes x 4 ranks, all rates, k = 1
    python tools/benchmarks/benchmark_cluster.py --out runs/cluster --rates 100mbit --micro-batches 8 --samples 3
    python tools/benchmarks/benchmark_cluster.py --out runs/islands --variants zero3 diloco-10 --rates 100mbit unlimited
    python tools/benchmarks/benchmark_cluster.py --out runs/local --local --samples 20  for CPU seconds per token

One set of rank processes holds the models of all variants and runs their steps in turn, so that whatever else the
machine does falls on all of them; medians count, and ratios are medians of ratios within a round, which has all rates.
Rates change under the running processes. What is measured of local steps is a whole cycle, from one synchronization
between islands to the next, and reported per step. Bytes are read from the interfaces and compared with our own
counters. Samples are written after every round to --out/samples.json, from which the same command goes on when it was
interrupted, and from which the tables are made. Needs root and iproute2, except with --local.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any, NamedTuple

import tools_path  # noqa: F401
from benchmark_cluster_ranks import VARIANTS, BenchmarkSettings
from benchmark_cluster_report import LOCAL, Sample, tables
from emulate_cluster import UNLIMITED, EmulatedCluster, parse_rate
from rank_processes import start_on_this_machine

from megazpp.base.errors import EXIT_INTERRUPTED, UserError
from megazpp.base.files import write_whole
from megazpp.base.program import exit_on_signals, flags_of, program, say

RANKS = Path(__file__).resolve().parent / "benchmark_cluster_ranks.py"
POLL_SECONDS = 0.05
RATES = ["100mbit", "200mbit", "500mbit", "1gbit", "10gbit"]
SHAPE = (
    *("nodes", "ranks_per_node", "hidden_size", "num_layers", "vocab_size", "seq_length", "micro_batch_size"),
    "rollout_tokens",
)


class BenchmarkCase(NamedTuple):
    """The case that is measured in every round: every variant once."""

    tp: int
    micro_batches: int
    rate: str


class Results:
    """The samples of a benchmark, in a file.

    Raises:
        ValueError: the file holds samples of another model or cluster.
    """

    def __init__(self, path: Path, shape: dict[str, int]) -> None:
        self.path, self.shape = path, shape
        self.parameters = 0
        self.samples: list[Sample] = []
        if path.exists():
            saved = json.loads(path.read_text())
            if {"rollout_tokens": 0, **saved["shape"]} != shape:
                raise ValueError(f"--out {path.parent} holds samples of {saved['shape']}, not of {shape}")
            self.samples, self.parameters = [Sample(**fields) for fields in saved["samples"]], saved["parameters"]

    def missing(self, case: BenchmarkCase, round_index: int, variants: list[str]) -> list[str]:
        """The variants that this round has no sample of yet."""
        have = {s.variant for s in self.samples if (*case, round_index) == (s.tp, s.micro_batches, s.rate, s.round)}
        return [name for name in variants if name not in have]

    def write(self) -> None:
        """Replace the file."""
        samples = [sample._asdict() for sample in self.samples]
        content = {"shape": self.shape, "parameters": self.parameters, "samples": samples}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(content, indent=1).encode())


class Driver:
    """A job of rank processes on the cluster, or on this machine, and the pipe through which rank 0 takes orders.

    A context manager, at whose end all of them have ended.
    """

    def __init__(self, cluster: EmulatedCluster | None, settings: BenchmarkSettings) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        control = theirs.fileno()
        command = [sys.executable, str(RANKS), json.dumps(dataclasses.asdict(settings)), str(control)]
        if cluster is not None:
            self._job = cluster.start(command, pass_fds=(control,))
        else:
            shape = {"nodes": settings.nodes, "ranks_per_node": settings.ranks_per_node}
            self._job = start_on_this_machine(command, **shape, pass_fds=(control,))
        theirs.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        try:
            if error is None:
                self._pipe.send(None)
                if self._job.wait():
                    raise UserError("the ranks did not end well")
        finally:
            self._job.stop()

    def step(self, variant: str, micro_batches: int) -> dict[str, Any]:
        """Have all ranks run one optimizer step or cycle."""
        self._pipe.send((variant, micro_batches))
        return self.receive()

    def receive(self) -> dict[str, Any]:
        """Receive what rank 0 sends next: of the model it has built, then of every step."""
        try:
            while not self._pipe.poll(POLL_SECONDS):
                if self._job.poll() is not None:
                    raise EOFError
            answer: dict[str, Any] = self._pipe.recv()
        except EOFError:
            self._job.wait()
            raise UserError("the ranks have ended") from None
        return answer


def measure(args: argparse.Namespace, results: Results) -> None:
    """Run all rounds that `results` does not hold."""
    cluster = None if args.local else EmulatedCluster(nodes=args.nodes, ranks_per_node=args.ranks_per_node)
    rates = [LOCAL] if args.local else args.rates
    with cluster or contextlib.nullcontext():
        for tp in args.tp:
            cases = [BenchmarkCase(tp, *rest) for rest in itertools.product(args.micro_batches, rates)]
            rounds = [(case, index) for index in range(args.samples) for case in cases]
            rounds = [r for r in rounds if results.missing(*r, args.variants)]
            if not rounds:
                continue
            settings = BenchmarkSettings(**results.shape, tp=tp, variants=tuple(args.variants))
            with Driver(cluster, settings) as driver:
                results.parameters = driver.receive()["parameters"]
                if cluster is not None:
                    cluster.set_rate(UNLIMITED)
                for name in args.variants:  # uncounted: connections, the optimizers' state, the allocator
                    say(f"{name}: first step, {driver.step(name, 1)['seconds']:.2f} s")
                for case, index in rounds:
                    run_round(cluster, driver, results, case, index, args.variants)


def run_round(
    cluster: EmulatedCluster | None,
    driver: Driver,
    results: Results,
    case: BenchmarkCase,
    index: int,
    variants: list[str],
) -> None:
    """One sample of every variant that has none yet."""
    if cluster is not None:
        cluster.set_rate(case.rate)
    for name in results.missing(case, index, variants):
        before = cluster.uplink_bytes() if cluster else []
        answer = driver.step(name, case.micro_batches)
        after = cluster.uplink_bytes() if cluster else []
        steps = VARIANTS[name].steps
        uplinks = [(now.sent - then.sent) // steps for now, then in zip(after, before, strict=True)]
        results.samples.append(Sample(*case, round=index, variant=name, uplink_bytes=uplinks, **answer))
        say(
            f"tp {case.tp}, k {case.micro_batches}, {case.rate}, round {index + 1}: {name} {answer['seconds']:.2f} s, "
            f"loss {answer['loss']:.3f}, rollout {answer['rollout_seconds']:.2f} s"
        )
    results.write()


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """The flags, checked.

    Raises:
        ValueError: naming the flag and its value.
    """
    parser = flags_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for samples.json and table.md")
    parser.add_argument("--nodes", type=int, default=2, help="nodes of the cluster")
    parser.add_argument("--ranks-per-node", type=int, default=4, help="ranks of each node")
    parser.add_argument("--rates", nargs="+", default=RATES, help=f"of the uplinks: 500mbit, 1gbit, ..., {UNLIMITED}")
    parser.add_argument("--local", action="store_true", help="no namespaces and no rates: the nodes are only counted")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1], help="micro-batches per optimizer step")
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="tensor-parallel degrees")
    parser.add_argument("--samples", type=int, default=5, help="rounds per rate and number of micro-batches")
    default = [name for name, variant in VARIANTS.items() if variant.steps == 1]
    parser.add_argument("--variants", nargs="+", default=default, choices=list(VARIANTS), help="what to compare")
    parser.add_argument("--hidden-size", type=int, default=512, help="width of the model")
    parser.add_argument("--num-layers", type=int, default=8, help="layers of the model")
    parser.add_argument("--vocab-size", type=int, default=512, help="tokens that the model knows")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="samples of a rank's micro-batch")
    parser.add_argument("--rollout-tokens", type=int, default=0, help="draw completions of so many before each step")
    args = parser.parse_args(argv)
    if args.rollout_tokens < 0:
        raise ValueError(f"--rollout-tokens {args.rollout_tokens} is negative")
    local = [name for name in args.variants if VARIANTS[name].steps > 1]
    if args.rollout_tokens and local:
        raise ValueError(f"--rollout-tokens {args.rollout_tokens} is of single steps: leave out {' '.join(local)}")
    if args.nodes == 1 and local:
        raise ValueError(f"--nodes 1 has no islands: leave out {' '.join(local)}")
    for rate in args.rates:
        parse_rate(rate)
    for name in (*SHAPE[:-1], "samples"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} is not positive")
    for tp in args.tp:
        if tp < 1 or args.ranks_per_node % tp:
            raise ValueError(f"--tp {tp} does not divide --ranks-per-node {args.ranks_per_node}")
    if min(args.micro_batches) < 1:
        raise ValueError(f"--micro-batches {min(args.micro_batches)} is not positive")
    return args


@program
def main(argv: list[str]) -> int:
    """Measure what is missing, then write and print the tables; returns the exit code."""
    exit_on_signals()
    try:
        args = parse_flags(argv)
        results = Results(args.out / "samples.json", {name: getattr(args, name) for name in SHAPE})
        measure(args, results)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        return EXIT_INTERRUPTED
    labels = {name: variant.label for name, variant in VARIANTS.items()}
    text = tables(results.samples, results.shape, results.parameters, labels)
    (args.out / "table.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
