"""The states that the processor of a `transformWithState` in Python declares: it does so by code, not in the plan.

Must not know what they are read for.
"""

from __future__ import annotations

import contextlib
from typing import Any

from pyspark.sql.types import StructType


def processor_of(of: Any) -> Any:
    """A copy of the user's processor, taken from the function that Spark sends to its workers; None if it is not found."""
    from pyspark import SparkContext
    from pyspark.serializers import CPickleSerializer

    context = SparkContext._active_spark_context
    assert context is not None
    with contextlib.suppress(Exception):  # a release of Spark may wrap the function in another way
        command = of.functionExpr().func().command().toArray(context._jvm.scala.reflect.ClassTag.Byte())  # type: ignore[union-attr]
        function, _ = CPickleSerializer().loads(bytes(command))
        return function.__self__._stateful_processor
    return None


class _StateRecorder:
    """Replaces the `StatefulProcessorHandle` and records the states that a processor requests."""

    def __init__(self) -> None:
        self.declared: list[str] = []

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> None:
        self.declared.append(f"value {stateName} {_schema(schema)}{_ttl(ttlDurationMs)}")

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> None:
        self.declared.append(f"list {stateName} {_schema(schema)}{_ttl(ttlDurationMs)}")

    def getMapState(
        self,
        stateName: str,
        userKeySchema: Any,
        valueSchema: Any,
        ttlDurationMs: int | None = None,
    ) -> None:
        self.declared.append(f"map {stateName} {_schema(userKeySchema)} -> {_schema(valueSchema)}{_ttl(ttlDurationMs)}")

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None  # timers and deletions of state declare nothing


def declared_states(processor: Any) -> list[str]:
    """The states that a processor's `init` declares. Spark calls it in the driver for the same purpose."""
    recorder = _StateRecorder()
    with contextlib.suppress(Exception):  # `init` may need more than a recorder; its earlier declarations are recorded
        processor.init(recorder)
    with contextlib.suppress(Exception):
        processor.close()
    return sorted(recorder.declared)


def _schema(schema: Any) -> str:
    return (StructType.fromDDL(schema) if isinstance(schema, str) else schema).simpleString()


def _ttl(ms: int | None) -> str:
    return f", kept {ms} ms" if ms else ""
