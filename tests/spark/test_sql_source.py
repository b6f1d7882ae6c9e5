"""A table of a database, read in splits, with a value that does not fit."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import pyspark
import pytest

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, bounded_source
from dagster_checkpoints.sources import read_sql_table
from dagster_checkpoints.spark.errors import SourceRefusedError
from dagster_checkpoints.spark.job.events import JobRestarting

pytestmark = pytest.mark.skipif(pyspark.__version__ < "4.2", reason="read_sql_table needs Spark 4.2")


def test_a_value_that_does_not_fit_ends_the_job_with_the_column_and_the_row(lab: Any) -> None:
    """The last of four splits has it: no restart is tried, since the next attempt would find it too."""
    with closing(sqlite3.connect(lab.folder / "shop.db")) as connection:
        connection.execute("CREATE TABLE sales (n INTEGER, amount INTEGER)")
        connection.executemany("INSERT INTO sales VALUES (?, ?)", [(n, n if n < 39 else 1.5) for n in range(40)])
        connection.commit()

    @bounded_source(sink=lab.sink())
    def sales(context):
        return read_sql_table(context.spark, f"sqlite:///{lab.folder}/shop.db", "sales", split_by="n", splits=4)

    job = lab.start(Pipeline("reading", [sales]), restart=FixedDelayRestart(3, 0.1))
    error = job.result().error
    assert type(error.__cause__) is SourceRefusedError and "another attempt would fail in the same way" in str(error)
    assert "read_sql_table('sales') in sqlite:///" in str(error)
    assert (
        "expected values of 'amount' that fit bigint exactly, found 1.5: it is not a whole number, in a row with n = 39."
        in str(error)
    )
    assert job.of(JobRestarting) == []
