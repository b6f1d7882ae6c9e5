"""A user's walk through Dagster's own interface, in a real browser: the pages of a pipeline from its graph to its report.

The walk is done once, by clicks, as a user does it; each test reads what was seen. Screenshots are kept in the folder that the
environment variable SCREENSHOTS names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import pytest

from tests.dagster.processes.dagster_services import SECONDS, Services
from tests.report.browser import NAMES, Browser, found_browser

pytestmark = pytest.mark.one_record

LOCATION = Path(__file__).with_name("browser_location.py")
GRAPH = "/locations/live/asset-groups/shop/lineage"
JOB = "/locations/live/jobs/shop_job"
CHECKPOINTS = "/assets/checkpoints/shop"
SAVEPOINTS = "/assets/savepoints/shop"
TOASTS = "[...document.querySelectorAll('[data-sonner-toast]')].filter(e => e.dataset.type === 'error').map(e => e.innerText)"
LINES = "(document.body ? document.body.innerText : '').split('\\n')"
EDITOR = "document.querySelector('.CodeMirror')"
REPORT_TABS = ("overview", "graph", "history", "summary", "timeline", "configuration")
STAGES = ("history", "live", "sales", "minutes")


@dataclass(frozen=True)
class Page:
    """What was seen of a page.

    Attributes:
        text: Its visible text.
        toasts: The errors that it reported in a corner.
        errors: What its console reported as an error.
        failures: Its requests that failed.
        requests: The addresses that it asked for.
    """

    text: str
    toasts: Sequence[str]
    errors: Sequence[str]
    failures: Sequence[str]
    requests: Sequence[str]


@dataclass
class Walk:
    """The record of a walk.

    Attributes:
        services: The webserver, the daemon and the code server.
        browser: The browser.
        folder: The folder of the screenshots.
        pages: What was seen, by the page's name.
        runs: The runs of the pipeline when the walk ended, oldest first.
        committed: The rows in the table `sales`, by the moment.
        minutes: The rows in the table `minutes`, by the moment.
    """

    services: Services
    browser: Browser
    folder: Path
    pages: dict[str, Page] = field(default_factory=dict)
    runs: list[dg.DagsterRun] = field(default_factory=list)
    committed: dict[str, list[int]] = field(default_factory=dict)
    minutes: dict[str, list[int]] = field(default_factory=dict)

    def visit(self, path: str) -> None:
        self.browser.visit(f"{self.services.url}{path}")

    def see(self, name: str, *texts: str) -> None:
        """Wait until the page shows all texts, and record it."""
        try:
            shown = self.browser.wait_for_texts(*texts, seconds=SECONDS)
        finally:
            self.browser.picture(self.folder / f"{len(self.pages) + 1:02}-{name.replace(' ', '-')}.png")
        browser = self.browser
        toasts = browser.value(TOASTS)
        self.pages[name] = Page(shown, toasts, [*browser.errors], [*browser.failures], [*browser.requests])

    def until(self, look: Callable[[], object], what: str) -> None:
        self.services.until(look, what)  # type: ignore[arg-type]

    def count(self, moment: str) -> None:
        """Record the rows that readers of the tables find now."""
        self.committed[moment] = self.services.committed("sales")
        self.minutes[moment] = self.services.committed("minutes")

    def newest_run(self) -> dg.DagsterRun | None:
        """The newest run of the pipeline, not of its savepoints."""
        runs = self.services.instance.get_runs(dg.RunsFilter(job_name="shop_job"), limit=1)
        return runs[0] if runs else None

    def launched(self, press: Callable[[], None]) -> str:
        """The id of the run that a press has launched."""
        before = self.newest_run()
        press()

        def newer() -> str | None:
            run = self.newest_run()
            return run.run_id if run is not None and (before is None or run.run_id != before.run_id) else None

        return self.services.until(newer, "a run is launched")

    def take_savepoint(self, name: str, stop: str | None = None) -> None:
        """Materialize a new partition of the savepoint asset, as its description says."""
        browser = self.browser
        self.visit(SAVEPOINTS)
        browser.press("Materialize…", shows="Add a partition", seconds=SECONDS)
        browser.press("Add a partition", shows="Partition name", seconds=SECONDS)
        browser.click("input[placeholder=name]")
        browser.type(name)
        browser.press("Save", shows="Launch 1 run", seconds=SECONDS)
        if stop is not None:
            browser.press("Config", shows="Add config", seconds=SECONDS)
            browser.press("Add config", shows="Save config", seconds=SECONDS)
            browser.wait_for_texts("savepoints__shop", seconds=SECONDS)
            browser.click(".CodeMirror")
            browser.type(f"ops:\n  savepoints__shop:\n    config:\n      stop: {stop}\n")
            browser.wait_for(f"{EDITOR}.CodeMirror.getValue().includes('stop: {stop}')")
            self.see(f"config of {name}", "No errors", "Save config")
            browser.press("Save config", hides="Save config", seconds=SECONDS)
        self.see(f"dialog of {name}", "Launch runs to materialize savepoints / shop", name, "Launch 1 run")
        browser.press("Launch 1 run", shows="Launched run", seconds=SECONDS)
        self.see(f"launch of {name}", "Launched run")
        self.until(lambda: self._ended(name), f"the run that takes the savepoint {name} ends")

    def _ended(self, savepoint: str) -> bool:
        """Whether the run has ended; the page of a partition does not look again by itself."""
        runs = self.services.instance.get_runs(dg.RunsFilter(tags={"dagster/partition": savepoint}))
        return bool(runs) and all(run.is_finished for run in runs)

    def filter_log(self, text: str) -> None:
        """Show only the lines of a run's log that have a text."""
        self.browser.wait_for("document.querySelector('input[placeholder^=Filter]') !== null", SECONDS)
        self.browser.click("input[placeholder^=Filter]")
        self.browser.type(text)


def walk_through(walk: Walk) -> None:
    services, browser = walk.services, walk.browser
    services.drop("first", range(5, 8))
    walk.visit(GRAPH)
    walk.see("graph before", *STAGES, "shop", "Spark", "Parquet", "Never materialized", "Materialize all (4)")
    for group in ("shop", "savepoints"):
        walk.visit(f"/locations/live/asset-groups/{group}/list")
        walk.see(f"assets of {group}", f"{'checkpoints' if group == 'shop' else group} / shop")

    walk.visit(JOB)
    walk.see("job", "Materialize all", "Launch this job first", *STAGES[:3])
    first = walk.launched(lambda: browser.press("Materialize all", seconds=SECONDS))
    walk.visit(f"/runs/{first}")
    walk.see("run live", "Started", "Checkpoint", "completed in", "Terminate")
    walk.until(lambda: services.committed("sales") == [*range(8)], "the first rows are committed")
    walk.count("first run")

    walk.visit(GRAPH)
    walk.see("graph live", *STAGES, "Materialized", "Materializing...", "1 / 1 Passed")
    walk.visit(CHECKPOINTS)
    walk.see("checkpoints", "External Asset", "checkpoint", "duration_seconds", "total_bytes", "report", "report.html")
    walk.visit(f"{CHECKPOINTS}?view=checks")
    walk.see("health live", "healthy", "Passed", "The pipeline runs, and is healthy.")
    walk.visit("/assets/live")
    walk.see("live stage", "rows", "watermark", "lag_seconds", "running", "Source code")

    walk.take_savepoint("before-lunch")
    walk.visit(f"{SAVEPOINTS}?view=partitions&partition=before-lunch")
    walk.see("savepoint", "location", "-before-lunch-", "duration_seconds", "stages", "Open the launchpad with this savepoint")
    walk.visit(f"{SAVEPOINTS}?view=checks")
    walk.see("savepoint check", "restorable", "Passed", "The savepoint is complete and fits the pipeline.")
    walk.visit(f"/runs/{first}")
    walk.see("run beside the savepoint", "Started", "Terminate")

    walk.take_savepoint("evening", "suspend")
    walk.visit(f"/runs/{first}")
    walk.see("run suspended", "Success", "is suspended with savepoint", "RUN_SUCCESS")
    walk.count("suspend")
    walk.visit("/assets/live")
    walk.see("live stage suspended", "suspended", "-evening-")

    services.drop("second", range(8, 10))
    walk.visit(f"{JOB}/playground")
    walk.see("launchpad", "restore_from: latest", "Launch Run")
    second = walk.launched(lambda: browser.press("Launch Run", hides="Launch Run", seconds=SECONDS))
    walk.visit(f"/runs/{second}")
    walk.filter_log("evening")
    walk.see("run resumed", "Started", "Continues from checkpoint")
    walk.until(lambda: services.committed("sales") == [*range(10)], "the rows dropped meanwhile are committed")
    walk.count("second run")

    walk.take_savepoint("night", "drain")
    walk.visit(f"/runs/{second}")
    walk.filter_log("of the drain")
    walk.see("run drained", "Success", "Savepoint", "of the drain")
    walk.count("drain")
    walk.visit(f"{SAVEPOINTS}?view=partitions&partition=night")
    walk.see("savepoint of the drain", "-night-", "drain")
    walk.visit(GRAPH)
    browser.wait_for(f"{LINES}.filter(line => line === 'Materialized').length === {len(STAGES)}", SECONDS)
    walk.see("graph after", *STAGES, "Materialized")
    walk.visit(f"{CHECKPOINTS}?view=checks")
    walk.see("health after", "healthy", "Passed", "The pipeline does not run.")
    walk.visit("/runs")
    walk.see("runs", "shop_job", first[:8], second[:8], "Success")
    walk.runs = services.instance.get_runs(dg.RunsFilter(job_name="shop_job"))[::-1]

    report = services.home / "checkpoints" / "shop" / "report.html"
    for tab in REPORT_TABS:
        browser.open(report, tab)
        walk.see(f"report {tab}", "shop")


def value(shown: str, label: str) -> str:
    """The value behind a label in the metadata of a page; the time of its event may be between them."""
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    assert label in lines, f"no {label!r} in {shown}"
    after = lines[lines.index(label) + 1 :]
    return after[1] if re.fullmatch(r"[A-Z][a-z]{2} \d+, \d+:\d+ [AP]M", after[0]) else after[0]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    program = found_browser()
    if program is None:
        pytest.skip(f"expected a browser on PATH, found none of {', '.join(NAMES)}: install Debian's package chromium")
    home = tmp_path_factory.mktemp("dagster")
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    services = Services(home, LOCATION, "shop")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    try:
        browser.look(1440, 1000)
        services.start_all()
        walked = Walk(services, browser, folder)
        walk_through(walked)
        yield walked
    finally:
        browser.close()
        services.close()


# Every page


def test_no_page_reports_an_error_in_a_corner(walk: Walk) -> None:
    assert {name: page.toasts for name, page in walk.pages.items() if page.toasts} == {}


def test_no_page_reports_an_error_to_the_console(walk: Walk) -> None:
    assert {name: page.errors for name, page in walk.pages.items() if page.errors} == {}


def test_no_request_of_a_page_fails(walk: Walk) -> None:
    assert {name: page.failures for name, page in walk.pages.items() if page.failures} == {}


def test_no_page_loads_anything_from_elsewhere(walk: Walk) -> None:
    known = (walk.services.url, f"blob:{walk.services.url}", "data:", walk.services.home.as_uri())
    elsewhere = {name: [url for url in page.requests if not url.startswith(known)] for name, page in walk.pages.items()}
    assert not any(elsewhere.values()), elsewhere


def test_each_page_has_a_screenshot(walk: Walk) -> None:
    names = {file.stem.partition("-")[2] for file in walk.folder.glob("*.png") if file.stat().st_size > 10_000}
    assert {name.replace(" ", "-") for name in walk.pages} <= names


# The graph


@pytest.mark.parametrize("stage", STAGES)
def test_the_graph_shows_each_stage(walk: Walk, stage: str) -> None:
    assert stage in walk.pages["graph before"].text.splitlines()


def test_the_graph_shows_what_runs_and_stores_a_stage(walk: Walk) -> None:
    lines = walk.pages["graph before"].text.splitlines()
    assert (lines.count("Spark"), lines.count("Parquet")) == (4, 2)


def test_the_graph_tells_the_checkpoints_from_the_pipeline(walk: Walk) -> None:
    assert "checkpoint" in walk.pages["graph before"].text.splitlines()


def test_materialize_all_of_the_group_takes_no_savepoint(walk: Walk) -> None:
    assert "Materialize all (4)" in walk.pages["graph before"].text


@pytest.mark.parametrize(("group", "asset"), [("shop", "checkpoints / shop"), ("savepoints", "savepoints / shop")])
def test_the_list_of_the_group_shows_the_asset(walk: Walk, group: str, asset: str) -> None:
    assert asset in walk.pages[f"assets of {group}"].text.splitlines()


def test_the_graph_shows_that_the_live_stage_runs(walk: Walk) -> None:
    assert "Materializing..." in walk.pages["graph live"].text


def test_the_graph_shows_that_the_finished_pipeline_is_up_to_date(walk: Walk) -> None:
    shown = walk.pages["graph after"].text
    assert shown.splitlines().count("Materialized") == 4
    assert "Unsynced" not in shown and "Never materialized" not in shown


# The live run


def test_the_job_says_that_it_is_launched_first(walk: Walk) -> None:
    assert "Launch this job first. Runs pipeline 'shop': all stages in one run." in walk.pages["job"].text


def test_the_page_of_a_live_run_shows_completed_checkpoints(walk: Walk) -> None:
    shown = walk.pages["run live"].text
    assert "Started" in shown.splitlines() and re.search(r"Checkpoint \d+ completed in \d+\.\d\d s from", shown)


def test_a_live_stage_shows_its_rows_event_time_and_lag(walk: Walk) -> None:
    shown = walk.pages["live stage"].text
    assert value(shown, "rows") == "3" and value(shown, "state") == "running"
    assert value(shown, "watermark").startswith("Feb 19, 2025") and int(value(shown, "lag_seconds")) > 0


# Checkpoints and health


@pytest.mark.parametrize("label", ["checkpoint", "duration_seconds", "total_bytes", "completed"])
def test_the_checkpoints_show_numbers_with_their_units(walk: Walk, label: str) -> None:
    assert float(value(walk.pages["checkpoints"].text, label)) > 0


def test_the_checkpoints_show_where_the_report_is(walk: Walk) -> None:
    shown = Path(value(walk.pages["checkpoints"].text, "report"))
    assert shown == walk.services.home / "checkpoints" / "shop" / "report.html" and shown.exists()


def test_the_health_of_a_live_pipeline_has_passed(walk: Walk) -> None:
    shown = walk.pages["health live"].text
    assert "Passed" in shown.splitlines() and "The pipeline runs, and is healthy." in shown


def test_the_health_of_a_pipeline_that_has_ended_says_how_it_ended(walk: Walk) -> None:
    shown = walk.pages["health after"].text
    assert "Passed" in shown.splitlines() and "The pipeline does not run." in shown


# Savepoints


def test_a_savepoint_shows_where_it_is(walk: Walk) -> None:
    shown = walk.pages["savepoint"].text
    location = value(shown, "location")
    assert re.fullmatch(r"savepoints/savepoint-\d+-before-lunch-\w+", location)
    assert Path(value(shown, "path")) == walk.services.home / "checkpoints" / "shop" / location


@pytest.mark.parametrize("label", ["total_bytes", "duration_seconds", "files"])
def test_a_savepoint_shows_numbers_with_their_units(walk: Walk, label: str) -> None:
    assert float(value(walk.pages["savepoint"].text, label)) > 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_savepoint_shows_each_stage(walk: Walk, stage: str) -> None:
    state = "finished" if stage == "history" else "running"
    assert re.search(rf"^{stage}\t{state}\t1\t", walk.pages["savepoint"].text, re.MULTILINE)


def test_a_savepoint_links_the_launchpad_that_restores_it(walk: Walk) -> None:
    shown = walk.pages["savepoint"].text
    assert "Open the launchpad with this savepoint" in shown
    assert f"restore_from: {value(shown, 'location')}" in shown


def test_a_savepoint_is_checked_with_its_run(walk: Walk) -> None:
    assert "The savepoint is complete and fits the pipeline." in walk.pages["savepoint check"].text


def test_the_run_goes_on_beside_a_savepoint(walk: Walk) -> None:
    assert "Started" in walk.pages["run beside the savepoint"].text.splitlines()


def test_the_savepoint_asset_says_how_the_pipeline_is_stopped(walk: Walk) -> None:
    """The editor of the configuration begins empty: this text can be copied into it."""
    lines = [line.strip() for line in walk.pages["launch of before-lunch"].text.splitlines()]
    begin = lines.index("ops:")
    assert lines[begin : begin + 4] == ["ops:", "savepoints__shop:", "config:", "stop: suspend"]


@pytest.mark.parametrize("savepoint", ["evening", "night"])
def test_the_configuration_of_a_stop_is_short_and_right(walk: Walk, savepoint: str) -> None:
    shown = walk.pages[f"config of {savepoint}"].text
    assert "No errors" in shown
    assert "Runs pipelines under consistent checkpoints" in shown and "pydantic.ValidationError" not in shown


# Suspend, resume, drain


def test_a_suspended_run_is_a_success(walk: Walk) -> None:
    shown = walk.pages["run suspended"].text
    assert "Success" in shown.splitlines() and "The next run continues from it." in shown
    assert walk.runs[0].status is dg.DagsterRunStatus.SUCCESS


def test_a_stage_of_a_suspended_pipeline_names_the_savepoint(walk: Walk) -> None:
    shown = walk.pages["live stage suspended"].text
    assert value(shown, "state") == "suspended"
    assert Path(value(shown, "savepoint")).parent == walk.services.home / "checkpoints" / "shop" / "savepoints"


def test_the_launchpad_of_the_job_shows_one_setting(walk: Walk) -> None:
    assert "restore_from: latest" in walk.pages["launchpad"].text and "claim_mode:" not in walk.pages["launchpad"].text


def test_the_resumed_run_says_that_it_continues_from_the_savepoint(walk: Walk) -> None:
    assert re.search(r"Continues from checkpoint \d+ \(savepoints/savepoint-\d+-evening-", walk.pages["run resumed"].text)


def test_the_drained_run_is_a_success(walk: Walk) -> None:
    assert "Success" in walk.pages["run drained"].text.splitlines()
    assert [run.status for run in walk.runs] == [dg.DagsterRunStatus.SUCCESS] * 2


def test_the_savepoint_of_the_drain_says_so(walk: Walk) -> None:
    assert value(walk.pages["savepoint of the drain"].text, "trigger") == "drain"


@pytest.mark.parametrize(("moment", "rows"), [("first run", 8), ("suspend", 8), ("second run", 10), ("drain", 10)])
def test_each_row_is_in_the_table_once(walk: Walk, moment: str, rows: int) -> None:
    assert walk.committed[moment] == [*range(rows)]


def test_a_suspend_emits_no_window_that_is_still_open(walk: Walk) -> None:
    assert walk.minutes["suspend"] == [*range(6)], "the watermark is a minute behind the newest row, of minute 7"


def test_a_drain_emits_each_window_once(walk: Walk) -> None:
    assert walk.minutes["drain"] == [*range(10)]


def test_the_list_of_runs_shows_both_runs(walk: Walk) -> None:
    assert all(run.run_id[:8] in walk.pages["runs"].text for run in walk.runs)


# The report


def test_the_report_shows_both_runs_and_how_they_ended(walk: Walk) -> None:
    shown = walk.pages["report timeline"].text
    rows = [line for line in shown.splitlines() if line.startswith(tuple(run.run_id for run in walk.runs))]
    assert len(rows) == 2
    assert [row.split("\t")[-1] for row in sorted(rows, key=lambda row: not row.startswith(walk.runs[0].run_id))] == [
        "suspended",
        "drained",
    ]


@pytest.mark.parametrize("savepoint", ["before-lunch", "evening", "night"])
def test_the_report_shows_each_savepoint(walk: Walk, savepoint: str) -> None:
    assert f"-{savepoint}-" in walk.pages["report timeline"].text


@pytest.mark.parametrize("stage", STAGES)
def test_the_report_shows_each_stage(walk: Walk, stage: str) -> None:
    assert stage in walk.pages["report graph"].text
