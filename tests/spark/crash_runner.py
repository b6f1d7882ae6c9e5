"""The pipeline of the crash tests, run in a separate process that can be killed, suspended, or be a cluster's driver.

    python crash_runner.py <folder> <settings as JSON>

The folder holds the input, both sinks and the store. The events are written to `<folder>/events/<run_id>.jsonl`, one line of
JSON each. When `<folder>/drain-at.json` exists and the run has consumed the numbers of rows that it names, the run drains (which
also ends a backfill that still runs). With `hold` the process stops for ever at a point of the protocol, after an event.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_checkpoints.coordination import CheckpointConfig, NoRestart
from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job import spark_start
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.session.spark_session import build_session
from dagster_checkpoints.storage import CheckpointStorage, open_store

ROWS = "k string, ts timestamp, v long"
NAMES = "k string, name string"
INSTANCES = ("a", "b", "c")


@dataclass
class Settings:
    """The settings of a run.

    Attributes:
        hold: "upload" (of a state file), "metadata" or "commit" (of a sink): the process stops at the `hold_at`-th one, counted
            from the drain if `hold_draining`. Or "commit-savepoint": at a sink's commit of a stop's savepoint.
        work: The work directory, below the folder or absolute.
        ask_executors: Whether the check at start asks the executors if they see the work directory. Later executors are never
            asked.
        spark: Settings of the session.
    """

    run_id: str
    hold: str = ""
    hold_at: int = 1
    hold_draining: bool = False
    interval: float = 1.0
    initial_delay: float | None = None
    lease_seconds: float = 6.0
    work: str = "work"
    ask_executors: bool = True
    spark: dict[str, Any] = field(default_factory=lambda: {"spark.master": "local[2]"})


class Recorder:
    """Writes events for the parent process, and holds the process at the configured point."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self._lock = threading.Lock()
        self._seen = 0
        (folder / "events").mkdir(exist_ok=True)
        self._file = open(folder / "events" / f"{settings.run_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end

    def say(self, event: str, **fields: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"event": event, **fields}, default=str) + "\n")

    def moment(self, name: str) -> None:
        if not name or self.settings.hold != name or (self.settings.hold_draining and not self.draining):
            return
        with self._lock:
            self._seen += 1
            mine = self._seen >= self.settings.hold_at
        if mine:
            self.say("Holding", at=name)
            threading.Event().wait()

    draining = False


RECORDER: Recorder | None = None


class HoldingStore:
    """A store that holds the process at the configured point."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: bytes, mode: Any = "overwrite") -> str:
        self._hold(key)
        return self._store.put(key, data, mode)  # type: ignore[no-any-return]

    def put_file(self, key: str, path: Path) -> None:
        self._hold(key)
        self._store.put_file(key, path)

    def _hold(self, key: str) -> None:
        if RECORDER is not None:
            RECORDER.moment("upload" if "/shared/" in key else "metadata" if key.endswith("_metadata") else "")


class HoldingSink(ParquetSink):
    def commit(self, transaction: str) -> None:
        if RECORDER is not None:
            RECORDER.moment("commit")
            if any(RECORDER.folder.glob("store/crashing/savepoints/*/_metadata")):
                RECORDER.moment("commit-savepoint")
        super().commit(transaction)


def in_hours(frame: DataFrame) -> DataFrame:
    counted = frame.groupBy(F.window("ts", "1 hour"), "name").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "name", "v", "n")


def with_names(frame: DataFrame, names: DataFrame) -> DataFrame:
    return frame.join(F.broadcast(names), "k", "left").select("name", "ts", "v")


def pipeline(folder: Path) -> Pipeline:
    """A backfill and three live feeds, a static join with a sink, windows with another."""

    def stream(spark: SparkSession, name: str) -> DataFrame:
        return spark.readStream.schema(ROWS).option("maxFilesPerTrigger", 1).parquet(str(folder / "input" / name))

    @bounded_source(watermark=("ts", "10 minutes"))
    def history(context):
        return stream(context.spark, "history")

    @unbounded_source(watermark=("ts", "10 minutes"), instances=INSTANCES)
    def live(context):
        return stream(context.spark, f"live-{context.instance}")

    @bounded_source
    def names(context):
        return context.spark.read.schema(NAMES).parquet(str(folder / "input" / "names"))

    @stage(inputs={"names": StageInput(mode="static")}, sink=HoldingSink(folder / "named"))
    def named(history, live, names):
        return with_names(history.unionByName(live), names)

    @stage(sink=HoldingSink(folder / "hours"))
    def hours(named):
        return in_hours(named)

    return Pipeline("crashing", [history, live, names, named, hours])


def main() -> None:
    global RECORDER
    folder = Path(sys.argv[1])
    settings = Settings(**json.loads(sys.argv[2]))
    RECORDER = recorder = Recorder(folder, settings)
    options = JobOptions(
        checkpoints=CheckpointConfig(
            interval=settings.interval,
            initial_delay=settings.initial_delay,
            retained=2,
            tolerable_failed_checkpoints=100,
        ),
        restart=NoRestart(),
        work_directory=folder / settings.work,
        trace=folder / "traces",
        lease_seconds=settings.lease_seconds,
    )
    if not settings.ask_executors:
        spark_start.is_local = lambda master: True
    store: Any = HoldingStore(open_store(str(folder / "store")))
    execution = JobExecution(
        pipeline(folder),
        storage=CheckpointStorage(store, "crashing"),
        options=options,
        session=lambda: build_session(settings.spark),
        on_event=lambda event: recorder.say(type(event).__name__, **asdict(event)),
        run_id=settings.run_id,
    )
    threading.Thread(target=drain_in_time, args=(execution, recorder), daemon=True).start()
    try:
        result = execution.run()
        recorder.say("Ended", status=result.status, error=repr(result.error))
    except Exception as error:
        recorder.say("Ended", status="REFUSED", error=repr(error))


def all_consumed(rows: dict[str, int], wanted: dict[str, int]) -> bool:
    return all(rows.get(source, 0) >= number for source, number in wanted.items())


def drain_in_time(execution: JobExecution, recorder: Recorder) -> None:
    written: dict[str, int] = {}
    parent = os.getppid()
    while True:
        if os.getppid() != parent:
            os._exit(1)  # the tests were interrupted: no process would end this run
        rows = dict(execution.rows())
        if rows != written:
            written = rows
            recorder.say("Rows", **rows)
        wanted = recorder.folder / "drain-at.json"
        if not recorder.draining and wanted.exists() and all_consumed(rows, json.loads(wanted.read_text())):
            recorder.draining = True
            recorder.say("Draining")
            execution.drain()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
