"""A running query with fused sources, as its task sees it: what each source has read, its watermark, its bound and its limit.

All questions go to Spark's execution of the query (a JVM object), which has no public API for them. It must not know tasks, nor
when a source ends.

Source: Spark's `MicroBatchExecution`, `EventTimeWatermarkExec`, `WatermarkTracker`, `SupportsTriggerAvailableNow`, `ReadLimit`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dagster_checkpoints.spark.query.driver_sources import KEPT_ERRORS
from dagster_checkpoints.spark.query.fused_plans import FusedStream
from dagster_checkpoints.spark.query.kafka_offsets import rows_between
from dagster_checkpoints.spark.query.plan_nodes import ExecutedNodes, streams_of_batch
from dagster_checkpoints.spark.query.query import START_TIMEOUT_SECONDS, TaskQuery
from dagster_checkpoints.spark.query.source_checks import Limit

FIRST_LIMIT: Mapping[Limit, int] = {"bytes": 1, "rows": 1000}
"""The limit of a source's first batch, by what it is limited by. Spark's file source reads at least one file."""
_WATERMARK = "EventTimeWatermark"
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class ReadRows:
    """What a source had in a batch: the number of its rows, and its watermark after them, epoch ms."""

    rows: int
    watermark: int


class FusedQuery:
    """The fused sources of one query.

    Args:
        query: The query.
        streams: The stream of each source.
    """

    def __init__(self, query: TaskQuery, streams: Mapping[str, FusedStream]) -> None:
        self._query = query
        self._streams = dict(streams)
        self._counted_from = dict.fromkeys(streams, 0)
        """By source, the first batch before which Spark has asked the source whether it has rows, after it was held."""
        self._proofs = 0
        """How often in a row Spark was seen to find no rows in any source, each time asked again."""
        watermarks = {stream.watermark_node: name for name, stream in streams.items() if stream.watermark_node}
        self._watermarks = ExecutedNodes(
            _WATERMARK, watermarks.values(), lambda node: watermarks.get(str(node.nodeId().toString()))
        )

    # The bound

    def starts(self) -> None:
        """The query is about to start: batches that are planned already are run without asking the sources."""
        self._counted_from = dict.fromkeys(self._streams, self._query.log.newest_planned() + 1)
        self._proofs = 0

    def hold(self, source: str) -> None:
        """Hold a source to what is there now, while the query runs. Raises what a source of the plugin has raised."""
        with KEPT_ERRORS.raised():
            self._source(self._streams[source].position).prepareForTriggerAvailableNow()
        # Spark may be planning the next batch now, and may have asked the source before it was held.
        self._counted_from[source] = self._query.log.newest_planned() + 2
        self._forget_proof()

    @property
    def limited(self) -> Mapping[str, Limit]:
        """By source that is limited with :meth:`limit`, what it is limited by."""
        return {name: stream.limit for name, stream in self._streams.items() if stream.limit is not None}

    def limit(self, limits: Mapping[str, int], jvm: Any) -> None:
        """Let Spark read at most so much of each source in the batches that it plans from now on: bytes, or rows.

        Spark must be waiting: for the end of a batch's processing, or before it plans the first batch.

        Args:
            limits: The limits, by source.
            jvm: The root of the names of Java's classes, see `jvm_of`.
        """
        limited = self.limited
        sources = {name: self._source(self._streams[name].position) for name in limits}
        execution = self._query.execution
        current = execution.uniqueSources()
        for name, source in sources.items():
            read_limit = jvm.org.apache.spark.sql.connector.read.streaming.ReadLimit
            of = read_limit.maxBytes if limited[name] == "bytes" else read_limit.maxRows
            current = current.updated(source, of(limits[name]))
        getattr(execution, "uniqueSources_$eq")(current)

    def _source(self, position: int) -> Any:
        """Spark's object for a stream of the query. Spark makes them on the query's own thread, shortly after its start."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        execution = self._query.execution
        while not (made := execution.uniqueSources().size()):  # it is set after `sources`
            if not self._query.active or time.monotonic() > deadline:
                raise self._query.failure() or TimeoutError(
                    f"expected Spark to make the sources of the query of {self._query.checkpoint} within "
                    f"{START_TIMEOUT_SECONDS:.0f} s after its start, found {made} of them. Is the machine overloaded?"
                )
            time.sleep(_POLL_SECONDS)
        return execution.sources().apply(position)

    # What the sources have read

    def asked(self, batch_id: int, sources: Collection[str]) -> tuple[list[str], list[str]]:
        """The sources that had rows in a batch, and those that had none when Spark asked them before it, and hold none back.

        Args:
            batch_id: A planned batch.
            sources: The sources that have not ended.
        """
        had_rows = self._query.log.moved(batch_id)
        moved = [name for name in sources if had_rows[self._streams[name].position]]
        counted = [name for name in sources if name not in moved and batch_id >= self._counted_from[name]]
        return moved, self.without_rows(counted, batch_id)

    def without_rows(self, sources: Collection[str], batch_id: int) -> list[str]:
        """Those of the sources that hold no rows back, see `TaskQuery.holds_back`; Spark has found none since this batch."""
        return [name for name in sources if not self._query.holds_back(batch_id, self._streams[name].position)]

    def caught_up(self, stage: str) -> bool:
        """Whether a source has caught up; of a stage behind them, whether all have. See `TaskQuery.caught_up`. Any thread."""
        stream = self._streams.get(stage)
        return self._query.caught_up(stream.position if stream is not None else None)

    def none_has_rows(self) -> bool:
        """Whether Spark has asked every source since they were held, and none had rows; to be called again and again.

        Spark sets a flag whenever it has found nothing to do. Its question may have begun before the flag was reset here; the
        next one has begun after.
        """
        if not self._query.found_nothing():
            return False
        getattr(self._query.execution, "noNewData_$eq")(False)
        self._proofs += 1
        return self._proofs >= 2

    def _forget_proof(self) -> None:
        getattr(self._query.execution, "noNewData_$eq")(False)
        self._proofs = 0

    # Event time

    def read(self) -> dict[str, ReadRows]:
        """By source with rows in the batch that has just been processed, what it had."""
        plan = self._query.executed_plan()
        found: dict[str, ReadRows] = {}
        for source, node in self._watermarks.of(plan) if plan is not None else ():
            statistics = node.eventTimeStats().value()
            if (rows := int(statistics.count())) > 0:
                found[source] = ReadRows(rows, int(statistics.max()) - int(node.delayMs()))
        return found

    def amounts(self) -> dict[str, int]:
        """By source that is limited, how much of it the batch reads that is processed now: bytes, or rows."""
        read = streams_of_batch(self._query.execution.lastExecution().logical())
        return {name: _amount(read[self._streams[name].position], limit) for name, limit in self.limited.items()}

    def advance(self, watermark: int) -> None:
        """Run the query under this watermark from its next batch on, if Spark's own is earlier. Spark must be waiting for the end
        of a batch's processing."""
        tracker = self._query.execution.watermarkTracker()
        if watermark > int(tracker.currentWatermark()):
            tracker.setWatermark(watermark)

    def advance_between_batches(self, watermark: int) -> bool:
        """The same between two batches. Returns False if Spark is planning or processing a batch.

        Spark plans a batch under a lock, and processes it afterwards. Before it plans one it simulates the next batch under the
        present watermark, and refuses another watermark for a batch that was simulated: so that is forgotten.
        """
        execution = self._query.execution
        lock = execution.awaitProgressLock()
        lock.lock()
        try:
            last = execution.lastExecution()
            if last is None or not self._query.log.newest_planned() == self._query.log.last_committed() == last.currentBatchId():
                return False
            last.watermarkPropagator().purge(last.currentBatchId() + 1)
            self.advance(watermark)
            self._forget_proof()  # Spark may want a batch now
            return True
        finally:
            lock.unlock()

    @property
    def has_run(self) -> bool:
        """Whether Spark has run a batch since the query's start: without one it runs none for a watermark alone."""
        return self._query.active and self._query.execution.lastExecution() is not None

    def has_run_under(self, watermark: int) -> bool:
        """Whether a batch under this watermark is committed, or Spark wants none; after :meth:`advance_between_batches`."""
        log = self._query.log
        batch_id = log.last_committed()
        if log.planned(batch_id).watermark_ms >= watermark:
            return True
        return log.newest_planned() == batch_id and bool(self._query.execution.noNewData())


def _amount(leaf: Any, limit: Limit) -> int:
    """How much of a stream a batch reads."""
    if leaf.nodeName().startswith("LocalRelation"):  # nothing
        return 0
    if limit == "bytes":
        return int(leaf.relation().location().sizeInBytes())
    return rows_between(str(leaf.startOffset().get().json()), str(leaf.endOffset().get().json()))
