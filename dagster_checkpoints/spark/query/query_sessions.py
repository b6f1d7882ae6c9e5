"""Sessions of queries that need another number of state partitions than the session of the run."""

from __future__ import annotations

from pyspark.sql import DataFrame

from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.plan_nodes import analyzed
from dagster_checkpoints.spark.query.query_log import STATE_PARTITIONS


def with_partitions(frame: DataFrame, partitions: int) -> DataFrame:
    """The same plan in a copy of its session with another number of shuffle partitions.

    A query takes the number from its session when it runs its first batch. Other queries start at the same moment, so the
    setting of the session that all share cannot be changed for one of them.

    Args:
        frame: The streaming DataFrame of a query.
        partitions: The number of partitions.
    """
    jvm = jvm_of(frame.sparkSession)
    session = frame._jdf.sparkSession().cloneSession()
    session.conf().set(STATE_PARTITIONS, str(partitions))
    return DataFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(session, analyzed(frame)), frame.sparkSession)
