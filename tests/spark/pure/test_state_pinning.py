"""Snapshots of a query's state directory, with hand-made files as RocksDB's provider and Spark's maintenance write them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.spark.errors import SnapshotError
from dagster_checkpoints.spark.query.query_log import PlannedBatch, QueryLog
from dagster_checkpoints.spark.snapshots import query_snapshots as snapshots
from dagster_checkpoints.spark.snapshots.pinned_queries import QueryPins, ReferencedQuery
from dagster_checkpoints.spark.snapshots.query_snapshots import pin, prune, relocate
from dagster_checkpoints.storage.state_files import HashCache, LocalSource, hash_file


class Query:
    """A checkpoint directory; version n of a state store is written by batch n - 1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = path / "state" / "0" / "0"
        self.write("metadata", "id")

    def write(self, name: str, text: str) -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def batches(self, *numbers: int, partitions: int = 1) -> None:
        offsets = json.dumps({"conf": {"spark.sql.shuffle.partitions": str(partitions)}})
        for number in numbers:
            for log, text in (("offsets", f"v1\n{offsets}"), ("commits", f"commits {number}")):
                self.write(f"{log}/{number}", text)
                self.write(f"{log}/.{number}.crc", "sum")

    def changelog(self, *versions: int) -> None:
        for version in versions:
            self.write(f"state/0/0/{version}.changelog", f"changes {version}")

    def whole(self, version: int, ssts: Iterable[str], logs: Iterable[str] = ()) -> None:
        metadata = {
            "sstFiles": [{"localFileName": name, "dfsSstFileName": name, "sizeBytes": 1} for name in ssts],
            "logFiles": [{"dfsLogFileName": name} for name in logs],
            "numKeys": 1,
        }
        with zipfile.ZipFile(self.store / f"{version}.zip", "w") as archive:
            archive.writestr("metadata", "v1\n" + json.dumps(metadata))
        for name in ssts:
            self.write(f"state/0/0/SSTs/{name}", name)
        for name in logs:
            self.write(f"state/0/0/logs/{name}", name)


@pytest.fixture
def query(tmp_path: Path) -> Query:
    made = Query(tmp_path / "checkpoint")
    made.batches(0, 1, 2, 3, 4)
    made.changelog(1, 2, 3, 4, 5)
    made.write("state/0/0/_metadata/schema", "schema")
    made.write("state/0/_metadata/metadata", "operator")
    made.write("sources/0/0", "files")
    return made


def take(query: Query, batch: int, target: Path) -> list[str]:
    pin(query.path, batch, target)
    return [file.as_posix() for file in prune(target, batch)]


def test_a_snapshot_holds_exactly_the_files_that_a_restore_needs(query: Query, tmp_path: Path) -> None:
    query.whole(2, ["old.sst"])
    query.whole(4, ["a.sst", "b.sst"], ["l.log"])
    query.changelog(6)  # of a batch that is running
    query.write("state/0/0/.5.changelog.tmp", "half")
    query.write("state/0/0/5.changelog.crc", "sum")  # by Spark 4.1
    assert take(query, 4, tmp_path / "snapshot") == sorted(
        [
            "commits/3",
            "commits/4",
            "metadata",
            "offsets/3",
            "offsets/4",
            "sources/0/0",
            "state/0/0/4.zip",
            "state/0/0/5.changelog",
            "state/0/0/SSTs/a.sst",
            "state/0/0/SSTs/b.sst",
            "state/0/0/_metadata/schema",
            "state/0/0/logs/l.log",
            "state/0/_metadata/metadata",
        ]
    )


def test_without_a_whole_version_every_changelog_from_the_first_is_needed(query: Query, tmp_path: Path) -> None:
    files = take(query, 4, tmp_path / "snapshot")
    assert [f for f in files if f.endswith(".changelog")] == [f"state/0/0/{n}.changelog" for n in range(1, 6)]


def test_a_whole_version_of_the_batch_itself_needs_no_changelog(query: Query, tmp_path: Path) -> None:
    query.whole(5, ["a.sst"])
    files = take(query, 4, tmp_path / "snapshot")
    assert "state/0/0/5.zip" in files
    assert not [f for f in files if f.endswith(".changelog")]


def test_the_first_batch_and_a_query_without_state(tmp_path: Path) -> None:
    query = Query(tmp_path / "checkpoint")
    query.batches(0)
    assert take(query, 0, tmp_path / "snapshot") == ["commits/0", "metadata", "offsets/0"]


def test_a_missing_changelog_is_named(query: Query, tmp_path: Path) -> None:
    (query.store / "3.changelog").unlink()
    with pytest.raises(SnapshotError, match=r"version 5 needs the changes of version\(s\) \[3\] after version 0"):
        take(query, 4, tmp_path / "snapshot")
    query.whole(3, ["a.sst"])  # then the older changes are not needed
    assert "state/0/0/3.zip" in take(query, 4, tmp_path / "again")


def test_a_missing_sst_is_named_unless_only_an_older_version_needs_it(query: Query, tmp_path: Path) -> None:
    query.whole(2, ["old.sst"])
    query.whole(4, ["a.sst", "b.sst"])
    (query.store / "SSTs" / "old.sst").unlink()  # Spark's maintenance, while it deletes files
    assert "state/0/0/SSTs/a.sst" in take(query, 4, tmp_path / "snapshot")
    (query.store / "SSTs" / "b.sst").unlink()
    with pytest.raises(SnapshotError, match=r"version 4 names \['b.sst'\], which do not exist"):
        take(query, 4, tmp_path / "again")


def test_a_file_that_vanishes_while_it_is_linked_is_no_error_unless_it_is_needed(
    query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.whole(4, ["a.sst"])
    real = os.link
    gone = {"1.changelog"}

    def link(source: Path, target: Path) -> None:
        if Path(source).name in gone:
            raise FileNotFoundError(source)
        real(source, target)

    monkeypatch.setattr(snapshots.os, "link", link)
    assert "state/0/0/4.zip" in take(query, 4, tmp_path / "snapshot")
    gone.add("5.changelog")
    with pytest.raises(SnapshotError, match="5"):
        take(query, 4, tmp_path / "again")
    gone.add("4")
    with pytest.raises(FileNotFoundError):
        pin(query.path, 4, tmp_path / "third")


def test_files_are_copied_where_they_cannot_be_linked(query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: Path, target: Path) -> None:
        if not Path(source).exists():
            raise FileNotFoundError(source)
        if not Path(target).parent.exists():
            raise FileNotFoundError(target)
        raise OSError("cross-device link")

    monkeypatch.setattr(snapshots.os, "link", no_links)
    files = take(query, 4, tmp_path / "snapshot")
    assert {f"state/0/0/{n}.changelog" for n in range(1, 6)} < set(files)
    assert (tmp_path / "snapshot" / "state/0/0/1.changelog").read_text() == "changes 1"


def test_a_copy_is_not_taken_for_a_deleted_one_that_had_its_inode(
    query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of one size, written in one tick of the file system's clock; the kernel gives the inode of a deleted copy again."""

    def no_links(source: Path, target: Path) -> None:
        if not Path(target).parent.exists():
            raise FileNotFoundError(target)
        raise PermissionError("a file of another user's, with protected_hardlinks")

    monkeypatch.setattr(snapshots.os, "link", no_links)
    other = tmp_path / "other instance"
    shutil.copytree(query.path, other)
    for number in range(1, 6):
        (other / f"state/0/0/{number}.changelog").write_text(f"another {number}")
    cache = HashCache()
    for number in range(20):
        checkpoint, pinned = (query.path, other)[number % 2], tmp_path / f"snapshot-{number}"
        for file in checkpoint.rglob("*.changelog"):
            os.utime(file, ns=(10**18, 10**18))
        pin(checkpoint, 4, pinned)
        for file in checkpoint.rglob("*.changelog"):
            copy = pinned / file.relative_to(checkpoint)
            assert hash_file(cache, LocalSource(copy)).sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.rmtree(pinned)


KEYED = 'v2{"type":"struct","fields":[{"name":"id","type":"long"}]}'
SCHEMAS = {
    "keyed": KEYED,
    "all rows": 'v2{"type":"struct","fields":[]}',
    "limit": 'v2{"type":"struct","fields":[{"name":"key","type":"void","nullable":true}]}',
}


JOIN = ("left-keyToNumValues", "left-keyWithIndexToValue", "right-keyToNumValues", "right-keyWithIndexToValue")
"""The state stores of a join of two streams."""


@pytest.mark.parametrize(
    ("schema", "stores", "missing"),
    [
        ("keyed", "0 1 2", None),
        ("keyed", "0 2", ["state/0/1"]),
        ("keyed", "1 2", ["state/0/0"]),
        ("keyed", "0", ["state/0/1", "state/0/2"]),  # the last ones
        ("keyed", "0/left 0/right 1/left 1/right 2/left 2/right", None),
        ("keyed", "0/left 0/right 1/left 2/left 2/right", ["state/0/1/right"]),
        ("keyed", f"0/{JOIN[0]} 1/{JOIN[0]} 2/{JOIN[0]}", [f"state/0/0/{name}" for name in JOIN[1:]]),
        ("keyed", " ".join(f"{partition}/{name}" for partition in range(3) for name in JOIN), None),
        ("all rows", "0", None),  # an operator without a key has one partition
        ("limit", "0", None),
        ("all rows", "0 2", ["state/0/1"]),
    ],
)
def test_a_state_store_without_a_version_is_refused(tmp_path: Path, schema: str, stores: str, missing: list[str] | None) -> None:
    """Its files were deleted after the batch: Spark would not go on from the checkpoint."""
    query = Query(tmp_path / "checkpoint")
    query.batches(0, partitions=3)
    query.write("state/0/0/_metadata/schema", SCHEMAS[schema])
    for store in stores.split():
        query.write(f"state/0/{store}/1.changelog", "changes")
    if missing is None:
        assert {f"state/0/{store}/1.changelog" for store in stores.split()} <= set(take(query, 0, tmp_path / "pinned"))
        return
    with pytest.raises(SnapshotError, match=rf"of 3 partitions, found none in {re.escape(str(missing))}: "):
        take(query, 0, tmp_path / "pinned")
    found: Any = {file.relative_to(query.path).as_posix(): None for file in query.path.rglob("*") if file.is_file()}
    if "0" not in stores.split():  # the schema is not looked at
        place: Any = "hdfs://n/q"
        with pytest.raises(SnapshotError, match=r"^hdfs://n/q: expected a version of each state store"):
            ReferencedQuery(place, 0, query.path, found).files()


def test_later_batches_do_not_change_a_pinned_snapshot(query: Query, tmp_path: Path) -> None:
    query.whole(4, ["a.sst"])
    files = take(query, 4, tmp_path / "snapshot")
    for file in query.store.rglob("*"):
        if file.is_file():
            file.unlink()
    assert "state/0/0/SSTs/a.sst" in files
    assert (tmp_path / "snapshot/state/0/0/SSTs/a.sst").read_text() == "a.sst"
    assert (tmp_path / "snapshot/commits/4").read_text() == "commits 4"


def test_an_operator_with_another_number_is_described_under_it(tmp_path: Path) -> None:
    """Operator 2 of a query has become operator 0 of one of its parts: its files were renamed, not what is inside them."""
    schema = "_stateSchema/default/0_5688b15e"
    folder = tmp_path / "restored/state"
    first, second = folder / "0/_metadata/v2/3", folder / "1/_metadata/metadata"
    for file in (first, second):
        file.parent.mkdir(parents=True)
    store = {"storeName": "default", "stateSchemaFilePaths": [f"file:/old/checkpoint/state/2/{schema}"]}
    first.write_text("v2\n" + json.dumps({"operatorInfo": {"operatorId": 2, "operatorName": "tws"}, "stateStoreInfo": [store]}))
    plain = {"storeName": "default", "numPartitions": 2}
    second.write_text("v1\n" + json.dumps({"operatorInfo": {"operatorId": 3, "operatorName": "d"}, "stateStoreInfo": [plain]}))
    relocate(tmp_path / "restored", tmp_path / "work")
    store["stateSchemaFilePaths"] = [f"file://{tmp_path}/work/state/0/{schema}"]
    found = [json.loads(file.read_text().split("\n")[1]) for file in (first, second)]
    assert found[0] == {"operatorInfo": {"operatorId": 0, "operatorName": "tws"}, "stateStoreInfo": [store]}
    assert found[1] == {"operatorInfo": {"operatorId": 1, "operatorName": "d"}, "stateStoreInfo": [plain]}


def test_a_part_of_a_query_begins_with_new_sources(tmp_path: Path) -> None:
    for folder in ("offsets", "commits"):
        (tmp_path / folder).mkdir()
    for batch in (6, 7):
        conf = json.dumps({"batchWatermarkMs": 1000 * batch})
        (tmp_path / f"offsets/{batch}").write_text(f'v1\n{conf}\n{{"logOffset": {batch}}}\n-')
        (tmp_path / f"offsets/.{batch}.crc").write_text("of the old content")
        (tmp_path / f"commits/{batch}").write_text('v1\n{"nextBatchWatermarkMs": 8000}')
    (tmp_path / "metadata").write_text('{"id": "of the whole query"}')
    log = QueryLog(tmp_path)
    log.begin_sources(3)
    assert [log.planned(batch) for batch in (6, 7)] == [PlannedBatch(b, 1000 * b, (None, None, None)) for b in (6, 7)]
    assert (log.last_committed(), log.next_watermark(7)) == (7, 8000)
    assert json.loads((tmp_path / "metadata").read_text())["id"] != "of the whole query"
    assert not list(tmp_path.rglob("*.crc"))


def test_the_paths_of_schemas_are_corrected_in_a_restored_directory(tmp_path: Path) -> None:
    """Without the correction a restore would look in the directory of the original query, which does not exist any more."""
    schema = "state/0/_stateSchema/default/0_5688b15e"
    metadata = tmp_path / "restored/state/0/_metadata/v2/0"
    metadata.parent.mkdir(parents=True)
    store = {"storeName": "default", "numPartitions": 2, "stateSchemaFilePaths": [f"file:/old/state/place/checkpoint/{schema}"]}
    metadata.write_text("v2\n" + json.dumps({"operatorInfo": {"operatorId": 0}, "stateStoreInfo": [store]}))
    relocate(tmp_path / "restored", tmp_path / "work")
    version, text = metadata.read_text().split("\n")
    assert version == "v2"
    moved = {**store, "stateSchemaFilePaths": [f"file://{tmp_path}/work/{schema}"]}
    assert json.loads(text) == {"operatorInfo": {"operatorId": 0}, "stateStoreInfo": [moved]}
    assert [file.name for file in metadata.parent.iterdir()] == ["0"]


class Pins:
    """The pins of a query, and the directories that they have now."""

    def __init__(self, query: Query, folder: Path) -> None:
        self.folder = folder
        self.pins = QueryPins(query.path, folder)

    def directories(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []


@pytest.fixture
def pins(query: Query, tmp_path: Path) -> Pins:
    return Pins(query, tmp_path / "pins")


def test_checkpoints_without_a_new_batch_share_its_pinned_files(query: Query, pins: Pins) -> None:
    first = pins.pins.pin(4)
    files = first.files()
    first.release()
    for store in query.store.iterdir():  # Spark's maintenance may delete what later versions no longer need
        shutil.rmtree(store) if store.is_dir() else store.unlink()
    again = pins.pins.pin(4)
    assert again.files() is files and pins.directories() == ["4-0"]
    assert all(source.sha256() or source.identity() for source in files.values()), "the files are still there"


def test_a_pinned_batch_stays_until_the_last_checkpoint_that_stores_it_is_done(query: Query, pins: Pins) -> None:
    stored_slowly, also = pins.pins.pin(4), pins.pins.pin(4)
    query.batches(5)
    query.changelog(6)
    newer = pins.pins.pin(5)
    assert pins.directories() == ["4-0", "5-1"]
    stored_slowly.release()
    assert pins.directories() == ["4-0", "5-1"]
    assert "commits/4" in also.files() and "commits/5" in newer.files()
    also.release()
    newer.release()
    assert pins.directories() == ["5-1"], "kept for the checkpoints that follow"


def test_files_that_could_not_be_stored_are_pinned_again(query: Query, pins: Pins) -> None:
    query.whole(4, ["a.sst"])
    (query.store / "SSTs/a.sst").unlink()
    declined = pins.pins.pin(4)
    with pytest.raises(SnapshotError, match=r"version 4 names \['a.sst'\]"):
        declined.files()
    declined.release(failed=True)
    query.whole(4, ["a.sst"])
    repaired = pins.pins.pin(4)
    assert "state/0/0/SSTs/a.sst" in repaired.files() and pins.directories() == ["4-1"]


@pytest.mark.parametrize("gone", ["offsets/4", "state/0/0/3.changelog"])
def test_a_batch_that_cannot_be_pinned_leaves_nothing(query: Query, pins: Pins, gone: str) -> None:
    (query.path / gone).unlink()
    with pytest.raises((FileNotFoundError, SnapshotError)):
        pins.pins.pin(4)
    assert pins.directories() == []


@pytest.mark.parametrize(
    ("operators", "deleted", "missing"),
    [
        (0, "state", []),  # it is not known that it has any
        (1, "nothing", []),
        (1, "state", ["state/0"]),
        (2, "nothing", []),
        (2, "state/1", ["state/1"]),
        (2, "state", ["state/0", "state/1"]),
        (3, "nothing", ["state/2"]),
    ],
)
def test_the_state_of_each_stateful_operator_is_there(
    query: Query, pins: Pins, operators: int, deleted: str, missing: list[str]
) -> None:
    """Deleted as a whole, it leaves no trace in the directory: a checkpoint without it could not be restored."""
    for version in range(1, 6):
        query.write(f"state/1/0/{version}.changelog", "changes")
    shutil.rmtree(query.path / deleted, ignore_errors=True)
    pinned = pins.pins.pin(4, operators)
    found: Any = {file.relative_to(query.path).as_posix(): None for file in query.path.rglob("*") if file.is_file()}
    remote = ReferencedQuery(query.path, 4, query.path, found, operators)  # type: ignore[arg-type]
    if not missing:
        assert {file for file in pinned.files() if file.startswith("state/1/")} == {file for file in found if "state/1/" in file}
        return
    said = rf"the state of {operators} stateful operators, found no version in {re.escape(str(missing))}"
    for each in (pinned, remote):
        with pytest.raises(SnapshotError, match=said):
            each.files()


@pytest.mark.parametrize(
    ("names", "needed"),
    [
        ("0 1 2", "0 1 2"),
        ("0 8 9.compact 10 19.compact 20", "0 8 9.compact 10 19.compact 20"),
        ("0 8 9.compact 10 19.compact 20 29.compact", "9.compact 10 19.compact 20 29.compact"),
        ("8 9.compact 10 18 19.compact 20 29.compact 30 39.compact", "19.compact 20 29.compact 30 39.compact"),
        ("3.compact 4.compact 5.compact 6.compact", "4.compact 5.compact 6.compact"),  # an interval of 1
        ("0 9.compact 19.compact 29.compact offsets", "9.compact 19.compact 29.compact offsets"),  # another source's file
        ("own/0.compact own/1.compact own/2.compact own/3.compact", "own/0.compact own/1.compact own/2.compact own/3.compact"),
    ],
)
def test_older_entries_of_a_log_of_files_are_not_kept(query: Query, tmp_path: Path, names: str, needed: str) -> None:
    """Spark keeps what a whole entry replaces for ten minutes: hundreds of files, at a micro-batch a second."""
    for name in names.split():
        query.write(f"sources/1/{name}", "files")
    files = take(query, 4, tmp_path / "snapshot")
    assert [file for file in files if file.startswith("sources/")] == sorted(
        ["sources/0/0", *(f"sources/1/{name}" for name in needed.split())]
    )


def test_what_spark_retains_for_other_batches_is_not_linked(query: Query, tmp_path: Path) -> None:
    """A hundred batches of each state partition, by default: to link them all would hold the query up at each checkpoint."""
    query.whole(2, ["old.sst"])
    query.whole(4, ["a.sst"], ["l.log"])
    query.write("state/0/0/SSTs/newer.sst", "of a version that is not written yet")
    for entry in ("0", *(f"{number}9.compact" for number in ("", 1, 2, 3)), "30"):
        query.write(f"sources/1/{entry}", "files")
    files = take(query, 4, tmp_path / "snapshot")
    pinned = tmp_path / "snapshot"
    assert files == sorted(file.relative_to(pinned).as_posix() for file in pinned.rglob("*") if file.is_file())


def test_a_whole_version_that_replaces_others_meanwhile_is_taken(
    query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.whole(2, ["old.sst"])
    real = os.link

    def link(source: Path, target: Path) -> None:
        if Path(source).name == "3.changelog":  # Spark's maintenance, between the look at the directory and the link
            query.whole(4, ["new.sst"])
            for name in ("2.zip", "SSTs/old.sst", *(f"{version}.changelog" for version in range(1, 5))):
                (query.store / name).unlink(missing_ok=True)
        real(source, target)

    monkeypatch.setattr(snapshots.os, "link", link)
    files = take(query, 4, tmp_path / "snapshot")
    assert [file for file in files if file.startswith("state/0/0/") and "_" not in file] == [
        *("state/0/0/4.zip", "state/0/0/5.changelog", "state/0/0/SSTs/new.sst"),
    ]


def test_a_query_awaits_the_commit_of_the_batch_that_it_has_processed(query: Query) -> None:
    log = QueryLog(query.path)
    assert (log.last_committed(), log.awaits_commit) == (4, False)
    log.processed(5)
    assert log.awaits_commit
    query.batches(5)
    assert not log.awaits_commit


def test_a_source_that_is_read_twice_has_one_log_and_a_topic_may_have_any_name(tmp_path: Path) -> None:
    query = Query(tmp_path / "checkpoint")
    query.batches(3, 4)
    query.write("offsets/4", 'v1\n{}\n{"logOffset":1}\n{"logOffset":1}\n{"logOffset":{"0":7}}')
    query.write("sources/1/0", "files")
    query.write("sources/1/1", "files")
    assert {"sources/1/0", "sources/1/1"} <= set(take(query, 4, tmp_path / "pinned"))
    query.write("offsets/4", 'v1\n{}\n{"logOffset":2}\n{"logOffset":1}\n-')
    with pytest.raises(SnapshotError, match=r"sources/0: .*found that \[0, 1, 2\] are missing"):
        take(query, 4, tmp_path / "again")


@pytest.mark.parametrize(
    ("entries", "missing"),
    [
        ("0 1 2 3", None),
        ("0 1 2 3 4", None),  # of the batch that is being planned
        ("2.compact 3", None),
        ("0 1 2 2.compact 3 4.compact", None),
        ("0 1 2 4", [3]),
        ("2 3", [0, 1]),
        ("4.compact", [0, 1, 2, 3]),
        ("2.compact", [3]),
        ("", [0, 1, 2, 3]),
    ],
)
def test_a_log_of_read_files_with_a_gap_is_refused(tmp_path: Path, entries: str, missing: list[int] | None) -> None:
    """Spark would not go on from it, or would read files again."""
    query = Query(tmp_path / "checkpoint")
    query.batches(3, 4)
    query.write("offsets/4", 'v1\n{}\n{"logOffset":3}\n-\n{"logOffset":-1}\n{"topic":{"0":7}}')
    query.write("sources/3/0", "Kafka")
    for entry in entries.split():
        query.write(f"sources/0/{entry}", "files")
    if missing is None:
        assert {f"sources/0/{entry}" for entry in entries.split()} <= set(take(query, 4, tmp_path / "pinned"))
    else:
        with pytest.raises(SnapshotError, match=rf"sources/0: .*found that {re.escape(str(missing))} are missing"):
            take(query, 4, tmp_path / "pinned")
        place: Any = "hdfs://n/q"
        found: Any = {f"sources/0/{entry}": None for entry in entries.split()}
        with pytest.raises(SnapshotError, match=r"^hdfs://n/q/sources/0: "):
            ReferencedQuery(place, 4, query.path, found).files()
