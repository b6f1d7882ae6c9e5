"""What queries that plan their micro-batches at the same time share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from dagster_checkpoints.spark.query.driver_sources import DriverSources

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
