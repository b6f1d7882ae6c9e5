"""Streaming sources that are implemented here, in the driver.

They implement Spark's interfaces for data sources (Data Source V2): py4j lets the JVM call Python objects. The rows are read by
Spark's own Parquet reader in the executors; no Python process takes part, and every type that Parquet files hold is carried.
Must not know channels, nor which tables there are.

Source: Spark's `org.apache.spark.sql.connector.read.streaming.MicroBatchStream`;
https://www.py4j.org/advanced_topics.html#implementing-java-interfaces-from-python-callback
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from dagster_checkpoints.spark.jvm import jvm_of
from dagster_checkpoints.spark.query.file_index import exact_index

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONNECTOR = "org.apache.spark.sql.connector"
READ_OPTIONS = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
"""Options of every read of files, whatever the session says: no file is skipped silently."""
_LISTING_IN_A_JOB = "spark.sql.sources.parallelPartitionDiscovery.threshold"
_T = TypeVar("_T")


class SourceFailed(Exception):
    """Raised in the JVM in place of an error of a source, which is kept here or by the query's gate (see `query.BatchFailed`)."""


class KeptErrors:
    """The errors of sources without a gate: in the JVM an error is a text, which has its number here."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._kept: dict[str, BaseException] = {}

    def keep(self, error: BaseException) -> SourceFailed:
        """Keep an error. Returns what is raised in its place."""
        number = f"source error {next(self._numbers)}"
        self._kept[number] = error
        return SourceFailed(f"A source failed; its task reports the error ({number}).")

    def take(self, raised: BaseException) -> BaseException | None:
        """The error that was kept for what Spark has raised; None if a source did not fail."""
        found = re.search(r"\((source error \d+)\)", str(raised))
        return self._kept.pop(found[1], None) if found else None

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise the error that was kept in the place of what Spark raises in the block."""
        try:
            yield
        except Exception as error:
            kept = self.take(error)
            if kept is None:
                raise
            raise kept from None


KEPT_ERRORS = KeptErrors()


def kept(method: Callable[..., _T]) -> Callable[..., _T]:
    """Keep the errors of a method that the JVM calls."""

    @functools.wraps(method)
    def call(*arguments: Any) -> _T:
        try:
            return method(*arguments)
        except BaseException as error:
            raise KEPT_ERRORS.keep(error) from None

    return call


def _returning(method: Callable[..., _T]) -> Callable[..., _T]:
    """Keep what a method returns until its thread returns something else to the JVM."""

    @functools.wraps(method)
    def call(*arguments: Any) -> _T:
        _RETURNED.value = result = method(*arguments)
        return result

    return call


class DriverSources:
    """Makes streaming DataFrames whose sources are Python objects of the driver, in one Spark session.

    Args:
        spark: The session.
    """

    def __init__(self, spark: SparkSession) -> None:
        from pyspark.java_gateway import ensure_callback_server_started

        self.spark = spark
        self.gateway: Any = spark.sparkContext._gateway
        ensure_callback_server_started(self.gateway)
        jvm = jvm_of(spark)
        self.jvm = jvm
        self.sql = jvm.org.apache.spark.sql
        self.files_session = spark._jsparkSession.newSession()
        self.files_session.conf().set(_LISTING_IN_A_JOB, str(2**31 - 1))  # the driver lists the files of a batch by itself
        # Spark asks for these many times in each micro-batch; each name that is looked up in the JVM is a message of its own.
        self.capabilities = jvm.java.util.Collections.singleton(self.sql.connector.catalog.TableCapability.MICRO_BATCH_READ)
        self.columnar_support = self.sql.connector.read.Scan.ColumnarSupportMode.PARTITION_DEFINED
        self.no_metrics = self.array(f"{CONNECTOR}.metric.CustomMetric")
        self.no_task_metrics = self.array(f"{CONNECTOR}.metric.CustomTaskMetric")
        self._relation = spark.readStream.format("rate").load()._jdf.queryExecution().analyzed()
        self._other_fields = tuple(map(self._relation.productElement, range(self._relation.productArity())))

    def stream(self, name: str, options: Mapping[str, str], schema: Any, make: Callable[[], Any]) -> DataFrame:
        """The DataFrame of a source: Spark's node for a streaming relation, around our table.

        There is no public way to read a table that is not in a catalog and whose class is not on the class path. So the node is
        made from that of another source.

        Args:
            name: The source's name in plans.
            options: Options of the plan's node, which Spark and the checkpoint show.
            schema: The columns, as Spark's Java object.
            make: Makes the stream whenever a query starts.
        """
        none = self.jvm.scala.Option.apply(None)
        table = _Table(self, name, schema, make)
        java_options = self.options(options)
        attributes = self.sql.catalyst.types.DataTypeUtils.toAttributes(schema)
        fields = (none, name, table, java_options, attributes, none, none, none)
        plan = self._relation.copy(*fields, *self._other_fields[len(fields) :])
        return DataFrame(self.sql.classic.Dataset.ofRows(self.spark._jsparkSession, plan), self.spark)

    def options(self, options: Mapping[str, str]) -> Any:
        """Options as Spark's Java object."""
        java_map = self.jvm.java.util.HashMap()
        for key, value in options.items():
            java_map.put(key, value)
        return self.sql.util.CaseInsensitiveStringMap(java_map)

    def java_schema(self, schema: StructType) -> Any:
        return self.java_type(schema.json())

    def java_type(self, json_text: str) -> Any:
        """A type as Spark's Java object, from its JSON."""
        return self.spark._jsparkSession.parseDataType(json_text)

    def offset(self, value: Mapping[str, Any]) -> Any:
        """An offset of Spark's that holds a JSON object."""
        return self.sql.execution.streaming.runtime.SerializedOffset(json.dumps(value, sort_keys=True))

    def array(self, name: str, *members: Any) -> Any:
        """A Java array of a class of Spark's SQL connector or execution."""
        kind = functools.reduce(getattr, name.split("."), self.jvm)
        made = self.gateway.new_array(kind, len(members))
        for index, member in enumerate(members):
            made[index] = member
        return made


class ParquetScans:
    """Spark's scans of Parquet files with the same columns (`ParquetScan`): each is a copy of the first one, in one message.

    Args:
        sources: What makes Spark's objects.
        schema: The columns, as Spark's Java object.
    """

    def __init__(self, sources: DriverSources, schema: Any) -> None:
        options, none = sources.options(READ_OPTIONS), sources.jvm.PythonUtils.toSeq([])
        self._parquet = sources.sql.execution.datasources.v2.parquet
        table = self._parquet.ParquetTable(
            "segments", sources.files_session, options, none, sources.jvm.scala.Option.apply(schema), None
        )
        scan = table.newScanBuilder(options).build()
        names = str(scan.productElementNames().mkString(",")).split(",")
        self._fields = {name: scan.productElement(position) for position, name in enumerate(names)}
        self._sources = sources

    def of(self, files: Sequence[str]) -> Any:
        """The scan of some files.

        Args:
            files: The paths of the files as Hadoop writes them.

        Raises:
            FilesLost: Spark would not read all of them.
        """
        return self.having(fileIndex=exact_index(self._sources.jvm, self._sources.files_session, files))

    def having(self, **fields: Any) -> Any:
        """A scan of no files, with other values of some of its fields."""
        return self._parquet.ParquetScan(*{**self._fields, **fields}.values())


def interfaces(*names: str) -> type:
    """What tells py4j which interfaces of Spark's SQL connector a class implements."""
    return type("Java", (), {"implements": tuple(f"{CONNECTOR}.{name}" for name in names)})


_RETURNED = threading.local()
"""By thread, what it has returned to the JVM last, see `JavaObject`."""


class JavaObject:
    """A Python object that the JVM calls. Two are equal if they are the same.

    What a method returns is kept until the JVM calls another one on the same thread. py4j answers with the number of a Java
    object, and lets the JVM forget the object when Python has no reference to it: the JVM would read null if it forgets it first.
    """

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(cls, name, _returning(method))

    def hashCode(self) -> int:
        return id(self) >> 4 & 0x7FFFFFFF

    def equals(self, other: object) -> bool:
        return self is other

    def toString(self) -> str:
        return type(self).__name__


class _Table(JavaObject):
    """One source as a table that can only be read as a stream."""

    def __init__(self, sources: DriverSources, name: str, schema: Any, make: Callable[[], Any]) -> None:
        self.sources = sources
        self._name = name
        self._schema = schema
        self._properties = sources.jvm.java.util.Collections.singletonMap("provider", name)
        self.make = make

    def name(self) -> str:
        return self._name

    def toString(self) -> str:
        return self._name

    def properties(self) -> Any:
        return self._properties

    def schema(self) -> Any:
        return self._schema

    def columns(self) -> Any:
        return self.sources.sql.connector.catalog.CatalogV2Util.structTypeToV2Columns(self._schema)

    def capabilities(self) -> Any:
        return self.sources.capabilities

    def newScanBuilder(self, options: Any) -> _ScanBuilder:
        return _ScanBuilder(self)

    Java = interfaces("catalog.SupportsRead")


class _ScanBuilder(JavaObject):
    def __init__(self, table: _Table) -> None:
        self._table = table

    def build(self) -> _Scan:
        return _Scan(self._table)

    Java = interfaces("read.ScanBuilder")


class _Scan(JavaObject):
    def __init__(self, table: _Table) -> None:
        self._table = table

    def readSchema(self) -> Any:
        return self._table.schema()

    def description(self) -> str:
        return self._table.name()

    def toMicroBatchStream(self, checkpoint: str) -> Any:
        return self._table.make()

    def columnarSupportMode(self) -> Any:
        return self._table.sources.columnar_support

    def supportedCustomMetrics(self) -> Any:
        return self._table.sources.no_metrics

    def reportDriverMetrics(self) -> Any:
        return self._table.sources.no_task_metrics

    Java = interfaces("read.Scan")
