"""One Spark streaming query of a task: started, watched, held still between two batches, and stopped.

`foreachBatch` and everything that must happen between two micro-batches take the same lock. It must not know channels,
checkpoints or the life cycle of a task.

Source: https://spark.apache.org/docs/latest/streaming/apis-on-dataframes-and-datasets.html#foreachbatch
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.spark.query.query_log import QueryLog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

COMMIT_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.002
START_TIMEOUT_SECONDS = 60.0
_START_POLL_SECONDS = 0.03

# Spark gives a Python source ten seconds to come up. Many at once on few cores would all be too slow.
_STARTS = threading.BoundedSemaphore(max(2, os.cpu_count() or 2))


class QueryClosing(Exception):
    """Raised in `foreachBatch` when the query is being stopped: returning would commit the batch."""


class QueryStopped(Exception):
    """The query has ended, without an error, before it had read what it was started for: its task did not stop it."""


class BatchFailed(Exception):
    """Raised in `foreachBatch` in place of an error, which is kept in :attr:`TaskQuery.error`.

    When a query is being stopped, Spark searches the text of what Python raised, its traceback included, by a regular
    expression that takes a stack frame for each character. The Java stack trace of a cancelled job in it ends Spark's thread
    with a StackOverflowError, a thousand lines on stderr (`StreamExecution.isInterruptionException`).
    """


def _is_no_error(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], QueryClosing | BatchFailed))


# py4j logs whatever `foreachBatch` raises.
logging.getLogger("py4j.clientserver").addFilter(_is_no_error)


class TaskQuery:
    """The query of one task.

    Args:
        checkpoint: Spark's checkpoint location.
        pool: FAIR scheduler pool in which its jobs run.
        on_batch: Called with every micro-batch, under the lock; evaluates it exactly once.
        before_batch: Called before the lock is taken: back-pressure waits here. Given a test whether to give up waiting.
    """

    def __init__(
        self,
        checkpoint: Path,
        pool: str,
        on_batch: Callable[[DataFrame, int], None],
        before_batch: Callable[[Callable[[], bool]], None],
    ) -> None:
        self.log = QueryLog(checkpoint)
        self.checkpoint = checkpoint
        self.error: BaseException | None = None
        self.runs: int = 0
        self._pool = pool
        self._on_batch = on_batch
        self._before_batch = before_batch
        self._lock = threading.Lock()
        self._closing = False
        self._going = threading.Event()  # cleared while the query is paused
        self._going.set()
        self._last_batch: int | None = None
        self._query: StreamingQuery | None = None
        self._trigger: Mapping[str, Any] = {}
        self._only_batch = 0  # with `once`: the batch that the query was started for

    def start(self, frame: DataFrame, output_mode: str, trigger: Mapping[str, Any]) -> None:
        """Start the query; a checkpoint directory that holds a committed batch is continued."""
        self._closing = False
        self.error = None
        self._trigger, self._only_batch = trigger, self.log.last_committed() + 1
        frame.sparkSession.sparkContext.setLocalProperty("spark.scheduler.pool", self._pool)
        writer = frame.writeStream.outputMode(output_mode).option("checkpointLocation", str(self.checkpoint))
        if trigger:
            writer = writer.trigger(**trigger)
        self.runs += 1
        self._query = writer.foreachBatch(self._run_batch).start()

    def _run_batch(self, frame: DataFrame, batch_id: int) -> None:
        try:
            while True:
                self._before_batch(lambda: self._closing)
                self._going.wait()
                with self._lock:
                    if self._closing:
                        raise QueryClosing
                    if self._going.is_set():  # it may have been paused while this batch waited for the lock
                        self._on_batch(frame, batch_id)
                        self._last_batch = batch_id
                        return
        except QueryClosing:
            raise
        except BaseException as error:
            self.error = error
            raise BatchFailed(f"Batch {batch_id} failed; the task knows with which error.") from None

    @contextmanager
    def between_batches(self) -> Iterator[int]:
        """Hold the query between two batches. Yields the newest batch, which is committed; -1 if there is none.

        Raises:
            TimeoutError: Spark did not commit a batch that had been processed.
        """
        with self._lock:
            if self._last_batch is not None and self._query is not None:
                self._await_commit(self._last_batch)
            yield self.log.last_committed()

    def pause(self) -> None:
        """Let no further batch be processed until :meth:`resume`. Call it between two batches, under the lock."""
        self._going.clear()

    def resume(self) -> None:
        """Go on with the batch that waits, if one does."""
        self._going.set()

    @property
    def paused(self) -> bool:
        return not self._going.is_set()

    @contextmanager
    def lock_if_free(self) -> Iterator[bool]:
        """Take the lock if no batch is being processed. Yields whether it was taken."""
        taken = self._lock.acquire(blocking=False)
        try:
            yield taken
        finally:
            if taken:
                self._lock.release()

    def _await_commit(self, batch_id: int) -> None:
        deadline = time.monotonic() + COMMIT_TIMEOUT_SECONDS
        while not self.log.is_committed(batch_id):
            if not self.active and not self.log.is_committed(batch_id):
                raise self.failure() or TimeoutError(f"The query ended without committing batch {batch_id} of {self.checkpoint}.")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Batch {batch_id} of {self.checkpoint} was processed, but its commit did not appear within "
                    f"{COMMIT_TIMEOUT_SECONDS:.0f} s. Is the work directory's file system full or slow?"
                )
            time.sleep(_POLL_SECONDS)

    @property
    def active(self) -> bool:
        return self._query is not None and bool(self._query.isActive)

    @property
    def started(self) -> bool:
        return self._query is not None

    def start_in_turn(self, start: Callable[[], None], check: Callable[[], None]) -> None:
        """Start when not too many other queries are starting, and wait until this one has asked its sources.

        Args:
            check: Called again and again meanwhile; raises to give up.
        """
        while not _STARTS.acquire(timeout=0.1):
            check()
        try:
            start()
            deadline = time.monotonic() + START_TIMEOUT_SECONDS
            while not self._has_asked_sources() and time.monotonic() < deadline:
                check()
                time.sleep(_START_POLL_SECONDS)
            check()  # a query that has failed asks nothing any more
        finally:
            _STARTS.release()

    def _has_asked_sources(self) -> bool:
        return self.log.has_planned(self.log.last_committed() + 1) or self.waits_for_data

    @property
    def busy(self) -> bool:
        """Whether the query is still starting, or has found new data that it has not finished with."""
        if self._query is None or not self._query.isActive:
            return True
        status = self._query.status
        return bool(status["isDataAvailable"]) or status["message"].startswith("Initializing")

    @property
    def waits_for_data(self) -> bool:
        """Whether Spark has looked for something to do since the last batch, and found nothing."""
        if self._query is None or not self._query.isActive:
            return True
        status = self._query.status
        return not status["isTriggerActive"] and not status["isDataAvailable"] and "Waiting" in status["message"]

    def failure(self) -> BaseException | None:
        """Why the query ended, if it failed: the user's own exception where there is one.

        A query that its task did not stop has failed, unless Spark proves that it has done what it was started for.
        """
        if self._query is None or self._closing or self._query.isActive:
            return None
        raised = self.error or self._query.exception()
        if raised is not None:
            return raised
        return None if self._reached_end() else QueryStopped()

    def _reached_end(self) -> bool:
        """Whether a query that is no longer active has done all that its trigger asks for.

        That it has ended proves nothing: a `stop()` from outside looks the same. With `availableNow` Spark sets `noNewData` when
        it looked for a next batch, up to the offsets that it fixed at the start, and found none; a `stop()` never sets it.

        Source: Spark's `MicroBatchExecution.constructNextBatch` and `executeOneBatch`.
        """
        if self._trigger.get("availableNow"):
            return bool(self._execution().noNewData())
        return bool(self._trigger.get("once")) and self.log.is_committed(self._only_batch)

    def _execution(self) -> Any:
        """Spark's execution of the query (a JVM object): no public way leads to its plans and to how it ended."""
        assert self._query is not None
        stream = self._query._jsq
        return stream.streamingQuery() if "StreamingQueryWrapper" in stream.getClass().getSimpleName() else stream

    def executed_plan(self) -> Any:
        """The executed plan of the newest batch (a JVM object), or None."""
        if self._query is None:
            return None
        execution = self._execution().lastExecution()
        return None if execution is None else execution.executedPlan()

    def stop(self) -> None:
        """Stop between two batches: a batch that runs is finished and committed first.

        Raises:
            QueryStopped, Exception: The query had failed before, see :meth:`failure`.
        """
        with self._lock:
            failure = self.failure()
            if failure is not None:
                raise failure
            if self._last_batch is not None:
                self._await_commit(self._last_batch)
            self._closing = True
        self._going.set()  # a paused batch finds that the query is closing
        if self._query is not None:
            self._query.stop()  # outside the lock: Spark waits for foreachBatch, which waits for the lock

    def kill(self) -> None:
        """Stop at once: a batch that runs is cancelled and never committed."""
        self._closing = True
        self._going.set()
        if self._query is not None:
            self._query.stop()
