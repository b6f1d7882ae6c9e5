"""IcebergSink with a key: a row replaces the row with its key, once, in a table that other programs may write to and change."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.manifest import ManifestContent
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import StringType

from dagster_checkpoints.pipeline import Pipeline, StageContext, stage, unbounded_source
from dagster_checkpoints.pipeline.errors import OutputModeError
from dagster_checkpoints.sinks import (
    IcebergSink,
    SinkCannotTakeBack,
    SinkColumnsMismatch,
    SinkFenced,
    SinkHoldsEarlierRows,
    SinkPathInUse,
    SinkRowsRefused,
    SinkUnavailable,
)
from tests.sinks.iceberg_lake import NAME, Lake
from tests.sinks.lake_rows import BATCH, context

KEY = {"key": "k"}
DAY = date(2024, 1, 1)
MOMENT = datetime(2024, 3, 1, 12, 30, 45, 123456, tzinfo=UTC)


def columns(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"k": pa.array([k for k, _ in pairs], pa.int64()), "v": pa.array([v for _, v in pairs])}


def rows(lake: Lake, *names: str) -> list[tuple[Any, ...]]:
    found = lake.table.scan().to_arrow()
    return sorted((tuple(row.values()) for row in found.select(names or found.column_names).to_pylist()), key=repr)


def files(lake: Lake) -> set[str]:
    return {task.file.file_path for task in lake.table.scan().plan_files()}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


# What readers see


def test_a_row_replaces_the_row_with_its_key_in_one_snapshot(lake: Lake) -> None:
    sink = lake.opened(settings=KEY)
    sink.start_new()
    sink.commit(lake.staged(sink, 1, **columns((1, "a"), (2, "b"), (3, "c"))))
    snapshots = lake.snapshots()
    done = sink.commit(lake.staged(sink, 2, **columns((2, "B"), (4, "d"))))
    assert rows(lake) == [(1, "a"), (2, "B"), (3, "c"), (4, "d")]
    snapshot = lake.table.current_snapshot()
    assert snapshot is not None and snapshot.summary is not None
    assert (done.rows, done.version, lake.snapshots()) == (2, str(snapshot.snapshot_id), snapshots + 1)
    assert snapshot.summary["dagster-checkpoints.checkpoint"] == "2"
    sink.commit(lake.staged(sink, 3, **columns((1, "x"), (3, "y"), (2, "z"), (4, "w"), (4, "W"))))
    assert rows(lake) == [(1, "x"), (2, "z"), (3, "y"), (4, "W")]
    assert not sink.appends


def test_files_without_a_key_of_the_transaction_stay_as_they_are(lake: Lake) -> None:
    sink = lake.opened(settings=KEY)
    for number, begin in enumerate((0, 100, 200)):
        sink.commit(lake.staged(sink, number + 1, **columns(*((n, "old") for n in range(begin, begin + 100, 2)))))
    before = files(lake)
    sink.commit(lake.staged(sink, 9, **columns((151, "odd"), (100, "new"))))
    after = files(lake)
    assert (len(before & after), len(after)) == (2, 4)
    assert len(rows(lake)) == 151 and {(100, "new"), (151, "odd")} <= {*rows(lake)}


KEYS: dict[str, tuple[Any, Any]] = {
    "long": (pa.array([1, 2, 3], pa.int64()), pa.array([3, 4], pa.int64())),
    "string": (pa.array(["a", "é" * 100, "é"]), pa.array(["é" * 100, "b"])),
    "boolean": (pa.array([True]), pa.array([True, False])),
    "binary": (pa.array([b"\x00", b"\xff" * 40]), pa.array([b"\xff" * 40, b""])),
    "date": (pa.array([date(1, 1, 1), date(9999, 12, 31)]), pa.array([date(9999, 12, 31), DAY])),
    "decimal": (
        pa.array([Decimal("1.50"), Decimal("2.25")], pa.decimal128(10, 2)),
        pa.array([Decimal("2.25"), Decimal("0")], pa.decimal128(10, 2)),
    ),
    "timestamptz": (
        pa.array([MOMENT, MOMENT + timedelta(microseconds=1)], pa.timestamp("us", "UTC")),
        pa.array([MOMENT + timedelta(microseconds=1), MOMENT - timedelta(days=1)], pa.timestamp("us", "UTC")),
    ),
    "timestamp": (
        pa.array([MOMENT.replace(tzinfo=None)], pa.timestamp("us")),
        pa.array([MOMENT.replace(tzinfo=None), datetime(1, 1, 1)], pa.timestamp("us")),
    ),
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_all_types_are_found_also_in_partitions(lake: Lake, tmp_path: Path, kind: str) -> None:
    old, new = KEYS[kind]
    expected = dict.fromkeys(old.to_pylist(), 0) | dict.fromkeys(new.to_pylist(), 1)
    for place, partition_by in ((lake, None), (Lake(tmp_path / "partitioned"), "k")):
        if kind == "binary" and partition_by:
            continue  # no type of a partition column
        sink = place.opened(settings={**KEY, "partition_by": partition_by})
        sink.commit(lake.staged(sink, 1, k=old, v=pa.array([0] * len(old))))
        sink.commit(lake.staged(sink, 2, k=new, v=pa.array([1] * len(new))))
        assert rows(place, "k", "v") == sorted(expected.items(), key=repr)


def test_any_sequence_of_checkpoints_leaves_the_newest_row_of_each_key(tmp_path: Path, chance: random.Random) -> None:
    r = chance
    for number in range(4):
        lake = Lake(tmp_path / str(number))
        by_both = r.random() < 0.5
        settings = {"key": ["k", "p"] if by_both else "k", "partition_by": r.choice([None, "p"])}
        sink = lake.opened(settings=settings)
        model: dict[Any, int] = {}
        for step in range(1, 9):
            for part in range(r.randint(1, 2)):
                batch = [(r.randrange(40), r.choice("xyz"), step * 1000 + n) for n in range(r.randint(1, 20))]
                data = dict(zip("kpv", map(pa.array, zip(*batch, strict=True)), strict=True))
                sink.write(BATCH, [lake.segment(**data)], step * 10 + part)
                for k, p, v in batch:
                    if not by_both:
                        model = {key: value for key, value in model.items() if key[0] != k}
                    model[k, p] = v
            transaction = sink.pre_commit(step)
            assert transaction is not None
            sink.commit(transaction)
            if r.random() < 0.2:  # another program rewrites the table
                lake.table.overwrite(lake.table.scan().to_arrow())
            if r.random() < 0.3:
                sink = lake.opened(settings=settings, attempt=f"after{step}")
                sink.recover([], restored=step)
            assert rows(lake, "k", "p", "v") == sorted(((*key, v) for key, v in model.items()), key=repr)


# Other programs


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
    assert rows(lake, "k", "gone", "v") == [(1, None, "a"), (2, None, "B"), (3, "new", "c"), (4, "z", "D"), (5, "z", "E")]
    with lake.table.update_schema(allow_incompatible_changes=True) as update:
        update.rename_column("v", "value")
    again = lake.opened(settings=KEY, attempt="a2")
    again.commit(lake.staged(again, 2, k=pa.array([1, 5], pa.int64()), gone=pa.array(["q", "q"]), value=pa.array(["A", "e"])))
    assert rows(lake, "k", "gone", "value") == [(1, "q", "A"), (2, None, "B"), (3, "new", "c"), (4, "z", "D"), (5, "q", "e")]


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


@pytest.mark.parametrize("what", ["append", "overwrite", "delete"])
def test_a_commit_that_another_program_overtakes_is_planned_again(lake: Lake, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = lake.opened(settings=KEY)
    sink.commit(lake.staged(sink, 1, **columns((1, "a"), (2, "b"))))
    sink.commit(lake.staged(sink, 2, **columns((3, "c"), (4, "d"))))
    text = lake.staged(sink, 3, **columns((1, "A"), (3, "C"), (5, "E")))
    acts = {
        "append": lambda: lake.append(**columns((5, "e"), (6, "f"))),
        "overwrite": lambda: lake.table.overwrite(lake.table.scan().to_arrow()),
        "delete": lambda: lake.table.delete("k = 2"),
    }
    lake.overtake(monkeypatch, acts[what])
    sink.commit(text)
    others = {"append": [(2, "b"), (4, "d"), (6, "f")], "delete": [(4, "d")]}
    assert rows(lake) == sorted([(1, "A"), (3, "C"), (5, "E"), *others.get(what, [(2, "b"), (4, "d")])], key=repr)
    used = {Path(file.removeprefix("file://")) for file in files(lake)}
    assert [file for file in lake.data_files() if file.parent.name == "remainders" and file not in used] == []


def test_instances_commit_to_one_table_and_a_late_owner_does_not(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (lake.opened(settings=KEY, index=index, parallelism=2) for index in (0, 1))
    one.commit(lake.staged(one, 1, **columns((1, "a"), (2, "b"))))
    other.commit(lake.staged(other, 1, **columns((3, "c"), (4, "d"))))
    first, second = lake.staged(one, 2, **columns((1, "A"), (3, "moved"))), lake.staged(other, 2, **columns((4, "D")))
    lake.overtake(monkeypatch, lambda: other.commit(second))
    one.commit(first)
    assert rows(lake) == [(1, "A"), (2, "b"), (3, "moved"), (4, "D")]
    late = lake.staged(one, 3, **columns((1, "late")))
    lake.overtake(monkeypatch, lambda: lake.opened(settings=KEY, epoch=2, attempt="newer").recover([]))
    with pytest.raises(SinkFenced, match=r"epoch 1.*epoch 2"):
        one.commit(late)
    assert rows(lake) == [(1, "A"), (2, "b"), (3, "moved"), (4, "D")]


def test_what_an_interrupted_commit_has_written_is_deleted(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = lake.opened(settings=KEY)
    sink.commit(lake.staged(sink, 1, **columns((1, "a"), (2, "b"))))
    text = lake.staged(sink, 2, **columns((1, "A")))

    def dies() -> None:
        raise KeyboardInterrupt

    lake.overtake(monkeypatch, dies)
    with pytest.raises(KeyboardInterrupt):
        sink.commit(text)
    (left,) = (file for file in lake.data_files() if file.parent.name == "remainders")
    lake.opened(settings=KEY, epoch=2, attempt="a2").recover([text], restored=2)
    assert rows(lake) == [(1, "A"), (2, "b")]
    assert not left.exists()


def test_a_file_that_has_vanished_is_named(lake: Lake) -> None:
    sink = lake.opened(settings=KEY)
    sink.commit(lake.staged(sink, 1, **columns((1, "a"))))
    text = lake.staged(sink, 2, **columns((1, "A")))
    (file,) = files(lake)
    Path(file.removeprefix("file://")).unlink()
    with pytest.raises(SinkUnavailable, match=r"part-000001-0000.*orphan files") as failed:
        sink.commit(text)
    assert not failed.value.repeats


# Restores and new starts


def test_a_restore_of_an_older_checkpoint_keeps_newer_rows_until_they_are_written_again(lake: Lake) -> None:
    sink = lake.opened(settings=KEY)
    for checkpoint_id, value in enumerate("abc", start=1):
        sink.commit(lake.staged(sink, checkpoint_id, **columns((1, value), (ord(value), value))))
    back = lake.opened(settings=KEY, epoch=2, attempt="a2")
    back.recover([], restored=1)
    assert (1, "c") in rows(lake)
    back.commit(lake.staged(back, 4, **columns((1, "B"))))
    assert rows(lake) == [(1, "B"), (97, "a"), (98, "b"), (99, "c")]
    with pytest.raises(SinkCannotTakeBack, match=r"rows of checkpoints 2, 3 may have been replaced"):
        lake.opened(settings=KEY, epoch=3, attempt="a3").recover([], restored=3)


def test_a_new_start_refuses_keeps_or_replaces(lake: Lake) -> None:
    def run(job: int, at_new_start: str, *pairs: tuple[Any, Any]) -> None:
        settings = {**KEY, "at_new_start": at_new_start}
        IcebergSink(NAME, warehouse=lake.path, **settings).check_new_start(context(job_id=job))  # type: ignore[arg-type]
        sink = lake.opened(settings=settings, job_id=job, attempt=f"job{job}")
        sink.start_new()
        for checkpoint_id in (1, 2):
            sink.commit(lake.staged(sink, checkpoint_id, **columns(*pairs[: 3 - checkpoint_id])))

    run(1, "refuse", (1, "a"), (2, "b"))
    with pytest.raises(SinkHoldsEarlierRows, match="job 1 has committed"):
        run(2, "refuse", (1, "never"))
    run(2, "keep", (1, "A"), (3, "c"))
    assert rows(lake) == [(1, "A"), (2, "b"), (3, "c")]
    run(3, "replace", (7, "x"), (8, "y"))
    assert rows(lake) == [(7, "x"), (8, "y")]
    lake.table.overwrite(lake.table.scan().to_arrow())
    with pytest.raises(SinkPathInUse, match=r"of another program, or rewritten by one \(rewrite_data_files"):
        run(4, "replace", (1, "never"))
    assert rows(lake) == [(7, "x"), (8, "y")]


# What does not fit


def test_keys_that_do_not_fit_are_refused_by_name(lake: Lake) -> None:
    data = {"k": pa.array([1, None], pa.int64()), "ratio": pa.array([0.5, 1.5]), "v": pa.array(["y", "y"])}
    for key, error, text in (
        ("k", SinkRowsRefused, "column 'k', which belongs to the key"),
        ("ratio", SinkColumnsMismatch, "key column 'ratio': expected type boolean, .*found double"),
        (["k", "missing"], SinkColumnsMismatch, "key column 'missing': expected a column of the stage's rows"),
    ):
        with pytest.raises(error, match=text):
            lake.opened(settings={"key": key}).write(BATCH, [lake.segment(**data)], 0)
    assert lake.data_files() == []


def test_tables_in_which_files_cannot_be_replaced_are_refused(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = lake.opened(settings=KEY)
    sink.commit(lake.staged(sink, 1, **columns((1, "a"), (2, "b"))))
    text = lake.staged(sink, 2, **columns((1, "A")))
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


def test_settings_of_the_key_and_output_modes() -> None:
    sink = IcebergSink(NAME, warehouse="lake", key=["a", "b"])
    assert (repr(sink), sink.key) == ("IcebergSink('shops.sales', key=['a', 'b'])", ("a", "b"))

    @unbounded_source
    def numbers(context: StageContext) -> Any: ...

    def totals(numbers: Any) -> Any: ...

    for mode in ("update", "complete"):
        Pipeline("sums", [numbers, stage(sink=sink, output_mode=mode)(totals)])  # type: ignore[call-overload]
        without = IcebergSink(NAME, warehouse="lake")
        with pytest.raises(OutputModeError, match=rf'output_mode="{mode}", but its sink IcebergSink supports append only'):
            Pipeline("sums", [numbers, stage(sink=without, output_mode=mode)(totals)])  # type: ignore[call-overload]
