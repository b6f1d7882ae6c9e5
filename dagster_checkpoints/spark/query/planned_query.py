"""The plans that Spark makes of a streaming query, without running it.

Spark's own `explain` of a streaming DataFrame makes it in this way. Must not know stages or checkpoints.

Source: Spark's `QueryExecution.explainString` and `IncrementalExecution`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagster_checkpoints.spark.jvm import jvm_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STREAMING = "org.apache.spark.sql.execution.streaming"
_EXECUTION = f"{_STREAMING}.runtime.IncrementalExecution"


def query_execution(spark: SparkSession, plan: Any, output_mode: str) -> Any:
    """What makes the plans of a batch of a streaming query, a JVM object: `optimizedPlan`, and `executedPlan`, the physical one.

    In the physical plan the stateful operators have their numbers.

    Args:
        spark: The session, whose settings decide the plan.
        plan: The analyzed plan, a JVM object.
        output_mode: The query's output mode.
    """
    jvm = jvm_of(spark)
    find_class = jvm.java.lang.Class.forName
    (constructor,) = find_class(_EXECUTION).getConstructors()
    # The first arguments are the same in each release of Spark; later ones have defaults, and are not named in bytecode.
    identity = jvm.java.util.UUID.randomUUID()
    settings = jvm.PythonUtils.toScalaMap(jvm.java.util.HashMap())
    given = [
        spark._jsparkSession,
        plan,
        getattr(jvm.org.apache.spark.sql.streaming.OutputMode, output_mode.capitalize())(),
        "<unknown>",
        identity,
        identity,
        jvm.java.lang.Long.valueOf(0),
        jvm.scala.Option.apply(None),
        jvm.org.apache.spark.sql.execution.streaming.checkpointing.OffsetSeqMetadata(0, 0, settings),
        _module(find_class, f"{_STREAMING}.runtime.WatermarkPropagator").noop(),
        False,
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
