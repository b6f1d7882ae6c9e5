"""Checks streaming sources: global checkpoints require that a source's rows can be read again.

Spark calls a source's `commit()` when a batch is done, before the checkpoint that covers the batch is complete: a
restore reads those rows again, and a source that has deleted or acknowledged them no longer has them. The code of a Java source's
`commit()` cannot be inspected, so this module lists the sources that are known to act; a Python source is inspected.

Source: https://spark.apache.org/docs/latest/streaming/apis-on-dataframes-and-datasets.html#input-sources
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from py4j.protocol import Py4JJavaError
from pyspark import cloudpickle
from pyspark.errors import IllegalArgumentException
from pyspark.sql import DataFrame
from pyspark.sql.datasource import CaseInsensitiveDict, DataSource, DataSourceStreamReader, SimpleDataSourceStreamReader
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import StructType

from dagster_checkpoints.pipeline import StageKind
from dagster_checkpoints.spark.errors import (
    EndlessSourceError,
    NamedSourceError,
    OffsetCommitError,
    SourceActsOnCommitError,
    SourceOptionsError,
)
from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.file_streams import SKIPS_MISSING_FILES
from dagster_checkpoints.spark.query.plan_nodes import V1_STREAM, V2_STREAM, analyzed, source_options, streams
from dagster_checkpoints.spark.query.stage_calls import StageCall

Limit = Literal["bytes", "rows"]

_FILES = "files"
_TOO_EARLY = "That is before the checkpoint that covers the batch is complete, and a restore could not read its rows again."

# Short names of sources that delete or acknowledge the rows that a batch has read, with the text for the error.
_ACTS_ON_COMMIT: Mapping[str, str] = {
    "socket": "it forgets its lines",
    "textsocket": "it forgets its lines",
    "s3-sqs": "it deletes the queue's messages",
    "sqs": "it deletes the queue's messages",
    "abs-aqs": "it deletes the queue's messages",
    "kafka-share": "it acknowledges the share group's records",
    "jms": "it acknowledges the queue's messages",
    "nats": "it acknowledges the stream's messages",
    "org.apache.spark.sql.nats": "it acknowledges the stream's messages",
    "mqtt": "it acknowledges the queue's messages",
    "solace": "it acknowledges the queue's messages",
    "org.apache.bahir.sql.streaming.mqtt.mqttstreamsourceprovider": "it acknowledges the queue's messages",
    "rabbitmq": "it acknowledges the queue's messages",
}

# Sources that may delete acknowledged rows, depending on settings outside of Spark.
_NEEDS_RETENTION: Mapping[str, str] = {
    "pulsar": "it acknowledges messages when Spark commits a batch, and topics without a retention policy then delete them",
}

# Sources whose rows can be read again after Spark has committed them.
_KEEPS_ROWS = frozenset(
    {_FILES, "cloudfiles", "delta", "hudi", "iceberg", "kafka", "kinesis", "paimon", "python", "rate", "rate-micro-batch"}
)

# Sources that begin at the first row that they have, or at a place that an option names.
_BEGIN_AT_FIRST_ROW = frozenset({_FILES, "cloudfiles", "hudi", "iceberg", "paimon", "rate", "rate-micro-batch"})

# Sources that make rows as time passes: where they end would depend on when a run, or a restart, asks them.
_ENDLESS = frozenset({"rate", "rate-micro-batch"})

# Sources that read all available rows in one micro-batch unless one of these options limits them, by short name. A source with
# a default limit (Delta: 1000 files) has no entry.
_LIMITS: Mapping[str, tuple[str, ...]] = {
    _FILES: ("maxFilesPerTrigger", "maxBytesPerTrigger"),
    "kafka": ("maxOffsetsPerTrigger",),
    "pulsar": ("maxBytesPerTrigger",),
    "iceberg": ("streaming-max-files-per-micro-batch", "streaming-max-rows-per-micro-batch"),
}

_SKIPPED_FILES: Mapping[str, str] = {
    SKIPS_MISSING_FILES: "files that were deleted before they were read",
    "ignoreCorruptFiles": "damaged files, behind the damage",
}
"""Options of file sources, with what Spark then skips."""

_PARSED_FORMATS = ("csv", "json", "xml")
"""Formats of files of which Spark parses only the columns that a query uses: a row whose damaged value it does not use is no
damaged one."""

COMMITS_OFFSETS = "commit.offsets.on.checkpoint"
"""Option of a Kafka source: with "true" its offsets go to the consumer group with each completed checkpoint."""
GROUP = "kafka.group.id"
"""Option of a Kafka source: the name of the consumer group."""

_SKIPS_OLD_FILES = (
    "no maxFileAge: Spark skips, without an error, each file whose modification time is more than 7 days before that of the "
    "newest file that it has found earlier (a copy that keeps its times, a backfill that is copied later). Set "
    '.option("maxFileAge", "36500d"), which includes every file'
)

_READS_BACKWARDS = (
    "latestFirst=true, a limit per micro-batch and a watermark: event time follows the newest files, which are read first, and "
    "stages with state drop rows of the older ones as late. Remove latestFirst, or give the watermark a lateness as long as the "
    "time that the files span"
)

_INFERRED = (
    "Spark infers it when a run starts, from the files and directories that are there then (of day=01 and day=1 the number 1, "
    "and text when there is day=x, too): after a resume the same column may have another type, and sinks get both. Declare it in "
    ".schema(...)"
)

_MISREAD: Mapping[str, str] = {
    "fileNameOnly": (
        "fileNameOnly=true: Spark skips, without an error, each file whose name is that of a file which it has read from another "
        "directory in an earlier micro-batch. Remove the option"
    ),
    "header": (
        "header=true, and not enforceSchema=false: Spark takes the columns of each file by their position, whatever the names in "
        "its first line are: where a file has them in another order, or one more, other columns are read, without an error. "
        'Set .option("enforceSchema", "false"), with which such a file ends the run'
    ),
}
"""Options of file sources, if they are "true", with what Spark then loses or mixes up."""


@dataclass(frozen=True)
class StreamingSource:
    """A streaming source of a plan.

    Attributes:
        title: The source's name in errors, such as `FileSource[/data/in]` or `kafka`.
        kind: The source's short name in lower case; "files" for every file format.
        options: The source's options, by name in lower case.
        acts: Text on what the source's `commit()` does; empty if it does not act.
    """

    title: str
    kind: str
    options: Mapping[str, str] = field(default_factory=dict)
    acts: str = ""


@dataclass(frozen=True)
class SourceWarning:
    """A warning of one source, which may be true of many others.

    Attributes:
        source: The stage, the source and its location.
        found: What it has, or has not.
        advice: What that means, and what to do.
    """

    source: str
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.source} {self.found}: {self.advice}"


def check_source(call: StageCall, frame: DataFrame) -> list[str | SourceWarning]:
    """Refuse a source that acts when Spark commits a batch; warn of sources that may skip rows, or not keep them.

    Returns:
        Warnings of sources that may not keep their rows, and of those that skip rows.

    Raises:
        SourceActsOnCommitError: A source deletes, moves or acknowledges its input before the checkpoint is complete.
        EndlessSourceError: A bounded source reads rows that have no end.
        NamedSourceError: A source has a name of Spark's own.
        OffsetCommitError: A source cannot commit its offsets to a consumer group.
        SourceOptionsError: Spark refuses the options of a file stream.
    """
    warnings: list[str | SourceWarning] = []
    for leaf in streams(frame):
        source = source_of(frame, leaf)
        if name := _name_in_spark(leaf):
            raise NamedSourceError(
                call.stage.name,
                call.context.instance,
                f"expected a source without a name of Spark's own, found {source.title} ({call.stage.location}) with "
                f"readStream.name({name!r}). Under names Spark keeps the offsets of sources in another form, which checkpoints "
                "do not hold. Remove .name(...), and the setting spark.sql.streaming.queryEvolution.enableSourceEvolution: the "
                "stage has a name of its own, and `uid=` keeps it when the stage is renamed",
            )
        if source.kind in _ENDLESS and call.stage.kind is StageKind.BOUNDED_SOURCE:
            raise EndlessSourceError(
                call.stage.name,
                call.context.instance,
                f"expected a bounded source to read rows that end, found {source.title} ({call.stage.location}), which makes "
                "rows as time passes. Declare the stage @unbounded_source, and end it on request",
            )
        wrong = wrong_offset_commit(source)
        if wrong:
            raise OffsetCommitError(call.stage.name, call.context.instance, f"{source.title} in {call.stage.location}: {wrong}")
        problem = acts_on_commit(source)
        if problem:
            raise SourceActsOnCommitError(
                call.stage.name,
                call.context.instance,
                f"expected a source whose rows can be read again after a restore, found {source.title} ({call.stage.location}): "
                f"{problem}",
            )
        refused = _refused_options(frame, leaf) if source.kind == _FILES else ""
        if refused:
            raise SourceOptionsError(
                call.stage.name,
                call.context.instance,
                f"expected options that Spark takes for a stream of files, found of {source.title} ({call.stage.location}): "
                f"{refused}. The query would fail at each start. Correct the option",
            )
        retention = _NEEDS_RETENTION.get(source.kind)
        if retention is not None:
            warnings.append(
                f"Stage {call.stage.name!r}: {source.title} in {call.stage.location}: {retention}. A restore reads the messages "
                "after its checkpoint again: let topics retain messages for longer than the oldest restorable checkpoint is kept."
            )
        elif source.kind not in _KEEPS_ROWS:
            warnings.append(
                f"Stage {call.stage.name!r}: it is not known what {source.title} in {call.stage.location} does when Spark "
                "commits a batch. If it deletes or acknowledges the rows that it has read, a restore cannot read those rows "
                "again: they are lost. Check the source's documentation before you rely on this pipeline."
            )
        if source.kind == "kafka" and source.options.get("failondataloss", "").lower() == "false":
            warnings.append(
                f"Stage {call.stage.name!r}: {source.title} in {call.stage.location} has failOnDataLoss=false: rows that Kafka "
                "has deleted before they were read are skipped, without an error. Remove the option after the gap."
            )
        for option in skips_files(source, frame.sparkSession.conf.get):
            warnings.append(
                f"Stage {call.stage.name!r}: {source.title} in {call.stage.location} has {option}=true: rows of "
                f"{_SKIPPED_FILES[option]} are skipped, without an error. Remove the option, or Spark's setting for it, after "
                "the gap."
            )
        misread = [_SKIPS_OLD_FILES] if skips_old_files(source) else []
        undeclared = _undeclared_columns(leaf) if source.kind == _FILES else []
        misread += [f"columns without a declared type ({', '.join(undeclared)}): {_INFERRED}"] if undeclared else []
        misread += [_MISREAD[option] for option in misread_options(source)]
        misread += [_READS_BACKWARDS] if call.stage.watermark and reads_backwards(source) else []
        about = f"Stage {call.stage.name!r}: {source.title} in {call.stage.location}"
        parts = (text.partition(": ") for text in misread)
        warnings += [SourceWarning(about, f"has {found}", f"{advice}.") for found, _, advice in parts]
    return warnings


def check_limits(call: StageCall, frame: DataFrame) -> list[SourceWarning]:
    """Warnings of the streaming sources of a DataFrame without a limit per micro-batch."""
    return [
        SourceWarning(
            f"Stage {call.stage.name!r}: {source.title} in {call.stage.location}",
            f"has no {missing}",
            "all available rows become one micro-batch: its rows are committed only when all of it has been evaluated, and a "
            "crash repeats all of it. Set the option.",
        )
        for source in (source_of(frame, leaf) for leaf in streams(frame))
        if (missing := missing_limit(source))
    ]


def reads_the_same(one: DataFrame, other: DataFrame) -> bool:
    """Whether two DataFrames certainly have the same rows, as their plans say: not known of sources such as Kafka's.

    A watermark that a stage declares has an id of its own in each plan, and changes no row.
    """
    plans = [analyzed(frame) for frame in (one, other)]
    first, second = (plan.child() if plan.nodeName() == "EventTimeWatermark" else plan for plan in plans)
    return bool(first.sameResult(second))


def acts_on_commit(source: StreamingSource) -> str:
    """The problem and the remedy for a source that acts when Spark commits a batch; empty if the source does not act."""
    clean = next((name for name in source.options if name.split(".")[-1] == "cleansource"), None)
    if clean is not None and source.options[clean].lower() != "off":
        return (
            f"with cleanSource={source.options[clean]!r} Spark removes files before the checkpoint that covers them is complete, "
            "and a restore could not read them again. Remove the option; clean up after the pipeline's checkpoints."
        )
    if source.acts:
        return (
            f"{source.acts} when a batch is done. {_TOO_EARLY} A source must not delete or acknowledge rows there: remove "
            "commit(); code that only frees memory may run in partitions()."
        )
    if source.kind in _ACTS_ON_COMMIT:
        return (
            f"{_ACTS_ON_COMMIT[source.kind]} when Spark commits a batch. {_TOO_EARLY} Copy the rows to a store that "
            "keeps them (files, Kafka, a table), and read that store."
        )
    return ""


def wrong_offset_commit(source: StreamingSource) -> str:
    """The problem and the remedy for a source that cannot commit its offsets to a consumer group as its options say; or empty.

    Source: Flink's options `commit.offsets.on.checkpoint` and `group.id` of a KafkaSource.
    """
    given = source.options.get(COMMITS_OFFSETS)
    if given is None:
        return ""
    if source.kind != "kafka":
        return f"expected the option {COMMITS_OFFSETS} at a Kafka source only, found it at one of kind {source.kind!r}. Remove it"
    if given.lower() not in ("true", "false"):
        return f'expected .option("{COMMITS_OFFSETS}", "true") or "false", found {given!r}'
    if given.lower() == "true" and not source.options.get(GROUP):
        return (
            f"{COMMITS_OFFSETS} commits offsets to a consumer group with each checkpoint: expected the name of a group in "
            f'.option("{GROUP}", "…"), found none. Name one in which no other program consumes'
        )
    return ""


def at_end(source: StreamingSource) -> bool:
    """Whether the source begins at what is its end when its query begins; True if that is not known.

    Source: the options of Spark's Kafka source, of which `startingTimestamp` counts before `startingOffsetsByTimestamp`, and that
    before `startingOffsets`; `startingVersion` of Delta Lake's.
    """
    options = source.options
    if source.kind == "kafka":
        if {"startingtimestamp", "startingoffsetsbytimestamp"} & options.keys():
            return options.get("startingoffsetsbytimestampstrategy", "").lower() == "latest"
        offsets = options.get("startingoffsets", "latest").lower()
        return offsets == "latest" or bool(re.search(r":\s*-1\s*[,}]", offsets))
    if source.kind == "delta":
        return options.get("startingversion", "").lower() == "latest"
    return source.kind not in _BEGIN_AT_FIRST_ROW


def rows_by_columns(frame: DataFrame) -> bool:
    """Whether it depends on the columns that are used of a stream which rows Spark drops, refuses or calls damaged.

    Source: the options `mode` and `columnNameOfCorruptRecord` of Spark's files of text, and `CSVOptions.isColumnPruningEnabled`
    """
    for leaf in streams(frame):
        if leaf.nodeName() != V1_STREAM:
            continue
        source = leaf.dataSource()
        if not str(source.className()).rpartition(".")[2].lower().startswith(_PARSED_FORMATS):
            continue
        options = source_options(leaf)
        damaged = options.get("columnnameofcorruptrecord") or frame.sparkSession.conf.get("spark.sql.columnNameOfCorruptRecord")
        if options.get("mode", "").upper() in ("DROPMALFORMED", "FAILFAST") or damaged in leaf.schema().fieldNames():
            return True
    return False


def skips_old_files(source: StreamingSource) -> bool:
    """Whether the source skips files that are much older than others, and its options do not say from which age.

    Source: Spark's `FileStreamSource`: with `latestFirst` and a limit per micro-batch it ignores `maxFileAge`, and skips no file.
    """
    return source.kind == _FILES and "maxfileage" not in source.options and not reads_backwards(source)


def reads_backwards(source: StreamingSource) -> bool:
    """Whether the source reads its newest files first, and the others in later micro-batches."""
    return source.kind == _FILES and source.options.get("latestfirst", "").lower() == "true" and not missing_limit(source)


def misread_options(source: StreamingSource) -> list[str]:
    """The options with which Spark loses rows of a source, or mixes up columns, where no other option prevents it.

    Source: Spark's `FileStreamSource.SeenFilesMap` and `CSVHeaderChecker`
    """
    if source.kind != _FILES:
        return []
    checks_names = source.options.get("enforceschema", "").lower() == "false"
    given = [option for option in _MISREAD if source.options.get(option.lower(), "").lower() == "true"]
    return [option for option in given if option != "header" or not checks_names]


def _undeclared_columns(leaf: Any) -> list[str]:
    """The columns of a file stream whose types its schema does not say, such as those of directories (`day=1`)."""
    declared = leaf.dataSource().userSpecifiedSchema()
    text = str(leaf.dataSource().className()).rpartition(".")[2].lower().startswith("text")
    known = declared.get().fieldNames() if declared.isDefined() else ["value"] * text
    names = {str(name).lower() for name in known}
    schema = leaf.dataSource().sourceInfo().schema()  # that of the leaf may have Spark's own column _metadata
    return [str(name) for name in schema.fieldNames() if str(name).lower() not in names]


def _refused_options(frame: DataFrame, leaf: Any) -> str:
    """What Spark refuses of the options of a file stream, which it reads when a query starts; empty if nothing.

    Source: Spark's `FileStreamOptions`
    """
    try:
        jvm_of(frame.sparkSession).org.apache.spark.sql.execution.streaming.runtime.FileStreamOptions(leaf.dataSource().options())
    except IllegalArgumentException as error:
        return str(error).replace("\n", " ")
    except Py4JJavaError as error:
        return str(error.java_exception.getMessage())
    return ""


def skips_files(source: StreamingSource, setting: Callable[[str], str | None]) -> list[str]:
    """The options with which Spark skips files of a source that it cannot read.

    Args:
        source: The source.
        setting: Gives a setting of the session, which counts if the source does not have the option.

    Source: Spark's `FileSourceOptions`.
    """
    if source.kind != _FILES:
        return []
    given = {name: source.options.get(name.lower()) or setting(f"spark.sql.files.{name}") or "" for name in _SKIPPED_FILES}
    return [name for name, value in given.items() if value.lower() == "true"]


def limit_in_query(source: StreamingSource) -> Limit | None:
    """What its query can limit its micro-batches by while it runs; None if nothing, or if its options limit it.

    A file source that reads the newest files first is left alone: Spark decides by its options whether it skips old files.

    Source: Spark's `FileStreamSource.latestOffset` and `KafkaMicroBatchStream.latestOffset`, which take any limit.
    """
    if not missing_limit(source) or "minoffsetspertrigger" in source.options:
        return None
    if source.kind == "kafka":
        return "rows"
    return "bytes" if source.kind == _FILES and source.options.get("latestfirst", "").lower() != "true" else None


def missing_limit(source: StreamingSource) -> str:
    """The names of the options that can limit the source's micro-batches; empty if there is a limit."""
    limits = _LIMITS.get(source.kind, ())
    if not limits or any(limit.lower() in source.options for limit in limits):
        return ""
    return " or ".join(limits)


def source_of(frame: DataFrame, leaf: Any) -> StreamingSource:
    """The source of a stream.

    Args:
        frame: The DataFrame that reads it.
        leaf: The stream, a leaf of the DataFrame's analyzed plan.
    """
    name = leaf.nodeName()
    if name == V1_STREAM:
        title = str(leaf.sourceName())
        kind = _FILES if title.startswith("FileSource[") else title.lower()
        return StreamingSource(title, kind, source_options(leaf))
    if name != V2_STREAM:
        return StreamingSource(str(name), str(name).lower())
    title, options = str(leaf.sourceName()), {str(k).lower(): str(v) for k, v in dict(leaf.extraOptions()).items()}
    python = _python_source(frame, leaf)
    if python is not None:
        return StreamingSource(title, "python", options, _acts_in_python(python, options, leaf.schema().json()))
    return StreamingSource(title, _short_name(leaf), options)


def _name_in_spark(leaf: Any) -> str:
    """The name that a source has been given with `readStream.name`; "" without one."""
    if leaf.nodeName() not in (V1_STREAM, V2_STREAM) or not hasattr(DataStreamReader, "name"):
        return ""
    identified = leaf.sourceIdentifyingName()
    return str(identified.name()) if identified.getClass().getSimpleName() == "UserProvided" else ""


def _short_name(leaf: Any) -> str:
    """The source's short name, also if `format()` was given its class; for a catalog's table, its provider."""
    provider = leaf.source()
    if provider.isDefined():
        source = provider.get()
        names = {kind.getSimpleName() for kind in source.getClass().getInterfaces()}
        return str(source.shortName() if "DataSourceRegister" in names else leaf.sourceName()).lower()
    return str(dict(leaf.table().properties()).get("provider", leaf.sourceName())).lower()


def _python_source(frame: DataFrame, leaf: Any) -> type[DataSource] | None:
    """The class of a Python data source; None if the source is not a Python data source."""
    provider = leaf.source()
    if not provider.isDefined() or provider.get().getClass().getSimpleName() != "PythonDataSourceV2":
        return None
    session = frame.sparkSession
    definition = session._jsparkSession.sessionState().dataSourceManager().lookupDataSource(leaf.sourceName())
    pickled = definition.dataSourceCls().command().toArray(jvm_of(session).scala.reflect.ClassTag.Byte())
    source: type[DataSource] = cloudpickle.loads(bytes(pickled))
    return source


def _acts_in_python(source: type[DataSource], options: dict[str, str], schema: str) -> str:
    """Text for a Python source whose stream reader overrides `commit`; empty for any other source."""
    instance = source(CaseInsensitiveDict(options))
    columns = StructType.fromJson(json.loads(schema))
    readers = ((DataSourceStreamReader, instance.streamReader), (SimpleDataSourceStreamReader, instance.simpleStreamReader))
    for kind, make in readers:
        try:
            reader = type(make(columns))
        except Exception:  # not this kind of reader; or a reader that cannot be created: the query then reports the cause
            continue
        return f"its reader {reader.__name__} overrides commit(), which Spark calls" if reader.commit is not kind.commit else ""
    return ""
