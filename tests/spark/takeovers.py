"""Plain queries over each kind of input, into each kind of output, that go on as pipelines and as plain queries again."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from deltalake import write_deltalake
from pyspark.sql import functions as F

from bench.kafka_broker import KafkaBroker
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.sources import read_delta_table, read_iceberg_table
from dagster_checkpoints.spark.files.work_path import WorkPath, entries_of
from dagster_checkpoints.spark.stored_state import CheckpointImport, export_checkpoint, import_checkpoint
from dagster_checkpoints.spark.stored_state.plain_checkpoints import plain_path
from tests.spark.plain_programs import ROWS, Program, rows_of

PAGE: dict[str, Any] = {}
"""The functions on the page about plain queries."""
for example in re.findall(
    r"^```python\n(.*?)^```$",
    (Path(__file__).parents[2] / "docs/migrating.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
):
    exec(example, PAGE)

CUTS = ("stopped", "in the output", "not in the output")
HEAP = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
"""Spark's default provider of state."""
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ARROW = pa.schema([("k", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.int64())])
Row = tuple[Any, ...]


# Inputs


class Input(Protocol):
    """A stream of rows; a micro-batch has those of one call of :meth:`put`, or of a part of them."""

    def put(self, rows: Sequence[Row]) -> None: ...

    def read(self) -> Any: ...


class Files:
    """A directory of files."""

    def __init__(self, lab: Any, name: str) -> None:
        self.lab = lab
        self.name = name

    def put(self, rows: Sequence[Row]) -> None:
        self.lab.put(self.name, ROWS, rows)

    def read(self) -> Any:
        return self.lab.stream(self.name, ROWS)


class RemoteFiles(Files):
    """The same on a file system that Spark's Hadoop client reaches.

    Args:
        lab: The environment.
        name: The directory on this machine that has the files, too.
        url: The URL of the directory.
    """

    def __init__(self, lab: Any, name: str, url: str) -> None:
        super().__init__(lab, name)
        self.url = url

    def put(self, rows: Sequence[Row]) -> None:
        file = self.lab.put(self.name, ROWS, rows)
        folder = plain_path(self.lab.spark, self.url)
        scratch = folder / f".{file.name}.next"  # readers see a file whole or not at all
        scratch.copy_from(file)
        scratch.rename(folder / file.name)

    def read(self) -> Any:
        reader = self.lab.spark.readStream.schema(ROWS).option("maxFilesPerTrigger", 1).option("maxFileAge", "36500d")
        return reader.parquet(self.url)


class Topic:
    """A topic of Kafka with one partition, which keeps the order of event time."""

    def __init__(self, lab: Any, kafka: KafkaBroker, name: str) -> None:
        self.lab = lab
        self.kafka = kafka
        self.name = name
        kafka.create_topic(name)

    def put(self, rows: Sequence[Row]) -> None:
        self.kafka.send(self.name, [f"{k},{int(ts.timestamp())},{v}" for k, ts, v in rows], 0)

    def read(self) -> Any:
        options = {"kafka.bootstrap.servers": self.kafka.servers, "subscribe": self.name, "startingOffsets": "earliest"}
        loaded = self.lab.spark.readStream.format("kafka").options(**options, maxOffsetsPerTrigger=20).load()
        parts = F.split(F.col("value").cast("string"), ",")
        ts = F.timestamp_seconds(parts[1].cast("long"))
        return loaded.select(parts[0].alias("k"), ts.alias("ts"), parts[2].cast("long").alias("v"))


class DeltaRows:
    """A Delta table, read by `read_delta_table`."""

    def __init__(self, lab: Any, name: str) -> None:
        self.lab = lab
        self.table = lab.folder / f"delta_{name}"

    def put(self, rows: Sequence[Row]) -> None:
        write_deltalake(self.table, _table_of(rows), mode="append")

    def read(self) -> Any:
        return read_delta_table(self.lab.spark, self.table, files_per_trigger=1)


class IcebergRows:
    """An Iceberg table, read by `read_iceberg_table`."""

    def __init__(self, lab: Any, name: str) -> None:
        from pyiceberg.catalog import load_catalog

        self.lab = lab
        self.table = f"shop.{name}"
        self.warehouse = lab.folder / "warehouse"
        self.warehouse.mkdir(exist_ok=True)
        uri = f"sqlite:///{self.warehouse}/catalog.db"
        catalog = load_catalog("default", type="sql", uri=uri, warehouse=f"file://{self.warehouse}")
        catalog.create_namespace_if_not_exists("shop")
        self._table = catalog.create_table(self.table, _ARROW)

    def put(self, rows: Sequence[Row]) -> None:
        self._table.append(_table_of(rows))

    def read(self) -> Any:
        return read_iceberg_table(self.lab.spark, self.table, warehouse=self.warehouse, files_per_trigger=1)


def _table_of(rows: Sequence[Row]) -> pa.Table:
    return pa.table([pa.array(column, kind.type) for column, kind in zip(zip(*rows, strict=True), _ARROW, strict=True)], _ARROW)


# Outputs


class Output(Protocol):
    """Where a plain query writes."""

    def start(self, frame: Any, checkpoint: str) -> Any:
        """Start the query."""

    def says(self, last: int) -> dict[str, Any]:
        """What an import is told of it, of which `last` is the last micro-batch."""

    def forget(self, batch: int) -> None:
        """Remove the newest micro-batch."""

    def next(self) -> tuple[Output, dict[str, Any]]:
        """Where the query that was given back writes, and what an export is told of it."""

    def rows(self) -> list[Row]:
        """All rows in it."""


class FileOutput:
    """Spark's file sink.

    Args:
        lab: The environment.
        place: The directory's path or URL.
    """

    def __init__(self, lab: Any, place: str) -> None:
        self.lab = lab
        self.place = place

    def start(self, frame: Any, checkpoint: str) -> Any:
        return frame.writeStream.format("parquet").option("checkpointLocation", checkpoint).start(self.place)

    def says(self, last: int) -> dict[str, Any]:
        return {"output": self.place}

    def forget(self, batch: int) -> None:
        _unlink(plain_path(self.lab.spark, self.place) / "_spark_metadata", batch)

    def next(self) -> tuple[Output, dict[str, Any]]:
        again = str(self.lab.folder / "plain again")
        return FileOutput(self.lab, again), {"output": again}

    def rows(self) -> list[Row]:
        return self.lab.rows(self.lab.spark.read.parquet(self.place))


class FunctionOutput:
    """A function of `foreachBatch`, which writes a directory for each batch."""

    def __init__(self, lab: Any, place: str) -> None:
        self.lab = lab
        self.place = place

    def start(self, frame: Any, checkpoint: str) -> Any:
        def write(batch: Any, number: int) -> None:
            batch.write.mode("overwrite").parquet(f"{self.place}/batch={number}")

        return frame.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint).start()

    def says(self, last: int) -> dict[str, Any]:
        return {"last_batch": last}

    def forget(self, batch: int) -> None:
        shutil.rmtree(f"{self.place}/batch={batch}")

    def next(self) -> tuple[Output, dict[str, Any]]:
        return FunctionOutput(self.lab, f"{self.place} again"), {}

    def rows(self) -> list[Row]:
        return self.lab.rows(self.lab.spark.read.parquet(self.place).drop("batch"))


MICROSECONDS = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"}
"""Options of JSON: by default Spark writes milliseconds."""


class TopicOutput:
    """A topic of Kafka, into which Spark's sink writes JSON."""

    def __init__(self, lab: Any, kafka: KafkaBroker, name: str) -> None:
        self.lab = lab
        self.kafka = kafka
        self.name = name
        self.schema: Any = None
        kafka.create_topic(name)

    def start(self, frame: Any, checkpoint: str) -> Any:
        self.schema = frame.schema
        writer = frame.select(F.to_json(F.struct("*"), MICROSECONDS).alias("value")).writeStream.format("kafka")
        options = {"kafka.bootstrap.servers": self.kafka.servers, "topic": self.name, "checkpointLocation": checkpoint}
        return writer.options(**options).start()

    def says(self, last: int) -> dict[str, Any]:
        return {}

    def forget(self, batch: int) -> None:
        raise NotImplementedError("a topic does not say which batch a message is of")

    def next(self) -> tuple[Output, dict[str, Any]]:
        return self, {}

    def rows(self) -> list[Row]:
        values = [(message.value().decode(),) for message in self.kafka.messages(self.name)]
        messages = self.lab.spark.createDataFrame(values, "value string")
        return self.lab.rows(messages.select(F.from_json("value", self.schema, MICROSECONDS).alias("row")).select("row.*"))


def _unlink(folder: WorkPath, name: object) -> None:
    (folder / str(name)).unlink()
    (folder / f".{name}.crc").unlink(missing_ok=True)


# There and back


class Takeover:
    """A program over its inputs: as a plain query, as a pipeline, and as a plain query again.

    Args:
        lab: The environment.
        program: The program.
        inputs: Its inputs by the names of its streams; default: directories of files.
        provider: The class that keeps the state of the plain query; default: that of the session, as pipelines have it.
    """

    def __init__(self, lab: Any, program: Program, inputs: Mapping[str, Input] | None = None, provider: str = "") -> None:
        self.lab = lab
        self.program = program
        self.provider = provider or lab.spark.conf.get(_PROVIDER)
        self.inputs = inputs or {name: Files(lab, name) for name in program.streams}
        self.all: dict[str, list[Row]] = {name: [] for name in program.streams}
        self.portions = 0
        self.outputs: list[Output] = []
        self.folder: Path = lab.folder

    def put(self, portions: int) -> None:
        """Add portions of rows to each of the streams."""
        for number in range(self.portions, self.portions + portions):
            for name in self.program.streams:
                self._put(name, rows_of(name, number, self.lab.at))
        self.portions += portions

    def put_last(self) -> None:
        """Add one row to each stream, of another key, much later than all others."""
        for name in self.program.streams:
            self._put(name, [("z", self.lab.at(1_000_000), -7)])

    def _put(self, name: str, rows: list[Row]) -> None:
        self.inputs[name].put(rows)
        self.all[name] += rows

    def read(self, name: str) -> Any:
        return self.inputs[name].read()

    def run_plain(self, checkpoint: object, output: Output | Path) -> None:
        """Run the plain query until it has read all rows; into a directory if that is named."""
        to = FileOutput(self.lab, str(output)) if isinstance(output, Path) else output
        of_pipelines = self.lab.spark.conf.get(_PROVIDER)
        self.lab.spark.conf.set(_PROVIDER, self.provider)
        try:
            query = to.start(self.program.plain(self.read), str(checkpoint))
            query.processAllAvailable()
            query.stop()
        finally:
            self.lab.spark.conf.set(_PROVIDER, of_pipelines)
        self.outputs.append(to)

    def pipeline(self, **options: bool) -> Pipeline:
        return self.program.pipeline(self.read, self.lab.sink(), **options)

    def drain_from(self, savepoint: str, **options: bool) -> None:
        """Run the pipeline from a savepoint until it has read all rows, and has emitted all that it holds."""
        self.lab.start(self.pipeline(bounded=True, **options), interval=0.5, restore_from=savepoint).finished()

    def take(self, checkpoint: object, apart: bool = False, **options: Any) -> CheckpointImport:
        target, pipeline = str(self.folder / "savepoints"), self.pipeline(apart=apart)
        return import_checkpoint(self.lab.spark, pipeline, str(checkpoint), stage=self.program.name, target=target, **options)

    def check(self, but: str = "k <> 'y'") -> None:
        """Check that all outputs together have exactly the rows of a batch computation."""
        found = Counter(self.lab.committed())
        for output in {id(each): each for each in self.outputs}.values():
            found.update(output.rows())
        tables = [self.lab.spark.createDataFrame(self.all[name], ROWS) for name in self.program.streams]
        wanted = Counter(self.lab.rows(self.program.expected(*tables).where(but)))
        assert found == wanted, (list((wanted - found).elements())[:5], list((found - wanted).elements())[:5])


def cut(how: str, checkpoint: WorkPath, output: Output) -> int:
    """Make the directory what a query leaves that is killed in its last micro-batch. Returns that batch's number."""
    last = max(int(each.name) for each in entries_of(checkpoint / "commits") if each.name.isdecimal())
    if how != "stopped":
        _unlink(checkpoint / "commits", last)
    if how == "not in the output":
        output.forget(last)
    return last


def check_there_and_back(there: Takeover, how: str, output: Output | None = None, place: str | None = None) -> None:
    """A plain query that ended as `how` says goes on as a pipeline, which is suspended, and goes on as a plain query.

    Args:
        there: The program and its inputs.
        how: One of `CUTS`.
        output: The output of the plain query; default: Spark's file sink.
        place: Path or URL of its checkpoint directory.
    """
    lab, name = there.lab, there.program.name
    place = place or str(there.folder / "checkpoint")
    checkpoint = plain_path(lab.spark, place)
    output = output or FileOutput(lab, str(there.folder / "plain"))
    # This project reads the files of a table's first version in no order of time: the other rows follow when that is read.
    for portions in (1, 3) if any(type(each) in (DeltaRows, IcebergRows) for each in there.inputs.values()) else (4,):
        there.put(portions)
        there.run_plain(place, output)
    last = cut(how, checkpoint, output)
    taken = last - (how == "not in the output")
    says = output.says(taken)
    before = _all_below(checkpoint)
    dry = there.take(place, dry_run=True, **says)
    assert (dry.url, dry.batch_id) == ("", taken)
    assert dry.planned_again == (last if how == "not in the output" else None)
    assert dry.operators == there.program.operators
    savepoints = str(there.folder / "savepoints")
    assert not Path(savepoints).exists()
    if says.keys() == {"output"}:
        shown = PAGE["what_would_be_taken"](lab.spark, there.pipeline(), place, name, says["output"])
        assert shown == {"batch": dry.batch_id, "operators": dry.operators, "sources": [offset for _, offset in dry.sources]}
        savepoint = PAGE["taken_over"](lab.spark, there.pipeline(), place, name, says["output"], savepoints)
    else:
        savepoint = there.take(place, **says).url
    assert _all_below(checkpoint) == before

    there.put(2)
    job = lab.start(there.pipeline(), interval=0.5, restore_from=savepoint)
    job.wait_until(lambda: bool(job.checkpoints()))
    there.put(2)
    stopped = job.done("stop", target=savepoints)
    job.finished()

    back, (again, named) = there.folder / "back", output.next()
    if "output" in named:
        assert PAGE["given_back"](stopped.url, str(back), named["output"], name) == (*there.program.streams, name)
    else:
        export_checkpoint(stopped.url, back, stage=name)
    there.put(2)
    there.put_last()
    there.run_plain(back, again)
    there.check("k <> 'z'" if there.program.held else "true")


def _all_below(checkpoint: WorkPath) -> list[str]:
    if isinstance(checkpoint, Path):
        return sorted(str(each) for each in checkpoint.rglob("*"))
    return sorted(str(each.path) for each in checkpoint.files_below())
