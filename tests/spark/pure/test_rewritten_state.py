"""State that Spark cannot write again is refused before it is. Without Spark."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_checkpoints.spark.session.spark_session import ROCKSDB
from dagster_checkpoints.spark.snapshots.moved_state import check_movable
from dagster_checkpoints.spark.snapshots.rewritten_state import StateOfBatch, repartition_state
from dagster_checkpoints.state.errors import InstancesChanged, StatePartitionsChanged

SPARK: Any = SimpleNamespace(version="4.3.0")


def state_of(folder: Path, operator: str, **settings: str) -> StateOfBatch:
    """The logs and the description of a query with one stateful operator."""
    conf = {"spark.sql.shuffle.partitions": "2", "spark.sql.streaming.stateStore.providerClass": ROCKSDB, **settings}
    described = {"operatorInfo": {"operatorId": 0, "operatorName": operator}}
    for path, text in (
        ("offsets/3", f"v1\n{json.dumps({'batchWatermarkMs': 0, 'conf': conf})}\n{{}}"),
        ("state/0/_metadata/metadata", f"v1\n{json.dumps(described)}"),
    ):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)
    return StateOfBatch(folder, 3)


def test_joins_whose_rows_rocksdb_merges_are_not_written_again(tmp_path: Path) -> None:
    """Spark would write them without an error, and fail at the first match."""
    version_4 = {"spark.sql.streaming.join.stateFormatVersion": "4"}
    join = state_of(tmp_path / "join", "symmetricHashJoin", **version_4)
    found = r"the query: expected .* format 2 or 3, found spark\.sql\.streaming\.join\.stateFormatVersion = 4"
    with pytest.raises(InstancesChanged, match=rf"{found}.*cannot move to other instances: give the stage the same ones"):
        check_movable(SPARK, "the query", join)
    with pytest.raises(StatePartitionsChanged, match=rf"{found}.*keeps its 2 partitions: leave out repartition_state"):
        repartition_state(SPARK, "the query", join, StateOfBatch(tmp_path / "new", 3))
    check_movable(SPARK, "the query", state_of(tmp_path / "window", "stateStoreSave", **version_4))
    version_3 = {"spark.sql.streaming.join.stateFormatVersion": "3"}
    check_movable(SPARK, "the query", state_of(tmp_path / "other", "symmetricHashJoin", **version_3))
