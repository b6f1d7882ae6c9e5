"""A test environment for pipelines on Spark: input files, a job on a thread, its events, and what its sinks committed."""

from __future__ import annotations

import contextlib
import datetime as dt
import inspect
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.control import PipelineControl
from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import FixedDelayRestart, NoRestart
from dagster_checkpoints.errors import OutcomeUnknown, Precondition, StorageUnavailable
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.job.events import CheckpointDone, JobEvent, JobResult, JobStarted
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.storage import CheckpointStorage, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEADLINE = 150.0  # seconds; only a broken pipeline needs all of them
HELD = 120.0  # seconds for which a write may be held; a test that does not release it fails
_POLL = 0.05
_REQUESTS = itertools.count()
_E = TypeVar("_E", bound=JobEvent)
Row = tuple[Any, ...]


@dataclass
class RunningJob:
    """A pipeline that runs on a separate thread; every wait has a deadline."""

    execution: JobExecution
    events: list[JobEvent] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    times: list[float] = field(default_factory=list)
    raised: BaseException | None = None
    _result: JobResult | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="job", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self.execution.run()
        except BaseException as error:
            self.raised = error
        with self._changed:
            self._changed.notify_all()

    def take(self, event: JobEvent) -> None:
        with self._changed:
            self.times.append(time.monotonic() - self.began)
            self.events.append(event)
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        return self._result is not None or self.raised is not None

    def of(self, kind: type[_E]) -> list[_E]:
        """All events of a kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[_E], where: Callable[[_E], bool] = lambda _: True, deadline: float = DEADLINE) -> _E:
        """The first event of a kind for which `where` holds; earlier events count."""
        until = time.monotonic() + deadline
        seen = 0
        with self._changed:
            while True:
                for event in self.events[seen:]:
                    seen += 1
                    if isinstance(event, kind) and where(event):
                        return event
                if self.over or time.monotonic() > until:
                    raise AssertionError(f"no such {kind.__name__}; {self.story()}")
                self._changed.wait(until - time.monotonic())

    def wait_until(self, condition: Callable[[], bool], deadline: float = DEADLINE) -> None:
        """Wait for a condition that no event reports, such as rows in a sink."""
        until = time.monotonic() + deadline
        while not condition():
            assert not self.over, f"the job ended before the condition held; {self.story()}"
            assert time.monotonic() < until, f"the condition does not hold; {self.story()}"
            time.sleep(_POLL)

    def drain(self) -> None:
        self.execution.drain()

    def cancel(self) -> None:
        self.execution.cancel()

    def result(self, deadline: float = DEADLINE) -> JobResult:
        """Wait for the end, with any status; an error that `run` raised is raised."""
        assert self._thread is not None
        self._thread.join(deadline)
        if self.raised is not None:
            raise self.raised
        assert self._result is not None, f"the job does not end; {self.story()}"
        return self._result

    def finished(self, deadline: float = DEADLINE) -> JobResult:
        """Wait for the end, which must be FINISHED."""
        result = self.result(deadline)
        if result.error is not None:
            raise AssertionError(f"the job is {result.status}: {result.error}; {self.story()}") from result.error
        assert result.status == "FINISHED", self.story()
        return result

    def ask(self, kind: str, **fields: Any) -> Future[Answer]:
        """Send a control request to the job without storage; the future is its final answer."""
        answered: Future[Answer] = Future()
        request = ControlRequest(
            **{
                "request_id": f"{kind}-{next(_REQUESTS)}",
                "kind": kind,
                "epoch": 0,
                "deadline_seconds": DEADLINE,
                "asked_by": "a test",
                "asked_at": dt.datetime.now(dt.UTC),
                **fields,
            }
        )
        self.execution.ask(request, answered.set_result)
        return answered

    def done(self, kind: str, **fields: Any) -> Answer:
        """Send a request, and wait until it is done."""
        answer = self.ask(kind, **fields).result(DEADLINE)
        assert answer.status == "done", f"{answer}; {self.story()}"
        return answer

    @property
    def chains(self) -> tuple[tuple[str, ...], ...]:
        return self.wait_for(JobStarted).chains

    def checkpoints(self) -> list[CheckpointDone]:
        return self.of(CheckpointDone)

    def story(self) -> str:
        lines = "\n".join(f"  {at:6.2f} s {event}" for at, event in zip(self.times, self.events, strict=False))
        return f"events:\n{lines}\nended: {self._result or self.raised}"


@dataclass(frozen=True)
class Difference:
    """Rows of a sink against rows of a batch computation; equal rows count."""

    missing: tuple[Row, ...]
    unexpected: tuple[Row, ...]
    duplicated: tuple[Row, ...]

    @property
    def none(self) -> bool:
        return not (self.missing or self.unexpected or self.duplicated)


class TroubledStore:
    """The test environment's store, in which requests for some keys fail or are held for as long as a test wants.

    Attributes:
        held: The number of writes that are held now.
        unread: The number of reads that have failed.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.inner = store
        self.held = 0
        self.unread = 0
        self._failing = ""
        self._unreadable = ""
        self._unanswered: tuple[str, bytes] | None = None
        self._holding = ""
        self._changed = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put(self, key: str, data: bytes, mode: Any = "overwrite") -> str:
        self._before_write(key)
        if self._unanswered and self._unanswered[0] in key and self._unanswered[1] in data:
            with contextlib.suppress(Precondition):  # a repetition of the same write
                self.inner.put(key, data, mode)
            raise OutcomeUnknown(f"no answer to the write of {key}: the test says so")
        return self.inner.put(key, data, mode)

    def stream(self, key: str, *options: Any) -> Iterator[bytes]:
        if self._unreadable and self._unreadable in key:
            self.unread += 1
            raise StorageUnavailable(f"no read of {key}: the test says so")
        return self.inner.stream(key, *options)

    def put_file(self, key: str, path: Path) -> None:
        self._before_write(key)
        self.inner.put_file(key, path)

    def copy_from(
        self, source: ObjectStore, source_key: str, key: str, size: int | None = None, *, etag: str = "", hashed: bool = False
    ) -> bool:
        self._before_write(key)
        inner = source.inner if isinstance(source, TroubledStore) else source
        return self.inner.copy_from(inner, source_key, key, size, etag=etag, hashed=hashed)

    @contextlib.contextmanager
    def failing(self, part: str) -> Iterator[None]:
        """Let writes to keys that contain `part` fail, inside the block."""
        self._failing = part
        try:
            yield
        finally:
            self._failing = ""

    @contextlib.contextmanager
    def unreadable(self, part: str) -> Iterator[None]:
        """Let reads of keys that contain `part` fail, inside the block."""
        self._unreadable = part
        try:
            yield
        finally:
            self._unreadable = ""

    @contextlib.contextmanager
    def unanswered(self, part: str, data: bytes) -> Iterator[None]:
        """Perform writes of bytes with `data` to keys with `part`, and report an unknown outcome, inside the block."""
        self._unanswered = (part, data)
        try:
            yield
        finally:
            self._unanswered = None

    @contextlib.contextmanager
    def holding(self, part: str) -> Iterator[None]:
        """Hold writes to keys that contain `part` until the end of the block."""
        self._holding = part
        try:
            yield
        finally:
            with self._changed:
                self._holding = ""
                self._changed.notify_all()

    def _before_write(self, key: str) -> None:
        if self._failing and self._failing in key:
            raise StorageUnavailable(f"no write to {key}: the test says so")
        with self._changed:
            if self._holding and self._holding in key:
                self.held += 1
                released = self._changed.wait_for(lambda: self._holding not in key or not self._holding, HELD)
                self.held -= 1
                assert released, f"the write of {key} was held for {HELD:.0f} s"


class Lab:
    """The environment of a test of the runtime, below one directory."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.jobs: list[RunningJob] = []
        self._number = itertools.count()
        self._modified_at = 0.0

    # Input

    @staticmethod
    def at(seconds: float) -> dt.datetime:
        """The time that is this number of seconds after the beginning of 2026, UTC."""
        return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=seconds)

    def put(self, name: str, schema: str, rows: Iterable[Sequence[Any]]) -> Path:
        """Add one Parquet file to the input folder `name`; readers see it whole or not at all.

        Files are read in the order in which they were put.
        """
        from pyspark.sql.pandas.types import to_arrow_schema
        from pyspark.sql.types import StructType

        zone = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}  # Spark 4.1: always UTC
        arrow = to_arrow_schema(StructType.fromDDL(schema), **zone)
        columns = list(zip(*rows, strict=True)) or [[] for _ in arrow]
        table = pa.table([pa.array(c, f.type) for c, f in zip(columns, arrow, strict=True)], schema=arrow)
        folder = self.input(name)
        number = next(self._number)
        scratch = folder / f".{number}.next"
        pq.write_table(table, scratch)
        # Spark reads files in the order of their modification times; a file system's clock may be the same for several of them.
        self._modified_at = max(time.time(), self._modified_at + 0.01)
        os.utime(scratch, (self._modified_at, self._modified_at))
        return scratch.rename(folder / f"{number:06d}.parquet")

    def input(self, name: str) -> Path:
        """The input folder `name`; created if it does not exist."""
        folder = self.folder / "input" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def stream(self, name: str, schema: str, files_per_trigger: int = 1) -> DataFrame:
        """A streaming DataFrame over an input folder."""
        reader = self.spark.readStream.schema(schema).option("maxFilesPerTrigger", files_per_trigger)
        reader = reader.option("maxFileAge", "36500d")
        return reader.parquet(str(self.input(name)))

    def table(self, name: str, schema: str) -> DataFrame:
        """A batch DataFrame over an input folder."""
        return self.spark.read.schema(schema).parquet(str(self.input(name)))

    # Output

    def sink(self, name: str = "out", **options: Any) -> ParquetSink:
        return ParquetSink(self.folder / name, **options)

    def committed(self, name: str = "out") -> list[Row]:
        """The rows that readers of a sink see, sorted; without the checkpoint column."""
        folder = self.folder / name
        if not any(folder.glob("checkpoint=*/*.parquet")):
            return []
        return self.rows(self.spark.read.parquet(str(folder)).drop("checkpoint"))

    @staticmethod
    def rows(frame: DataFrame) -> list[Row]:
        """All rows of a batch DataFrame, sorted."""
        return sorted((tuple(row.values()) for row in frame.toArrow().to_pylist()), key=repr)

    def difference(self, expected: DataFrame | Iterable[Row], name: str = "out") -> Difference:
        """Compare the committed rows of a sink with a batch computation."""
        wanted = Counter(expected if not hasattr(expected, "toArrow") else self.rows(expected))  # type: ignore[arg-type]
        found = Counter(self.committed(name))
        return Difference(
            missing=tuple((wanted - found).elements()),
            unexpected=tuple(row for row in found if row not in wanted),
            duplicated=tuple(row for row in found if row in wanted and found[row] > wanted[row]),
        )

    def count(self, name: str = "out") -> int:
        """The number of rows that readers of a sink see; without Spark, for use in conditions of a wait."""
        found = 0
        for file in (self.folder / name).glob("checkpoint=*/*.parquet"):
            with contextlib.suppress(FileNotFoundError):  # the rows are being taken back
                found += pq.read_metadata(file).num_rows
        return found

    def check(self, expected: DataFrame | Iterable[Row], name: str = "out") -> None:
        """Check that the sink holds exactly the expected rows."""
        difference = self.difference(expected, name)
        assert difference.none, f"{name}: {difference}"

    # Jobs

    def storage(self, pipeline: str, store: ObjectStore | None = None) -> CheckpointStorage:
        return CheckpointStorage(store or open_store(str(self.folder / "store")), pipeline)

    def troubled_store(self) -> TroubledStore:
        """A store for `storage` whose requests a test can let fail or hold."""
        return TroubledStore(open_store(str(self.folder / "store")))

    def control(self, pipeline: str) -> PipelineControl:
        """The pipeline's control, as another process uses it."""
        return PipelineControl(self.storage(pipeline), asked_by="a test", poll=0.2)

    def start(
        self,
        pipeline: Pipeline,
        *,
        interval: float | None = 1.0,
        checkpoints: Mapping[str, Any] | None = None,
        storage: CheckpointStorage | None = None,
        **options: Any,
    ) -> RunningJob:
        """Start a job; `options` are those of JobOptions, `checkpoints` those of CheckpointConfig."""
        config = CheckpointConfig(
            **{"interval": interval, "retained": 2, "tolerable_failed_checkpoints": 5, **(checkpoints or {})}
        )
        chosen = JobOptions(
            **{
                "checkpoints": config,
                "restart": NoRestart(),
                "work_directory": self.folder / "work",
                "lease_seconds": 20.0,
                "request_poll_seconds": 0.2,
                **options,
            }
        )
        job = RunningJob(
            JobExecution(
                pipeline,
                storage=storage or self.storage(pipeline.name),
                options=chosen,
                session=lambda: self.spark,
                on_event=lambda event: job.take(event),
                run_id=f"run-{len(self.jobs)}",
            )
        )
        self.jobs.append(job)
        job.begin()
        return job

    def close(self) -> None:
        for job in self.jobs:
            if not job.over:
                job.cancel()
        for job in self.jobs:
            if job._thread is not None:
                job._thread.join(60)


class FragileSink(ParquetSink):
    """A sink that fails once in the method that a file names."""

    def __init__(self, path: Path, fault: Path) -> None:
        super().__init__(path)
        self.fault = fault

    def write(self, batch: DataFrame, files: Sequence[str], batch_id: int) -> None:
        self._may_fail("write")
        super().write(batch, files, batch_id)

    def commit(self, transaction: str) -> None:
        self._may_fail("commit")
        super().commit(transaction)

    def _may_fail(self, method: str) -> None:
        if self.fault.exists() and self.fault.read_text() == method:
            self.fault.unlink()
            raise OSError("the disk has gone to lunch")


class FragileJob:
    """live -> rows -> hours, a query each: an unbounded job, with a store and a sink that a test can let fail.

    Attributes:
        written: the number of rows in the input so far.
    """

    ROWS = "k string, ts timestamp, v long"
    PER_FILE = 40

    def __init__(self, lab: Lab, name: str, **checkpoints: Any) -> None:
        self.lab = lab
        self.written = 0
        self.store = lab.troubled_store()
        self._fault = lab.folder / "fault"

        @unbounded_source(watermark=("ts", "1 minute"))
        def live(context):
            return lab.stream("live", self.ROWS)

        @stage(sink=FragileSink(lab.folder / "rows", self._fault))
        def rows(live):
            return live

        @stage(sink=lab.sink("hours"))
        def hours(rows):
            return self._in_hours(rows)

        self.pipeline = Pipeline(name, [live, rows, hours], chaining=False)
        self.job = lab.start(
            self.pipeline,
            interval=0.5,
            storage=lab.storage(name, self.store),
            restart=FixedDelayRestart(50, 0.1),
            checkpoints={"tolerable_failed_checkpoints": 1000, **checkpoints},
        )

    def more(self) -> None:
        """Add one input file."""
        first, self.written = self.written, self.written + self.PER_FILE
        values = [("ab"[m % 2], self.lab.at(60 * m), m) for m in range(first, self.written)]
        self.lab.put("live", self.ROWS, values)

    def wait_for_rows(self) -> None:
        """Wait until all rows of the input have been emitted."""
        self.job.wait_until(lambda: self.job.execution.rows().get("rows") == self.written)

    def check_progress(self) -> None:
        """Check that the sources read, and that periodic checkpoints commit."""
        self.more()
        self.job.wait_for(CheckpointDone, lambda done: done.stages["rows"].rows == self.written)
        self.job.wait_until(lambda: self.lab.count("rows") == self.written)

    def fail_once(self, method: str) -> None:
        """Let the sink of `rows` raise in the next call of this method."""
        scratch = self._fault.with_suffix(".next")
        scratch.write_text(method)
        scratch.rename(self._fault)

    def check(self) -> None:
        """Check, after a drain, that the sinks hold exactly the result of a batch computation over all input."""
        self.lab.check(self.lab.table("live", self.ROWS), "rows")
        self.lab.check(self._in_hours(self.lab.table("live", self.ROWS)), "hours")

    @staticmethod
    def _in_hours(frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        counted = frame.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
        return counted.select(F.col("window.start").alias("start"), "k", "v", "n")


SETTINGS_OF_CASES = (
    "spark.sql.shuffle.partitions",
    "spark.sql.streaming.stateStore.providerClass",
    "spark.sql.codegen.wholeStage",
)


@pytest.fixture
def settings_of_the_session(spark: Any) -> Iterator[None]:
    """A case changes settings of the session, which all tests share."""
    before = {name: spark.conf.get(name) for name in SETTINGS_OF_CASES}
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.fixture
def fragile(lab: Lab) -> Callable[..., FragileJob]:
    """Starts a fragile job: its pipeline's name, and settings of CheckpointConfig."""
    return lambda name, **checkpoints: FragileJob(lab, name, **checkpoints)


@pytest.fixture
def lab(spark: SparkSession, tmp_path: Path) -> Iterator[Lab]:
    """A test environment for one test; jobs that still run at the test's end are cancelled."""
    environment = Lab(spark, tmp_path)
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def shared_lab(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The same for all tests of a module, which read the results of a few runs."""
    environment = Lab(spark, tmp_path_factory.mktemp("lab"))
    yield environment
    environment.close()
