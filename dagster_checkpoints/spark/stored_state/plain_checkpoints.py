"""Reads the checkpoint directory of a plain query, and what its output says, as values; nothing there is changed.

The rules are in `state.plain_queries`. Must not know stages or storage.

Source: Spark's `HDFSMetadataLog` and `CompactibleFileStreamLog` for the logs, `OperatorStateMetadata` for descriptions of state.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from dagster_checkpoints.files.urls import local_path, url_scheme
from dagster_checkpoints.spark.files.hadoop_path import HadoopFileSystem
from dagster_checkpoints.spark.files.work_path import WorkPath, entries_of, url
from dagster_checkpoints.spark.query.query_log import QueryLog
from dagster_checkpoints.state.plain_queries import ImportRefused, OutputSays, PlainBatch, PlainQuery, SourceKind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NEWEST = 2
"""Number of planned batches that are read: one of them is taken."""
_VERSION = re.compile(r"\d+\.(zip|changelog|snapshot|delta)")
_UNNUMBERED = re.compile(r"\d+_[^.]+\.(zip|changelog|snapshot|delta)")
_ONLY_STORE = "default"
"""Name of the store of an operator with one; its files are in the directory of the partition."""
_SINK_LOG = "_spark_metadata"
_DELTA_LOG = "_delta_log"


def plain_path(spark: SparkSession, place: str | os.PathLike[str]) -> WorkPath:
    """A directory that Spark's Hadoop client reaches: a path, a `file:` URL, or a URL of Hadoop's, such as `s3a://bucket/path`.

    Args:
        spark: The session; its Hadoop configuration applies.
        place: The directory.

    Raises:
        ImportRefused: It is a `file:` URL without a path, or Hadoop's client does not know the URL.
    """
    text = os.fspath(place)
    scheme = url_scheme(text)
    if scheme is None:
        return Path(text).expanduser().absolute()
    if scheme == "file":
        path = local_path(text) or local_path(f"file://{text.partition(':')[2]}")
        if path is None:
            raise ImportRefused(f"expected a path or a URL such as file:///data/checkpoint, found {text!r}")
        return path
    try:
        return HadoopFileSystem(spark, text).qualified(text.rstrip("/"))
    except OSError as error:
        raise ImportRefused(
            f"expected {text} to be on a file system that Spark's Hadoop client reaches, found: {error}. Name it as the query "
            "does (s3a://, not s3://), in a session with the jars and settings of the query"
        ) from error


def read_plain_query(checkpoint: WorkPath) -> PlainQuery:
    """The checkpoint directory of a plain query, which does not run.

    Raises:
        ImportRefused: A file of its logs cannot be read.
    """
    place, log = url(checkpoint), QueryLog(checkpoint)
    planned, committed = log.all_planned(), log.all_committed()
    try:
        # A version that is not known may have another form: no entry is read.
        versions = log.versions(max(planned, default=-1), max(committed, default=-1))
        batches = {number: _batch(log, number) for number in planned[-_NEWEST:]} if set(versions) == {"v1"} else {}
        newest = next(iter(reversed(batches.values())), None)
        described = dict(_operators(checkpoint))
        return PlainQuery(
            place=place,
            query_id=_query_id(checkpoint),
            log_versions=versions,
            planned=planned,
            committed=committed,
            batches=batches,
            operators={number: each.name for number, each in described.items()},
            partitions={
                number: (each.partitions, _partitions(checkpoint, number, each.stores)) for number, each in described.items()
            },
            unnumbered=_unnumbered(checkpoint),
            read=tuple(_read_by(checkpoint, number) for number in range(len(newest.offsets) if newest is not None else 0)),
        )
    except (ValueError, KeyError, IndexError) as error:
        raise ImportRefused(
            f"expected the logs of a Structured Streaming query in {place}, found one that cannot be read: "
            f"{type(error).__name__}: {error}. The directory was damaged, or a release of Spark that is not known wrote it"
        ) from error


def _batch(log: QueryLog, number: int) -> PlainBatch:
    planned = log.planned(number)
    return PlainBatch(planned.watermark_ms, log.configuration(number), planned.sources)


def _query_id(checkpoint: WorkPath) -> str:
    metadata = checkpoint / "metadata"
    return str(json.loads(metadata.read_text(encoding="utf-8"))["id"]) if metadata.exists() else ""


@dataclass(frozen=True, slots=True)
class _DescribedOperator:
    """A stateful operator as it is described: its name, the number of its state partitions, and the stores of each of them."""

    name: str = ""
    partitions: int = 0
    stores: tuple[str, ...] = (_ONLY_STORE,)


def _operators(checkpoint: WorkPath) -> Iterator[tuple[int, _DescribedOperator]]:
    """The stateful operators by number."""
    for operator in entries_of(checkpoint / "state"):
        if operator.name.isdecimal():
            description = _description(operator)
            if description is None:
                yield int(operator.name), _DescribedOperator()
            else:
                stores = description["stateStoreInfo"]
                names = tuple(str(store["storeName"]) for store in stores)
                found = _DescribedOperator(
                    str(description["operatorInfo"]["operatorName"]), int(stores[0]["numPartitions"]), names
                )
                yield int(operator.name), found


def _description(operator: WorkPath) -> dict[str, Any] | None:
    first = operator / "_metadata" / "metadata"
    second = [each for each in entries_of(operator / "_metadata" / "v2") if each.name.isdecimal()]
    if not first.exists() and not second:
        return None
    newest = max(second, key=lambda each: int(each.name)) if second else first
    found: dict[str, Any] = json.loads(newest.read_text(encoding="utf-8").partition("\n")[2])
    return found


def _partitions(checkpoint: WorkPath, operator: int, stores: Sequence[str]) -> frozenset[int]:
    """The partitions whose stores all have state: one may have a directory, and none, where a batch was not evaluated."""
    partitions = [each for each in entries_of(checkpoint / "state" / str(operator)) if each.name.isdecimal()]
    return frozenset(int(each.name) for each in partitions if all(map(_has_versions, _stores_of(each, stores))))


def _stores_of(partition: WorkPath, names: Sequence[str]) -> list[WorkPath]:
    return [partition if name == _ONLY_STORE else partition / name for name in names]


def _has_versions(store: WorkPath) -> bool:
    return any(_VERSION.fullmatch(file.name) for file in entries_of(store))


def _unnumbered(checkpoint: WorkPath) -> str:
    """A file of state in the form of checkpointFormatVersion 2; "" if there is none."""
    for operator in entries_of(checkpoint / "state"):
        for partition in (each for each in entries_of(operator) if each.name.isdecimal()):
            for file in _files_of(partition):
                if _UNNUMBERED.fullmatch(file.name):
                    return f"state/{operator.name}/{partition.name}/{file.name}"
    return ""


def _files_of(partition: WorkPath) -> Iterator[WorkPath]:
    """The entries of a state partition and of its stores, of which a join has several."""
    entries = entries_of(partition)
    yield from entries
    for store in entries:
        if not _is_file(store.name):
            yield from entries_of(store)


def _is_file(name: str) -> bool:
    return "." in name or name in ("SSTs", "logs")


def _read_by(checkpoint: WorkPath, number: int) -> str:
    """The path of a file that a source of files has read; "" for other sources."""
    entries = [each for each in entries_of(checkpoint / "sources" / str(number)) if _logged(each.name) is not None]
    if not entries:
        return ""
    newest = max(entries, key=lambda each: _logged(each.name) or 0)
    lines = newest.read_text(encoding="utf-8").split("\n")[1:]
    try:
        entry = json.loads(lines[-1])
    except ValueError:  # of another kind of source
        return ""
    return plain_name(str(entry["path"]), encoded=True) if isinstance(entry, dict) and "path" in entry else ""


def _logged(name: str) -> int | None:
    """The number of an entry of a log of files."""
    number = name.removesuffix(".compact")
    return int(number) if number.isdecimal() else None


def plain_name(text: str, *, encoded: bool = False) -> str:
    """A path or URL in one spelling, for comparison: a path of this machine without its scheme.

    Args:
        text: The path or URL.
        encoded: Whether it is a URL in which special characters are encoded.
    """
    scheme = url_scheme(text)
    if scheme is None:
        return os.path.abspath(os.path.expanduser(text))
    if scheme == "file":
        path = urlsplit(text).path if encoded else f"/{text.partition(':')[2].lstrip('/')}"
        return unquote(path) if encoded else path
    return unquote(text) if encoded else text


def output_says(spark: SparkSession, query_id: str, output: str | os.PathLike[str] | None, last_batch: int | None) -> OutputSays:
    """What is known of a plain query's output.

    Args:
        spark: The session, which reaches the output.
        query_id: The query's id, under which Delta Lake records its batches.
        output: The directory of Spark's file sink, or a Delta table; None if it is not named.
        last_batch: The last micro-batch whose rows are in the output, as the user says; None if he does not.

    Raises:
        ImportRefused: Both are named, or the output is neither.
    """
    if output is None:
        return OutputSays(last_batch, "last_batch")
    if last_batch is not None:
        raise ImportRefused("expected either output or last_batch, found both: the output itself says what is its last batch")
    folder = plain_path(spark, output)
    last = last_in_file_sink(folder)
    if last is not None:
        return OutputSays(last, f"{url(folder)}/{_SINK_LOG}")
    if (folder / _DELTA_LOG).exists():
        return OutputSays(_last_in_delta(url(folder), query_id), f"the transactions of query {query_id} in {url(folder)}")
    if not entries_of(folder):
        return OutputSays(-1, f"{url(folder)} is empty")
    raise ImportRefused(
        f"expected the output of Spark's file sink at {url(folder)}, with {_SINK_LOG}, or a Delta table, found neither. Of "
        "another sink, name the last micro-batch whose rows are completely in the output: last_batch= (--last-batch)"
    )


def last_in_file_sink(output: WorkPath) -> int | None:
    """The last micro-batch that Spark's file sink has recorded in its output; None if the directory is not that of one."""
    numbers = [found for each in entries_of(output / _SINK_LOG) if (found := _logged(each.name)) is not None]
    return max(numbers, default=None)


def begin_file_sink(output: WorkPath, batch_id: int) -> None:
    """Record in a new directory that the batches up to one have written no file into it.

    Spark's file sink merges its records of ten batches or so into one, and fails where an earlier one is missing.

    Args:
        output: The directory.
        batch_id: The batch.

    Source: Spark's `CompactibleFileStreamLog.compactInterval`, which follows from the only merged record.
    """
    (output / _SINK_LOG).mkdir(parents=True, exist_ok=True)
    (output / _SINK_LOG / f"{batch_id}.compact").write_text("v1", encoding="utf-8")


def _last_in_delta(table: str, query_id: str) -> int:
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError
    except ImportError as error:
        raise ImportRefused(
            f"expected the library deltalake, which reads the Delta table {table}, found that it is not installed: "
            "pip install 'dagster-checkpoints[delta]'; or name the last micro-batch with last_batch="
        ) from error
    try:
        found = DeltaTable(table.replace("s3a://", "s3://")).transaction_version(query_id)
    except (DeltaError, OSError, ValueError) as error:
        raise ImportRefused(
            f"expected the log of the Delta table {table}, found that the library deltalake does not read it: {error}. It has "
            "the address and the credentials of storage from its environment (AWS_ENDPOINT_URL, …). Or name the last batch: "
            "last_batch="
        ) from error
    return -1 if found is None else int(found)


def names_of(kind: SourceKind, options: Mapping[str, str]) -> tuple[str, ...]:
    """The topics or the directory that a source reads; empty if they are a pattern, or not known.

    Args:
        kind: The kind of the source.
        options: Its options, by name in lower case.
    """
    if kind == "kafka":
        if "subscribe" in options:
            return tuple(topic.strip() for topic in options["subscribe"].split(","))
        return tuple(json.loads(options["assign"])) if "assign" in options else ()
    return (plain_name(options["path"]),) if kind == "files" and "path" in options else ()
