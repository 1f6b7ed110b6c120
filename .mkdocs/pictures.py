"""Generate the pictures of the documentation: charts of tables on the same page, and one step of a run.

    python .mkdocs/pictures.py [--timeline runs/x/timeline.json]

docs/pictures/ gets speed.svg (README.md), tiers.svg (docs/guides/diloco.md), and with --timeline step.svg
(docs/concepts/overlap.md). The program does not generate two_hops.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLORS = ("#9aa5b1", "#6ea8dc", "#2563b0", "#e08a2e")
STYLE = (
    "text{font:13px sans-serif;fill:#24292f}.grid{stroke:#8886;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#d7dde3}}"
)


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table below a line that begins with `heading`, with cells as plain text."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"\n{heading}")[2]
    lines = re.search(r"(?m)^\|.*\n\|[-|]+\n((?:\|.*\n)+)", text)
    assert lines is not None, f"{page} has no table below {heading!r}"
    return [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in lines[1].splitlines()]


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """Return a complete SVG file with the given elements `parts`."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title><style>{STYLE}</style>", *parts, "</svg>\n"])


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height}" rx="2" fill="{color}"/>'


def speed() -> str:
    """Tokens per second by uplink, as multiples of ZeRO-3's."""
    names, parts, y = ("ZeRO-1", "HSDP", "--zeropp, int8 weights", "--zeropp, lossless deltas"), [], 40.0
    for name, color, x in zip(names, COLORS, (130, 220, 300, 470), strict=True):
        parts += [bar(x, 10, 14, 14, color), text(x + 20, 22, name)]
    for uplink, _, *cells in rows("README.md", "## Results"):
        parts.append(text(120, y + 38, uplink.partition(" (")[0].strip('"'), "end"))
        for cell, color in zip(cells, COLORS, strict=True):
            times = float(re.search(r"\(([\d.]+)\)", cell)[1])  # type: ignore[index]
            parts += [bar(130, y, 80 * times, 14, color), text(135 + 80 * times, y + 12, f"{times:.2f} x")]
            y += 17
        y += 12
    parts.append(f'<line class="grid" x1="210" x2="210" y1="32" y2="{y:.0f}"/>')
    parts.append(text(210, y + 16, "1 = ZeRO-3 with a bandwidth-optimal ring", "middle"))
    return svg(700, int(y) + 26, "Tokens per second by uplink, as multiples of ZeRO-3's", parts)


def tiers() -> str:
    """Return a chart of the uplink rate above which each tier's communication overlaps completely with compute."""

    def at(gigabits: float) -> float:
        return 270 + 130 * (math.log10(gigabits) + 1.5)

    table = rows("docs/guides/diloco.md", "![From which rate")
    parts, bottom = [], 20 + 28 * len(table)
    for rate, name in ((0.1, "100 Mbit/s"), (1, "1 Gbit/s"), (10, "10 Gbit/s"), (100, "100 Gbit/s")):
        parts.append(f'<line class="grid" x1="{at(rate):.0f}" x2="{at(rate):.0f}" y1="8" y2="{bottom}"/>')
        parts.append(text(at(rate), bottom + 18, name, "middle"))
    for n, ((name, rate), color) in enumerate(zip(table, COLORS, strict=True)):
        start, y = at(float(rate)), 14 + 28 * n
        parts += [text(258, y + 14, name, "end"), bar(start, y, at(250) - start, 18, color)]
        parts.append(text(start - 6, y + 14, f"{rate}", "end"))
    return svg(800, bottom + 30, "From which rate each tier hides its bytes", parts)


def step(path: Path) -> str:
    """Return a picture of rank 0's activity in the recorded step of the trace `path`, one track per row."""
    events = json.loads(path.read_text())
    events = [event for event in (events["traceEvents"] if isinstance(events, dict) else events) if event["pid"] == 0]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    start, whole = next((event["ts"], event["dur"]) for event in spans if tracks[event["tid"]] == "step")
    colors = {"forward": COLORS[1], "backward": COLORS[2], "all_gather": COLORS[1], "all_to_all": COLORS[2]}
    parts, scale = [], 800 / whole
    for row, name in enumerate(("compute", "local", "cross")):
        parts.append(text(80, 27 + 34 * row, name, "end"))
        for event in spans:
            if tracks[event["tid"]] == name:
                color = colors.get(event["name"].split()[0], COLORS[0])
                parts.append(bar(90 + scale * (event["ts"] - start), 12 + 34 * row, scale * event["dur"], 22, color))
    for tick in range(0, int(whole / 1000) + 1, 100):
        parts.append(text(90 + scale * tick * 1000, 132, f"{tick} ms", "middle"))
    legend = ((COLORS[1], "forward, and gathers of weights"), (COLORS[2], "backward, and reductions of gradients"))
    for n, (color, words) in enumerate(legend):
        parts += [bar(90 + 300 * n, 146, 14, 14, color), text(110 + 300 * n, 158, words)]
    return svg(920, 168, "One optimizer step of rank 0", parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeline", type=Path, help="timeline.json of a run with --timeline-step")
    args = parser.parse_args()
    folder = ROOT / "docs" / "pictures"
    (folder / "speed.svg").write_text(speed())
    (folder / "tiers.svg").write_text(tiers())
    if args.timeline is not None:
        (folder / "step.svg").write_text(step(args.timeline))


if __name__ == "__main__":
    main()
