"""Settings of one query that differ from the session of the run: its state partitions, and how often it asks for rows.

Spark takes them from a query's session when the query starts.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame

from dagster_checkpoints.files.urls import in_object_store
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.plan_nodes import V1_STREAM, analyzed, source_options, streams

POLLING_DELAY = "spark.sql.streaming.pollingDelay"
USUAL_POLLING_DELAY = "50ms"
_LONGEST_DELAY_MS = 1000
_DELAY_OF_EACH_SOURCE_MS = 20
"""A look at a directory takes Spark some 2 ms of processor time: all sources of a run together take a tenth of a core."""


def with_settings(frame: DataFrame, settings: Mapping[str, str]) -> DataFrame:
    """The same plan in a copy of its session with other settings; without settings the DataFrame itself.

    Other queries start at the same moment, so a setting of the session that all share cannot be changed for one of them.

    Args:
        frame: The streaming DataFrame of a query.
        settings: The settings, by name.
    """
    if not settings:
        return frame
    jvm = jvm_of(frame.sparkSession)
    session = frame._jdf.sparkSession().cloneSession()
    for name, value in settings.items():
        session.conf().set(name, value)
    return DataFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(session, analyzed(frame)), frame.sparkSession)


def polling_delay_ms(sources: int, remote: bool) -> int:
    """Milliseconds that a query waits before it asks its sources again, after they had no rows.

    Args:
        sources: The number of unbounded sources of the run.
        remote: Whether a look at one of the query's sources is a request to an object store, which costs money.
    """
    return max(
        int(USUAL_POLLING_DELAY.removesuffix("ms")),
        min(_DELAY_OF_EACH_SOURCE_MS * sources, _LONGEST_DELAY_MS),
        remote * _LONGEST_DELAY_MS,
    )


def polling_of(frame: DataFrame, sources: int) -> dict[str, str]:
    """The setting for the query of some sources; none if the session's own value is right, or is the user's.

    Args:
        frame: The streaming DataFrame of the query.
        sources: The number of unbounded sources of the run.
    """
    if frame.sparkSession.conf.get(POLLING_DELAY, None) != USUAL_POLLING_DELAY:
        return {}
    paths = [source_options(leaf).get("path", "") for leaf in streams(frame) if leaf.nodeName() == V1_STREAM]
    delay = f"{polling_delay_ms(sources, any(map(in_object_store, paths)))}ms"
    return {POLLING_DELAY: delay} if delay != USUAL_POLLING_DELAY else {}
