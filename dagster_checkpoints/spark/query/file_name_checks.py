"""Refuses the names of the files of rows behind the sources: the rows of a stage's inputs come from files of the plugin.

Spark accepts `input_file_name()` in any stage. In one that reads channels it names a file of the work directory, and in one that
shares its query with a source the source's file. Analysis only.

Source: Spark's `InputFileBlockHolder`, and `FileSourceMetadataAttribute` for the hidden column `_metadata`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame

from dagster_checkpoints.spark.errors import PlanRefusedError
from dagster_checkpoints.spark.query.plan_nodes import analyzed, analyzed_nodes
from dagster_checkpoints.spark.query.plan_text import Node, is_streaming
from dagster_checkpoints.spark.query.row_counts import counted_stage
from dagster_checkpoints.spark.query.stage_calls import StageCall
from dagster_checkpoints.spark.query.stateful_nodes import analyzed_plan

_FUNCTIONS = {
    "InputFileName": "input_file_name()",
    "InputFileBlockStart": "input_file_block_start()",
    "InputFileBlockLength": "input_file_block_length()",
}
"""By class of an expression, the function."""
_HIDDEN = "_metadata"
"""The column that Spark adds to a table of files when a query names it."""


def check_file_names(calls: Sequence[StageCall], frame: DataFrame, inputs: Mapping[str, DataFrame]) -> None:
    """Check that no stage asks for the files of its inputs; it may do so for a table that it reads itself.

    Args:
        calls: The stages of the chain, in order.
        frame: The result of the last one.
        inputs: The first stage's inputs by name.

    Raises:
        PlanRefusedError: A stage does.
    """
    reading = {call.stage.name: call for call in calls if call.stage.inputs}
    if not reading:
        return
    tables = [given for given in inputs.values() if not given.isStreaming]
    for stage, node in _by_stage(analyzed_plan(frame), [call.stage.name for call in calls]):
        found = _asked_for(node, frame, tables) if stage in reading else ""
        if found:
            call = reading[stage]
            raise PlanRefusedError(
                stage,
                call.context.instance,
                f"its result ({call.stage.location}) has {found} of rows of its inputs, which would be that of a temporary file "
                "of the pipeline, or of another stage in the same query. Select it in the source, "
                'F.col("_metadata.file_path").alias(...), and pass that column on.',
            )


def _by_stage(plan: Node, stages: Sequence[str]) -> Iterator[tuple[str, Node]]:
    """The nodes of a chain's plan, each with the stage that has added it.

    Args:
        plan: The plan.
        stages: The stages of the chain, in order.
    """
    pending = [(stages[-1], plan)]
    while pending:
        stage, node = pending.pop()
        stage = counted_stage(node, stages) or stage
        yield stage, node
        pending += [(stage, child) for child in node.children]


def _asked_for(node: Node, frame: DataFrame, tables: Sequence[DataFrame]) -> str:
    """What a node of a plan asks of the files of a stage's inputs, in words; empty if it asks for nothing.

    Args:
        node: The node.
        frame: The DataFrame of the plan.
        tables: The static inputs.
    """
    called = next((_FUNCTIONS[kind] for kind in _classes(list(node.fields.values())) if kind in _FUNCTIONS), "")
    if called and (is_streaming(node) or any(_table_of(each, frame, tables) is not None for each in node.all())):
        return called
    table = _table_of(node, frame, tables) if _HIDDEN in [each.fields["name"] for each in node.expressions("output")] else None
    return _HIDDEN if table is not None and _HIDDEN not in table.columns else ""


def _table_of(node: Node, frame: DataFrame, tables: Sequence[DataFrame]) -> DataFrame | None:
    """The static input that a node of a plan reads; None if it reads none."""
    if node.kind != "LogicalRelation":
        return None
    relation = analyzed_nodes(frame)[node.number].of.relation()
    return next((table for table in tables if analyzed(table).relation().equals(relation)), None)


def _classes(value: Any) -> Iterator[str]:
    """The classes of the expressions in a field of a plan's node, which may be one, or lists of them."""
    if isinstance(value, list):
        for each in value:
            yield from _classes(each)
    elif isinstance(value, dict) and "num-children" in value:
        yield str(value["class"]).rpartition(".")[2]
