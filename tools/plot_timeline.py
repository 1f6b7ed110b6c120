"""Draw the timeline of a step, which `pretrain_gpt.py --timeline-step N` has written, as a picture.

python tools/plot_timeline.py runs/.../timeline.json --out timeline.png --ranks 0 4

A row per rank and track. Hatched is where compute stands still: in a wait, or in a collective that it called itself.
Whatever has no hatching above it is hidden behind compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megazpp.parallel.timeline import COMPUTE, STEP, WAIT, Span, hidden_shares, stalls
from megazpp.program import check_matplotlib, flags_of, program
from megazpp.training.step_timeline import read_chrome_trace, rows_without_crossings, sorted_tracks

PHASES = {"forward": "#9ecae1", "backward": "#4292c6", "norm": "#c6dbef", "optimizer": "#08519c"}
COLORS = {
    WAIT: "#bdbdbd",
    "tp": "#74c476",
    "local": "#fdae6b",
    "cross": "#de2d26",
    "island": "#67000d",
    "shard": "#9e9ac8",
}
BETWEEN_NODES = ("cross", "island")  # axes whose share behind the compute stands above a rank
OTHER = "#8c6d31"
STANDS_STILL: dict[str, Any] = {"facecolor": "white", "hatch": "//////", "edgecolor": "#969696", "linewidth": 0}
ROW_INCHES, HEAD_INCHES, WIDTH_INCHES = 0.24, 0.32, 13.0


@program
def main(argv: list[str]) -> None:
    parser = flags_of(__doc__)
    parser.add_argument("trace", type=Path, help="the timeline.json of a run folder")
    parser.add_argument(
        "--out", type=Path, required=True, help="the picture; its suffix is the format (.png, .svg, .pdf)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", help="which ranks (default: all)")
    args = parser.parse_args(argv)
    check_matplotlib(f"--out {args.out}")
    plot(pick(read_chrome_trace(args.trace), args.ranks), args.out)


def pick(by_rank: Mapping[str, list[Span]], ranks: Sequence[int] | None) -> dict[str, list[Span]]:
    """The timelines of the ranks that were asked for.

    Raises:
        ValueError: the trace has no such rank.
    """
    names = list(by_rank)
    for rank in ranks or ():
        if not 0 <= rank < len(names):
            raise ValueError(f"--ranks {rank}: the trace has ranks 0 to {len(names) - 1}")
    return {names[rank]: by_rank[names[rank]] for rank in (range(len(names)) if ranks is None else ranks)}


def plot(by_rank: Mapping[str, list[Span]], out: Path) -> None:
    """Draw the ranks below each other on one time axis.

    Raises:
        ValueError: matplotlib cannot write files of that name.
    """
    from matplotlib.figure import Figure  # optional
    from matplotlib.patches import Patch

    every = [span for spans in by_rank.values() for span in spans]
    zero = min(span.start_seconds for span in every)
    tracks = {name: [track for track in sorted_tracks(spans) if track != STEP] for name, spans in by_rank.items()}
    height = ROW_INCHES * sum(map(len, tracks.values())) + HEAD_INCHES * len(by_rank) + 1.4
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    axes = figure.add_subplot()
    y, ticks, labels = 0.0, [], []
    for name, spans in by_rank.items():
        y += HEAD_INCHES / ROW_INCHES
        shares = [
            f"{hidden.behind_compute:.0%} of the {axis} axis's time hidden behind compute, "
            f"{hidden.behind_work:.0%} behind compute and other hops"
            for axis in BETWEEN_NODES
            if (hidden := hidden_shares(spans, axis)) is not None
        ]
        axes.text(
            0.0,
            y - 0.62,
            ": ".join(filter(None, (name, "; ".join(shares)))),
            fontsize=8,
            fontweight="bold",
            va="bottom",
        )
        for track in tracks[name]:
            draw_track(axes, spans, track, y, zero)
            ticks.append(y)
            labels.append(track)
            y += 1
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_ylim(y - 0.4, 0.2)
    axes.set_xlim(0, max(span.end_seconds for span in every) - zero)
    axes.set_xlabel("seconds")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    steps = [span for span in every if span.track == STEP]
    slowest = f"{max(span.seconds for span in steps):.3f} s"
    axes.set_title(", ".join([*dict.fromkeys(span.name for span in steps), slowest]), fontsize=11)
    shown = {span.name for span in every if span.track == COMPUTE}
    names = {name: face for name, face in PHASES.items() if name in shown}
    names |= {track: COLORS.get(track, OTHER) for track in sorted_tracks(every) if track not in (STEP, COMPUTE)}
    patches = [Patch(facecolor=face, label=name) for name, face in names.items()]
    patches.append(Patch(label="compute stands still", **STANDS_STILL))
    figure.legend(handles=patches, loc="outside lower center", ncols=10, fontsize=8, frameon=False)
    figure.savefig(out, dpi=150)


def draw_track(axes: Any, spans: Sequence[Span], track: str, y: float, zero: float) -> None:
    """One row; spans that overlap without nesting share its height."""
    rows = rows_without_crossings(spans, track)
    height = 0.8 / len(rows)
    for index, row in enumerate(rows):
        bars: dict[str, list[tuple[float, float]]] = {}
        for span in row:
            face = PHASES.get(span.name, OTHER) if track == COMPUTE else COLORS.get(track, OTHER)
            bars.setdefault(face, []).append((span.start_seconds - zero, span.seconds))
        for face, times in bars.items():
            axes.broken_barh(times, (y - 0.4 + index * height, height), facecolor=face, linewidth=0)
    if track == COMPUTE:
        times = [(start - zero, end - start) for start, end in stalls(spans)]
        axes.broken_barh(times, (y - 0.4, 0.8), **STANDS_STILL)


if __name__ == "__main__":
    raise SystemExit(main())
