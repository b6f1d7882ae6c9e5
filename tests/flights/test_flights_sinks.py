"""Each kind of sink that SINK chooses gives back the rows that were committed, with their types."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from assets.flights_data import FlightsData
from assets.flights_sinks import KINDS, committed_rows, sink_of
from dagster_checkpoints.sinks import SinkContext

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = """
SELECT timestamp'2013-12-31 23:59:59.999999' AS ts, 'EWR' AS origin, 7L AS flights, 1.5D AS mean_delay, NULLIF('', '') AS carrier
UNION ALL SELECT timestamp'2013-07-01 00:59:59.999999', 'JFK', 9L, CAST(NULL AS DOUBLE), 'United "UA"; Inc.'
"""


@pytest.mark.parametrize("kind", KINDS)
def test_committed_rows_are_read_back(
    kind: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("SINK", kind)
    if kind == "kafka":
        broker = request.getfixturevalue("kafka")
        broker.create_topic("delays")
        monkeypatch.setenv("KAFKA_SERVERS", broker.servers)
    data = FlightsData(tmp_path)
    rows = spark.sql(ROWS)
    assert committed_rows(spark, data, "delays", rows.schema).count() == 0
    rows.write.parquet(str(tmp_path / "segment"))
    sink = sink_of(data, "delays").new_instance()
    sink.open(SinkContext("flights", "delays", "0", 0, 1, 1, "a1", "history", 1))
    sink.start_new()
    sink.write(rows, [str(file) for file in (tmp_path / "segment").glob("*.parquet")], 0)
    transaction = sink.pre_commit(1)
    assert committed_rows(spark, data, "delays", rows.schema).count() == 0
    assert transaction is not None
    sink.commit(transaction)
    sink.close()
    committed = committed_rows(spark, data, "delays", rows.schema)
    assert [(field.name, field.dataType) for field in committed.schema] == [(f.name, f.dataType) for f in rows.schema]
    assert sorted(committed.collect(), key=str) == sorted(rows.collect(), key=str)


def test_an_unknown_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINK", "csv")
    with pytest.raises(ValueError, match="variable SINK to be one of parquet, delta, files, iceberg, kafka, sql, found 'csv'"):
        sink_of(FlightsData(tmp_path), "delays")
