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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import FixedDelayRestart, NoRestart
from dagster_checkpoints.pipeline import (
    Pipeline,
    Quarantine,
    Stage,
    StageInput,
    bounded_source,
    split_source,
    stage,
    unbounded_source,
)
from dagster_checkpoints.sinks import DeltaSink, FileSink, IcebergSink, ParquetSink, SqlSink, TwoPhaseCommitSink
from dagster_checkpoints.sources import FileSplits
from dagster_checkpoints.spark.files import server_copies
from dagster_checkpoints.spark.job import spark_start
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.session.spark_session import build_session
from dagster_checkpoints.spark.session.work_directory import parse_work_directory
from dagster_checkpoints.spark.snapshots import moved_state
from dagster_checkpoints.storage import CheckpointStorage, open_store
from tests.spark.numbered_feed import NumberedFeed

ROWS = "k string, ts timestamp, v long"
NAMES = "k string, name string"


@dataclass
class Settings:
    """The settings of a run.

    Attributes:
        hold: "upload" (of a state file), "metadata", "pre-commit", "commit" or "recover" (of a sink): the process stops at the
            `hold_at`-th one, counted from the drain if `hold_draining`. Or "commit-savepoint": at a sink's commit of a stop's
            savepoint. Or "state": before an instance takes its part of state that was written again.
        hold_seconds: How long a thread of the process stops there; default: for ever.
        work: The work directory: a path below the folder or absolute, or a URL.
        storage: The URL of the storage; default: a directory below the folder.
        ask_executors: Whether the check at start asks the executors if they see the work directory. Later executors are never
            asked.
        restart_attempts: How often the job restarts after a failure.
        smallest_server_copy: Size in bytes of the smallest file that an S3 server copies; default: the usual one.
        input: The URL of the directory with the input; default: the folder's.
        feeds: The names of the live feeds, in the order of the instances.
        hours: The number of instances of the stage with windows.
        numbered: Whether the live feeds number their rows, with the help of `context.state`.
        fused: Whether the pipeline is that of :func:`fused_pipeline`.
        checkpoints: Settings of CheckpointConfig, beside those of every run.
        regions: Whether the pipeline is that of :func:`regions_pipeline`.
        splits: The names of the instances of the split source of :func:`splits_pipeline`, which the pipeline is then.
        split_seconds: How long each of its splits takes at least.
        chained: "alone" or "read": the pipeline is that of :func:`chained_pipeline`, without or with a reader inside its chain.
        sink: A name of SINKS: the pipeline is that of :func:`sink_pipeline`.
        refused: Another one: the pipeline is that of :func:`refusing_pipeline`.
        spark: Settings of the session.
        repartition_state: Whether restored state gets as many partitions as these settings say.
        allow_non_restored_state: Whether the state of stages that the pipeline does not have any more is left behind.
    """

    run_id: str
    hold: str = ""
    hold_at: int = 1
    hold_draining: bool = False
    hold_seconds: float | None = None
    interval: float = 1.0
    initial_delay: float | None = None
    lease_seconds: float = 6.0
    work: str = "work"
    storage: str = ""
    ask_executors: bool = True
    restart_attempts: int = 0
    smallest_server_copy: int | None = None
    input: str = ""
    feeds: str = "abc"
    hours: int = 1
    fused: bool = False
    checkpoints: dict[str, Any] = field(default_factory=dict)
    numbered: bool = False
    regions: bool = False
    chained: str = ""
    sink: str = ""
    refused: str = ""
    splits: str = ""
    split_seconds: float = 0.3
    spark: dict[str, Any] = field(default_factory=lambda: {"spark.master": "local[2]"})
    repartition_state: bool = False
    allow_non_restored_state: bool = False


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
            lasting = self.settings.hold_seconds is None
            mine = self._seen >= self.settings.hold_at if lasting else self._seen == self.settings.hold_at
        if mine:
            self.say("Holding", at=name)
            threading.Event().wait(self.settings.hold_seconds)

    draining = False


RECORDER: Recorder | None = None


class HoldingStore:
    """A store that holds the process at the configured point, and records the copies that the server makes."""

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

    def sibling(self, url: str) -> HoldingStore | None:
        sibling = self._store.sibling(url)
        return HoldingStore(sibling) if sibling is not None else None

    def copy_from(self, source: Any, source_key: str, key: str, *rest: Any, **named: Any) -> bool:
        inner = source._store if isinstance(source, HoldingStore) else source
        copied = self._store.copy_from(inner, source_key, key, *rest, **named)
        if RECORDER is not None and copied:
            RECORDER.say("CopiedByServer", key=key)
        return copied  # type: ignore[no-any-return]

    def _hold(self, key: str) -> None:
        if RECORDER is not None:
            RECORDER.moment("upload" if "/shared/" in key else "metadata" if key.endswith("_metadata") else "")


class Holding(TwoPhaseCommitSink):
    """A sink that holds the process when it has pre-committed rows, and before it commits or recovers rows."""

    def pre_commit(self, checkpoint_id: int) -> str | None:
        transaction = super().pre_commit(checkpoint_id)
        if RECORDER is not None and transaction is not None:
            RECORDER.moment("pre-commit")
        return transaction

    def recover(self, committed: Sequence[str], *, restored: int | None = None) -> None:
        if RECORDER is not None and committed:
            RECORDER.moment("recover")
        super().recover(committed, restored=restored)

    def commit(self, transaction: str) -> None:
        if RECORDER is not None:
            RECORDER.moment("commit")
            if any(RECORDER.folder.glob("store/crashing/savepoints/*/_metadata")):
                RECORDER.moment("commit-savepoint")
        super().commit(transaction)


class HoldingSink(Holding, ParquetSink):
    pass


class HoldingFileSink(Holding, FileSink):
    pass


class HoldingSqlSink(Holding, SqlSink):
    pass


class HoldingDeltaSink(Holding, DeltaSink):
    pass


class HoldingIcebergSink(Holding, IcebergSink):
    pass


SINKS: Mapping[str, Callable[[Path, str], TwoPhaseCommitSink]] = {
    "parquet": lambda folder, name: HoldingSink(folder / name),
    "files": lambda folder, name: HoldingFileSink(folder / name),
    "sql": lambda folder, name: HoldingSqlSink(f"sqlite:///{folder}/hours.db", name),
    "delta": lambda folder, name: HoldingDeltaSink(folder / name),
    "iceberg": lambda folder, name: HoldingIcebergSink(f"lake.{name}", warehouse=folder / "lake"),
}
"""Each with the folder and the name of the table."""


class HoldingState(moved_state.MovedState):
    def take(self, index: int, target: Any) -> None:
        if RECORDER is not None:
            RECORDER.moment("state")
        super().take(index, target)


def in_hours(frame: DataFrame) -> DataFrame:
    counted = frame.groupBy(F.window("ts", "1 hour"), "name").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return counted.select(F.col("window.start").alias("start"), "name", "v", "n")


def with_names(frame: DataFrame, names: DataFrame) -> DataFrame:
    number = {"number"} & {*frame.columns}
    return frame.join(F.broadcast(names), "k", "left").select("name", "ts", "v", *number)


def stream(spark: SparkSession, source: str, name: str) -> DataFrame:
    return (
        spark.readStream.schema(ROWS).option("maxFilesPerTrigger", 1).option("maxFileAge", "36500d").parquet(f"{source}/{name}")
    )


def pipeline(folder: Path, source: str, feeds: str = "abc", hours_instances: int = 1, *, numbered: bool = False) -> Pipeline:
    """A backfill and three live feeds, a static join with a sink, windows with another."""
    by_name = {"named": StageInput(key="name")} if hours_instances > 1 else {}

    @bounded_source(watermark=("ts", "10 minutes"))
    def history(context):
        return stream(context.spark, source, "history")

    @unbounded_source(watermark=("ts", "10 minutes"), instances=list(feeds))
    def live(context):
        return stream(context.spark, source, f"live-{context.instance}")

    @bounded_source
    def names(context):
        return context.spark.read.schema(NAMES).parquet(f"{source}/names")

    @stage(inputs={"names": StageInput(mode="static")}, sink=HoldingSink(folder / "named"))
    def named(history, live, names):
        return with_names(history.unionByName(live, allowMissingColumns=True), names)

    @stage(sink=HoldingSink(folder / "hours"), inputs=by_name, instances=[str(number) for number in range(hours_instances)])
    def hours(named):
        return in_hours(named)

    return Pipeline("crashing", [history, NumberedFeed(source, ROWS, list(feeds)) if numbered else live, names, named, hours])


def fused_pipeline(folder: Path, source: str) -> Pipeline:
    """A backfill and one live feed in the query of the stage that reads both. The feed's files overlap by hours."""

    @bounded_source(watermark=("ts", "3 hours"))
    def history(context):
        return stream(context.spark, source, "history")

    @unbounded_source(watermark=("ts", "3 hours"))
    def live(context):
        return stream(context.spark, source, "live-*")

    @stage(sink=HoldingSink(folder / "hours"), inputs=dict.fromkeys(("history", "live"), StageInput(fuse=True)))
    def hours(history, live):
        return in_hours(history.unionByName(live).withColumnRenamed("k", "name"))

    return Pipeline("crashing", [history, live, hours])


class FailingOnce(Stage):
    """Raises at the next batch after a file appears, and removes the file."""

    def __init__(self, fault: Path, **options: Any) -> None:
        super().__init__(**options)
        self.fault = fault

    def transform(self, context: Any, live: Any) -> Any:
        return live

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        if self.fault.exists():
            self.fault.unlink()
            raise ValueError("a plane without wings")
        return batch


def regions_pipeline(folder: Path, source: str) -> Pipeline:
    """Two feeds with windows of their own; no edge connects them. The stage `checked` of the first can be made to fail."""

    @unbounded_source(watermark=("ts", "10 minutes"))
    def live(context):
        return stream(context.spark, source, "live-a")

    @stage(sink=HoldingSink(folder / "hours"))
    def hours(checked):
        return in_hours(checked.withColumnRenamed("k", "name"))

    @unbounded_source(watermark=("ts", "10 minutes"), sink=HoldingSink(folder / "weather"))
    def weather(context):
        return stream(context.spark, source, "live-b")

    @stage(sink=HoldingSink(folder / "storms"))
    def storms(weather):
        return in_hours(weather.withColumnRenamed("k", "name"))

    checked = FailingOnce(folder / "fault", name="checked", inputs={"live": StageInput()}, sink=HoldingSink(folder / "checked"))
    return Pipeline("crashing", [live, checked, hours, weather, storms])


def in_numbers(hours: DataFrame) -> DataFrame:
    """The hours with a number in the place of each time, which every sink writes alike."""
    return hours.select(F.unix_seconds("start").alias("start"), "name", "v", "n")


def sink_pipeline(folder: Path, source: str, sink: str) -> Pipeline:
    """A live feed, and its windows in a sink of SINKS."""

    @unbounded_source(watermark=("ts", "10 minutes"))
    def live(context):
        return stream(context.spark, source, "live-a")

    @stage(sink=SINKS[sink](folder, "hours"))
    def hours(live):
        return in_numbers(in_hours(live.withColumnRenamed("k", "name")))

    return Pipeline("crashing", [live, hours])


def refusing_pipeline(folder: Path, source: str, sink: str, refused: str) -> Pipeline:
    """A live feed whose rows are in one of two tables each, by a condition that answers differently when it is asked again."""
    by_chance = Quarantine(
        {"is_lucky": lambda rows: F.rand() < 0.5, "is_even": "v % 2 = 0"}, sink=SINKS[refused](folder, "refused")
    )

    @unbounded_source(instances=("a", "b"))
    def live(context):
        return stream(context.spark, source, f"live-{context.instance}")

    @stage(instances=("a", "b"), sink=SINKS[sink](folder, "passed"), quarantine=by_chance)
    def passed(live):
        return live.select(F.unix_seconds("ts").alias("start"), F.col("k").alias("name"), "v", F.lit(1).alias("n"))

    @stage(sink=SINKS[sink](folder, "hours"), inputs={"passed": StageInput(edge="all_to_all")})
    def hours(passed):
        return passed.where("v >= 0")

    return Pipeline("crashing", [live, passed, hours])


def chained_pipeline(folder: Path, source: str, *, read: bool) -> Pipeline:
    """Two backfills, each in one query with a stage that drops duplicates and one that counts in windows."""

    @bounded_source(watermark=("ts", "10 minutes"), instances=("a", "b"))
    def live(context):
        return stream(context.spark, source, f"live-{context.instance}").withColumnRenamed("k", "name")

    @stage(instances=("a", "b"))
    def fresh(live):
        return live.dropDuplicatesWithinWatermark(["name", "v"])

    @stage(instances=("a", "b"), sink=HoldingSink(folder / "hours"))
    def hours(fresh):
        return in_hours(fresh)

    @stage(instances=("a", "b"), sink=HoldingSink(folder / "seen"))
    def seen(fresh):
        return fresh.select("name", "v")

    return Pipeline("crashing", [live, fresh, hours, *([seen] if read else [])])


def splits_pipeline(folder: Path, source: str, instances: str, run_id: str = "", seconds: float = 0.3) -> Pipeline:
    """A backfill in splits with windows. Seven of its files are discovered at once, all when the file `all` appears."""

    def files(context: Any) -> Iterator[str]:
        found = FileSplits(f"{source}/history/")(context)
        yield from found[:7]  # a discovery reports 1, 2, 4, ... splits at a time
        while not (folder / "all").exists():
            time.sleep(0.05)
        yield from found

    @split_source(
        schema=ROWS, discover=files, watermark=("ts", "10 minutes"), instances=list(instances), sink=HoldingSink(folder / "days")
    )
    def days(context, split):
        with (folder / "reads").open("a") as reads:
            reads.write(f"{run_id} {split}\n")
        time.sleep(seconds)
        return context.spark.read.schema(ROWS).parquet(split)

    @stage(sink=HoldingSink(folder / "hours"))
    def hours(days):
        return in_hours(days.withColumnRenamed("k", "name"))

    return Pipeline("crashing", [days, hours])


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
            **settings.checkpoints,
        ),
        restart=FixedDelayRestart(settings.restart_attempts, 1.0) if settings.restart_attempts else NoRestart(),
        work_directory=parse_work_directory(settings.work if "://" in settings.work else str(folder / settings.work)),
        scratch_directory=folder / "scratch",
        trace=folder / "traces",
        lease_seconds=settings.lease_seconds,
        repartition_state=settings.repartition_state,
        allow_non_restored_state=settings.allow_non_restored_state,
    )
    moved_state.MovedState = HoldingState  # type: ignore[misc]
    if not settings.ask_executors:
        spark_start.is_local = lambda master: True
    if settings.smallest_server_copy is not None:
        server_copies.SMALLEST_SERVER_COPY = settings.smallest_server_copy
    store: Any = HoldingStore(open_store(settings.storage or str(folder / "store")))
    source = settings.input or str(folder / "input")
    made = pipeline(folder, source, settings.feeds, settings.hours, numbered=settings.numbered)
    if settings.fused or settings.regions:
        made = (fused_pipeline if settings.fused else regions_pipeline)(folder, source)
    if settings.sink:
        made = sink_pipeline(folder, source, settings.sink)
    if settings.refused:
        made = refusing_pipeline(folder, source, settings.sink, settings.refused)
    if settings.splits:
        made = splits_pipeline(folder, source, settings.splits, settings.run_id, settings.split_seconds)
    if settings.chained:
        made = chained_pipeline(folder, source, read=settings.chained == "read")
    execution = JobExecution(
        made,
        storage=CheckpointStorage(store, "crashing"),
        options=options,
        session=lambda: build_session(settings.spark, share_classes=True),
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
