"""Spark's errors as users read them: shortened, with the disk or the file that they are about, and with advice.

Spark adds plans, stack traces and the query's state, and its hints are meant for a standalone query. Nothing is lost: the error
itself, with all of its text, stays the cause of the stage's error. An error is identified by Spark's condition, if it has one.
Must not know tasks.

Source: https://spark.apache.org/docs/latest/sql-error-conditions.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from pyspark.errors import AnalysisException

from dagster_checkpoints.pipeline import Pipeline, Stage
from dagster_checkpoints.spark.errors import LostRows
from dagster_checkpoints.spark.files.work_path import WorkPath
from dagster_checkpoints.spark.query.plan_nodes import nodes, stream_name, streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


# What Spark writes behind the message of an error, each to the end of the text.
_APPENDIX = re.compile(r"\n=== Streaming Query ===|\n+JVM stacktrace:|\n+Driver stacktrace:")
# The line of a plan behind the message of an AnalysisException.
_PLAN = re.compile(r";\s*\n\s*['~+!*:-]*\s*[A-Z][\w ]*[(\[{<#,'` \n]")
_JAVA_FRAME = re.compile(r"^\s*(at [\w.$/<>]+\(.*\)|\.\.\. \d+ more)\s*$")
_WRAPPINGS = (
    re.compile(r"^\[STREAM_FAILED\] Query \[[^\]]*\] terminated with exception: "),
    re.compile(r"^An error occurred while calling [\w.]+\.\n: "),
    re.compile(r"^(?:org\.apache\.spark|java)\.[\w.$]+: (?=\[)"),
    re.compile(r"^Job aborted due to stage failure: .*?most recent failure: Lost task [^\n]*?\): (?=\S)", re.DOTALL),
)
_WRAPPING_STATE = " SQLSTATE: XXKST"


def text_of_error(error: BaseException) -> str:
    """The name of an error's class, and its message."""
    text = str(error)
    if type(error).__module__.partition(".")[0] in ("pyspark", "py4j"):
        text = _without_appendices(text, analysis=isinstance(error, AnalysisException))
    return f"{type(error).__name__}: {text}" if text.strip() else type(error).__name__


def _without_appendices(text: str, *, analysis: bool) -> str:
    appendix = _APPENDIX.search(text)
    text = text[: appendix.start()] if appendix else text
    for wrapping in _WRAPPINGS:
        text, wrapped = wrapping.subn("", text, count=1)
        if wrapped:
            text = text.removesuffix(_WRAPPING_STATE)
    plan = _PLAN.search(text) if analysis else None
    text = text[: plan.start()] if plan else text
    return "\n".join(line for line in text.splitlines() if not _JAVA_FRAME.match(line)).rstrip().removesuffix(_WRAPPING_STATE)


_FULL = re.compile(r"(?:java\.io\.IOException|RocksDBException)\b[^\n]*(No space left on device|Disk quota exceeded)")

_NOT_FOUND = re.compile(r"\b(?:FileNotFound|NoSuchFile)Exception: ([^\n]+)|\b(File [^\n]+ does not exist)")


class QueryFilesError(Exception):
    """Spark could not write or read a query's own files; the code of its stages is not the cause."""


def query_files_error(error: BaseException, directory: WorkPath) -> QueryFilesError | None:
    """What an error, or the state of the directory after it, says of the query's files; None if they are not the cause.

    Args:
        error: the error with which a query has ended. Those of Python, as of a sink, name the place by themselves.
        directory: the directory of the query's files, in the work directory.
    """
    of_spark = type(error).__module__.partition(".")[0] in ("pyspark", "py4j")
    full = _FULL.search(str(error)) if of_spark else None
    if full is not None:
        text = (
            f"a disk is full: expected to write the query's files to the work directory, below {directory}, or to "
            f"Spark's own directory (spark.local.dir), found: {full[1]}. Free space there, or choose another work_directory"
        )
    elif unusable := (of_spark and _unusable(directory)) or _missing(error, str(directory)):
        text = (
            "the work directory cannot be used: expected to write the query's files, and to find them again, below "
            f"{directory}, found: {unusable}. Check that the directory may be written, and that no other program deletes its "
            "files (tmpreaper, systemd-tmpfiles); or choose another work_directory"
        )
    else:
        return None
    found = QueryFilesError(f"{text}. Nothing is lost: what no checkpoint has committed is read again")
    found.__cause__ = error
    return found


def _unusable(directory: WorkPath) -> str:
    """Why nothing can be written to a directory of this machine; empty if that is possible, or if it is elsewhere."""
    if not isinstance(directory, Path):
        return ""  # an error of its server says so
    try:
        probe = directory / ".probe"
        probe.touch()
        probe.unlink()
    except FileNotFoundError:
        return "it was deleted"
    except OSError as error:
        return str(error)
    return ""


def _missing(error: BaseException, directory: str) -> str:
    """What an error says of a missing file of the query; empty if it says nothing."""
    if isinstance(error, FileNotFoundError):
        return str(error) if str(error.filename).startswith(directory) else ""
    return next((line for found in _NOT_FOUND.findall(str(error)) for line in found if directory in line), "")


_CONDITION = "FAILED_READ_FILE"
_FILE = re.compile(r"\[FAILED_READ_FILE(?:\.\w+)?\] Encountered error while reading file (?P<file>.+?)\.\s")
_COLUMN = re.compile(
    r"reading Parquet column \[(?P<column>[^\]]*)\]\. Expected Spark type (?P<expected>.+?), actual Parquet type (?P<found>\w+)"
)
_CAUSE = re.compile(r"^Caused by: (?:[\w.$]+: )?(.+(?:\n(?!\s+at |\s+\.\.\. |Caused by: ).+)*)", re.MULTILINE)
_SOURCE = re.compile(r"^\w+\[(?P<path>.+)\]$")


@dataclass(frozen=True)
class UnreadableFile:
    """A file that Spark could not read.

    Attributes:
        file: The file's URL, as Spark writes it.
        column: The path of the column whose type in the file is another one; empty if that is not the problem.
        expected: The column's type in the source's schema, as Spark writes it.
        found: The column's type in the file, as Parquet writes it.
        cause: The innermost error.
    """

    file: str
    column: str = ""
    expected: str = ""
    found: str = ""
    cause: str = ""

    @property
    def repeats(self) -> bool:
        """Whether another attempt would find the same: a file's types do not change, while a file may still be being written."""
        return bool(self.column)

    @property
    def text(self) -> str:
        """What was expected, what was found, and what to do."""
        if self.column:
            return (
                f"expected column {self.column!r} of type {self.expected}, as the schema of the source says, in the file "
                f"{self.file}, found the Parquet type {self.found}. Declare the type that the file has and cast the column "
                "behind the source, or write the file again; files of both types need a source each, united behind the cast. "
                "No row of the file was used."
            )
        return (
            f"expected that Spark can read the file {self.file}, found: {self.cause}. Write the file again, or move it away if "
            "its rows are not needed; a file that is written to the source's directory has to appear in one step, by a rename."
        )


def unreadable_file(error: BaseException) -> UnreadableFile | None:
    """The file that an error of Spark is about; None for any other error."""
    found = _FILE.search(str(error)) if _CONDITION in str(error) else None
    if found is None:
        return None
    column = _COLUMN.search(str(error))
    if column is not None:
        path = ".".join(part.strip() for part in column["column"].split(","))
        return UnreadableFile(found["file"], path, column["expected"], column["found"])
    return UnreadableFile(found["file"], cause=_innermost(error))


def _innermost(error: BaseException) -> str:
    """The innermost cause that Spark names: in the objects of PySpark's errors, or in the text of an error of py4j."""
    named = _CAUSE.findall(str(error))
    while (inner := getattr(error, "_cause", None)) is not None:
        error = inner
    text = str(named[-1]) if named else str(error).partition("\n")[0]
    return " ".join(text.split()).rstrip(".")


def source_of_file(file: str, sources: Mapping[str, DataFrame]) -> str | None:
    """The source that reads a file, by its directory; None if none of them does.

    Args:
        file: The file's URL.
        sources: The DataFrame of each source, by the name of its stage.
    """
    path = unquote(urlsplit(file).path)
    found: dict[str, str] = {}
    for name, frame in sources.items():
        for leaf in streams(frame):
            read = _SOURCE.match(stream_name(leaf))
            if read is not None and (folder := _folder_of(urlsplit(read["path"]).path, path)) is not None:
                found.setdefault(folder, name)
    return found[max(found, key=len)] if found else None


def _folder_of(read: str, file: str) -> str | None:
    """The directory that a source reads, if a file is in it: of a pattern what is in front of its first special character."""
    folder = re.split(r"[*?\[{]", read)[0]
    if folder == read:
        folder = f"{read.rstrip('/')}/"
    return folder if f"{file}/".startswith(folder) else None


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
