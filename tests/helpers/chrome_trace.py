"""Read the trace files that --timeline-step writes, in the format of Chrome's trace viewer."""

import json
from pathlib import Path

from megazpp.base.program import MEGA
from megazpp.parallel.timeline import Span


def read_chrome_trace(path: Path) -> dict[str, list[Span]]:
    """Return each rank's spans (intervals of time with a name), in the order of the file.

    The keys are the ranks' names in the trace, in rank order.
    """
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans: dict[str, list[Span]] = {names[rank]: [] for rank in sorted(names)}
    for e in events:
        if e["ph"] == "X":
            span = Span(e["cat"], e["name"], e["ts"] / MEGA, e["dur"] / MEGA, e["args"]["blocking"])
            spans[names[e["pid"]]].append(span)
    return spans
