"""IcebergSink with overwrite_partitions: the partitions that a job has written to hold exactly its rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.transforms import BucketTransform

from dagster_checkpoints.pipeline import Pipeline, StageContext, stage, unbounded_source
from dagster_checkpoints.pipeline.errors import UnboundedSinkError
from dagster_checkpoints.sinks import IcebergSink, SinkCannotTakeBack, SinkColumnsMismatch, SinkHoldsEarlierRows
from tests.sinks.iceberg_lake import NAME, Lake
from tests.sinks.lake_rows import context

SETTINGS: dict[str, Any] = {"partition_by": ["day", "shop"], "overwrite_partitions": True, "at_new_start": "keep"}
MON, TUE, WED = (date(2024, 1, day) for day in (1, 2, 3))
Row = tuple[date | None, str]


def columns(*rows: Row) -> dict[str, Any]:
    return {
        "day": pa.array([day for day, _ in rows], pa.date32()),
        "shop": pa.array(["é/="] * len(rows)),
        "v": pa.array([v for _, v in rows]),
    }


def rows(lake: Lake) -> list[tuple[str, str]]:
    return sorted((str(row["day"]), row["v"]) for row in lake.table.scan().to_arrow().to_pylist())


def shown(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return sorted((str(day), v) for day, v in rows)


def sink_of(lake: Lake, job_id: int = 1, *, epoch: int = 1, index: int = 0) -> IcebergSink:
    return lake.opened(settings=SETTINGS, job_id=job_id, epoch=epoch, attempt=f"a{epoch}", index=index, parallelism=2)


def commit(lake: Lake, sink: IcebergSink, checkpoint_id: int, *written: Row) -> None:
    sink.commit(lake.staged(sink, checkpoint_id, **columns(*written)))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A table with rows of another program on three days and on none."""
    lake = Lake(tmp_path)
    first = lake.opened(settings={"partition_by": ["day", "shop"]}, pipeline="other")
    first.commit(lake.staged(first, 1, **columns((MON, "other"))))
    lake.append(**columns((TUE, "other"), (WED, "other"), (None, "other")))
    return lake


def test_a_job_replaces_the_partitions_that_it_writes_to(lake: Lake) -> None:
    first = sink_of(lake)
    first.start_new()
    commit(lake, first, 1, (MON, "1a"), (None, "1a"))
    assert rows(lake) == shown([(MON, "1a"), (None, "1a"), (TUE, "other"), (WED, "other")])
    commit(lake, first, 2, (MON, "1b"), (MON, "1b"), (TUE, "1b"))
    lake.append(**columns((MON, "late")))
    again = sink_of(lake, epoch=2)  # a restart reads from storage which partitions the job has
    again.recover([], restored=2)
    commit(lake, again, 3, (MON, "1c"))
    assert rows(lake) == shown(
        [(MON, "1a"), (MON, "1b"), (MON, "1b"), (MON, "late"), (MON, "1c"), (None, "1a"), (TUE, "1b"), (WED, "other")]
    )
    second = sink_of(lake, 2, epoch=3)
    second.start_new()
    commit(lake, second, 1, (MON, "2a"), (WED, "2a"))
    assert rows(lake) == shown([(MON, "2a"), (None, "1a"), (TUE, "1b"), (WED, "2a")])


def test_instances_that_begin_a_partition_at_the_same_time(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = sink_of(lake, index=0), sink_of(lake, index=1)
    texts = [lake.staged(one, 1, **columns((MON, "i0"))), lake.staged(two, 1, **columns((MON, "i1")))]
    lake.overtake(monkeypatch, lambda: two.commit(texts[1]))
    one.commit(texts[0])
    assert rows(lake) == shown([(MON, "i0"), (MON, "i1"), (TUE, "other"), (WED, "other"), (None, "other")])


def test_an_older_checkpoint_takes_back_the_jobs_rows_and_nothing_else(lake: Lake) -> None:
    sink = sink_of(lake)
    commit(lake, sink, 1, (MON, "a"))
    commit(lake, sink, 2, (MON, "b"), (TUE, "b"))
    commit(lake, sink, 3, (TUE, "c"))
    back = sink_of(lake, epoch=2)
    back.recover([], restored=1)
    assert rows(lake) == shown([(MON, "a"), (WED, "other"), (None, "other")])
    lake.append(**columns((TUE, "between")))
    commit(lake, back, 4, (TUE, "b again"))
    assert rows(lake) == shown([(MON, "a"), (TUE, "between"), (TUE, "b again"), (WED, "other"), (None, "other")])
    sink_of(lake, epoch=3).recover([], restored=3)
    assert rows(lake) == shown(
        [(MON, "a"), (MON, "b"), (TUE, "b"), (TUE, "c"), (TUE, "between"), (WED, "other"), (None, "other")]
    )


def test_what_is_refused(lake: Lake) -> None:
    sink = sink_of(lake)
    commit(lake, sink, 1, (MON, "a"))
    text = lake.staged(sink, 2, **columns((MON, "b")))
    with pytest.raises(SinkCannotTakeBack, match=r"found rows of job 1\.h1"):
        sink_of(lake, 2, epoch=2).recover([text])
    refusing = IcebergSink(NAME, warehouse=lake.path, **{**SETTINGS, "at_new_start": "refuse"})
    with pytest.raises(SinkHoldsEarlierRows, match="job 1 has committed"):
        refusing.check_new_start(context(job_id=2))
    for settings, problem in (({"partition_by": None}, "partition_by"), ({"key": "v"}, "found both")):
        with pytest.raises(ValueError, match=problem):
            IcebergSink(NAME, warehouse=lake.path, **{**SETTINGS, **settings})
    with lake.table.update_spec() as spec:
        spec.add_field("v", BucketTransform(2), "bucket")
    with pytest.raises(SinkColumnsMismatch, match=r"bucket.*files of another partitioning"):
        refusing.check_new_start(context(job_id=2))


def test_an_unbounded_stage_cannot_overwrite_partitions() -> None:
    sink = IcebergSink(NAME, warehouse="lake", **SETTINGS)
    assert repr(sink) == "IcebergSink('shops.sales', overwrite_partitions=True)"

    def read(context: StageContext) -> Any: ...

    def delays(read: Any) -> Any: ...

    with pytest.raises(UnboundedSinkError, match="'delays' is unbounded"):
        Pipeline("daily", [unbounded_source(read), stage(sink=sink)(delays)])
