"""Rows of a table in PostgreSQL are read once, through a failed batch and a second run."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pyspark
import pytest

from bench.postgresql import PASSWORD, PostgresqlServer
from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage
from dagster_checkpoints.sources import read_sql_table

pytestmark = pytest.mark.skipif(pyspark.__version__ < "4.2", reason="read_sql_table needs Spark 4.2")


def test_a_failed_batch_and_a_second_run_on_postgresql(lab: Any, postgresql: PostgresqlServer) -> None:
    """Two sources over one table, with event time; one fails; then the job ends early on request, and the next one continues."""
    schema = f"s{uuid4().hex[:8]}"
    url = postgresql.url(schema=schema)
    with postgresql.connect() as connection:
        connection.execute(f'CREATE TABLE "{schema}".events (id bigint, at timestamptz, amount numeric(12, 3))')  # type: ignore[call-overload]
        connection.execute(
            f"INSERT INTO \"{schema}\".events SELECT n, timestamptz '2026-01-01 00:00:00+00' + n * interval '1 minute', n / 8.0 "  # type: ignore[call-overload]
            "FROM generate_series(0, 599) n"
        )
    failing = lab.folder / "fail"
    failing.touch()

    @bounded_source(watermark=("at", "1 minute"))
    def by_time(context):
        return read_sql_table(
            context.spark, lambda: url, "events", schema=schema, split_by="at", splits=6, splits_per_trigger=4
        ).withColumnRenamed("amount", "total")

    @bounded_source
    def by_number(context):
        return read_sql_table(context.spark, url, "events", columns=["amount"], split_by="id", splits=5)

    @stage(sink=lab.sink("hours"))
    def hours(by_time):
        from pyspark.sql import functions as F

        counted = by_time.groupBy(F.window("at", "1 hour")).agg(F.count("*").alias("n"), F.sum("total").alias("total"))
        return counted.select("window.start", "n", "total")

    @stage(sink=lab.sink("numbers"))
    def numbers(by_number):
        from pyspark.sql import functions as F

        def check(value):
            if value > 40 and failing.exists():
                failing.unlink()
                raise OSError("the test fails this row")
            return value

        return by_number.select(F.udf(check, "decimal(12, 3)")("amount").alias("amount"))

    job = lab.start(Pipeline("reading", [by_time, by_number, hours, numbers]), interval=0.3, restart=FixedDelayRestart(2, 0.1))
    job.finished()
    assert not failing.exists()
    assert PASSWORD not in job.story()
    expected = lab.spark.sql(
        "SELECT window(at, '1 hour').start AS start, count(*) AS n, sum(total) AS total FROM (SELECT "
        "TIMESTAMP '2026-01-01 00:00:00+00:00' + make_interval(0, 0, 0, 0, 0, id) AS at, CAST(id / 8.0 AS decimal(12, 3)) AS "
        "total FROM range(600)) GROUP BY window(at, '1 hour')"
    )
    lab.check(expected, "hours")
    lab.check(lab.spark.sql("SELECT CAST(id / 8.0 AS decimal(12, 3)) AS amount FROM range(600)"), "numbers")
