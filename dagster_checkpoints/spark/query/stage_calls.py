"""Calls a stage's functions with its context, and refuses what they must not do or return.

Their exceptions are reported with the stage's name and the user's line. A function starts no streaming query (only tasks do):
Spark offers no hook for this, so `DataStreamWriter.start` and `toTable` are wrapped once in this process; the wrappers raise on a
thread that is inside a stage's function. It leaves the session's settings as they are, on which the rows of other stages depend,
and returns a DataFrame of the run's session: libraries of other DataFrames are recognized by name, and never imported.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame

from dagster_checkpoints.pipeline import Stage, StageContext
from dagster_checkpoints.spark.errors import StageError, StageFailedError, StageQueryError, StageResultError, StageSettingError
from dagster_checkpoints.spark.query.error_location import CodeLine, located
from dagster_checkpoints.spark.query.error_text import advice_on_stage_error
from dagster_checkpoints.spark.row_settings import row_settings, set_back


@contextmanager
def keeping_settings(stage: Stage, context: StageContext) -> Iterator[None]:
    """A context in which a stage's function is called, and must leave the settings as they are that decide rows.

    All stages share the job's session: the stages that are planned before would get the setting at a restart, and not before it.

    Raises:
        StageSettingError: The function has changed one; it has its value of before again.
    """
    before = row_settings(context.spark)
    try:
        yield
    finally:
        after = row_settings(context.spark)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        found = [(name, context.spark.conf.get(name, None)) for name in changed]
        for name in changed:
            set_back(context.spark, name, before.get(name))
    if found:
        name, value = found[0]
        raise StageSettingError(
            stage.name,
            context.instance,
            f"expected its function ({stage.location}) to leave the settings of the job's session as they are, found that it has "
            f"set {name}={value}, before {before.get(name, 'not set')}: the plans of the stages in front of it were made without "
            "it, and would be made with it after a restart. Set it for the whole job, in the resource's spark_config; or use a "
            "function that has it as an argument, such as F.from_utc_timestamp for a time zone",
        )


_GUARDED = "_dagster_checkpoints_guarded"
_current = threading.local()  # `running`: the stage and the instance whose function runs on this thread


@contextmanager
def refusing_queries(stage: Stage, instance: str) -> Iterator[None]:
    """While a function of this stage runs on this thread, starting a streaming query raises StageQueryError."""
    outer = getattr(_current, "running", None)
    _current.running = (stage, instance)
    try:
        yield
    finally:
        _current.running = outer


def guard_queries() -> None:
    """Install the wrappers in this process, so that :func:`refusing_queries` works. Idempotent."""
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    for name in ("start", "toTable"):
        method = getattr(DataStreamWriter, name)
        if not hasattr(method, _GUARDED):
            setattr(DataStreamWriter, name, _guarded(method))


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def start(*args: Any, **options: Any) -> Any:
        running: tuple[Stage, str] | None = getattr(_current, "running", None)
        if running is not None:
            stage, instance = running
            raise StageQueryError(
                stage.name,
                instance,
                f"starts a streaming query itself ({_line(stage)}). Checkpoints do not cover such a query: after a restart "
                "its rows would be lost or written twice. The query was not started. Return the DataFrame; write it with "
                "sink=, or handle each micro-batch in process_batch.",
            )
        return method(*args, **options)

    setattr(start, _GUARDED, True)
    return start


def _line(stage: Stage) -> CodeLine:
    frames = [CodeLine(f.filename, f.lineno or 0, f.name) for f in traceback.extract_stack()[:-2]]
    return next((frame for frame in reversed(frames) if frame.file == stage.location.file), frames[-1])


_STREAM = "a stage that reads a stream cannot collect it: change its rows with DataFrame functions or mapInPandas"
_FROM_ROWS = f"a source makes a DataFrame of rows with context.spark.createDataFrame(rows); {_STREAM}"
_WRITES = "return the DataFrame that is written; set sink= of the stage to write its rows: only the pipeline starts queries"
_UNREAD = "call .load(), .table(name) or a method for a format, such as .parquet(path)"
_GROUPED = "call .agg(...), .count(), or another method that makes one row of each group"

# By a class's package and name: the name that users know, and what to do.
_KINDS = {
    "pandas.DataFrame": ("a pandas.DataFrame", _FROM_ROWS),
    "pandas.Series": ("a pandas.Series", _FROM_ROWS),
    "polars.DataFrame": (
        "a polars.DataFrame",
        f"a source makes a DataFrame of it with context.spark.createDataFrame(rows.to_arrow()); {_STREAM}",
    ),
    "polars.LazyFrame": (
        "a polars.LazyFrame",
        f"a source makes a DataFrame of it with context.spark.createDataFrame(rows.collect().to_arrow()); {_STREAM}",
    ),
    "pyarrow.Table": ("a pyarrow.Table", _FROM_ROWS),
    "pyarrow.RecordBatch": (
        "a pyarrow.RecordBatch",
        f"a source makes a DataFrame of it with context.spark.createDataFrame(pyarrow.Table.from_batches([batch])); {_STREAM}",
    ),
    "numpy.ndarray": ("a numpy.ndarray", _FROM_ROWS),
    "pyspark.Column": ("a Column, which is an expression without rows", "select it from a DataFrame: frame.select(column)"),
    "pyspark.GroupedData": ("a GroupedData, the groups of a groupBy without an aggregate", _GROUPED),
    "pyspark.RDD": ("an RDD", "make a DataFrame of it: rdd.toDF()"),
    "pyspark.DataFrameReader": ("a DataFrameReader, which has read nothing", _UNREAD),
    "pyspark.DataStreamReader": ("a DataStreamReader, which has read nothing", _UNREAD),
    "pyspark.DataFrameWriter": ("a DataFrameWriter", _WRITES),
    "pyspark.DataFrameWriterV2": ("a DataFrameWriterV2", _WRITES),
    "pyspark.MergeIntoWriter": ("a MergeIntoWriter", _WRITES),
    "pyspark.DataStreamWriter": ("a DataStreamWriter", _WRITES),
    "pyspark.StreamingQuery": ("a StreamingQuery", _WRITES),
    "builtins.NoneType": ("None", "the function, or one of its branches, has no return: end it with return and the DataFrame"),
    "builtins.generator": ("a generator", "the function contains yield: return one DataFrame; union several with unionByName"),
    "builtins.coroutine": ("a coroutine", "the function is declared async def: write def"),
    "builtins.async_generator": ("an asynchronous generator", "write def, and return one DataFrame"),
    "builtins.function": ("a function", "call it, and return the DataFrame that it returns"),
    "builtins.method": ("a method that was not called", "add its parentheses, such as frame.distinct()"),
    "builtins.type": ("a class", "return a DataFrame"),
    "builtins.str": (
        "a text",
        "read the table that it names: context.spark.table(name); run a query: context.spark.sql(text)",
    ),
}


def no_dataframe(result: Any) -> str:
    """Why the result of a stage's function is not a DataFrame; empty if it is one.

    Returns:
        What was found, and what to do.
    """
    if isinstance(result, DataFrame):
        if not type(result).__module__.startswith("pyspark.sql.connect"):
            return ""
        return (
            "a DataFrame of Spark Connect, whose session is in another process. Make it with context.spark, the session of the "
            "run, not with a session of your own"
        )
    for kind in type(result).__mro__:
        found = _KINDS.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")
        if found is not None:
            return ". ".join((found[0], found[1][0].upper() + found[1][1:]))
    if isinstance(result, list | tuple | set | frozenset | dict):
        values = list(result.values() if isinstance(result, dict) else result)
        return _collection(type(result).__name__, values)
    return f"{_name(type(result))}. Return the DataFrame of the stage's rows"


def _collection(kind: str, values: list[Any]) -> str:
    frames = sum(isinstance(value, DataFrame) for value in values)
    if frames == 1:
        return f"a {kind} that holds a DataFrame. Return the DataFrame itself (a comma after it makes a tuple)"
    if frames:
        return f"a {kind} of {frames} DataFrames. Return one: unite them with unionByName, or declare a stage for each"
    return f"a {kind}. {_FROM_ROWS[0].upper()}{_FROM_ROWS[1:]}"


def _name(kind: type) -> str:
    return f"an object of the class {kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True)
class StageCall:
    """A stage with the context of the instance that is being built."""

    stage: Stage
    context: StageContext


def open_stage(call: StageCall) -> None:
    """Call a stage's `open`.

    Raises:
        StageError: `open` raised; names the user's line.
    """
    try:
        with refusing_queries(call.stage, call.context.instance), keeping_settings(call.stage, call.context):
            call.stage.open(call.context)
    except StageError:
        raise
    except Exception as error:
        raise _failed(call, error, "open() failed ") from error


def transform_stage(call: StageCall, arguments: Mapping[str, DataFrame]) -> DataFrame:
    """Call a stage's `transform`.

    Raises:
        StageError: `transform` raised, then the text names the user's line; or it did not return a DataFrame.
    """
    stage = call.stage
    try:
        with refusing_queries(call.stage, call.context.instance), keeping_settings(call.stage, call.context):
            result = stage.transform(call.context, **arguments)
    except StageError:
        raise
    except Exception as error:
        raise _failed(call, error, "failed ") from error
    problem = no_dataframe(result)
    if problem:
        raise StageResultError(
            stage.name,
            call.context.instance,
            f"expected its function ({stage.location}) to return a Spark DataFrame, found {problem}.",
        )
    return result


def _failed(call: StageCall, error: Exception, what: str) -> StageFailedError:
    text = located(error, call.stage, advice_on_stage_error(error))
    return StageFailedError(call.stage.name, call.context.instance, f"{what}{text}")
