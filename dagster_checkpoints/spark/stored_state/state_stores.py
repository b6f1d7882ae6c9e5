"""The keyed state in a query's checkpoint directory as DataFrames. It must not know stages, nor where the directory came from.

Source: Spark's state data sources, https://spark.apache.org/docs/latest/streaming/structured-streaming-state-data-source.html
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.spark.files.work_path import url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TIMERS = "TimerState"
_SIDES = ("left", "right")
_JOIN = "symmetricHashJoin"


@dataclass(frozen=True, slots=True)
class KeyedState:
    """The keyed state of one stateful operator, or one variable of it, in all instances of a stage.

    Attributes:
        operator_id: Number of the operator in the query.
        operator: Spark's name of the operator, such as "stateStoreSave" for an aggregation.
        variable: The side of a join ("left", "right"), the variable of a stateful processor ("timers" for its timers), or
            "default".
        rows: The state: `instance`, `partition_id`, `key` (struct), and `value` (struct) or, for a stateful processor, the
            columns of its kind of variable.
    """

    operator_id: int
    operator: str
    variable: str
    rows: DataFrame


def read_stores(spark: SparkSession, checkpoints: Mapping[str, Path]) -> tuple[KeyedState, ...]:
    """The keyed state of the instances of a query.

    Args:
        spark: A session.
        checkpoints: The checkpoint directory of each instance's query, by the instance's name.

    Raises:
        pyspark.errors.AnalysisException: Spark cannot read the state.
    """
    parts: dict[tuple[int, str, str], list[DataFrame]] = {}
    for instance, checkpoint in checkpoints.items():
        for operator_id, operator, variable, options in _variables(spark, checkpoint):
            reader = spark.read.format("statestore").option("operatorId", operator_id).options(**options)
            rows = reader.load(url(checkpoint))
            parts.setdefault((operator_id, operator, variable), []).append(_with_instance(rows, instance))
    return tuple(
        KeyedState(*found, functools.reduce(lambda one, other: one.unionByName(other), frames))
        for found, frames in sorted(parts.items(), key=lambda item: item[0])
    )


def _with_instance(rows: DataFrame, instance: str) -> DataFrame:
    from pyspark.sql import functions as F

    columns = [name for name in rows.columns if name != "partition_id"]
    return rows.select(F.lit(instance).alias("instance"), "partition_id", *columns)


def _variables(spark: SparkSession, checkpoint: Path) -> Iterator[tuple[int, str, str, dict[str, str]]]:
    """The operator's id and name, the name of a variable, and the options that read it."""
    operators: dict[int, Any] = {}
    for row in spark.read.format("state-metadata").load(url(checkpoint)).collect():
        operators.setdefault(row.operatorId, row)  # a join has a row for each of its stores
    for operator_id, row in sorted(operators.items()):
        for variable, options in _of_operator(row.operatorName, json.loads(row.operatorProperties or "{}")):
            yield operator_id, row.operatorName, variable, options


def _of_operator(name: str, properties: Mapping[str, Any]) -> Sequence[tuple[str, dict[str, str]]]:
    if name == _JOIN:
        return [(side, {"joinSide": side}) for side in _SIDES]
    variables = properties.get("stateVariables")
    if variables is None:
        return [("default", {})]
    return [
        ("timers", {"readRegisteredTimers": "true"})
        if variable["stateVariableType"] == _TIMERS
        else (variable["stateName"], {"stateVarName": variable["stateName"]})
        for variable in variables
    ]
