"""Test the HTML page of a report.

It is self-contained, escapes text from runs, and renders in a browser without errors.
"""

import datetime
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.run_folders import make_run, row

from megazpp.report.page import report_html, write_report
from megazpp.report.runs import read_runs

NOW = datetime.datetime(2026, 1, 2, 3, 4)
BAD = "</script><img src=x onerror=alert(1)>&\"'"


def data_of(html: str) -> dict[str, Any]:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_numbers_of_any_size_make_a_page(tmp_path):
    for at, value in enumerate((10**400, -(10**18), math.inf, math.nan, None, "x", [], True, 1e308)):
        for name in ("iteration", "steps", "lm_loss", "consumed_samples", "tp_bytes", "peak_memory_bytes"):
            folder = tmp_path / f"{at}-{name}"
            summary = {"iteration": 2, "unigram_entropy": 1.0, name: value}
            validation = [{"iteration": 2, "lm_loss": 6.0, name: value}]
            make_run(folder, [row(2), {**row(4), name: value}], validation=validation, summary=summary)
            assert "</html>" in report_html(read_runs([folder]), NOW)


def varied(row: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the record `row` with numbers that change with the step `i`.

    Only the bytes sent inside a node are constant.
    """
    changing = ("tokens_per_second", "grad_norm", "learning_rate", "cross_bytes", "peak_memory_bytes")
    return {**row, **{key: (row.get(key) or 1) * (1 + i / 100) for key in changing}}


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    """Make four run folders, and return them.

    The folders have a complete run, a crashed run, a run with a single record, and a run without records. The crashed
    run has a NaN loss, and its last line is cut.
    """
    traffic = [{"collective": BAD, "axis": "shard", "wire": "cross", "calls": 8, "sent_bytes": 1}]
    whole = make_run(
        tmp_path / "whole",
        [varied(row(i, tp_bytes=5, local_bytes=5), i) for i in range(2, 40)],
        validation=[{"iteration": 20, "lm_loss": 4.0}],
        args={"lr": BAD},
        summary={"iteration": 39, "iterations": BAD, "traffic": traffic, "unigram_entropy": 6.5},
    )
    (whole / "topology.txt").write_text(f"2 nodes\n{BAD}\n")
    crashed = make_run(
        tmp_path / BAD.replace("/", ""), [row(2), row(4, lm_loss=math.nan), row(2)], tail='{"it', args={"lr": 1}
    )
    return [whole, crashed, make_run(tmp_path / "line", [row(7)]), make_run(tmp_path / "none", args={"lr": 2})]


def test_page_escapes_run_text_and_loads_nothing_external(folders):
    html = report_html(read_runs(folders), NOW)
    assert "<img" not in html
    assert html.count("<script") == html.count("</script>") == 2
    assert html.count("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;&amp;&quot;&#x27;") >= 3
    links = set(re.findall(r"https?://[^\s\"'<>)]+", html))
    # the only address is the name of SVG's namespace, which a browser does not fetch
    assert links == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|<link|\bsrc=(?!x onerror)", html.replace("src=x", ""))


def test_page_holds_curves_and_tables_of_all_runs(folders):
    html = report_html(read_runs(folders), NOW)
    data = data_of(html)
    assert [run["name"] for run in data["runs"]] == ["whole", BAD.replace("/", ""), "line", "none"]
    assert [len(run["curves"].get("lm_loss", ())) for run in data["runs"]] == [1, 2, 1, 0]
    assert data["runs"][1]["curves"]["lm_loss"][0][4] == [5, None]
    for title in ("Summary", "Flags that differ", "Bytes by axis, wire and collective", "Placement of ranks"):
        assert html.count(f"<h2>{title}</h2>") == 1
    alone = report_html(read_runs(folders[3:]), NOW)
    assert re.findall("<h2>(.*?)</h2>", alone) == ["Summary", "Flags"]
    assert data_of(alone)["runs"][0]["curves"] == {}


def test_loss_of_a_preference_run_has_no_unit(tmp_path):
    for objective, unit in (("sft", "nats per token"), ("dpo", "")):
        folder = make_run(tmp_path / objective, [row(2), row(4)], args={"objective": objective})
        (loss,) = [
            chart for chart in data_of(report_html(read_runs([folder]), NOW))["charts"] if chart["key"] == "lm_loss"
        ]
        assert loss["unit"] == unit


def test_report_overwrites_an_older_report(folders, tmp_path):
    for run in read_runs(folders[:2]):
        write_report([run], tmp_path / "report.html", NOW)
        assert (tmp_path / "report.html").read_text() == report_html([run], NOW)


def test_report_escapes_text_that_utf8_lacks(tmp_path):
    folder = make_run(tmp_path / "run\udcff", [row(2)], completions=[{"iteration": 2, "prompt": "\ud800"}])
    write_report(read_runs([folder]), tmp_path / "report.html", NOW)
    text = (tmp_path / "report.html").read_text()
    assert "run\\udcff</span>" in text
    assert "<td>\\ud800</td>" in text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield the system's Chromium, started by Playwright with a new profile. Nothing is downloaded."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install '.[test]'")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("neither chromium nor google-chrome is installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=found, timeout=100_000)


@pytest.fixture
def open_report(browser, folders, tmp_path) -> Iterator[Callable[..., Any]]:
    """Yield a function that opens the report of `folders` on a screen of 390 x 844, after running a given script.

    Any script error in the page fails the test.
    """
    context = browser.new_context(viewport={"width": 390, "height": 844})
    context.set_default_timeout(100_000)  # milliseconds
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(error))

    def load(script: str = "") -> Any:
        write_report(read_runs(folders), tmp_path / "report.html", NOW)
        page.add_init_script(script)
        page.goto((tmp_path / "report.html").as_uri())
        return page

    yield load
    context.close()
    assert errors == []


@pytest.mark.slow
def test_browser_renders_every_chart_after_the_page_has_loaded(open_report):
    # replaces ResizeObserver, so the page must render without resize events
    page = open_report("window.ResizeObserver = class { observe() {} }")
    drawn = page.content()
    charts = re.findall(r'<svg viewBox="[^"]*" height="\d+" role="img" aria-label="(\w+)', drawn)
    # a quantity that never changes, here the bytes inside a node, gets no chart
    assert charts == [*["Loss"] * 4, "Throughput", "Gradient", "Learning", "Inter", "Peak"]
    assert len(re.findall(r'<path d="M[\d.]+ [\d.]+L[^"]*" class="curve colour0 dash0"', drawn)) == 9
    # each of the four charts of the loss has the line of the entropy, and a mark for the crashed run's NaN loss
    assert drawn.count(">unigram entropy 6.5</text>") == drawn.count('class="bad colour1 dash0"') == 4
    assert "NaN" not in "".join(re.findall(r"<(?:path|circle|text)[^>]*>", drawn))


@pytest.mark.slow
def test_browser_redraws_when_width_or_axis_changes(open_report):
    page = open_report()
    fits = """() => [...document.querySelectorAll(".plot")].every(
        (plot) => plot.firstChild.viewBox.baseVal.width === plot.clientWidth)"""
    page.wait_for_function(fits)
    narrow = page.locator(".plot").first.bounding_box()["width"]
    page.set_viewport_size({"width": 360, "height": 844})
    page.wait_for_function(fits)
    assert page.locator(".plot").first.bounding_box()["width"] == narrow - 30
    fixed = [page.get_by_role("img", name=f"against {name}").count() for name in ("tokens", "training time", "sent")]
    assert fixed == [1, 1, 1]
    page.get_by_text("bytes", exact=True).first.click()
    assert page.get_by_role("img", name="against sent to other nodes").count() == 1 + 6


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_fits_a_phone_and_every_text_is_legible(open_report, scheme):
    page = open_report()
    page.emulate_media(color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    contrast = """(background) => {
        const luminance = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
            .map((part) => part <= 0.04 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
            .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0.05);
        const behind = luminance(getComputedStyle(document.querySelector(background)).backgroundColor);
        return Math.min(...["h1", "header p", "td", "tbody th", ".chart h3 small", ".plot text", "summary"]
            .map((name) => getComputedStyle(document.querySelector(name)))
            .map((found) => luminance(found.fill === "rgb(0, 0, 0)" ? found.color : found.fill))
            .map((text) => Math.max(text, behind) / Math.min(text, behind)));
    }"""
    # the accessibility guideline WCAG AA requires a contrast of 4.5
    assert all(page.evaluate(contrast, background) >= 4.5 for background in ("body", ".chart"))


@pytest.mark.slow
def test_browser_shows_values_under_the_pointer(open_report):
    page = open_report()
    page.locator(".plot").first.hover()
    assert page.locator(".tip").first.inner_text().startswith("1600 tokens\n5\n")
