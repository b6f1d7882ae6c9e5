"""Makes the pictures of the page of checkpoints in docs/: what a real run has written, in Chromium.

    make pictures

A pipeline of history and live rows runs twice, on an S3 in this process: the first run restarts once, and is suspended; in the
second one two instances are too slow for a checkpoint. The page is written while that run goes on.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.cli.app import app
from dagster_checkpoints.control import PipelineControl
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import CheckpointDone, CheckpointNotDone, JobEvent
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.session.spark_session import build_session
from dagster_checkpoints.storage import CheckpointStorage, open_store
from resources.embedded_s3 import EmbeddedS3
from tests.report.browser import Browser, found_browser

DOCS = Path(__file__).resolve().parents[1] / "docs"
ROWS = "airport string, at timestamp, minutes long"
AIRPORTS = ("EWR", "JFK", "LGA")
WIDTH, HEIGHT = 1100, 690
TIMEOUT = 20.0
SECONDS = 900.0
"""How long each part may take."""
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Departures(Stage):
    """Makes `slow` instances late for one checkpoint, and fails once, if files say so."""

    slow = ("2", "3")

    def __init__(self, folder: Path) -> None:
        super().__init__(
            "departures", inputs={name: StageInput(key="airport") for name in ("history", "live")}, instances=["0", "1", "2", "3"]
        )
        self.folder = folder

    def open(self, context: StageContext) -> None:
        self.instance = context.instance

    def transform(self, context: StageContext, history: DataFrame, live: DataFrame) -> DataFrame:
        hours = history.unionByName(live).groupBy(F.window("at", "1 hour"), "airport")
        found = hours.agg(F.avg("minutes").alias("delay"), F.count("*").alias("flights"))
        return found.select("airport", F.col("window.start").alias("at"), "delay", "flights")

    def snapshot_state(self, checkpoint_id: int) -> None:
        if (self.folder / "slow").exists() and self.instance in self.slow:
            time.sleep(TIMEOUT + 1)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        fault = self.folder / "fault"
        if self.instance == "1" and fault.exists():
            fault.unlink()
            raise ConnectionError("connection refused")


def pipeline(folder: Path) -> Pipeline:
    """history and live (three instances) -> departures (four instances) -> delays, alerts."""

    def files(context: StageContext, name: str) -> DataFrame:
        reader = context.spark.readStream.schema(ROWS).option("maxFilesPerTrigger", 4).option("maxFileAge", "36500d")
        return reader.parquet(str(folder / name))

    @bounded_source(watermark=("at", "1 hour"))
    def history(context: StageContext) -> DataFrame:
        return files(context, "history")

    @unbounded_source(watermark=("at", "1 hour"), instances=AIRPORTS)
    def live(context: StageContext) -> DataFrame:
        return files(context, context.instance)

    @stage(sink=ParquetSink(folder / "delays"), instances=["0", "1", "2", "3"])
    def delays(departures: DataFrame) -> DataFrame:
        return departures

    @stage(sink=ParquetSink(folder / "alerts"), inputs={"departures": StageInput(edge="all_to_all")})
    def alerts(departures: DataFrame) -> DataFrame:
        return departures.where("delay > 28")

    return Pipeline("flights", [history, live, Departures(folder), delays, alerts])


class Feed:
    """Writes files with flights: those of the past at once, then one for each airport every second, until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._closed = threading.Event()
        for name in ("history", *AIRPORTS):
            (folder / name).mkdir()
        for _ in range(40):
            self._put("history", AIRPORTS)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(1.0):
            for airport in AIRPORTS:
                self._put(airport, (airport,))

    def _put(self, name: str, airports: tuple[str, ...]) -> None:
        """A file of an hour."""
        self._number += 1
        numbers = range(self._number * 600, self._number * 600 + 600)
        columns = {
            "airport": [airports[n % len(airports)] for n in numbers],
            "at": [BEGIN + timedelta(seconds=6 * n) for n in numbers],
            "minutes": [n * 7919 % 60 for n in numbers],
        }
        hidden = self._folder / name / f".{self._number}"
        pq.write_table(pa.table(columns), hidden, coerce_timestamps="us")
        hidden.rename(self._folder / name / f"{self._number:06d}.parquet")


class Run:
    """A run of the pipeline, in a thread of this process."""

    def __init__(self, folder: Path, url: str) -> None:
        self.events: list[JobEvent] = []
        execution = JobExecution(
            pipeline(folder),
            storage=CheckpointStorage(open_store(url), "flights"),
            options=JobOptions(
                CheckpointConfig(interval=2.0, timeout=TIMEOUT, retained=3, tolerable_failed_checkpoints=100),
                FixedDelayRestart(5, 1.0),
                folder / "work",
                lease_seconds=120.0,  # also on a busy machine
                request_poll_seconds=0.5,
            ),
            session=lambda: build_session(
                {"spark.master": "local[2]", "spark.sql.shuffle.partitions": 2, "spark.ui.enabled": "false"}
            ),
            on_event=self.events.append,
            run_id=str(uuid4()),
        )
        self.cancel = execution.cancel
        self._result: Any = None
        self._thread = threading.Thread(target=lambda: setattr(self, "_result", execution.run()), daemon=True)
        self._thread.start()

    def count(self, kind: type[JobEvent]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + SECONDS
        while not condition():
            if not self._thread.is_alive() or time.monotonic() > until:
                raise RuntimeError(f"expected {what}, found {self._result or self.events[-3:]}")
            time.sleep(0.1)
        print(what, flush=True)

    def join(self) -> None:
        self._thread.join(SECONDS)


def story(folder: Path, url: str) -> Run:
    """What the pictures show. Returns the run that goes on."""
    control = PipelineControl(CheckpointStorage(open_store(url), "flights"), asked_by="make pictures")
    run = Run(folder, url)
    run.until(lambda: run.count(CheckpointDone) >= 12, "12 checkpoints are complete")
    (folder / "fault").touch()
    run.until(lambda: not (folder / "fault").exists(), "a stage has failed")
    run.until(lambda: run.count(CheckpointDone) >= 22, "22 checkpoints are complete")
    control.savepoint(name="before-upgrade").wait(SECONDS)
    run.until(lambda: run.count(CheckpointDone) >= 26, "a savepoint and 26 checkpoints are complete")
    control.stop(drain=False).wait(SECONDS)
    run.join()
    run = Run(folder, url)
    run.until(lambda: run.count(CheckpointDone) >= 12, "suspended, resumed, and 12 checkpoints are complete")
    (folder / "slow").touch()
    run.until(lambda: run.count(CheckpointNotDone) >= 1, "a checkpoint has expired")
    (folder / "slow").unlink()
    complete = run.count(CheckpointDone)
    run.until(lambda: run.count(CheckpointDone) >= complete + 3, "checkpoints are complete again")
    return run


def main() -> int:
    program = found_browser()
    if program is None:
        print("expected Chromium on PATH, found none: install Debian's package chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary, EmbeddedS3("flight-checkpoints") as s3:
        folder = Path(temporary)
        os.environ |= s3.environment
        feed, run = Feed(folder), None
        try:
            run = story(folder, s3.url)
            file = folder / "report.html"
            asked = ["report", "--storage", s3.url, "--pipeline", "flights", "--output", str(file)]
            written = CliRunner().invoke(app, asked, catch_exceptions=False)
            assert written.exit_code == 0, written.output
        finally:
            feed.close()
            if run is not None:
                run.cancel()
                run.join()
        browser = Browser(program, folder / "profile")
        try:
            browser.look(WIDTH, HEIGHT)
            browser.open(file)
            browser.picture(DOCS / "report-overview.png")
            browser.look(WIDTH, HEIGHT, dark=True)
            browser.open(file, "history/failed")
            browser.click("tr.row")
            browser.picture(DOCS / "report-history.png")
        finally:
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
