"""IcebergSink with a key, in tables that only Iceberg has. What it promises beside: `test_lake_by_key.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.manifest import ManifestContent
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import StringType

from dagster_checkpoints.sinks import (
    SinkColumnsMismatch,
)
from tests.sinks.iceberg_lake import NAME, Lake
from tests.sinks.test_lake_by_key import MOMENT, rows

KEY = {"key": "k"}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def test_rows_of_other_programs_are_replaced_also_after_columns_were_renamed_and_dropped(lake: Lake) -> None:
    lake.path.mkdir()
    lake.catalog.create_namespace("shops")
    first = {"id": pa.array([1, 2], pa.int64()), "gone": ["x", "y"], "v": ["a", "b"]}
    lake.catalog.create_table(NAME, pa.table(first).schema).append(pa.table(first))
    with lake.table.update_schema(allow_incompatible_changes=True) as update:
        update.rename_column("id", "k")
        update.delete_column("gone")
    with lake.table.update_schema() as update:
        update.add_column("gone", StringType())
    lake.append(k=pa.array([3, 4], pa.int64()), gone=pa.array(["new", "new"]), v=pa.array(["c", "d"]))
    sink = lake.opened(settings=KEY)
    sink.commit(
        lake.staged(sink, 1, k=pa.array([2, 4, 5], pa.int64()), gone=pa.array([None, "z", "z"]), v=pa.array(["B", "D", "E"]))
    )
    assert lake.sorted_rows("k", "gone", "v") == [(1, None, "a"), (2, None, "B"), (3, "new", "c"), (4, "z", "D"), (5, "z", "E")]
    with lake.table.update_schema(allow_incompatible_changes=True) as update:
        update.rename_column("v", "value")
    again = lake.opened(settings=KEY, attempt="a2")
    again.commit(lake.staged(again, 2, k=pa.array([1, 5], pa.int64()), gone=pa.array(["q", "q"]), value=pa.array(["A", "e"])))
    assert lake.sorted_rows("k", "gone", "value") == [
        (1, "q", "A"),
        (2, None, "B"),
        (3, "new", "c"),
        (4, "z", "D"),
        (5, "q", "e"),
    ]


def test_nested_values_of_rows_that_remain_come_back(lake: Lake) -> None:
    def nested(*keys: int) -> dict[str, Any]:
        kind = pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())})
        at = [MOMENT] * len(keys)
        return {
            "k": pa.array(keys, pa.int64()),
            "v": pa.array([{"a": k, "b": ["x", None]} for k in keys], kind),
            "m": pa.array([[("y", k)] for k in keys], pa.map_(pa.string(), pa.int64())),
            "at": pa.array(at, pa.timestamp("us", "UTC")),
        }

    sink = lake.opened(settings=KEY)
    sink.commit(lake.staged(sink, 1, **nested(1, 2, 3)))
    sink.commit(lake.staged(sink, 2, **nested(2)))
    found = lake.table.scan().to_arrow().sort_by("k").to_pylist()
    assert found == pa.table(nested(1, 2, 3)).to_pylist()


def test_tables_in_which_files_cannot_be_replaced_are_refused(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = lake.opened(settings=KEY)
    sink.commit(lake.staged(sink, 1, **rows((1, "a"), (2, "b"))))
    text = lake.staged(sink, 2, **rows((1, "A")))
    with lake.table.update_spec() as spec:
        spec.add_field("v", IdentityTransform(), "v")
    with pytest.raises(SinkColumnsMismatch, match="files of another partitioning"):
        lake.opened(settings=KEY, attempt="a2")
    with pytest.raises(SinkColumnsMismatch, match=r"expected partition columns \[\], found \['v'\]"):
        sink.commit(text)
    with lake.table.update_spec() as spec:
        spec.remove_field("v")
    monkeypatch.setattr("pyiceberg.manifest.ManifestFile.content", property(lambda self: ManifestContent.DELETES))
    with pytest.raises(SinkColumnsMismatch, match="merge-on-read"):
        lake.opened(settings=KEY, attempt="a2")
    lake.opened(attempt="a2")


def test_rows_are_replaced_in_one_snapshot_which_names_its_checkpoint(lake: Lake) -> None:
    """So that a reader never finds a key missing, nor twice."""
    sink = lake.opened(settings=KEY)
    sink.commit(lake.staged(sink, 1, **rows((1, "a"), (2, "b"), (3, "c"))))
    before = lake.table.snapshots()
    done = sink.commit(lake.staged(sink, 2, **rows((2, "B"), (4, "d"))))
    *earlier, new = lake.table.snapshots()
    assert earlier == before
    assert done is not None and (done.rows, done.version) == (2, str(new.snapshot_id))
    assert new.summary is not None and new.summary["dagster-checkpoints.checkpoint"] == "2"
    assert lake.sorted_rows("k", "v") == [(1, "a"), (2, "B"), (3, "c"), (4, "d")]
