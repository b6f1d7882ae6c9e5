"""Sources that cannot be read again after a restore are refused by name; those without a limit per micro-batch are warned of."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, SimpleDataSourceStreamReader
from pyspark.sql.streaming import DataStreamReader

from dagster_checkpoints.pipeline import Pipeline, StageContext, bounded_source, split_source, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.errors import (
    EndlessSourceError,
    NamedSourceError,
    SourceActsOnCommitError,
    SourceOptionsError,
    StageFailedError,
)
from dagster_checkpoints.spark.job.events import JobStarted
from dagster_checkpoints.spark.job.pipeline_checks import check_plans
from dagster_checkpoints.spark.query import source_checks
from dagster_checkpoints.spark.query.source_checks import (
    COMMITS_OFFSETS,
    StreamingSource,
    acts_on_commit,
    at_end,
    limit_in_query,
    misread_options,
    missing_limit,
    rows_by_columns,
    skips_files,
    skips_old_files,
    wrong_offset_commit,
)
from dagster_checkpoints.spark.query.stage_calls import StageCall, transform_stage

FLIGHTS = "k string, ts timestamp, v long"


@pytest.mark.parametrize(
    ("kind", "options", "found"),
    [
        ("files", {}, ""),
        ("files", {"cleansource": "off"}, ""),
        ("files", {"cleansource": "delete"}, "cleanSource='delete'"),
        ("cloudfiles", {"cloudfiles.cleansource": "MOVE"}, "cleanSource='MOVE'"),
        ("socket", {}, "forgets its lines when Spark commits"),
        ("s3-sqs", {}, "deletes the queue's messages when Spark commits"),
        ("kafka", {}, ""),
        ("kafka-share", {"subscribe": "a"}, "acknowledges the share group's records when Spark commits"),
        ("solace", {"queue": "q"}, "acknowledges the queue's messages when Spark commits"),
        ("nats", {}, "acknowledges the stream's messages when Spark commits"),
        ("org.apache.spark.sql.nats", {}, "acknowledges the stream's messages when Spark commits"),
        ("delta", {}, ""),
        ("rate", {}, ""),
    ],
)
def test_which_sources_act_on_commit(kind: str, options: Mapping[str, str], found: str) -> None:
    problem = acts_on_commit(StreamingSource(kind, kind, options))
    assert (found in problem) if found else problem == ""


@pytest.mark.parametrize(
    ("kind", "columns", "options", "found"),
    [
        ("csv", "k long", {}, False),
        ("csv", "k long", {"mode": "dropMalformed"}, True),
        ("org.apache.spark.sql.execution.datasources.csv.CSVFileFormat", "k long", {"MODE": "FAILFAST"}, True),
        ("json", "k long, _corrupt_record string", {}, True),
        ("json", "k long, _corrupt_record string", {"columnNameOfCorruptRecord": "damaged"}, False),
        ("json", "k long, damaged string", {"columnNameOfCorruptRecord": "damaged", "mode": "PERMISSIVE"}, True),
        ("parquet", "k long, _corrupt_record string", {"mode": "DROPMALFORMED"}, False),
        ("text", "value string", {"mode": "FAILFAST"}, False),
    ],
)
def test_whether_the_columns_that_are_used_decide_the_rows(
    lab: Any, kind: str, columns: str, options: Mapping[str, str], found: bool
) -> None:
    frame = lab.spark.readStream.format(kind).schema(columns).options(**options).load(str(lab.input("in")))
    assert rows_by_columns(frame.select("*").where("true")) is found


@pytest.mark.parametrize(
    ("kind", "options", "missing"),
    [
        ("files", {}, "maxFilesPerTrigger or maxBytesPerTrigger"),
        ("files", {"maxbytespertrigger": "1g"}, ""),
        ("kafka", {"subscribe": "a"}, "maxOffsetsPerTrigger"),
        ("kafka", {"maxoffsetspertrigger": "1000"}, ""),
        ("iceberg", {}, "streaming-max-files-per-micro-batch or streaming-max-rows-per-micro-batch"),
        ("delta", {}, ""),  # 1000 files by default
        ("rate", {}, ""),
        ("python", {}, ""),
    ],
)
def test_which_sources_have_no_limit(kind: str, options: Mapping[str, str], missing: str) -> None:
    assert missing_limit(StreamingSource(kind, kind, options)) == missing


@pytest.mark.parametrize(
    ("kind", "options", "found"),
    [
        ("kafka", {}, ""),
        ("kafka", {"kafka.group.id": "g"}, ""),
        ("kafka", {COMMITS_OFFSETS: "false"}, ""),
        ("kafka", {COMMITS_OFFSETS: "True", "kafka.group.id": "g"}, ""),
        ("kafka", {COMMITS_OFFSETS: "true"}, 'expected the name of a group in .option("kafka.group.id"'),
        ("kafka", {COMMITS_OFFSETS: "true", "kafka.group.id": ""}, "found none"),
        ("kafka", {COMMITS_OFFSETS: "yes", "kafka.group.id": "g"}, "found 'yes'"),
        ("delta", {COMMITS_OFFSETS: "false"}, "found it at one of kind 'delta'"),
    ],
)
def test_which_sources_cannot_commit_their_offsets_to_a_group(kind: str, options: Mapping[str, str], found: str) -> None:
    problem = wrong_offset_commit(StreamingSource(kind, kind, options))
    assert (found in problem) if found else problem == ""


@pytest.mark.parametrize(
    ("kind", "options", "limit"),
    [
        ("files", {}, "bytes"),
        ("files", {"latestfirst": "false"}, "bytes"),
        ("files", {"latestfirst": "True"}, None),  # with a limit of the user's Spark would ignore the age of files
        ("files", {"maxfilespertrigger": "1"}, None),
        ("kafka", {"subscribe": "a"}, "rows"),
        ("kafka", {"maxoffsetspertrigger": "1000"}, None),
        ("kafka", {"minoffsetspertrigger": "1000"}, None),
        ("iceberg", {}, None),
        ("delta", {}, None),
        ("python", {}, None),
    ],
)
def test_which_sources_their_query_can_limit(kind: str, options: Mapping[str, str], limit: str | None) -> None:
    assert limit_in_query(StreamingSource(kind, kind, options)) == limit


@pytest.mark.parametrize(
    ("kind", "options", "found"),
    [
        ("kafka", {"subscribe": "a"}, True),
        ("kafka", {"startingoffsets": "Latest"}, True),
        ("kafka", {"startingoffsets": "earliest"}, False),
        ("kafka", {"startingoffsets": '{"a-1": {"0": 7, "1": -1}}'}, True),
        ("kafka", {"startingoffsets": '{"a-1": {"0": 7, "1": -2}, "b": {"-1": 3, "0": 11}}'}, False),
        ("kafka", {"startingtimestamp": "1000"}, False),
        ("kafka", {"startingtimestamp": "1000", "startingoffsets": "latest"}, False),
        ("kafka", {"startingoffsetsbytimestamp": "{}", "startingoffsetsbytimestampstrategy": "LATEST"}, True),
        ("delta", {}, False),
        ("delta", {"startingversion": "3"}, False),
        ("delta", {"startingversion": "latest"}, True),
        ("files", {"latestfirst": "true"}, False),
        ("iceberg", {}, False),
        ("kinesis", {}, True),
        ("some.other.format", {}, True),
    ],
)
def test_which_sources_begin_at_their_present_end(kind: str, options: Mapping[str, str], found: bool) -> None:
    assert at_end(StreamingSource(kind, kind, options)) is found


@pytest.mark.parametrize(
    ("kind", "options", "skips"),
    [
        ("files", {}, True),
        ("files", {"maxfilespertrigger": "1"}, True),
        ("files", {"latestfirst": "true"}, True),
        ("files", {"latestfirst": "TRUE", "maxfilespertrigger": "1"}, False),  # Spark ignores the age
        ("files", {"latestfirst": "true", "maxbytespertrigger": "1g"}, False),
        ("files", {"latestfirst": "false", "maxfilespertrigger": "1"}, True),
        ("files", {"maxfileage": "36500d"}, False),
        ("files", {"maxfileage": "2d"}, False),  # what the user wants
        ("cloudfiles", {}, False),
        ("kafka", {}, False),
    ],
)
def test_which_sources_skip_old_files(kind: str, options: Mapping[str, str], skips: bool) -> None:
    assert skips_old_files(StreamingSource(kind, kind, options)) is skips


@pytest.mark.parametrize(
    ("kind", "options", "settings", "skips"),
    [
        ("files", {}, {}, []),
        ("files", {"ignoremissingfiles": "True"}, {}, ["ignoreMissingFiles"]),
        ("files", {"ignorecorruptfiles": "false"}, {"spark.sql.files.ignoreCorruptFiles": "true"}, []),
        (
            "files",
            {"ignoremissingfiles": "true"},
            {"spark.sql.files.ignoreCorruptFiles": "true"},
            ["ignoreMissingFiles", "ignoreCorruptFiles"],
        ),
        ("kafka", {}, {"spark.sql.files.ignoreCorruptFiles": "true"}, []),
    ],
)
def test_which_sources_skip_files_that_spark_cannot_read(
    kind: str, options: Mapping[str, str], settings: Mapping[str, str], skips: list[str]
) -> None:
    assert skips_files(StreamingSource(kind, kind, options), settings.get) == skips


WITHOUT_TIME_LIMIT = {"maxFileAge": "36500d"}


@pytest.mark.parametrize(
    ("kind", "options", "misread"),
    [
        ("files", {"filenameonly": "false", "header": "false"}, []),
        ("files", {"filenameonly": "TRUE"}, ["fileNameOnly"]),
        ("files", {"header": "True", "enforceschema": "true"}, ["header"]),
        ("files", {"header": "true", "enforceschema": "False"}, []),
        ("delta", {"header": "true", "filenameonly": "true"}, []),
    ],
)
def test_which_sources_lose_rows_or_mix_up_columns(kind: str, options: Mapping[str, str], misread: list[str]) -> None:
    assert misread_options(StreamingSource(kind, kind, options)) == misread


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"maxFilesPerTrigger": "0"}, "Invalid value '0' for option 'maxFilesPerTrigger'"),
        ({"maxBytesPerTrigger": "many"}, "Invalid value 'many' for option 'maxBytesPerTrigger'"),
        ({"maxFilesPerTrigger": "1", "maxBytesPerTrigger": "1"}, "can't be both set"),
        ({"maxFileAge": "old"}, "Failed to parse time string: old"),
        ({"modifiedAfter": "2026-01-01T00:00:00"}, "option 'modifiedafter' is not allowed"),
        ({"latestFirst": "perhaps"}, "Invalid value 'perhaps' for option 'latestFirst'"),
        ({"fileNameOnly": "true", "header": "true"}, ""),
    ],
)
def test_options_that_spark_refuses_when_a_query_starts(spark: Any, tmp_path: Path, options: dict[str, str], found: str) -> None:
    @unbounded_source
    def lines(context):
        return context.spark.readStream.schema("a string, b string").options(**options).csv(str(tmp_path))

    context = StageContext(spark=spark, stage="lines", instance="0", index=0, parallelism=1, state=None, log=None)  # type: ignore[arg-type]
    call, frame = StageCall(lines, context), lines.transform(context)
    if found:
        with pytest.raises(SourceOptionsError, match="expected options that Spark takes for a stream of files") as raised:
            source_checks.check_source(call, frame)
        assert found in str(raised.value)
    else:
        warnings = " ".join(map(str, source_checks.check_source(call, frame)))
        assert "has fileNameOnly=true: Spark skips" in warnings and "has header=true, and not enforceSchema=false" in warnings


@pytest.mark.parametrize(
    ("kind", "schema", "directory", "undeclared"),
    [
        ("json", "k string", "day=1", "(day)"),
        ("json", "k string", "day=1/Shop=a", "(day, Shop)"),
        ("json", "k string, DAY int", "day=1/shop=a", "(shop)"),
        ("json", "k string, day string", "day=1", None),
        ("json", "k string", "one", None),
        ("text", None, "one", None),
        ("text", None, "day=1", "(day)"),
    ],
)
def test_columns_whose_types_spark_would_infer_at_each_start(
    spark: Any, tmp_path: Path, kind: str, schema: str | None, directory: str, undeclared: str | None
) -> None:
    (tmp_path / "in" / directory).mkdir(parents=True)
    (tmp_path / "in" / directory / "file").write_text('{"k": "a"}\n')

    @unbounded_source
    def lines(context):
        reader = context.spark.readStream.format(kind).options(**WITHOUT_TIME_LIMIT)
        files = (reader.schema(schema) if schema else reader).load(str(tmp_path / "in"))
        return files.select("*", "_metadata.file_path")  # a column of Spark's own, which no schema declares

    context = StageContext(spark=spark, stage="lines", instance="0", index=0, parallelism=1, state=None, log=None)  # type: ignore[arg-type]
    warnings = [str(each) for each in source_checks.check_source(StageCall(lines, context), lines.transform(context))]
    found = [f"columns without a declared type {undeclared}: Spark infers" in text for text in warnings]
    assert found == [True] * bool(undeclared)


BACKWARDS = {"latestFirst": "true", "maxFilesPerTrigger": "1"}


@pytest.mark.parametrize(
    ("options", "warned", "read"),
    [
        ({}, True, {"new", "recent"}),
        (WITHOUT_TIME_LIMIT, False, {"new", "recent", "a month old", "from 1970"}),
        ({**WITHOUT_TIME_LIMIT, "maxFilesPerTrigger": "1"}, False, {"new", "recent", "a month old", "from 1970"}),
        (BACKWARDS, False, {"new", "recent", "a month old", "from 1970"}),
    ],
    ids=["default", "without a limit of time", "one file per batch", "newest files first"],
)
def test_files_that_are_older_than_others(
    spark: Any, tmp_path: Path, options: dict[str, str], warned: bool, read: set[str]
) -> None:
    """Each file is copied when the source has read a newer one, and keeps its time. Spark's default skips old files."""
    folder = tmp_path / "in"

    @unbounded_source
    def lines(context):
        return context.spark.readStream.options(**chosen).text(str(folder))

    def put(text: str, days: float) -> None:
        folder.mkdir(exist_ok=True)
        (folder / text).write_text(text)
        then = max(0.0, time.time() - days * 86400)
        os.utime(folder / text, (then, then))

    def read_all() -> None:
        context = StageContext(spark=spark, stage="lines", instance="0", index=0, parallelism=1, state=None, log=None)  # type: ignore[arg-type]
        frame = lines.transform(context)
        warnings = [
            text for text in map(str, source_checks.check_source(StageCall(lines, context), frame)) if "maxFileAge" in text
        ]
        assert bool(warnings) is warned
        assert all(
            text.startswith("Stage 'lines': FileSource[") and '.option("maxFileAge", "36500d")' in text for text in warnings
        )
        writer = frame.writeStream.foreachBatch(lambda batch, _: found.extend(row.value for row in batch.collect()))
        writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start().awaitTermination()

    chosen, found = options, list[str]()
    put("new", 0)
    read_all()
    put("recent", 6), put("a month old", 30), put("from 1970", 1e6)
    read_all()
    read_all()
    assert sorted(found) == sorted(read)
    chosen, warned = WITHOUT_TIME_LIMIT, False
    read_all()
    assert sorted(found) == ["a month old", "from 1970", "new", "recent"], "files that were skipped, each once"


@pytest.mark.parametrize(
    ("options", "lateness", "warned"),
    [
        (BACKWARDS, "1 hour", True),
        (BACKWARDS, None, False),
        ({"latestFirst": "true"}, "1 hour", False),  # one micro-batch
        ({**BACKWARDS, "latestFirst": "false"}, "1 hour", False),
    ],
)
def test_newest_files_first_make_rows_of_the_others_late(
    spark: Any, tmp_path: Path, options: dict[str, str], lateness: str | None, warned: bool
) -> None:
    @unbounded_source(watermark=("ts", lateness) if lateness else None)
    def lines(context):
        return context.spark.readStream.schema(FLIGHTS).options(**options).json(str(tmp_path))

    context = StageContext(spark=spark, stage="lines", instance="0", index=0, parallelism=1, state=None, log=None)  # type: ignore[arg-type]
    warnings = [str(each) for each in source_checks.check_source(StageCall(lines, context), lines.transform(context))]
    assert any("event time follows the newest files" in text for text in warnings) is warned


class Numbers(DataSourceStreamReader):
    def initialOffset(self):
        return {"at": 0}

    def latestOffset(self, start, limit):
        return {"at": 0}

    def partitions(self, start, end):
        return []

    def read(self, partition):
        return iter([])


class AcknowledgingNumbers(Numbers):
    def commit(self, end):
        """A source that deletes files after reading them."""


class Letters(SimpleDataSourceStreamReader):
    def initialOffset(self):
        return {"at": 0}

    def read(self, start):
        return iter([]), start

    def readBetweenOffsets(self, start, end):
        return iter([])


class AcknowledgingLetters(Letters):
    def commit(self, end):
        """A source that deletes files after reading them."""


def data_source(reader: type) -> type[DataSource]:
    """A Python data source of the same name as its reader."""

    class Source(DataSource):
        @classmethod
        def name(cls):
            return reader.__name__.lower()

        def schema(self):
            return "v long"

        if issubclass(reader, SimpleDataSourceStreamReader):

            def simpleStreamReader(self, schema):
                return reader()
        else:

            def streamReader(self, schema):
                return reader()

    return Source


def started_with(lab: Any, opened: Any) -> tuple[Any, Any]:
    """A pipeline with this stream as its only source: the job, and the error with which it ends."""

    @unbounded_source
    def numbers(context):
        return opened()

    @stage(sink=lab.sink())
    def last(numbers):
        return numbers

    job = lab.start(Pipeline("p", [numbers, last], chaining=False))
    if opened.allowed:
        job.wait_for(JobStarted)
        job.drain()
    return job, job.result().error


class Opened:
    """Open a stream by its format, and check whether the pipeline may start with it."""

    def __init__(self, lab: Any, name: str, allowed: bool, **options: str) -> None:
        self.lab, self.name, self.allowed, self.options = lab, name, allowed, options

    def __call__(self) -> Any:
        return self.lab.spark.readStream.format(self.name).options(**self.options).load()


@pytest.mark.parametrize(
    ("name", "options", "texts"),
    [
        ("socket", {"host": "localhost", "port": "9"}, ["found socket (", "test_source_checks.py:", "forgets its lines"]),
        ("text", {"cleanSource": "archive"}, ["found FileSource[", "cleanSource='archive'", "Remove the option"]),
        ("acknowledgingnumbers", {}, ["its reader AcknowledgingNumbers overrides commit()", "remove commit()"]),
        ("acknowledgingletters", {}, ["its reader AcknowledgingLetters overrides commit()", "could not read its rows again"]),
        ("numbers", {}, []),
        ("letters", {}, []),
    ],
)
def test_a_source_that_acts_on_commit_is_refused_before_anything_starts(
    lab: Any, name: str, options: dict[str, str], texts: list[str]
) -> None:
    for reader in (Numbers, AcknowledgingNumbers, Letters, AcknowledgingLetters):
        lab.spark.dataSource.register(data_source(reader))
    if name == "text":
        options = {**options, "path": str(lab.input("in"))}
    job, error = started_with(lab, Opened(lab, name, not texts, **options))
    if not texts:
        assert error is None
        return
    assert type(error) is SourceActsOnCommitError
    assert str(error).startswith("Stage 'numbers' (instance '0'): ")
    for text in texts:
        assert text in str(error)
    assert job.of(JobStarted) == []


def test_a_source_that_is_not_known_to_keep_its_rows_is_warned_of(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @unbounded_source
    def ticks(context):
        return context.spark.readStream.format("rate").load()

    context = StageContext(spark=spark, stage="ticks", instance="0", index=0, parallelism=1, state=None, log=None)  # type: ignore[arg-type]
    call = StageCall(ticks, context)
    frame = ticks.transform(context)
    assert source_checks.check_source(call, frame) == []
    monkeypatch.setattr(source_checks, "_KEEPS_ROWS", frozenset({"kafka"}))
    [warning] = source_checks.check_source(call, frame)
    assert (
        isinstance(warning, str)
        and warning.startswith("Stage 'ticks': it is not known what rate in ")
        and "they are lost" in warning
    )


@pytest.mark.skipif(not hasattr(DataStreamReader, "name"), reason="Spark 4.2 has begun to name sources")
@pytest.mark.parametrize("enabled", [False, True])
def test_a_source_with_a_name_of_sparks_own_is_refused(spark: Any, enabled: bool) -> None:
    """Spark would write its offsets by names, in the second version of its log."""

    @unbounded_source
    def ticks(context):
        return context.spark.readStream.format("rate").name("own").load()

    session = spark.newSession()
    session.conf.set("spark.sql.streaming.queryEvolution.enableSourceEvolution", str(enabled).lower())
    context = StageContext(spark=session, stage="ticks", instance="0", index=0, parallelism=1, state=None, log=None)  # type: ignore
    call = StageCall(ticks, context)
    if not enabled:
        with pytest.raises(
            StageFailedError, match=r"name of Spark's own with readStream\.name.*do not set the setting that Spark"
        ):
            transform_stage(call, {})
        return
    with pytest.raises(NamedSourceError, match=r"'ticks' .*found rate \(.*readStream\.name\('own'\)\.[\s\S]*Remove \.name"):
        source_checks.check_source(call, transform_stage(call, {}))


@pytest.mark.parametrize("kind", ["rate", "rate-micro-batch"])
def test_rows_that_have_no_end_are_refused_in_a_bounded_source(lab: Any, kind: str) -> None:
    @bounded_source(sink=lab.sink())
    def ticks(context):
        return context.spark.readStream.format(kind).option("rowsPerBatch", 1).load()

    with pytest.raises(
        EndlessSourceError, match=r"Stage 'ticks' .*found .*, which makes rows as time passes\. Declare the stage @unb"
    ):
        raise lab.start(Pipeline("p", [ticks])).result().error


def test_a_probable_mistake_is_warned_of_once_for_all_instances(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Warned of: files without a limit, and a join of two streams whose state is never removed; not a join with a time limit."""

    def files(name: str) -> Any:
        return lab.spark.readStream.schema(FLIGHTS).parquet(str(lab.input(name)))

    @unbounded_source(watermark=("ts", "1 minute"), instances=["x", "y"])
    def flights(context):
        return files(f"flights-{context.instance}")

    @unbounded_source(watermark=("ts", "1 minute"))
    def weather(context):
        return lab.stream("weather", FLIGHTS)

    @stage
    def forgetful(flights, weather):
        return flights.alias("f").join(weather.select("k").alias("w"), "k")

    @stage(sink=lab.sink())
    def bounded_in_time(flights, weather):
        right = weather.selectExpr("k as right_k", "ts as right_ts")
        return flights.join(right, _expr("k = right_k and right_ts between ts and ts + interval 1 hour"))

    @stage(sink=lab.sink("other"))
    def behind(forgetful):
        return forgetful

    stages = [flights, weather, forgetful, bounded_in_time, behind]
    with caplog.at_level(logging.WARNING, "dagster_checkpoints"):
        job = lab.start(Pipeline("p", stages))
        job.wait_for(JobStarted)
    messages = [record.getMessage() for record in caplog.records if record.name == "dagster_checkpoints"]
    limits = [text for text in messages if "maxFilesPerTrigger" in text]
    joins = [text for text in messages if "join of two streams" in text]
    assert [text[: text.index(" has no")].split(":")[0] for text in limits] == ["Stage 'flights'"] * 2  # a folder each
    assert len(joins) == 1
    assert joins[0].startswith("Stage 'forgetful' (")
    assert "every row of its left and right side" in joins[0]
    job.cancel()


def test_instances_that_read_the_same_rows_are_warned_of(spark: Any, tmp_path: Path) -> None:
    """Each instance of a source calls the function: without a part of its own it reads all rows once more."""

    def files(context: Any, name: str) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        return context.spark.readStream.schema(FLIGHTS).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / name))

    def named(number: int, function: Any) -> Any:
        return bounded_source(name=f"s{number}", watermark=("ts", "1 hour"), instances=["x", "y"], sink=sink(number))(function)

    def sink(number: int) -> ParquetSink:
        return ParquetSink(tmp_path / f"out{number}")

    def never(context: Any, split: str) -> Any:
        raise AssertionError("no split is read")

    sources = [
        named(0, lambda context: files(context, "all")),
        named(1, lambda context: files(context, "all").where("v > 1")),
        named(2, lambda context: files(context, context.instance)),
        named(3, lambda context: files(context, "all").where(f"k = '{context.instance}'")),
        bounded_source(name="s4", sink=sink(4))(lambda context: files(context, "all")),
        split_source(name="s5", schema=FLIGHTS, discover=["a"], instances=["x", "y"], sink=sink(5))(never),
    ]
    report = check_plans(Pipeline("p", sources), spark)
    assert report.ok and len(report.passed) == 6, report
    warned = [text for text in report.warnings if "read the same rows" in text]
    assert [text.partition(" (")[0] for text in warned] == ["Stage 's0'", "Stage 's1'"], report.warnings
    assert all("its instances 'x' and 'y' read" in text and "context.instance" in text for text in warned)


def _expr(text: str) -> Any:
    from pyspark.sql import functions as F

    return F.expr(text)
