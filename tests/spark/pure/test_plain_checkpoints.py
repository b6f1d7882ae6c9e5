"""Checkpoint directories as Spark writes them, made by hand and read as values; outputs of Spark's file sink and Delta Lake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, Transaction, write_deltalake

from dagster_checkpoints.spark.stored_state.plain_checkpoints import (
    last_in_file_sink,
    names_of,
    output_says,
    plain_name,
    plain_path,
    read_plain_query,
)
from dagster_checkpoints.state.plain_queries import ImportRefused, OutputSays, PlainBatch, PlainQuery

NO_SESSION: Any = None  # paths of this machine need none
SETTINGS = {"spark.sql.shuffle.partitions": "2"}


class Directory:
    """A checkpoint directory of a query over files, with one aggregation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("metadata", json.dumps({"id": "7a"}))
        for batch in range(3):
            self.plan(batch)
            self.write(f"commits/{batch}", 'v1\n{"nextBatchWatermarkMs":5}')
        self.write("sources/0/0", "v1\n" + json.dumps({"path": "file:///in/a%20b.parquet", "timestamp": 1, "batchId": 0}))
        self.write("sources/0/9.compact", "v1\n" + json.dumps({"path": "file:///in/c%20d.parquet", "timestamp": 1, "batchId": 9}))
        description = {
            "operatorInfo": {"operatorId": 0, "operatorName": "stateStoreSave"},
            "stateStoreInfo": [{"storeName": "default", "numColsPrefixKey": 0, "numPartitions": 2}],
        }
        self.write("state/0/_metadata/metadata", f"v1\n{json.dumps(description)}")
        for partition in range(2):
            for version in range(1, 4):
                self.write(f"state/0/{partition}/{version}.delta", "changes")

    def plan(self, batch: int, version: str = "v1") -> None:
        metadata = {"batchWatermarkMs": 10 * batch, "batchTimestampMs": 1, "conf": SETTINGS}
        self.write(f"offsets/{batch}", f'{version}\n{json.dumps(metadata)}\n{{"logOffset":{batch}}}')

    def write(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        (file.parent / f".{file.name}.crc").write_text("sum")

    def read(self) -> PlainQuery:
        return read_plain_query(self.path)


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path / "checkpoint")


def test_a_directory_is_read_as_it_is(directory: Directory) -> None:
    directory.plan(3)
    found = directory.read()
    assert found.place == f"file://{directory.path}"
    assert (found.query_id, found.log_versions) == ("7a", ("v1", "v1"))
    assert (found.planned, found.committed) == ((0, 1, 2, 3), (0, 1, 2))
    assert sorted(found.batches) == [2, 3]
    assert found.batches[3] == PlainBatch(30, SETTINGS, ({"logOffset": 3},))
    assert (found.operators, found.partitions) == ({0: "stateStoreSave"}, {0: (2, frozenset({0, 1}))})
    assert (found.unnumbered, found.read) == ("", ("/in/c d.parquet",))


def test_state_of_other_forms_is_found(directory: Directory) -> None:
    directory.write("state/1/0/left-keyToNumValues/4_0a1b2c.zip", "")
    found = directory.read()
    assert found.unnumbered == "state/1/0/4_0a1b2c.zip"
    assert found.operators[1] == ""  # without a description
    description = {
        "operatorInfo": {"operatorId": 1, "operatorName": "transformWithStateInPySparkExec"},
        "operatorPropertiesJson": "{}",
        "stateStoreInfo": [{"storeName": "default", "numColsPrefixKey": 0, "numPartitions": 7, "stateSchemaFilePaths": []}],
    }
    for batch in (0, 12, 9):
        named = description | {"operatorInfo": {"operatorId": 1, "operatorName": f"of batch {batch}"}}
        directory.write(f"state/1/_metadata/v2/{batch}", f"v2\n{json.dumps(named)}")
    found = directory.read()
    assert (found.operators[1], found.partitions[1]) == ("of batch 12", (7, frozenset()))
    directory.write("state/1/3/4.changelog", "")
    directory.write("state/1/5/_metadata/schema", "")
    assert directory.read().partitions[1] == (7, frozenset({3}))


def test_partitions_of_which_a_store_is_missing(directory: Directory) -> None:
    stores = [f"{side}-{what}" for side in ("left", "right") for what in ("keyToNumValues", "keyWithIndexToValue")]
    description = {
        "operatorInfo": {"operatorId": 0, "operatorName": "symmetricHashJoin"},
        "stateStoreInfo": [{"storeName": name, "numColsPrefixKey": 0, "numPartitions": 3} for name in stores],
    }
    directory.write("state/0/_metadata/metadata", f"v1\n{json.dumps(description)}")
    for partition, there in enumerate((stores, stores[:3], [])):
        for name in there:
            directory.write(f"state/0/{partition}/{name}/4.delta", "changes")
    assert directory.read().partitions == {0: (3, frozenset({0}))}


def test_what_is_no_directory_of_a_query(directory: Directory, tmp_path: Path) -> None:
    nothing = read_plain_query(tmp_path / "nowhere")
    assert (nothing.planned, nothing.committed, nothing.log_versions) == ((), (), ())
    directory.plan(3, "v2")
    later = directory.read()
    assert (later.log_versions, dict(later.batches)) == (("v2", "v1"), {})
    directory.write("offsets/3", "v1\n{broken")
    with pytest.raises(ImportRefused, match="cannot be read"):
        directory.read()


def test_what_an_output_says(tmp_path: Path) -> None:
    def says(**named: Any) -> OutputSays:
        return output_says(NO_SESSION, "7a", **{"output": None, "last_batch": None, **named})

    assert says().last is None
    assert says(last_batch=4).last == 4
    for batch in (3, 11):
        (tmp_path / "out/_spark_metadata").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"out/_spark_metadata/{batch}").write_text("v1")
    (tmp_path / "out/_spark_metadata/.12.tmp").write_text("half")
    assert says(output=tmp_path / "out").last == last_in_file_sink(tmp_path / "out") == 11
    (tmp_path / "out/_spark_metadata/19.compact").write_text("v1")
    assert says(output=f"file://{tmp_path}/out").last == 19
    with pytest.raises(ImportRefused, match="found both"):
        says(output=tmp_path / "out", last_batch=3)
    (tmp_path / "other").mkdir()
    assert says(output=tmp_path / "other").last == says(output=tmp_path / "none").last == -1
    (tmp_path / "other/part.parquet").write_text("rows")
    with pytest.raises(ImportRefused, match="found neither"):
        says(output=tmp_path / "other")
    rows = pa.table({"n": [1]})
    write_deltalake(tmp_path / "delta", rows)
    assert says(output=tmp_path / "delta").last == -1
    for query, batch in (("another", 9), ("7a", 5)):
        written = CommitProperties(app_transactions=[Transaction(query, batch)])
        write_deltalake(tmp_path / "delta", rows, mode="append", commit_properties=written)
    assert says(output=tmp_path / "delta").last == 5
    for entry in (tmp_path / "delta/_delta_log").glob("*.json"):
        entry.write_text("{half")
    with pytest.raises(ImportRefused, match="the library deltalake does not read it"):
        says(output=tmp_path / "delta")


@pytest.mark.parametrize(
    "text, encoded, expected",
    [
        ("/in/a b", False, "/in/a b"),
        ("/in/../on/", False, "/on"),
        ("file:///in/a%20b", True, "/in/a b"),
        ("file:/in/a b", False, "/in/a b"),
        ("s3a://bucket/in/a%20b", True, "s3a://bucket/in/a b"),
    ],
)
def test_one_spelling_of_a_path(text: str, encoded: bool, expected: str) -> None:
    assert plain_name(text, encoded=encoded) == expected


def test_what_a_source_reads_by_its_options() -> None:
    assert names_of("kafka", {"subscribe": "a, b"}) == ("a", "b")
    assert names_of("kafka", {"assign": '{"a":[0,1]}'}) == ("a",)
    assert names_of("kafka", {"subscribepattern": "a.*"}) == ()
    assert names_of("files", {"path": "/in"}) == ("/in",)
    assert names_of("table", {"path": "/in"}) == ()
    assert plain_path(NO_SESSION, "file:///in") == Path("/in")
