"""Time training steps of ZeRO-3, ZeRO-1, HSDP, ZeRO++, its parts and local steps on nodes with emulated slow links.

    python tools/benchmarks/benchmark_cluster.py --out runs/cluster        2 nodes x 4 ranks, all rates, 1 micro-batch
    python tools/benchmarks/benchmark_cluster.py --out runs/k8 --rates 100mbit --micro-batches 8 --samples 3
    python tools/benchmarks/benchmark_cluster.py --out runs/diloco --variants zero3 diloco-10 --rates 100mbit unlimited
    python tools/benchmarks/benchmark_cluster.py --out runs/moe -- --num-experts 8 --swiglu --disable-bias-linear

Flags after `--` are passed to pretrain_gpt.py in all variants.

The same rank processes hold the models of all variants and run their steps in turn, so that other load on the machine
affects all variants alike. A round measures each variant once at one rate; each such measurement is a sample. The
tables show medians over rounds. A relative speed is the median over rounds of ZeRO-3's seconds divided by the variant's
seconds. The benchmark changes the rate of the links while the processes run. With local steps, a sample is a whole
cycle from one synchronization of DiLoCo to the next, reported per step. Bytes are read from the network interfaces and
compared with the program's own counters. Each round is saved to samples.json in the --out folder. The same command
resumes an interrupted benchmark from this file. Root and iproute2 are needed, except with --local.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[2]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from benchmark_cluster_ranks import ESTIMATE
from emulate_cluster import UNLIMITED, EmulatedCluster, parse_rate, start_on_this_machine

from megazpp.base.files import write_whole
from megazpp.base.program import EXIT_INTERRUPTED, MEGA, UserError, exit_on_signals, flags_of, markdown, program, say
from megazpp.features import FEATURES
from megazpp.run.arguments import parse_run_config
from megazpp.run.checks import plan_run
from megazpp.topology.cluster import Cluster

RANKS = Path(__file__).resolve().parent / "benchmark_cluster_ranks.py"
POLL_SECONDS = 0.05
# Untimed first steps of each variant, which open connections and allocate states. With lossless deltas, the first
# message has whole weights, and the next two have room for a change of every weight. Later messages have normal sizes.
WARM_UP_STEPS = 4
RATES = ["100mbit", "200mbit", "500mbit", "1gbit", "10gbit"]
LOCAL, BASELINE = "local", "zero3"  # name of the rate without emulated links, and the variant for relative speeds
# Names of flags of this program. MODEL has the sizes of the model, and SHAPE all flags that must have equal values if a
# benchmark is resumed.
MODEL = ("hidden_size", "num_layers", "vocab_size", "seq_length", "micro_batch_size")
SHAPE = ("nodes", "ranks_per_node", "tp", "micro_batches", *MODEL, "flags")
NO_OVERLAP, DILOCO = "--no-overlap-param-gather --no-overlap-grad-reduce", "--diloco-outer-momentum 0.9 --diloco-steps"
# --zero-weight-delta none, because by default bf16 weights cross nodes as lossless deltas, not in int8
INT8 = "--zeropp --zero-weight-delta none"
VARIANTS = {  # flags of pretrain_gpt.py; with DiLoCo each node is a replica group that also holds outer momentum
    "zero3": "",
    "zero3-overlap": "--overlap-param-gather --overlap-grad-reduce",
    "zero1": "--zero-stage 1",
    "hsdp": "--hsdp",
    "qwz": "--zero-quantized-weights",
    "hpz": "--zero-hpz-partition-size auto",
    "qgz": "--zero-quantized-gradients",
    "zeropp": f"{INT8} {NO_OVERLAP}",
    "zeropp-overlap": INT8,
    "lossless": "--zeropp --zero-weight-delta lossless",
    "diloco-10": f"{DILOCO} 10",
    "diloco-10-delay": f"{DILOCO} 10 --diloco-fragment-sync-delay 2",
    "diloco-50": f"{DILOCO} 50",
    "diloco-50-delay": f"{DILOCO} 50 --diloco-fragment-sync-delay 10",
}


class Sample(NamedTuple):
    """Measurement of one optimizer step of one variant.

    With DiLoCo a measurement covers a cycle of H local steps, from one synchronization to the next. The attributes are
    then means over the cycle, except `loss`, which is the loss of the cycle's last step.

    Attributes:
        rate: bandwidth of the links between nodes, such as 100mbit.
        round: index of the round.
        variant: name of the variant.
        seconds: seconds per step, between two barriers.
        estimate: seconds that the planner estimates from links and speeds that were measured in the same round.
        loss: loss of the step.
        uplink_bytes: bytes that each node's network interface sent per step; empty without emulated links.
        cross_bytes: bytes that each node's ranks sent to other nodes per step, by the program's own counters.
    """

    rate: str
    round: int
    variant: str
    seconds: float
    estimate: float
    loss: float
    uplink_bytes: list[int]
    cross_bytes: list[int]


class Results:
    """Samples of a benchmark, stored in a JSON file.

    Args:
        path: JSON file, whose samples of earlier calls are read if it exists.
        shape: sizes of cluster and model, by the names in SHAPE.

    Raises:
        ValueError: the file holds samples of another model or cluster.
    """

    def __init__(self, path: Path, shape: dict[str, Any]) -> None:
        self.path, self.shape = path, shape
        self.parameters = 0
        self.samples: list[Sample] = []
        if path.exists():
            saved = json.loads(path.read_text())
            if saved["shape"] != shape:
                raise ValueError(
                    f"--out {path.parent} holds samples of another cluster or model, {saved['shape']}, but the flags "
                    f"give {shape}: give another --out"
                )
            self.samples, self.parameters = [Sample(**fields) for fields in saved["samples"]], saved["parameters"]

    def missing(self, rate: str, round_index: int, variants: list[str]) -> list[str]:
        """Return the variants whose sample of this round at this link rate is still missing."""
        have = {s.variant for s in self.samples if (rate, round_index) == (s.rate, s.round)}
        return [name for name in variants if name not in have]

    def write(self) -> None:
        """Write the samples, the shape and the number of parameters to the JSON file."""
        samples = [sample._asdict() for sample in self.samples]
        content = {"shape": self.shape, "parameters": self.parameters, "samples": samples}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(content, indent=1).encode())


class Driver:
    """A job of rank processes, and the pipe through which rank 0 receives commands and answers them.

    Args:
        cluster: emulated cluster on which the job runs; None for this machine without emulated links.
        shape: sizes of cluster and model.
        flags: flags of pretrain_gpt.py by variant.
    """

    def __init__(self, cluster: EmulatedCluster | None, shape: Mapping[str, Any], flags: Mapping[str, str]) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        control = theirs.fileno()
        places = {name: shape[name] for name in ("nodes", "ranks_per_node")}
        command = [sys.executable, str(RANKS), json.dumps({**places, "flags": flags}), str(control)]
        if cluster is not None:
            self.job = cluster.start(command, pass_fds=(control,))
        else:
            self.job = start_on_this_machine(command, **places, pass_fds=(control,))
        theirs.close()

    def step(self, variant: str, micro_batches: int) -> dict[str, Any]:
        """Run one optimizer step of a variant, or with DiLoCo one cycle of local steps; return its measurements.

        Args:
            variant: name of a variant, or ESTIMATE. ESTIMATE runs no step, and returns the planner's estimate of the
                seconds per step by variant.
            micro_batches: micro-batches of each rank per optimizer step.

        Raises:
            UserError: the rank processes have ended.
        """
        self._pipe.send((variant, micro_batches))
        return self.receive()

    def receive(self) -> dict[str, Any]:
        """Return the next message of rank 0, a dict: first the number of parameters, then the figures of each step.

        Raises:
            UserError: the rank processes have ended.
        """
        try:
            while not self._pipe.poll(POLL_SECONDS):
                if self.job.poll() is not None:
                    raise EOFError
            answer: dict[str, Any] = self._pipe.recv()
        except EOFError:
            self.job.wait()
            raise UserError("the rank processes have ended; their errors are above") from None
        return answer


def measure(args: argparse.Namespace, results: Results) -> None:
    """Measure all rounds that `results` does not hold yet, and add their samples."""
    # ---- find the rounds that samples.json does not have
    rounds = [(rate, index) for index in range(args.samples) for rate in ([LOCAL] if args.local else args.rates)]
    rounds = [each for each in rounds if results.missing(*each, args.variants)]
    if not rounds:
        return
    # ---- start the rank processes, and run untimed warm-up steps of each variant
    cluster = None if args.local else EmulatedCluster(nodes=args.nodes, ranks_per_node=args.ranks_per_node)
    with contextlib.ExitStack() as stack:
        if cluster is not None:
            stack.enter_context(cluster)
        driver = Driver(cluster, results.shape, flags_of_variants(args))
        stack.callback(driver.job.stop)
        results.parameters = driver.receive()["parameters"]
        for name in args.variants:
            seconds = [driver.step(name, 1)["seconds"] for _ in range(WARM_UP_STEPS)]
            say(f"{name}: {WARM_UP_STEPS} steps that are not counted, the last took {seconds[-1]:.2f} s")
        # ---- measure the missing rounds
        for rate, index in rounds:
            if cluster is not None:
                cluster.set_rate(rate)
            estimates = driver.step(ESTIMATE, args.micro_batches)
            # Each round begins with another variant. ESTIMATE measures the links, which can slow down the variant that
            # follows, so this must not be the same variant in every round.
            first = index % len(args.variants)
            for name in results.missing(rate, index, args.variants[first:] + args.variants[:first]):
                before = cluster.uplink_bytes() if cluster else []
                answer = driver.step(name, args.micro_batches)
                after, steps = cluster.uplink_bytes() if cluster else [], answer.pop("steps")
                sent = [(now.sent - then.sent) // steps for now, then in zip(after, before, strict=True)]
                results.samples.append(Sample(rate, index, name, uplink_bytes=sent, estimate=estimates[name], **answer))
                times = f"{answer['seconds']:.2f} s, estimated {estimates[name]:.2f} s"
                say(f"{rate}, round {index + 1}: {name} {times}, loss {answer['loss']:.3f}")
            results.write()


def flags_of_variants(args: argparse.Namespace) -> dict[str, str]:
    """Return the flags of pretrain_gpt.py for every variant, including the model's sizes.

    Raises:
        ValueError: a flag has an invalid value, or the cluster cannot run a variant.
    """
    common = f"--tensor-model-parallel-size {args.tp} --num-attention-heads {max(args.hidden_size // 64, args.tp)}"
    common += f" --max-position-embeddings {args.seq_length} --hidden-dropout 0 --attention-dropout 0 --mock-data"
    common += " --lr 1e-4 --bf16 --grad-reduce-in-bf16 --train-iters 1000000"
    for name in MODEL:
        common += f" --{name.replace('_', '-')} {getattr(args, name)}"
    flags = {name: " ".join([common, *args.flags, VARIANTS[name]]) for name in args.variants}
    cluster = Cluster(num_nodes=args.nodes, ranks_per_node=args.ranks_per_node)
    for words in flags.values():
        plan_run(parse_run_config(words.split(), Path(), features=FEATURES).config, cluster, device_type="cpu")
    return flags


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """Parse and check the command line; ValueError names the wrong flag."""
    parser = flags_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for samples.json and table.md")
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes")
    parser.add_argument("--ranks-per-node", type=int, default=4, help="number of ranks on each node")
    parser.add_argument(
        "--rates", nargs="+", default=RATES, help=f"rates of the links between nodes: 500mbit, 1gbit, {UNLIMITED}, ..."
    )
    parser.add_argument(
        "--local", action="store_true", help="run without emulated links; bytes between nodes are only counted"
    )
    parser.add_argument("--micro-batches", type=int, default=1, help="number of micro-batches per optimizer step")
    parser.add_argument("--tp", type=int, default=1, help="number of tensor-parallel ranks")
    parser.add_argument("--samples", type=int, default=5, help="number of rounds at each rate")
    default = [name for name, flags in VARIANTS.items() if DILOCO not in flags]
    parser.add_argument("--variants", nargs="+", default=default, choices=list(VARIANTS), help="variants to compare")
    parser.add_argument("--hidden-size", type=int, default=512, help="width of the residual stream, in channels")
    parser.add_argument("--num-layers", type=int, default=8, help="number of transformer layers")
    parser.add_argument("--vocab-size", type=int, default=512, help="number of tokens in the vocabulary")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens per sample")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="samples per micro-batch of a rank")
    parser.add_argument("flags", nargs="*", help="flags of pretrain_gpt.py for all variants, after --")
    args = parser.parse_args(argv)
    for rate in args.rates:
        parse_rate(rate)
    for name in ("nodes", "ranks_per_node", "samples", "micro_batches", "tp"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} is not positive")
    flags_of_variants(args)
    return args


# ---- tables -------------------------------------------------------------------------------------------------------


def tables(samples: Sequence[Sample], shape: Mapping[str, Any], parameters: int) -> str:
    """Return all results as Markdown tables.

    Args:
        samples: measurements.
        shape: sizes of cluster and model, by the names in SHAPE.
        parameters: number of parameters of the model.
    """
    names = [name for name in VARIANTS if any(s.variant == name for s in samples)]
    shaped = "{nodes} nodes x {ranks_per_node} ranks, TP {tp}, {micro_batches} micro-batch(es) per step"
    tokens, size = shape["seq_length"] * shape["micro_batch_size"], parameters / MEGA
    text = [
        f"{shaped.format_map(shape)}, {size:.1f}M parameters (M = {2 * size:.1f} MB in bf16), {tokens} tokens per rank "
        "and micro-batch, bf16 in all communication that is not quantized. Cells: median seconds per optimizer step, "
        f"and in brackets tokens per second relative to {BASELINE} (with a ring reduce-scatter), median over rounds "
        "that run every variant once.",
        "",
        *_speed_table(samples, names),
    ]
    text += ["", *_estimate_table(samples, names)]
    if any(s.uplink_bytes for s in samples):
        text += ["", *_limit_table(samples, names)]
        text += ["", *_bytes_table(samples, names, parameters)]
    return "\n".join([*text, ""])


def speedup(samples: Iterable[Sample], variant: str) -> float | None:
    """Return the median over rounds of a variant's speed relative to BASELINE at equal link rate.

    The result is None if no round has samples of both variants.
    """
    seconds = {(s.variant, s.rate, s.round): s.seconds for s in samples}
    pairs = [(seconds.get((BASELINE, at, i)), own) for (name, at, i), own in seconds.items() if name == variant]
    ratios = [baseline / own for baseline, own in pairs if baseline is not None]
    return statistics.median(ratios) if ratios else None


def _speed_table(samples: Sequence[Sample], names: list[str]) -> list[str]:
    """Return the table of seconds and speed ratios, with a row for each rate and a column for each variant."""
    rows = []
    for rate in _rates(samples):
        here = [s for s in samples if s.rate == rate]
        cells = []
        for name in names:
            times = [s.seconds for s in here if s.variant == name]
            speed = speedup(here, name)
            against = "-" if speed is None else f"{speed:.2f}x"
            cells.append(f"{statistics.median(times):.2f} s ({against})" if times else "-")
        most = max(sum(s.variant == name for s in here) for name in names)
        rows.append([rate, *cells, str(most)])
    return markdown(["uplink", *names, "rounds"], rows)


def _estimate_table(samples: Sequence[Sample], names: list[str]) -> list[str]:
    """Return the table of estimated seconds per step, and of the format that --zero-weight-delta auto would choose."""
    rows = []
    formats = [name for name in ("zeropp-overlap", "lossless") if name in names]
    for rate in _rates(samples):
        estimated, measured = (_medians(samples, rate, field) for field in ("estimate", "seconds"))
        cells = [f"{estimated[name]:.2f} s ({estimated[name] / measured[name]:.2f})" for name in names]
        taken = min(formats, key=lambda name: estimated[name], default="-")
        loss = measured[taken] / min(measured[name] for name in formats) if formats else math.nan
        rows.append([rate, *cells, taken, f"{loss:.2f}"])
    header = [f"{name}: estimate (relative to the measured step)" for name in names]
    return markdown(["uplink", *header, "auto takes", "its step, relative to the faster format"], rows)


def _limit_table(samples: Sequence[Sample], names: list[str]) -> list[str]:
    """Return the table of step times relative to their lower limit.

    The limit is the larger of two times: the step's bytes at the rate of the link, and the step on the fastest link."""
    samples = [s for s in samples if s.uplink_bytes]
    names = [name for name in names if any(s.variant == name for s in samples)]
    rows, rates = [], _rates(samples)
    fastest = _medians(samples, rates[-1], "seconds")
    for rate in rates:
        seconds, bits, cells = _medians(samples, rate, "seconds"), parse_rate(rate) or math.inf, []
        for name in names:
            wire = 8 * statistics.median(statistics.mean(s.uplink_bytes) for s in samples if s.variant == name) / bits
            cells.append(f"{seconds[name] / max(wire, fastest[name]):.2f} (wire {wire:.2f} s)")
        rows.append([rate, *cells])
    return markdown([f"step / max(wire, step at {rates[-1]})", *names], rows)


def _rates(samples: Sequence[Sample]) -> list[str]:
    """Return the link rates that have samples, in ascending order."""
    bits = {s.rate: math.inf if s.rate == LOCAL else parse_rate(s.rate) or math.inf for s in samples}
    return sorted(bits, key=lambda rate: bits[rate])


def _medians(samples: Sequence[Sample], rate: str, field: str) -> dict[str, float]:
    """Return the median over rounds of a field of the samples at a link rate, by variant; NaN without samples."""
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.rate == rate:
            values[sample.variant].append(getattr(sample, field))
    return defaultdict(lambda: math.nan, {name: statistics.median(found) for name, found in values.items()})


def _bytes_table(samples: Sequence[Sample], names: list[str], parameters: int) -> list[str]:
    """Return the table of bytes per node and step, by network interface and by counter, with a row for each variant."""
    rows = []
    for name in names:
        if own := [s for s in samples if s.variant == name and s.uplink_bytes]:
            measured = statistics.median(statistics.mean(s.uplink_bytes) for s in own)
            counted = statistics.median(statistics.mean(s.cross_bytes) for s in own)
            above = f"{100 * (measured / counted - 1):+.2f} %" if counted else "-"
            in_models = f"{measured / (2 * parameters):.3f}"
            rows.append([name, f"{measured / MEGA:.3f}", in_models, f"{counted / MEGA:.3f}", above])
    header = ["sent per uplink and step", "MB by the interface", "in M", "MB by our counters", "difference"]
    return markdown(header, rows)


@program
def main(argv: list[str]) -> int:
    """Measure the rounds that samples.json does not have, write and print the tables, and return the exit status."""
    exit_on_signals()
    try:
        args = parse_flags(argv)
        results = Results(args.out / "samples.json", {name: getattr(args, name) for name in SHAPE})
        measure(args, results)
    except KeyboardInterrupt:
        say("interrupted; run the same command again to resume")
        return EXIT_INTERRUPTED
    text = tables(results.samples, results.shape, results.parameters)
    (args.out / "table.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
