"""The page in a real browser: every tab, in light and dark, on a screen and on a phone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.report import history_of, report_of
from dagster_checkpoints.control.history import Entries
from dagster_checkpoints.report.building import build_report, page
from tests.report.browser import NAMES, Browser, found_browser

TABS = ("overview", "graph", "history", "summary", "timeline", "configuration")
OPEN = "history/all/3-299"
ROWS = "document.querySelectorAll('tr.row').length"
PICTURES = os.environ.get("REPORT_PICTURES")
"""A folder into which the tests write what they see."""
EVIL = "</script><b>bold</b><img src=x onerror=document.title='broken'>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = found_browser()
    if program is None:
        pytest.skip(f"expected a browser on PATH, found none of {', '.join(NAMES)}: install Debian's package chromium")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page") / "report.html"
    found.write_bytes(page(report_of(history_of(300))))
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1240, 390])
def test_every_tab_is_drawn(browser: Browser, file: Path, width: int, dark: bool) -> None:
    browser.look(width, 900, dark=dark)
    for fragment in (*TABS, OPEN):
        browser.open(file, fragment)
        assert browser.problems == []
        assert browser.requests == [file.as_uri()], "the page loads nothing"
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), f"{fragment} is wider than the screen"
        assert browser.value("document.querySelector('[aria-selected=true]').dataset.tab") == fragment.partition("/")[0]
        assert browser.value("document.querySelectorAll('main .card').length") > 0
        assert not browser.value("document.body.innerText.match(/NaN|undefined|\\bnull\\b|Infinity/)")
        if PICTURES:
            browser.picture(Path(PICTURES) / f"{fragment.replace('/', '-')}-{width}-{'dark' if dark else 'light'}.png")
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(14, 19, 24)") is dark


CONTRAST = """(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = node => { for (; node; node = node.parentElement) {
    const color = parse(getComputedStyle(node).backgroundColor); if (color.length < 4 || color[3] > 0) return color; } };
  const found = [];
  for (const node of document.querySelectorAll('body *')) {
    if (![...node.childNodes].some(child => child.nodeType === 3 && child.data.trim()) || !node.getClientRects().length) continue;
    if (node.closest('svg') || node.disabled) continue;
    const pair = [light(parse(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) found.push([node.textContent.slice(0, 40), ratio]);
  }
  return found;
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_can_be_read(browser: Browser, file: Path, dark: bool) -> None:
    browser.look(1240, 900, dark=dark)
    for fragment in (*TABS, "history/failed"):
        browser.open(file, fragment)
        assert browser.value(CONTRAST) == [], "a contrast below 4.5, which WCAG AA asks for"


def test_tables_have_headings(browser: Browser, file: Path) -> None:
    browser.look(1240, 900)
    for fragment in (*TABS, OPEN):
        browser.open(file, fragment)
        assert browser.value(
            "[...document.querySelectorAll('table')].every(t => t.querySelectorAll('thead th[scope=col]').length)"
        )
        assert browser.value("[...document.querySelectorAll('svg')].every(s => s.getAttribute('aria-label'))")


def test_tabs_by_mouse_and_keyboard(browser: Browser, file: Path) -> None:
    browser.look(1240, 900)
    browser.open(file)
    assert browser.value("document.querySelector('main').innerText").startswith("completed")
    browser.click("#tab-summary")
    browser.wait_for("document.querySelector('main').innerText.startsWith('All stages')")
    assert browser.value("location.hash") == "#summary"
    browser.value(
        "document.getElementById('tab-summary').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))"
    )
    browser.wait_for("location.hash === '#timeline' && document.activeElement.id === 'tab-timeline'")
    assert browser.problems == []


def test_filters_search_pages_and_details_of_the_history(browser: Browser, file: Path) -> None:
    failed = sum(entry.status == "failed" for entry in history_of(300).checkpoints)
    browser.look(1240, 900)
    browser.open(file, "history")
    assert browser.value(ROWS) == 50
    browser.click(".pages button:last-child")
    browser.wait_for("document.querySelector('.pages').innerText.includes('51 to 100 of 300')")
    browser.click("[data-filter=failed]")
    browser.wait_for(f"{ROWS} === {failed}")
    browser.click("[data-filter=savepoints]")
    browser.wait_for(f"{ROWS} === 5")
    browser.click("[data-filter=all]")
    browser.click("input[type=search]")
    browser.type("299")
    browser.wait_for(f"{ROWS} === 1")
    browser.click("tr.row")
    browser.wait_for("document.querySelector('tr.detail') !== null")
    shown = browser.value("document.querySelector('tr.detail').innerText")
    assert "EWR" in shown and "acknowledged after" in shown and "finished before" in shown
    assert browser.value("location.hash") == "#history/all/3-299"
    assert browser.problems == []


def test_the_value_under_the_pointer_is_shown(browser: Browser, file: Path) -> None:
    browser.look(1240, 900)
    browser.open(file)
    browser.click("section .chart svg")
    browser.wait_for("!document.querySelector('.tip').hidden")
    assert "checkpoint" in browser.value("document.querySelector('.tip').innerText")


def test_texts_are_no_html(browser: Browser, tmp_path: Path) -> None:
    made = history_of(30)
    events = tuple(msgspec.structs.replace(event, text=EVIL, run_id=EVIL) for event in made.events)
    checkpoints = tuple(msgspec.structs.replace(entry, status="failed", message=EVIL, reason=EVIL) for entry in made.checkpoints)
    stages: dict[str, Any] = {EVIL: made.samples[-1].stages["live"]}
    samples = tuple(msgspec.structs.replace(sample, stages=stages) for sample in made.samples)
    file = tmp_path / "evil.html"
    made_report = report_of(Entries(checkpoints, events, samples), state=EVIL, problems=(EVIL,))
    row = msgspec.structs.replace(made_report.stages[0], name=EVIL)
    file.write_bytes(page(msgspec.structs.replace(made_report, pipeline=EVIL, stages=(row,), settings={EVIL: EVIL})))
    browser.look(390, 900)
    for fragment in (*TABS, "history/failed/3-29"):
        browser.open(file, fragment)
        assert browser.problems == []
        assert browser.value("document.querySelectorAll('b, main img').length") == 0
        assert browser.value("document.title") == f"{EVIL} · checkpoints"
        assert EVIL in browser.value("document.body.textContent")
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), fragment


def test_a_pipeline_without_a_history(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "empty.html"
    empty = build_report(
        pipeline="flights",
        url="file:///flights",
        entries=Entries(),
        status=None,
        state="",
        running_epoch=None,
        now=datetime.now(UTC),
    )
    file.write_bytes(page(empty))
    for fragment in TABS:
        browser.open(file, fragment)
        assert browser.problems == []
        assert browser.value("document.querySelectorAll('main .card').length") > 0


def test_ten_thousand_checkpoints_are_drawn(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "long.html"
    file.write_bytes(page(report_of(history_of(10_000))))
    browser.look(390, 900)
    for fragment in TABS:
        browser.open(file, fragment)
        assert browser.problems == []
    assert browser.value("rows.length") == 10_000
