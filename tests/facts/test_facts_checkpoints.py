"""The checkpoint directory of a stopped query: which files a restore needs, changed state partitions, purged batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dagster_checkpoints.spark.query.query_log import QueryLog
from dagster_checkpoints.spark.snapshots.query_snapshots import pin, prune, relocate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_STATE = "org.apache.spark.sql.execution.streaming.state"
PROVIDERS = {"RocksDB": f"{_STATE}.RocksDBStateStoreProvider", "HDFS-backed": f"{_STATE}.HDFSBackedStateStoreProvider"}
MINOR = tuple(int(part) for part in pyspark.__version__.split(".")[:2])


class Sums(StatefulProcessor):
    """The running sum of each key, and the number of its rows: a value and a map state."""

    def init(self, handle: Any) -> None:
        self.sum, self.seen = handle.getValueState("sum", "n long"), handle.getMapState("seen", "v long", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        total = self.sum.get()[0] if self.sum.exists() else 0
        for row in rows:
            total += row.v
            self.seen.updateValue((row.v,), (1,))
        self.sum.update((total,))
        yield Row(k=key[0], n=total, seen=len(list(self.seen.keys())))

    def close(self) -> None:
        pass


def outer_join(scene: Any) -> DataFrame:
    left = scene.stream("in").withWatermark("ts", "5 seconds")
    right = scene.stream("others").withWatermark("ts", "5 seconds").select(F.col("k").alias("other"), F.col("ts").alias("at"))
    near = F.expr("k = other AND at >= ts AND at <= ts + INTERVAL 30 SECONDS")
    return left.join(right, near, "leftOuter").select("k", "v", F.coalesce("other", F.lit("none")))


def sums(scene: Any) -> DataFrame:
    return scene.stream("in").groupBy("k").transformWithState(Sums(), "k string, n long, seen long", "update", "none")


def put(scene: Any, *minutes: int) -> None:
    for minute in minutes:
        second = 60 * minute
        scene.put("in", ("a", second + 1, 1), ("b", second + 2, minute), ("c", second + 3, 3))
        scene.put("others", ("a", second + 4, 10), ("b", second + 5, 10))


def snapshot(checkpoint: Path, target: Path) -> list[str]:
    """Restore a checkpoint directory, pruned to its newest batch, to another one. Returns its files."""
    batch = QueryLog(checkpoint).last_committed()
    pinned = target.with_name(f"{target.name} pinned")
    pin(checkpoint, batch, pinned)
    files = [file.as_posix() for file in prune(pinned, batch)]
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pinned / file, target / file)
    relocate(target, target)
    return files


@pytest.mark.parametrize(
    ("plan", "mode", "provider"),
    [(outer_join, "append", "RocksDB"), (outer_join, "append", "HDFS-backed"), (sums, "update", "RocksDB")],
    ids=["join in RocksDB", "join in HDFS-backed state", "transformWithState"],
)
def test_a_pruned_checkpoint_restores_exactly_and_needs_the_batch_before(scene: Any, plan: Any, mode: str, provider: str) -> None:
    with scene.setting("spark.sql.streaming.stateStore.providerClass", PROVIDERS[provider]):
        put(scene, 0, 1, 2)
        scene.run(plan(scene), scene.folder / "first", mode=mode)
        files = snapshot(scene.folder / "first", scene.folder / "restored")
        last = QueryLog(scene.folder / "first").last_committed()
        logs = {name for name in files if name.startswith(("offsets/", "commits/"))}
        assert logs == {f"{log}/{number}" for log in ("offsets", "commits") for number in (last - 1, last)}
        assert not [name for name in files if name.endswith(".crc")]
        shutil.copytree(scene.folder / "restored", scene.folder / "without")

        put(scene, 3, 4)
        expected = scene.run(plan(scene), scene.folder / "first", mode=mode)
        assert any(rows for _, rows in expected)
        assert scene.run(plan(scene), scene.folder / "restored", mode=mode) == expected

        (scene.folder / "without" / "offsets" / str(last - 1)).unlink()
        with pytest.raises(StreamingQueryException, match=f"{last - 1}"):
            scene.run(plan(scene), scene.folder / "without", mode=mode)


def test_a_log_of_files_needs_its_newest_whole_entries_only(scene: Any) -> None:
    """At each distance from a whole entry: no file is read again, and the query goes on for more than another whole entry."""
    with scene.setting("spark.sql.streaming.fileSource.log.compactInterval", "3"):
        for number in range(12):
            scene.put("in", ("a", number, number))
        scene.run(scene.stream("in"), scene.folder / "query")
        for number in range(12, 16):
            files = snapshot(scene.folder / "query", scene.folder / f"restored {number}")
            assert len([name for name in files if name.endswith(".compact")]) == 3 and "sources/0/0" not in files
            scene.put("in", ("a", number, number))
            expected = scene.run(scene.stream("in"), scene.folder / "query")
            assert len(expected) == 1 and expected == scene.run(scene.stream("in"), scene.folder / f"restored {number}")
        for number in range(16, 21):
            scene.put("in", ("a", number, number))
        expected = scene.run(scene.stream("in"), scene.folder / "query")
        for number in range(12, 16):
            found = scene.run(scene.stream("in"), scene.folder / f"restored {number}")
            assert [rows for _, rows in found][-5:] == [rows for _, rows in expected] and len(found) == 20 - number


def test_state_partitions_of_a_stopped_query_can_be_changed(scene: Any) -> None:
    put(scene, 0, 1, 2)
    scene.run(outer_join(scene), scene.folder / "one")
    shutil.copytree(scene.folder / "one", scene.folder / "three")
    last = QueryLog(scene.folder / "one").last_committed()
    assert stores(scene.folder / "three") == {"0"}
    manager = getattr(scene.spark, "_streamingCheckpointManager", None)
    if MINOR < (4, 2):
        assert manager is None, "this version can change state partitions: say so in docs/limits.md"
        return
    manager.repartition(str(scene.folder / "three"), 3)
    log = QueryLog(scene.folder / "three")
    assert log.last_committed() == last + 1, "the change is a batch"
    planned = (scene.folder / "three" / "offsets" / str(last + 1)).read_text().split("\n")[1]
    assert json.loads(planned)["conf"]["spark.sql.shuffle.partitions"] == "3"

    put(scene, 3, 4)
    expected = [rows for _, rows in scene.run(outer_join(scene), scene.folder / "one")]
    assert any(expected)
    assert [rows for _, rows in scene.run(outer_join(scene), scene.folder / "three")] == expected
    assert stores(scene.folder / "three") == {"0", "1", "2"}


def stores(checkpoint: Path) -> set[str]:
    """The state partitions of a query's only stateful operator."""
    return {folder.name for folder in (checkpoint / "state" / "0").iterdir() if folder.name.isdigit()}


def test_old_batches_are_purged(scene: Any) -> None:
    put(scene, *range(8))
    in_order = scene.setting("spark.sql.streaming.asyncLogPurge.enabled", "false")  # a purge is left out while another one runs
    with in_order, scene.setting("spark.sql.streaming.minBatchesToRetain", "2"):
        scene.run(scene.stream("in").groupBy("k").count(), scene.folder / "query", mode="update")
    for log in ("offsets", "commits"):
        assert [number for number in range(8) if (scene.folder / "query" / log / str(number)).exists()] == [5, 6, 7]
