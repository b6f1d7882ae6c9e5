"""Holds queries at their start, before they plan their first batch: what is then set of their sources counts from the first row.

Must not know what is set.

Source: Spark's `StreamExecution.runStream`, which tells listeners of a query's start on the query's own thread, before it makes
the query's sources; `MicroBatchExecution` plans each batch under the query's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame

from dagster_checkpoints.spark.jvm import jvm_of

_SECONDS = 60.0
_ONE_BLOCK = threading.Lock()
"""Of two blocks at once each would hold the queries of the other, too, and wait for them to make their sources."""


@contextmanager
def held_start(frame: DataFrame) -> Iterator[None]:
    """Inside the block queries of a DataFrame's session that start make their sources, and plan no batch.

    Args:
        frame: The DataFrame of the query that is started in the block.
    """
    gateway = frame.sparkSession.sparkContext._gateway
    assert gateway is not None
    ensure_callback_server_started(gateway)
    streams = frame._jdf.sparkSession().streams()
    listener = _Listener(streams)
    in_java = jvm_of(frame.sparkSession).org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper(listener)
    with _ONE_BLOCK:
        streams.addListener(in_java)
        try:
            yield
        finally:
            listener.ended.set()
            streams.removeListener(in_java)


class _Listener:
    """Holds the lock of each query that starts, until the block has ended."""

    def __init__(self, streams: Any) -> None:
        self.ended = threading.Event()
        self._streams = streams

    def onQueryStarted(self, event: Any) -> None:
        held = threading.Event()
        # The lock belongs to a thread of Java's, and this one is the query's.
        threading.Thread(target=self._hold, args=(event.id(), held), daemon=True).start()
        held.wait(_SECONDS)

    def _hold(self, query_id: Any, held: threading.Event) -> None:
        try:
            lock = self._streams.get(query_id).streamingQuery().awaitProgressLock()
            lock.lock()
        finally:
            held.set()
        try:
            self.ended.wait(_SECONDS)
        finally:
            lock.unlock()

    def onQueryProgress(self, event: Any) -> None:
        """Another query's."""

    onQueryIdle = onQueryTerminated = onQueryProgress

    class Java:
        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)
