"""DeltaSink and IcebergSink with overwrite_partitions: the partitions that a job has written to hold exactly its rows."""

from __future__ import annotations

import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.transforms import BucketTransform

from dagster_checkpoints.pipeline import Pipeline, StageContext, bounded_source, stage, unbounded_source
from dagster_checkpoints.pipeline.errors import UnboundedSinkError
from dagster_checkpoints.sinks import SinkCannotTakeBack, SinkColumnsMismatch, SinkHoldsEarlierRows, SinkRowsRefused
from tests.sinks.delta_lake import Table
from tests.sinks.iceberg_lake import Lake
from tests.sinks.lake_rows import LakeRows
from tests.sinks.sink_instance import context

SETTINGS: dict[str, Any] = {"partition_by": ["day", "shop"], "overwrite_partitions": True, "at_new_start": "keep"}
MON, TUE, WED = (date(2024, 1, day) for day in (1, 2, 3))
Row = tuple[date | None, str]
OTHERS: list[Row] = [(MON, "other"), (TUE, "other"), (WED, "other"), (None, "other")]


def columns(*rows: Row) -> dict[str, Any]:
    return {
        "day": pa.array([day for day, _ in rows], pa.date32()),
        "shop": pa.array(["é/="] * len(rows)),
        "v": pa.array([v for _, v in rows]),
    }


class Days:
    """A table with partitions of days, and its jobs."""

    def __init__(self, lake: LakeRows[Any]) -> None:
        self.lake = lake

    def sink(self, job_id: int = 1, *, epoch: int = 1, index: int = 0) -> Any:
        return self.lake.opened(settings=SETTINGS, job_id=job_id, epoch=epoch, attempt=f"a{epoch}", index=index, parallelism=2)

    def staged(self, sink: Any, checkpoint_id: int, *rows: Row) -> str:
        return self.lake.staged(sink, checkpoint_id, **columns(*rows))

    def commit(self, sink: Any, checkpoint_id: int, *rows: Row) -> None:
        sink.commit(self.staged(sink, checkpoint_id, *rows))

    def check(self, *rows: Row) -> None:
        assert self.lake.sorted_rows("day", "v") == sorted(rows, key=repr)


@pytest.fixture(params=[Table, Lake])
def days(request: pytest.FixtureRequest, tmp_path: Path) -> Days:
    """A table with rows of another program on three days and on none."""
    lake = request.param(tmp_path)
    first = lake.opened(settings={"partition_by": ["day", "shop"]}, pipeline="other")
    first.commit(lake.staged(first, 1, **columns(*OTHERS[:1])))
    lake.append(**columns(*OTHERS[1:]))
    return Days(lake)


def test_a_job_replaces_the_partitions_that_it_writes_to(days: Days) -> None:
    first = days.sink()
    first.start_new()
    days.commit(first, 1, (MON, "1a"), (None, "1a"))
    days.check((MON, "1a"), (None, "1a"), (TUE, "other"), (WED, "other"))
    days.commit(first, 2, (MON, "1b"), (MON, "1b"), (TUE, "1b"))
    days.lake.rewrite()
    days.lake.append(**columns((MON, "late")))
    again = days.sink(epoch=2)  # a restart reads from storage which partitions the job has
    again.recover([], restored=2)
    days.commit(again, 3, (MON, "1c"))
    days.check(*[(MON, v) for v in ("1a", "1b", "1b", "late", "1c")], (None, "1a"), (TUE, "1b"), (WED, "other"))
    second = days.sink(2, epoch=3)
    second.start_new()
    days.commit(second, 1, (MON, "2a"), (WED, "2a"))
    days.check((MON, "2a"), (None, "1a"), (TUE, "1b"), (WED, "2a"))


def test_instances_share_the_jobs_partitions_also_if_they_begin_one_at_the_same_time(
    days: Days, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = days.sink(index=0), days.sink(index=1)
    texts = [days.staged(one, 1, (MON, "i0")), days.staged(two, 1, (MON, "i1"), (TUE, "i1"))]
    days.lake.overtake(monkeypatch, lambda: two.commit(texts[1]))
    one.commit(texts[0])
    days.commit(one, 2, (TUE, "i0"))
    days.check((MON, "i0"), (MON, "i1"), (TUE, "i1"), (TUE, "i0"), (WED, "other"), (None, "other"))


def test_an_older_checkpoint_takes_back_the_jobs_rows_and_nothing_else(days: Days) -> None:
    sink = days.sink()
    days.commit(sink, 1, (MON, "a"))
    days.commit(sink, 2, (MON, "b"), (TUE, "b"))
    days.commit(sink, 3, (TUE, "c"))
    back = days.sink(epoch=2)
    back.recover([], restored=1)
    days.check((MON, "a"), (WED, "other"), (None, "other"))
    days.lake.append(**columns((TUE, "between")))
    days.commit(back, 4, (TUE, "b again"))
    days.check((MON, "a"), (TUE, "between"), (TUE, "b again"), (WED, "other"), (None, "other"))
    days.sink(epoch=3).recover([], restored=3)
    days.check(
        (MON, "a"), (MON, "b"), (TUE, "b"), (TUE, "c"), (TUE, "between"), (WED, "other"), (None, "other")
    )  # fmt: skip


def test_a_savepoint_of_another_job_needs_a_table_without_its_rows(days: Days, tmp_path: Path) -> None:
    sink = days.sink()
    days.commit(sink, 1, (MON, "a"))
    text = days.staged(sink, 2, (MON, "b"))
    files = {name: Path(shutil.copy(file, tmp_path / name)) for name, file in sink.transaction_files(text).items()}
    with pytest.raises(SinkCannotTakeBack, match=r"found rows of job 1\.h1"):
        days.sink(2, epoch=2).recover([text])
    days.check((MON, "a"), *OTHERS[1:])
    elsewhere = Days(type(days.lake)(tmp_path / "elsewhere"))
    sink = elsewhere.sink(2)
    sink.restore_transaction(text, files)
    sink.recover([text])
    elsewhere.check((MON, "b"))


def test_what_is_refused(days: Days) -> None:
    for settings, text in (
        ({"partition_by": None}, "partition_by"),
        ({"key": "k"}, "found both"),
        ({"at_new_start": "replace"}, "'replace', which removes all rows"),
    ):
        with pytest.raises(ValueError, match=text):
            days.lake.sink(**{**SETTINGS, **settings})
    days.commit(days.sink(), 1, (MON, "a"))
    refusing = days.lake.sink(**{**SETTINGS, "at_new_start": "refuse"})
    with pytest.raises(SinkHoldsEarlierRows, match="job 1 has committed"):
        refusing.check_new_start(context(job_id=2))
    if isinstance(days.lake, Lake):
        with days.lake.table.update_spec() as spec:
            spec.add_field("v", BucketTransform(2), "bucket")
    else:
        DeltaTable(days.lake.path).alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(SinkColumnsMismatch, match=r"bucket.*files of another partitioning|delta\.appendOnly"):
        days.lake.sink(**SETTINGS).check_new_start(context(job_id=2))


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (pa.array([2_932_897], pa.int32()).cast(pa.date32()), "years 1 to 9999, found 10000-01-01 in column 'day'"),
        (
            pa.array([-62_135_596_800_000_001]).view(pa.timestamp("us", "UTC")),
            "years 1 to 9999, found 0000-12-31 .* in column 'day'",
        ),
        (pa.array([b"\xff"]).view(pa.string()), r"UTF-8, found b'.xff' in column 'day'"),
    ],
)
@pytest.mark.parametrize("kind", [Table, Lake])
def test_a_value_that_cannot_name_a_partition_is_refused(tmp_path: Path, kind: Any, column: pa.Array, found: str) -> None:
    lake = kind(tmp_path)
    with pytest.raises(SinkRowsRefused, match=found):
        lake.staged(lake.opened(settings={"partition_by": "day"}), 1, n=pa.array([1]), day=column)


def test_an_unbounded_stage_cannot_overwrite_partitions(days: Days) -> None:
    sink = days.lake.sink(**SETTINGS)
    assert "overwrite_partitions=True" in repr(sink)

    def read(context: StageContext) -> Any: ...

    def delays(read: Any) -> Any: ...

    Pipeline("daily", [bounded_source(read), stage(sink=sink)(delays)])
    with pytest.raises(UnboundedSinkError, match=r"'delays' is unbounded \(it reads the unbounded source 'read'\)"):
        Pipeline("daily", [unbounded_source(read), stage(sink=sink)(delays)])
