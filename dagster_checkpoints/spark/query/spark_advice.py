"""Advice on Spark's errors, shown before Spark's own text, whose hints are meant for a standalone query.

An error is identified by Spark's condition, if it has one. Must not know tasks.

Source: https://spark.apache.org/docs/latest/sql-error-conditions.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dagster_checkpoints.pipeline import Pipeline, Stage
from dagster_checkpoints.spark.errors import LostRows
from dagster_checkpoints.spark.query.plan_nodes import nodes

_NO_CONDITION = "_LEGACY_ERROR_TEMP"
_IN_BRACKETS = re.compile(r"\[([A-Z][A-Z0-9_]+(?:\.[A-Z0-9_]+)?)\]")

_PYTHON_IN_CONDITION = "UNSUPPORTED_FEATURE.PYTHON_UDF_IN_ON_CLAUSE"

_IN_A_STAGE = {
    "CALL_ON_STREAMING_DATASET_UNSUPPORTED": (
        "its function writes a stream. A stage's function only computes the rows and returns the DataFrame: set sink= of the "
        "stage to write them; code for each micro-batch belongs into process_batch of a Stage subclass."
    ),
    "STREAMING_QUERY_EVOLUTION_ERROR.SOURCE_NAMING_NOT_SUPPORTED": (
        "its function gives a source a name of Spark's own with readStream.name(...). Checkpoints know a source by its stage: "
        "remove the call, and do not set the setting that Spark names below."
    ),
    "INVALID_SUBQUERY_EXPRESSION.STREAMING_QUERY": (
        'its function reads a stream in a subquery. Join the two inputs, or read the inner one with StageInput(mode="static").'
    ),
}
_READS_ROWS = (
    "its function reads rows of a stream (count, collect, show, cache, ...). While the plan is built there are none: return the "
    "DataFrame; code for each micro-batch belongs into process_batch of a Stage subclass."
)

_STATE_CHANGED = frozenset(
    {
        "STATE_STORE_COLUMN_FAMILY_SCHEMA_INCOMPATIBLE",
        "STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION",
        "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE",
        "STATE_STORE_KEY_ROW_FORMAT_VALIDATION_FAILURE",
        "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE",
        "STATE_STORE_STATE_SCHEMA_FILES_THRESHOLD_EXCEEDED",
        "STATE_STORE_VALUE_ROW_FORMAT_VALIDATION_FAILURE",
        "STATE_STORE_VALUE_SCHEMA_EVOLUTION_THRESHOLD_EXCEEDED",
        "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE",
        "STREAMING_STATEFUL_OPERATOR_MISSING_STATE_DIRECTORY",
        "STREAMING_STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA",
    }
)
_STATE_REMEDY = (
    "the checkpoint holds state of another plan than this query has now: a grouping, an aggregate, a join, a watermark or the "
    "columns of user-defined state were changed since. Either revert that change and resume; or drain the pipeline with the "
    "old code, and start the changed pipeline with restore_from: none. Do not delete the checkpoint, and do not set the Spark "
    "configuration that Spark names below: without its check, state is read into the wrong columns."
)
_STATE_SETTING = (
    "a Spark setting on which the checkpoint's state depends was changed since the checkpoint was taken. Restore the old value "
    "in the resource's spark_config. Do not delete the checkpoint."
)

_EARLIER_ROWS = "EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED"
_EARLIER_ROWS_REMEDY = (
    "a processor with eventTimeColumnName (transformWithState) emitted a row that is older than the watermark, which Spark "
    "refuses. At the end of data each timer does that which another timer has set: such a pipeline can be suspended, and not "
    "drained. Leave out eventTimeColumnName, and put the operators behind the processor into a stage of their own."
)

# Spark's connector for Kafka gives its condition only in the driver; executors' errors have the text.
_ROWS_LOST = ("KAFKA_DATA_LOSS", "not available in Kafka any more")
_ROWS_LOST_REMEDY = (
    "the topic no longer has all messages after the last ones that were read: its retention has deleted them, or the topic or a "
    "partition was deleted. Rows are missing that no restart brings back, so the job stops. To continue with what is left, start "
    'the run again with .option("failOnDataLoss", "false"), and remove the option afterwards; to have all rows, put the '
    "messages into the topic again and begin a new job. Then let the topic keep messages for longer than the pipeline may "
    "stand still."
)


_NO_PANDAS = re.compile(r"Pandas >= \S+ must be installed; however, [^\n]*|No module named 'pandas'")
NO_PANDAS_REMEDY = (
    "pandas, which PySpark's pandas functions and Python's transformWithState need, is not installed in a version that PySpark "
    "accepts: pip install 'dagster-checkpoints[pandas]'."
)
"""Advice on an error for which :func:`no_pandas` is true."""

# Spark gives the error of a Python worker as text.
_REFUSED_BY_SOURCE = re.compile(r"dagster_checkpoints\.sources\.errors\.InvalidSource: (.+)")


def advice_on_refused_plan(error: BaseException, pipeline: Pipeline, stage: Stage, plan: Any) -> str:
    """Advice on a plan that Spark refuses as a streaming query.

    Args:
        error: The error of Spark's check.
        plan: The analyzed plan of the stage's result, a JVM object.
    """
    refused = f"Spark refuses its plan as a streaming query in output mode {stage.output_mode!r}. "
    if stage.output_mode == "append" and (condition(error) or "").startswith("STREAMING_OUTPUT_MODE"):
        return refused + (
            f"Its groups are never complete: {advice_on_event_time(pipeline, stage)} Or, at a last stage whose sink can replace "
            'rows, write output_mode="update" or "complete".'
        )
    streaming = {node.nodeName(): node for node in nodes(plan) if node.isStreaming()}
    if "Sort" in streaming:
        return refused + (
            "A stream has no last row, so it cannot be sorted: remove the sort, and sort when the result is read. The result of "
            'an aggregation can be sorted at a last stage with output_mode="complete" and a sink that replaces its rows.'
        )
    if "DeduplicateWithinWatermark" in streaming:
        return refused + f"It is not known how long rows must be kept to find duplicates: {advice_on_event_time(pipeline, stage)}"
    if "LeftAnti" in str(error):
        return refused + (
            "Spark has no left anti join of two streams. Use a left outer join that also bounds the event time, and keep the "
            "rows without a match: F.col(<a column of the right side that is never null>).isNull()."
        )
    if "monotonically_increasing_id() is not supported" in str(error):
        return refused + (
            "The function begins at 0 again in each micro-batch. Derive a number from the row, such as F.xxhash64(<its key>)."
        )
    if condition(error) == _PYTHON_IN_CONDITION:
        return refused + (
            "A Python function cannot be in the condition of an outer join: compute it as a column of its side in front of the "
            "join (withColumn), and compare that column; or use Spark's own functions in the condition."
        )
    if "without a watermark in the join keys" in str(error):
        return refused + (
            "It is not known when a row of an outer join has no more matching rows: declare watermark=(column, lateness) at the "
            "sources of both inputs, and join on the event time as well (equal times, or a range)."
        )
    return refused


def advice_on_stage_error(error: BaseException) -> str:
    """Advice on an error of Spark that a stage's function raised while its plan was built; empty if there is none."""
    name = condition(error)
    if name in _IN_A_STAGE:
        return _IN_A_STAGE[name]
    if no_pandas(error):
        return NO_PANDAS_REMEDY
    # This mistake has no condition in Spark.
    return _READS_ROWS if name is not None and name.startswith(_NO_CONDITION) and "writeStream.start()" in str(error) else ""


def advice_on_failed_query(error: BaseException) -> str:
    """Advice on an error with which a query has ended; empty if there is none."""
    names = set(conditions(error))
    if names & _STATE_CHANGED:
        return _STATE_REMEDY
    if _EARLIER_ROWS in names:
        return _EARLIER_ROWS_REMEDY
    if lost_rows(error):
        return "" if isinstance(error, LostRows) else _ROWS_LOST_REMEDY  # a source of the plugin says what to do
    if refused_by_source(error):
        return refused_by_source(error)
    if no_pandas(error):
        return NO_PANDAS_REMEDY
    return _STATE_SETTING if "STATE_STORE_INVALID_CONFIG_AFTER_RESTART" in names else ""


def lost_rows(error: BaseException) -> bool:
    """Whether a source no longer has rows that the query has to read."""
    condition_name, text = _ROWS_LOST
    named = any(name.partition(".")[0] == condition_name for name in conditions(error))
    return isinstance(error, LostRows) or named or text in str(error)


def refused_by_source(error: BaseException) -> str:
    """The text with which a source of the plugin has refused, in a worker of Spark's, what it found; empty if none has."""
    found = _REFUSED_BY_SOURCE.search(str(error))
    return found[1] if found is not None else ""


def no_pandas(error: BaseException) -> bool:
    """Whether PySpark, or a user's function in a worker of Spark's, has not found a pandas that it can use."""
    return _NO_PANDAS.search(str(error)) is not None


def condition(error: BaseException) -> str | None:
    """Spark's condition of an error, such as STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION."""
    get = getattr(error, "getCondition", None)
    return None if get is None else get()


def conditions(error: BaseException) -> Iterator[str]:
    """Spark's conditions of an error and its causes; for an error from an executor, the conditions that its text names."""
    cause: BaseException | None = error
    while cause is not None:
        name = condition(cause)
        if name is not None:
            yield name
        cause = getattr(cause, "_cause", None) or cause.__cause__
    yield from _IN_BRACKETS.findall(str(error))


def advice_on_event_time(pipeline: Pipeline, stage: Stage) -> str:
    """Advice on how to use the stage's event time, or how to declare one."""
    column = pipeline.event_time(stage.name) if pipeline.carries_watermark(stage.name) else None
    if column is not None:
        return f"use its event time {column!r} as well, by itself or in a window (F.window({column!r}, ...))."
    sources = ", ".join(
        f"{source.name!r} ({source.location})" for source in _sources(pipeline, stage) if source.watermark is None
    )
    return (
        f"no event time reaches it. Declare watermark=(column, lateness) at the source {sources}, and use that column, by itself "
        "or in a window (F.window(column, ...))."
    )


def _sources(pipeline: Pipeline, stage: Stage) -> list[Stage]:
    """The sources that the stage reads as streams, directly or through others."""
    if stage.kind.is_source:
        return [stage]
    streams = [name for name, how in stage.inputs.items() if how.mode == "stream"]
    sources = [source for name in streams for source in _sources(pipeline, pipeline.stage(name))]
    return list({source.name: source for source in sources}.values())
