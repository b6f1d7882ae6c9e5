"""What queries that plan their micro-batches at the same time share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_checkpoints.sources import SourceUnavailable
from dagster_checkpoints.spark.query.driver_sources import DriverSources, kept
from dagster_checkpoints.spark.query.fused_plans import FusedStream
from dagster_checkpoints.spark.query.fused_query import FusedQuery

FIELDS = ("sparkSession", "fileIndex", "dataSchema")


class Names:
    """Spark's iterator over the names of a scan's fields; each of two threads waits for the other one behind the first name."""

    def __init__(self, both: threading.Barrier) -> None:
        self.both = both
        self.position = 0

    def hasNext(self) -> bool:
        if self.position == 1:
            self.both.wait(60)
        return self.position < len(FIELDS)

    def next(self) -> str:
        self.position += 1
        return FIELDS[self.position - 1]


def test_two_queries_that_plan_their_first_scan_at_once_do_not_mix_its_fields() -> None:
    both = threading.Barrier(2)
    scan = SimpleNamespace(productElementNames=lambda: Names(both), productElement=lambda at: f"the scan's {FIELDS[at]}")
    sources: Any = DriverSources.__new__(DriverSources)
    sources._scan_fields = ()
    sources.sql = SimpleNamespace()
    sources.sql.execution = sources.sql.datasources = sources.sql.v2 = sources.sql.parquet = sources.sql
    sources.sql.ParquetScan = lambda *values: values
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda number: sources.scan_with(scan, fileIndex=number), range(2)))
    assert made == [("the scan's sparkSession", number, "the scan's dataSchema") for number in range(2)]


@pytest.mark.parametrize("error", [SourceUnavailable("the store does not answer"), ValueError("of Spark's own source")])
def test_a_source_that_fails_when_it_is_held_to_what_is_there_gives_its_own_error(error: Exception) -> None:
    def prepare() -> None:
        raise error

    source = SimpleNamespace(prepareForTriggerAvailableNow=kept(prepare) if isinstance(error, SourceUnavailable) else prepare)
    made = SimpleNamespace(size=lambda: 1, apply=lambda position: source)
    query: Any = SimpleNamespace(execution=SimpleNamespace(uniqueSources=lambda: made, sources=lambda: made))
    with pytest.raises(type(error)) as raised:
        FusedQuery(query, {"history": FusedStream(0, "", True)}).hold("history")
    assert raised.value is error
