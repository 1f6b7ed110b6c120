"""The tables of benchmark_cluster.py: pure functions of its samples."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from emulate_cluster import UNLIMITED, parse_rate

from megazpp.base.formatting import MEGA

BASELINE, PLAIN, LOCAL = "zero3", "fsdp2", "local"
NONE = "-"


class Sample(NamedTuple):
    """One optimizer step; with local steps the mean of a cycle of them, but for the loss.

    Attributes:
        tp, micro_batches, rate, round, variant: which.
        seconds: of the step, between two barriers.
        cpu_seconds: of all ranks together.
        loss: of the step.
        uplink_bytes: what each node's interface sent; empty without emulated links.
        cross_bytes: what each node's ranks sent to other nodes by our own counters.
        rollout_seconds, rollout_cross_bytes: of the completions drawn before it; both bytes above count them too.
            0 and None where none were drawn.
    """

    tp: int
    micro_batches: int
    rate: str
    round: int
    variant: str
    seconds: float
    cpu_seconds: float
    loss: float
    uplink_bytes: list[int]
    cross_bytes: list[int]
    rollout_seconds: float = 0.0
    rollout_cross_bytes: list[int] | None = None

    @property
    def update_seconds(self) -> float:
        """The seconds of the rollout and the step."""
        return self.seconds + self.rollout_seconds


def tables(samples: Sequence[Sample], shape: Mapping[str, int], parameters: int, labels: Mapping[str, str]) -> str:
    """All results as markdown.

    Args:
        samples: the results.
        shape: nodes, ranks_per_node and what the model is made of.
        parameters: of the whole model.
        labels: the variants in the order of columns, with their names for people.
    """
    world = shape["nodes"] * shape["ranks_per_node"]
    text = [
        f"{shape['nodes']} nodes x {shape['ranks_per_node']} ranks, {parameters / MEGA:.1f}M parameters "
        f"(M = {2 * parameters / MEGA:.1f} MB in bf16), {shape['seq_length'] * shape['micro_batch_size']} tokens per "
        f"rank and micro-batch. Weights and gradients are bf16 on every wire where a variant does not quantize them. "
        f"Seconds per optimizer step, median; in brackets tokens per second against {labels[BASELINE]}, median over "
        f"rounds in which every variant ran once."
    ]
    for tp, k in sorted({(s.tp, s.micro_batches) for s in samples}):
        part = [s for s in samples if (s.tp, s.micro_batches) == (tp, k)]
        names = [name for name in labels if any(s.variant == name for s in part)]
        text += ["", f"### {_title(tp, k)}", ""]
        text += _speed_table(part, names, labels, "seconds")
        if len(_rates(part)) > 1 and UNLIMITED in _rates(part):
            text += ["", "Share of the tokens per second without a limit, median over rounds:", ""]
            text += _share_table(part, names, labels)
        if any(s.rollout_seconds for s in part):
            text += ["", "Drawing the completions:", "", *_speed_table(part, names, labels, "rollout_seconds")]
            text += ["", "Both together:", "", *_speed_table(part, names, labels, "update_seconds")]
            sent = {name: [sum(s.rollout_cross_bytes or []) for s in part if s.variant == name] for name in names}
            rows = [[labels[name], f"{statistics.median(sent[name]) / shape['nodes'] / MEGA:.3f}"] for name in names]
            text += ["", *_markdown(["rollout", "MB per node by our counters"], rows)]
        if any(s.uplink_bytes for s in part):
            text += ["", *_bytes_table(part, names, labels, parameters)]
        tokens = world // tp * shape["seq_length"] * shape["micro_batch_size"] * k
        for rate in _rates(part):
            if rate_bits(rate) is None:  # with a slow link most of the time is waiting
                text += ["", *_cpu_table([s for s in part if s.rate == rate], names, labels, tokens)]
    return "\n".join([*text, ""])


def paired_ratio(samples: Iterable[Sample], over: str, under: str, field: str) -> float | None:
    """The median over rounds of one variant's `field` over another's at the same rate; None where no round has both."""
    values: dict[str, dict[tuple[int, int, str, int], float]] = {over: {}, under: {}}
    for s in samples:
        if s.variant in values:
            values[s.variant][s.tp, s.micro_batches, s.rate, s.round] = float(getattr(s, field))
    ratios = [value / values[under][which] for which, value in values[over].items() if which in values[under]]
    return statistics.median(ratios) if ratios else None


def rate_bits(rate: str) -> float | None:
    """Bits per second; None without a limit."""
    return None if rate == LOCAL else parse_rate(rate)


def _speed_table(samples: list[Sample], names: list[str], labels: Mapping[str, str], field: str) -> list[str]:
    rows = []
    for rate in _rates(samples):
        here = [s for s in samples if s.rate == rate]
        cells = []
        for name in names:
            times = [getattr(s, field) for s in here if s.variant == name]
            speed = paired_ratio(here, BASELINE, name, field)
            cells.append(f"{statistics.median(times):.2f} s ({_times(speed)})" if times else NONE)
        most = max(sum(s.variant == name for s in here) for name in names)
        rows.append([rate, *cells, str(most)])
    return _markdown(["uplink", *(labels[name] for name in names), "rounds"], rows)


def _share_table(samples: list[Sample], names: list[str], labels: Mapping[str, str]) -> list[str]:
    """The share that the links leave of each variant's speed."""
    seconds = {(s.variant, s.rate, s.round): s.seconds for s in samples}
    rows = []
    for rate in _rates(samples)[:-1]:
        cells = []
        for name in names:
            rounds = {i for (n, r, i) in seconds if (n, r) == (name, rate) and (name, UNLIMITED, i) in seconds}
            shares = [seconds[name, UNLIMITED, i] / seconds[name, rate, i] for i in rounds]
            cells.append(f"{statistics.median(shares):.3f}" if shares else NONE)
        rows.append([rate, *cells])
    return _markdown(["uplink", *(labels[name] for name in names)], rows)


def _bytes_table(samples: list[Sample], names: list[str], labels: Mapping[str, str], parameters: int) -> list[str]:
    """Bytes depend on no rate, so all samples count."""
    rows = []
    for name in names:
        own = [s for s in samples if s.variant == name and s.uplink_bytes]
        if not own:
            continue
        measured = statistics.median(statistics.mean(s.uplink_bytes) for s in own)
        counted = statistics.median(statistics.mean(s.cross_bytes) for s in own)
        ours = [f"{counted / MEGA:.3f}", f"{100 * (measured / counted - 1):+.2f} %" if counted else NONE]
        if name == PLAIN:  # nothing of ours is installed in it
            ours = [NONE, NONE]
        rows.append([labels[name], f"{measured / MEGA:.3f}", f"{measured / (2 * parameters):.3f}", *ours])
    header = ["sent per uplink and step", "MB by the interface", "in M", "MB by our counters", "difference"]
    return _markdown(header, rows)


def _cpu_table(samples: list[Sample], names: list[str], labels: Mapping[str, str], tokens: int) -> list[str]:
    rows = []
    for name in names:
        own = [s.cpu_seconds for s in samples if s.variant == name]
        ratios = [_times(paired_ratio(samples, name, base, "cpu_seconds")) for base in (BASELINE, PLAIN)]
        if own:
            rows.append([labels[name], f"{1e3 * statistics.median(own) / tokens:.3f}", *ratios])
    where = "no link" if samples[0].rate == LOCAL else "no limit"
    header = [f"CPU, {where}", "ms per token", *(f"against {labels[base]}" for base in (BASELINE, PLAIN))]
    return _markdown(header, rows)


def _title(tp: int, micro_batches: int) -> str:
    return f"TP {tp}, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''} per step"


def _rates(samples: Iterable[Sample]) -> list[str]:
    """Slowest first, no limit last."""
    return sorted({s.rate for s in samples}, key=lambda rate: rate_bits(rate) or float("inf"))


def _times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}x"


def _markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
