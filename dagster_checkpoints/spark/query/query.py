"""One Spark streaming query of a task: starts, monitors, pauses and stops it.

A micro-batch is evaluated first, which takes nearly all of its time, and then emitted. What it emits, and every snapshot, takes
the same lock: so a snapshot waits for no evaluation, and a batch that is being evaluated then belongs behind it. Must not know
channels, checkpoints or the life cycle of a task.

Source: https://spark.apache.org/docs/latest/streaming/apis-on-dataframes-and-datasets.html#foreachbatch
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.execution.source_answers import Doing, SourceLook
from dagster_checkpoints.execution.sources import SourceProgress
from dagster_checkpoints.spark.files.work_path import WorkPath, url
from dagster_checkpoints.spark.query.driver_sources import KEPT_ERRORS, SourceFailed
from dagster_checkpoints.spark.query.file_streams import check_files, reads_files
from dagster_checkpoints.spark.query.held_starts import held_start
from dagster_checkpoints.spark.query.kafka_offsets import reads_only_kafka, rows_behind, rows_between, streams_with_minimum
from dagster_checkpoints.spark.query.query_gate import QueryGate
from dagster_checkpoints.spark.query.query_log import QueryLog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

COMMIT_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.002
_LONGEST_POLL_SECONDS = 0.05  # each poll may be a request to a server
START_TIMEOUT_SECONDS = 60.0
_START_POLL_SECONDS = 0.03
_MAX_CAUSES = 20
_DOING: tuple[tuple[str, Doing], ...] = (
    ("Initializing", "starting"),
    ("Getting offsets", "asking"),
    ("Processing new data", "reading"),
)
"""How the messages of Spark's status begin, and what they mean (`MicroBatchExecution`)."""
_INTERRUPTIONS = frozenset(
    {"java.io.InterruptedIOException", "java.lang.InterruptedException", "java.nio.channels.ClosedByInterruptException"}
)

# Spark gives a user's Python source ten seconds to start. Too many concurrent starts on few cores would all exceed that.
_STARTS = threading.BoundedSemaphore(max(2, os.cpu_count() or 2))


class QueryClosing(Exception):
    """Raised in `foreachBatch` when the query is being stopped: returning would commit the batch."""


class QueryStopped(Exception):
    """The query ended without an error and before the end of its input, although its task did not stop it."""


class BatchFailed(Exception):
    """Raised in `foreachBatch` in place of an error, which is kept in :attr:`TaskQuery.error`.

    When a query is being stopped, Spark searches the text of the Python exception, its traceback included, with a regular
    expression that needs a stack frame for each character. If that text contains the Java stack trace of a cancelled job, Spark's
    thread ends with a StackOverflowError and a thousand lines on stderr (`StreamExecution.isInterruptionException`).
    """


def _is_interruption(error: BaseException | None) -> bool:
    """Whether an error says only that Spark interrupted its thread: other code has stopped the query in the middle of a batch."""
    cause = getattr(error, "java_exception", None)  # of py4j's error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            return False
        if cause.getClass().getName() in _INTERRUPTIONS:
            return True
        cause = cause.getCause()
    return False


def _is_no_error(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], QueryClosing | BatchFailed | SourceFailed))


# py4j logs every exception that `foreachBatch` or a source raises.
logging.getLogger("py4j.clientserver").addFilter(_is_no_error)


def _execution_of(query: StreamingQuery) -> Any:
    stream = query._jsq
    return stream.streamingQuery() if "StreamingQueryWrapper" in stream.getClass().getSimpleName() else stream


class TaskQuery:
    """The query of one task.

    Args:
        checkpoint: Spark's checkpoint location.
        pool: FAIR scheduler pool in which the query's jobs run.
        on_batch: Called with every micro-batch; evaluates it exactly once. Returns a function that emits what was evaluated.
        before_batch: Called before a batch begins, to wait because of back-pressure. Its argument returns True when the wait
            must end because the query is closing.
        begin: Called with the number of a micro-batch before `on_batch`; no snapshot is taken meanwhile.
        gate: The gate that the query's sources ask; None for a query that reads no channels.
    """

    def __init__(
        self,
        checkpoint: WorkPath,
        pool: str,
        on_batch: Callable[[DataFrame, int], Callable[[], None]],
        before_batch: Callable[[Callable[[], bool]], None],
        begin: Callable[[int], None] = lambda batch_id: None,
        gate: QueryGate | None = None,
    ) -> None:
        self.log = QueryLog(checkpoint)
        self.checkpoint = checkpoint
        self.error: BaseException | None = None
        self.runs: int = 0
        self._pool = pool
        self._on_batch = on_batch
        self._before_batch = before_batch
        self._begin = begin
        self._gate = gate
        self._lock = threading.Lock()
        """Held while a batch is processed, its evaluation included."""
        self._emitting = threading.Lock()
        """Held while a batch emits; taken after `_lock` by the thread that holds both."""
        self._closing = False
        self._running = threading.Event()  # cleared while the query is paused
        self._running.set()
        self._admits = threading.Event()  # cleared when no other batch may begin
        self._admits.set()
        self._last_batch: int | None = None
        self._reads_files = self._reads_only_kafka = False
        self._with_minimum: tuple[int, ...] = ()
        """The positions of the streams that may hold rows back, see `holds_back`."""
        self._begun = threading.Event()  # the query's object is known
        self._query: StreamingQuery | None = None
        self._execution: Any = None
        self._progress = SourceProgress()
        self._trigger: Mapping[str, Any] = {}
        self._only_batch = 0  # with `once`: the batch that the query was started for

    def start(
        self,
        frame: DataFrame,
        output_mode: str,
        trigger: Mapping[str, Any],
        before_first_batch: Callable[[], None] | None = None,
    ) -> None:
        """Start the query; a checkpoint directory that holds a committed batch is continued.

        Args:
            before_first_batch: Called when the query has been made, and before it plans its first batch.
        """
        self._closing = False
        self._admits.set()
        self.error = None
        self._progress.begins(self.log.newest_planned())
        if self._gate is not None:
            self._gate.begin()
        self._trigger, self._only_batch = trigger, self.log.last_committed() + 1
        frame.sparkSession.sparkContext.setLocalProperty("spark.scheduler.pool", self._pool)
        writer = frame.writeStream.outputMode(output_mode).option("checkpointLocation", url(self.checkpoint))
        if trigger:
            writer = writer.trigger(**trigger)
        self.runs += 1
        self._reads_files = reads_files(frame)
        self._reads_only_kafka = self._gate is None and reads_only_kafka(frame)
        self._with_minimum = streams_with_minimum(frame) if self._gate is None else ()
        self._begun.clear()
        with held_start(frame) if before_first_batch is not None else nullcontext():
            query = writer.foreachBatch(self._run_batch).start()
            self._execution = _execution_of(query)
            self._query = query
            self._begun.set()
            if before_first_batch is not None:
                before_first_batch()

    def _run_batch(self, frame: DataFrame, batch_id: int) -> None:
        emit: Callable[[], None] | None = None
        try:
            while True:
                if emit is None:
                    self._before_batch(lambda: self._closing)
                    self._admits.wait()
                self._running.wait()
                with self._lock:
                    if emit is None:
                        with self._effects() as running:
                            if not running:  # the query was paused while this batch waited for the lock
                                continue
                            self._begin(batch_id)
                        self._check_files()
                        emit = self._on_batch(frame, batch_id)
                    with self._effects() as running:
                        if running:  # a snapshot may have paused the query during the evaluation
                            self.log.processed(batch_id)  # `emit` wakes the task, which then awaits the commit
                            emit()
                            self._last_batch = batch_id
                            return
        except QueryClosing:
            raise
        except BaseException as error:
            self.error = error
            raise BatchFailed(f"Batch {batch_id} failed; its task reports the error.") from None

    @contextmanager
    def _effects(self) -> Iterator[bool]:
        """Around what a batch does that a snapshot would see. Yields whether it may do that now: the query is not paused."""
        with self._emitting:
            if self._closing:
                raise QueryClosing
            try:
                yield self._running.is_set()
            except BaseException as error:
                self.error = error  # still under the lock: a snapshot that waits for the lock must not be taken
                raise

    def _check_files(self) -> None:
        if self._reads_files and self._begun.wait(START_TIMEOUT_SECONDS):
            check_files(self.execution)

    @contextmanager
    def between_batches(self) -> Iterator[int]:
        """Keep the query's effects between two batches inside the block: none emits; one may be evaluated, to emit later.

        Yields:
            The newest committed batch; -1 if there is none.

        Raises:
            BatchFailed: A batch has failed. It may have emitted rows to the sink and to channels, and it will be processed again:
                a snapshot would hold its rows twice.
            TimeoutError: Spark did not commit a batch that had been processed.
        """
        with self._emitting:
            if self.error is not None:
                raise BatchFailed("A batch failed; its task reports the error.")
            if self._last_batch is not None and self._query is not None:
                self._await_commit(self._last_batch)
            yield self.log.last_committed()

    def no_batch_emits(self) -> AbstractContextManager[object]:
        """A context in which no batch emits; one that was emitted need not be committed."""
        return self._emitting

    def pause(self) -> None:
        """Let no batch begin or emit until :meth:`resume`. Called between two batches, in :meth:`between_batches`."""
        self._running.clear()

    def resume(self) -> None:
        """Process batches again, first the one that waits to begin or to emit."""
        self._running.set()

    def admit_no_batch(self) -> None:
        """Let no other batch begin until the query is stopped; the batch that runs goes on."""
        self._admits.clear()

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    @contextmanager
    def lock_if_free(self) -> Iterator[bool]:
        """Take the lock if no batch is being processed. Yields whether the lock was taken."""
        taken = self._lock.acquire(blocking=False)
        try:
            yield taken
        finally:
            if taken:
                self._lock.release()

    def _await_commit(self, batch_id: int) -> None:
        deadline = time.monotonic() + COMMIT_TIMEOUT_SECONDS
        pause = _POLL_SECONDS
        while not self.log.is_committed(batch_id):
            if not self.active and not self.log.is_committed(batch_id):
                raise self.failure() or TimeoutError(f"The query ended without committing batch {batch_id} of {self.checkpoint}.")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Batch {batch_id} of {self.checkpoint} was processed, but its commit did not appear within "
                    f"{COMMIT_TIMEOUT_SECONDS:.0f} s. Is the work directory's file system full or slow?"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_POLL_SECONDS)

    @property
    def active(self) -> bool:
        return self._query is not None and bool(self._query.isActive)

    @property
    def started(self) -> bool:
        return self._query is not None

    def start_in_turn(self, start: Callable[[], None], check: Callable[[], None]) -> None:
        """Wait until few enough other queries are starting, start, and wait until this query has asked its sources.

        A query that reads channels needs no turn: no Python process takes part in its start.

        Args:
            start: Starts the query.
            check: Called repeatedly during the waits; raises to end them.
        """
        if self._gate is not None:
            self._start_and_wait(start, check)
            return
        while not _STARTS.acquire(timeout=0.1):
            check()
        try:
            self._start_and_wait(start, check)
        finally:
            _STARTS.release()

    def _start_and_wait(self, start: Callable[[], None], check: Callable[[], None]) -> None:
        start()
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._has_asked_sources() and time.monotonic() < deadline:
            check()
            time.sleep(_START_POLL_SECONDS)
        check()  # a failed query has not asked its sources

    def _has_asked_sources(self) -> bool:
        if self._gate is not None:
            return self._gate.asked or not self.active  # Spark 4.1 runs a planned batch without asking
        return self.log.has_planned(self.log.last_committed() + 1) or self.waits_for_data

    def caught_up(self, position: int | None = None) -> bool:
        """Whether the query runs and its sources have caught up, see `SourceProgress`. Any thread.

        Args:
            position: The position of one stream among those of the query, from 0; None for all of them.
        """
        newest, found_none = self._found_none(position)
        return found_none and not self.holds_back(newest, position)

    def _found_none(self, position: int | None = None) -> tuple[int, bool]:
        """The newest planned batch, and whether the query runs and Spark has asked its sources since then, and found no rows."""
        if not self.active:
            return -1, False
        self.found_nothing()
        committed = self.log.last_committed()
        newest = committed + 1 if self.log.has_planned(committed + 1) else committed

        def has_rows(batch_id: int) -> bool:
            moved = self.log.moved(batch_id)
            return any(moved) if position is None else moved[position]

        return newest, self._progress.caught_up(newest, has_rows)

    @property
    def waits_for_the_clock(self) -> bool:
        """Whether the query runs, Spark has found no rows in its sources, and a batch has run under the newest event time.

        If it runs on after that, it is for timers of processing time, for which Spark runs batch after batch without an end, also
        with `availableNow`.
        """
        batch_id = self.log.last_committed()
        if batch_id < 0 or self.log.planned(batch_id).watermark_ms < self.log.next_watermark(batch_id):
            return False
        return self._found_none()[1]

    def holds_back(self, batch_id: int, position: int | None = None) -> bool:
        """Whether sources that Spark has asked have more rows than a batch reads, and give none before there are enough of them.

        Spark says of such a source what it says of one without rows, see `kafka_offsets`. Any thread.

        Args:
            batch_id: The number of a planned batch; -1 for none.
            position: The position of one stream among those of the query, from 0; None for all of them.
        """
        asked = [each for each in self._with_minimum if position in (None, each)]
        if not asked or batch_id < 0:
            return False
        read, sources = self.log.planned(batch_id).sources, self.execution.sources()
        found = {each: sources.apply(each).reportLatestOffset() for each in asked}
        latest = {each: str(offset.json()) for each, offset in found.items() if offset is not None}
        return any(rows_between(json.dumps(read[each]), offset) for each, offset in latest.items())

    def found_nothing(self) -> bool:
        """Whether Spark has asked the sources since the newest batch, and wants no other one; some may still hold rows back."""
        committed = self.log.last_committed()  # before the question: a batch that is committed after it is not meant
        found = bool(self.execution.noNewData())
        if found:
            self._progress.found_nothing(committed)
        return found

    def look(self) -> SourceLook | None:
        """What the query does with its sources; None if it does not run. Any thread."""
        query = self._query
        if query is None or not query.isActive or self._closing:
            return None
        words = str(query.status["message"])
        kind: Doing = next((kind for beginning, kind in _DOING if words.startswith(beginning)), "other")
        # A query without new rows reports its progress every ten seconds.
        progress = query._jsq.lastProgress()
        return SourceLook("" if progress is None else f"{progress.batchId()} {progress.timestamp()}", kind, words)

    @property
    def rows_behind(self) -> int | None:
        """The number of Kafka's messages that were not read when the last micro-batch was planned; None for other sources."""
        if self._query is None or not self._reads_only_kafka:
            return None
        progress = self._query.lastProgress
        return None if progress is None else rows_behind(progress.sources)

    @property
    def waits_for_data(self) -> bool:
        """Whether Spark has checked for new data since the last batch, and found none."""
        if self._query is None or not self._query.isActive:
            return True
        status = self._query.status
        return not status["isTriggerActive"] and not status["isDataAvailable"] and "Waiting" in status["message"]

    def failure(self) -> BaseException | None:
        """The error with which the query ended: the user's own exception if there is one; None if the query has not failed.

        A query that its task did not stop has failed, unless Spark proves that it has reached the end of its input. If Spark has
        no error, the error of a batch comes from the `stop()` that cancelled the batch: it is the cause of `QueryStopped`.
        """
        if self._query is None or self._closing or self._query.isActive:
            return None
        raised = self._query.exception()
        if raised is not None and not _is_interruption(self.error):
            return self.error or (self._gate.error if self._gate is not None else KEPT_ERRORS.take(raised)) or raised
        if self.error is None and self._reached_end():
            return None
        stopped = QueryStopped()
        stopped.__cause__ = self.error
        return stopped

    def _reached_end(self) -> bool:
        """Whether a query that is no longer active has processed all input that its trigger requests.

        The end of the query alone does not prove that: after a `stop()` by other code it looks the same. With `availableNow`
        Spark sets `noNewData` when there is no next batch up to the offsets that it fixed at the start; a `stop()` never sets it.

        Source: Spark's `MicroBatchExecution.constructNextBatch` and `executeOneBatch`.
        """
        if self._trigger.get("availableNow"):
            return bool(self.execution.noNewData())
        return bool(self._trigger.get("once")) and self.log.is_committed(self._only_batch)

    @property
    def execution(self) -> Any:
        """Spark's execution of the query (a JVM object): Spark has no public API for its plans and for how it ended."""
        assert self._execution is not None
        return self._execution

    def executed_plan(self) -> Any:
        """The executed plan of the newest batch (a JVM object), or None."""
        if self._query is None:
            return None
        execution = self.execution.lastExecution()
        return None if execution is None else execution.executedPlan()

    def stop(self) -> None:
        """Stop between two batches: a running batch is finished and committed first.

        Raises:
            QueryStopped, Exception: The query had failed before, see :meth:`failure`.
        """
        with self._lock:
            failure = self.failure()
            if failure is not None:
                raise failure
            if self._last_batch is not None:
                self._await_commit(self._last_batch)
            self._close()
        if self._query is not None:
            self._query.stop()  # outside the lock: Spark waits for foreachBatch, which waits for the lock

    def kill(self) -> None:
        """Stop at once: a running batch is cancelled and never committed."""
        self._close()
        if self._query is not None:
            self._query.stop()

    def _close(self) -> None:
        self._closing = True
        self._running.set()  # a batch that waits finds that the query is closing
        self._admits.set()
        if self._gate is not None:
            self._gate.close()
