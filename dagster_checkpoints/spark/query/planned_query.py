"""The plans that Spark makes of a streaming query, without running it.

Spark's own `explain` of a streaming DataFrame makes it in this way. Must not know stages or checkpoints.

Source: Spark's `QueryExecution.explainString` and `IncrementalExecution`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.spark.files.work_path import WorkPath, url
from dagster_checkpoints.spark.jvm import jvm_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STREAMING = "org.apache.spark.sql.execution.streaming"
_EXECUTION = f"{_STREAMING}.runtime.IncrementalExecution"


@dataclass(frozen=True)
class ResumedBatch:
    """The first batch of a query that goes on from a checkpoint directory. Spark checks, as it plans the batch, that the stateful
    operators and the columns of their state are those that the directory describes.

    Attributes:
        checkpoint: The directory; Spark may write to it.
        batch_id: The batch, at least 1.
        settings: The settings of Spark that the query keeps.
    """

    checkpoint: WorkPath
    batch_id: int
    settings: Mapping[str, str]


def query_execution(spark: SparkSession, plan: Any, output_mode: str, first: ResumedBatch | None = None) -> Any:
    """What makes the plans of a batch of a streaming query, a JVM object: `optimizedPlan`, and `executedPlan`, the physical one.

    In the physical plan the stateful operators have their numbers.

    Args:
        spark: The session, whose settings decide the plan.
        plan: The analyzed plan, a JVM object.
        output_mode: The query's output mode.
        first: The batch that is planned; None for one of a query without a checkpoint directory.
    """
    jvm = jvm_of(spark)
    session, kept = spark._jsparkSession, jvm.java.util.HashMap()
    metadata = jvm.org.apache.spark.sql.execution.streaming.checkpointing.OffsetSeqMetadata
    if first is not None:
        session = session.cloneSession()
        for name, value in first.settings.items():
            kept.put(name, value)
    find_class = jvm.java.lang.Class.forName
    (constructor,) = find_class(_EXECUTION).getConstructors()
    # The first arguments are the same in each release of Spark; later ones have defaults, and are not named in bytecode.
    identity = jvm.java.util.UUID.randomUUID()
    settings = metadata(0, 0, jvm.PythonUtils.toScalaMap(kept))
    if first is not None:
        metadata.setSessionConf(settings, session.sessionState().conf())
    given = [
        session,
        plan,
        getattr(jvm.org.apache.spark.sql.streaming.OutputMode, output_mode.capitalize())(),
        "<unknown>" if first is None else url(first.checkpoint / "state"),
        identity,
        identity,
        jvm.java.lang.Long.valueOf(0 if first is None else first.batch_id),
        jvm.scala.Option.apply(None),
        settings,
        _module(find_class, f"{_STREAMING}.runtime.WatermarkPropagator").noop(),
        first is not None,
    ]
    count = constructor.getParameterCount()
    defaults = _module(find_class, _EXECUTION)
    given += [getattr(defaults, f"$lessinit$greater$default${number}")() for number in range(len(given) + 1, count + 1)]
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    arguments = gateway.new_array(jvm.java.lang.Object, count)
    for number, argument in enumerate(given):
        arguments[number] = argument
    return constructor.newInstance(arguments)


def _module(find_class: Any, name: str) -> Any:
    """The object of Scala that belongs to a class."""
    return find_class(f"{name}$").getField("MODULE$").get(None)
