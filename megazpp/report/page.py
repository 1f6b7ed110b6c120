"""Writer of the report about training runs as a single HTML file.

Tables are HTML. Curves are numbers that the page's script draws. The page loads nothing from the network, because
`page.css` and `page.js` are copied into the file. Text from the runs is escaped.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from megazpp.base.files import write_whole
from megazpp.report.contents import (
    Table,
    charts,
    completions_table,
    curves,
    differences_in_words,
    experts_table,
    flag_differences,
    flags_table,
    same_loss_table,
    summary_table,
    traffic_line,
    traffic_table,
    unigram_entropy,
)
from megazpp.report.groups import Row, groups_line, groups_table, strips
from megazpp.report.runs import Run

MARK = "<!doctype html><!-- MegaZ++ report -->"  # first line of a report, by which `write_report` detects an older one
# Each curve is reduced to about POINTS_OF_PAGE / (number of runs) points, but to no fewer than about FEWEST_POINTS and
# no more than about MOST_POINTS. A curve with fewer points keeps all of them.
POINTS_OF_PAGE, MOST_POINTS, FEWEST_POINTS = 8000, 1500, 200
COLOURS = 7  # number of colors that page.css defines for the curves of runs


def write_report(runs: Sequence[Run], output: Path, now: datetime.datetime, rounds: Sequence[Row] = ()) -> None:
    """Write the HTML report about training runs atomically. An older report at the same path is replaced.

    Args:
        runs: recorded data of the runs.
        output: path of the HTML file.
        now: time of the report, which the page shows.
        rounds: versions of an elastic DiLoCo run whose replica groups are `runs`, from `read_rounds`; () otherwise.

    Raises:
        ValueError: the path exists and is not a report, or the file cannot be written.
    """
    if output.exists() and not (output.is_file() and output.read_bytes().startswith(MARK.encode())):
        raise ValueError(f"--output {output} exists and is not a report, so it was not replaced: choose another path")
    try:
        # A folder's name may have bytes that are not UTF-8, and a recorded text may have half of a surrogate pair. The
        # page shows both as escape sequences.
        write_whole(output, report_html(runs, now, rounds).encode(errors="backslashreplace"))
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from error


def report_html(runs: Sequence[Run], now: datetime.datetime, rounds: Sequence[Row] = ()) -> str:
    """Return the HTML text of the report about training runs, from the same arguments as `write_report`."""
    # Build the sections of the page that contain tables
    names = [_named(index, run.name) for index, run in enumerate(runs)]
    named = list(zip(names, runs, strict=True))
    traffic, experts, completions, topology, flags = (list[str]() for _ in range(5))
    for name, run in named:
        if len(table := traffic_table(run)) > 1:
            traffic.append(f"<h3>{name}</h3>{_table(table)}<p>{escape(traffic_line(run))}</p>")
        if len(table := experts_table(run)) > 1:
            experts.append(f"<h3>{name}</h3>{_table(table)}")
        if len(table := completions_table(run)) > 1:
            completions.append(f"<h3>{name}</h3>{_table(table, style='texts')}")
    for text in dict.fromkeys(run.topology for run in runs if run.topology):
        where = " ".join(name for name, run in named if run.topology == text)
        topology.append(f'<h3>{where}</h3><pre class="scroll">{escape(text)}</pre>')
    same_loss = [_table(table, names)] if len(runs) > 1 and len(table := same_loss_table(runs)) > 1 else []
    if len(runs) > 1:
        flags = [_table(table, names) if len(table := flag_differences(runs)) > 1 else "<p>None.</p>"]
    if len(every := flags_table(runs)) > 1:
        flags.append(f"<details><summary>All {len(every) - 1} flags</summary>{_table(every, names)}</details>")
    groups = [*strips(rounds), _table(groups_table(rounds)), f"<p>{escape(groups_line(rounds))}</p>"] if rounds else []
    sections = {
        "Summary": [_table(summary_table(runs), names)],
        "Replica groups by version": groups,
        "Cost of the same loss": same_loss,
        "Flags" if len(runs) == 1 else "Flags that differ": flags,
        "Completions": completions,
        "Experts by layer, last log line": experts,
        "Bytes by axis, wire and collective": traffic,
        "Placement of ranks": topology,
    }

    # Write the data of the curves as JSON for a script element. "<" is escaped, so that no run's name ends the element.
    title = "Report on one run" if len(runs) == 1 else f"Report on {len(runs)} runs"
    max_points = min(MOST_POINTS, max(FEWEST_POINTS, POINTS_OF_PAGE // max(1, len(runs))))
    drawn = [{"name": run.name, "curves": curves(run, max_points), "entropy": unigram_entropy(run)} for run in runs]
    data = {"charts": [chart._asdict() for chart in charts(runs)], "runs": drawn}
    numbers = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")

    # Join styles, sections, data and script to the text of the page
    assets = files("megazpp.report")
    return "\n".join(
        [
            MARK,
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(', '.join(run.name for run in runs))} - MegaZ++</title>",
            f"<style>\n{(assets / 'page.css').read_text()}</style></head><body>",
            f"<header><h1>{title}</h1><p>MegaZ++, {now:%Y-%m-%d %H:%M}</p></header>",
            "<main>",
            *_curve_section(names, differences_in_words(runs)),
            *("\n".join([f"<section><h2>{h}</h2>", *parts, "</section>"]) for h, parts in sections.items() if parts),
            "</main>",
            f'<script type="application/json" id="data">{numbers}</script>',
            f"<script>\n{(assets / 'page.js').read_text()}</script></body></html>\n",
        ]
    )


def _curve_section(names: Sequence[str], differences: Sequence[str]) -> Iterator[str]:
    """Yield the HTML of the report's section of curves: legend, choice of the horizontal axis, and an empty element.

    The page's script draws the charts into the empty element.

    Args:
        names: HTML name of each run, from `_named`.
        differences: text for each run with the flags in which it differs from the other runs.
    """
    yield '<section id="curves"><div class="bar"><div class="switch" role="radiogroup" aria-label="horizontal axis">'
    for index, name in enumerate(("steps", "tokens", "time", "bytes")):
        checked = " checked" if index == 0 else ""
        yield f'<label><input type="radio" name="axis" value="{index}"{checked}><span>{name}</span></label>'
    yield '</div><ul class="legend">'
    for name, words in zip(names, differences, strict=True):
        yield f"<li>{name}" + (f"<small>{escape(words)}</small>" if words else "") + "</li>"
    yield "</ul></div>"
    yield '<div class="charts"></div><noscript>The curves need JavaScript, which is disabled.</noscript>'
    yield "</section>"


def _table(table: Table, names: Sequence[str] = (), *, style: str = "numbers") -> str:
    """Return a table of the report as HTML.

    Args:
        table: rows of cells; the first row is the header.
        names: HTML names of the runs, which replace the header's cells after the first; () if columns are not runs.
        style: class in page.css of a table without `names`: "numbers", or "texts", which keeps line breaks.
    """
    head, *rows = ([escape(cell) for cell in row] for row in table)
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in ([head[0], *names] if names else head))
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    style = "" if names else f' class="{style}"'
    return f'<div class="scroll"><table{style}><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>'


def _named(index: int, name: str) -> str:
    """Return the HTML of a run's name, after a short line in the color and dash pattern of the run's curves."""
    style = f"colour{index % COLOURS} dash{index // COLOURS % 3}"
    line = f'<svg class="swatch {style}" width="26" height="10" aria-hidden="true"><path d="M1 5h24"/></svg>'
    return f'{line}<span class="name" title="{escape(name)}">{escape(name)}</span>'
