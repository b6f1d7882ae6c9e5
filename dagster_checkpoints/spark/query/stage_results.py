"""What a stage's function returned: a DataFrame of the run's session, or a text on what it is and how it becomes one.

Must not know how functions are called. Libraries of other DataFrames are recognized by name, and never imported.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame

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
