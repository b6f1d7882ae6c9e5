"""DeltaSink and IcebergSink with a key: a row replaces the row with its key, in a table that other programs may write to."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_checkpoints.pipeline import Pipeline, StageContext, stage, unbounded_source
from dagster_checkpoints.pipeline.errors import OutputModeError
from dagster_checkpoints.sinks import (
    SinkCannotTakeBack,
    SinkColumnsMismatch,
    SinkFenced,
    SinkHoldsEarlierRows,
    SinkPathInUse,
    SinkRowsRefused,
    SinkUnavailable,
)
from dagster_checkpoints.sinks.lake import replaced_rows
from tests.sinks.delta_lake import Table
from tests.sinks.iceberg_lake import Lake
from tests.sinks.lake_rows import LakeRows
from tests.sinks.sink_instance import BATCH, context

DAY = date(2024, 1, 1)
MOMENT = datetime(2024, 3, 1, 12, 30, 45, 123456, tzinfo=UTC)


class Job:
    """A job that writes rows to a table by key."""

    def __init__(self, lake: LakeRows[Any], key: str | Sequence[str] = "k", **settings: Any) -> None:
        self.lake = lake
        self.settings = {"key": key, **settings}
        self.checkpoint = 0
        self.batch = 0

    def sink(self, **changes: Any) -> Any:
        self.batch += 1
        return self.lake.opened(settings=self.settings, **{"attempt": f"a{self.batch}", **changes})

    def write(self, sink: Any, *files: dict[str, Any]) -> None:
        """One micro-batch of these files."""
        self.batch += 1
        sink.write(BATCH, [self.lake.segment(**columns) for columns in files], self.batch)

    def staged(self, sink: Any, *batches: dict[str, Any]) -> str:
        for columns in batches:
            self.write(sink, columns)
        self.checkpoint += 1
        transaction = sink.pre_commit(self.checkpoint)
        assert transaction is not None
        return str(transaction)

    def commit(self, sink: Any, *batches: dict[str, Any]) -> None:
        sink.commit(self.staged(sink, *batches))

    def rows(self) -> list[tuple[Any, ...]]:
        return self.lake.sorted_rows("k", "v")


def rows(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"k": pa.array([k for k, _ in pairs], pa.int64()), "v": pa.array([v for _, v in pairs])}


@pytest.fixture(params=[Table, Lake])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> LakeRows[Any]:
    return request.param(tmp_path)  # type: ignore[no-any-return]


@pytest.fixture
def job(lake: LakeRows[Any]) -> Job:
    return Job(lake)


# What readers see


def test_a_row_replaces_the_row_with_its_key(job: Job) -> None:
    sink = job.sink()
    sink.start_new()
    job.commit(sink, rows((1, "a"), (2, "b"), (3, "c")))
    text = job.staged(sink, rows((2, "B"), (4, "d")))
    before = job.lake.version()
    done = sink.commit(text)
    assert job.rows() == [(1, "a"), (2, "B"), (3, "c"), (4, "d")]
    assert done.rows == 2 and done.version and job.lake.version() != before
    job.commit(sink, rows((1, "x"), (3, "y"), (2, "z"), (4, "w")))
    assert job.rows() == [(1, "x"), (2, "z"), (3, "y"), (4, "w")]
    assert len(job.lake.files()) == 1  # what is replaced as a whole leaves no empty file


def test_a_batch_that_is_written_again_keeps_its_place(job: Job) -> None:
    sink = job.sink()
    for batch_id, columns in ((1, rows((1, "one"))), (2, rows((1, "two"))), (1, rows((1, "one again")))):
        sink.write(BATCH, [job.lake.segment(**columns)], batch_id)
    sink.write(BATCH, [job.lake.segment(**rows((2, text))) for text in ("earlier", "later")], 3)
    job.commit(sink)
    assert job.rows() == [(1, "two"), (2, "later")]


def test_files_without_a_key_of_the_transaction_stay_as_they_are(job: Job) -> None:
    sink = job.sink()
    for begin in (0, 100, 200):
        job.commit(sink, rows(*((n, "old") for n in range(begin, begin + 100, 2))))
    before = job.lake.files()
    job.commit(sink, rows((151, "odd"), (100, "new")))
    after = job.lake.files()
    assert len(before & after) == 2 and len(after) == 4
    assert job.rows() == sorted([*((n, "old") for n in range(0, 300, 2) if n != 100), (100, "new"), (151, "odd")], key=repr)


def test_what_remains_of_many_files_goes_into_one(job: Job) -> None:
    sink = job.sink()
    for number in range(10):
        job.commit(sink, rows((number * 2, "a"), (number * 2 + 1, "b")))
    assert len(job.lake.files()) == 10
    job.commit(sink, rows(*((number * 2, "A") for number in range(10))))
    assert len(job.lake.files()) == 2
    assert job.rows() == sorted([(n, "b" if n % 2 else "A") for n in range(20)], key=repr)


def test_rows_that_remain_go_to_several_files_where_one_would_be_too_large(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced_rows, "_BUFFERED_BYTES", 1000)
    monkeypatch.setattr(replaced_rows, "_FILE_BYTES", 1000)
    monkeypatch.setattr(replaced_rows, "_ROWS_AT_A_TIME", 150)
    sink = job.sink()
    for begin in (0, 100, 200, 300):
        job.commit(sink, rows(*((n, f"{n:>20}") for n in range(begin, begin + 100))))
    job.commit(sink, rows((0, "A"), (150, "B"), (399, "C")))
    assert len(job.lake.files()) > 3
    assert [row for row in job.rows() if len(row[1]) < 20] == [(0, "A"), (150, "B"), (399, "C")]
    assert len(job.rows()) == 400


KEYS: dict[str, tuple[Any, Any]] = {
    "long": (pa.array([1, 2, 3], pa.int64()), pa.array([3, 4], pa.int64())),
    "byte": (pa.array([-128, 2, 127], pa.int8()), pa.array([127, 4], pa.int8())),
    "string": (pa.array(["a", "é" * 100, "é"]), pa.array(["é" * 100, "é", "b"])),
    "boolean": (pa.array([True]), pa.array([True, False])),
    "binary": (pa.array([b"\x00", b"\xff" * 40, b"\xff"]), pa.array([b"\xff" * 40, b"\xff", b""])),
    "date": (pa.array([date(1, 1, 1), date(9999, 12, 31)]), pa.array([date(9999, 12, 31), DAY])),
    "decimal": (
        pa.array([Decimal("1.50"), Decimal("2.25")], pa.decimal128(10, 2)),
        pa.array([Decimal("2.25"), Decimal("0")], pa.decimal128(10, 2)),
    ),
    "timestamp": (
        pa.array([MOMENT, MOMENT + timedelta(microseconds=1)], pa.timestamp("us", "UTC")),
        pa.array([MOMENT + timedelta(microseconds=1), MOMENT - timedelta(days=1)], pa.timestamp("us", "UTC")),
    ),
    "timestamp_ntz": (
        pa.array([MOMENT.replace(tzinfo=None)], pa.timestamp("us")),
        pa.array([MOMENT.replace(tzinfo=None), datetime(1, 1, 1)], pa.timestamp("us")),
    ),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("partitioned", [False, True])
def test_keys_of_all_types_are_found(lake: LakeRows[Any], kind: str, partitioned: bool) -> None:
    if (kind == "binary" and partitioned) or (kind == "byte" and isinstance(lake, Lake)):
        return  # no type of a partition column, or of Iceberg
    old, new = KEYS[kind]
    job = Job(lake, partition_by="k" if partitioned else None)
    sink = job.sink()
    job.commit(sink, {"k": old, "v": pa.array([0] * len(old))})
    job.commit(sink, {"k": new, "v": pa.array([1] * len(new))})
    assert job.rows() == sorted((dict.fromkeys(old.to_pylist(), 0) | dict.fromkeys(new.to_pylist(), 1)).items(), key=repr)


def test_any_sequence_of_checkpoints_leaves_the_newest_row_of_each_key(
    lake: LakeRows[Any], chance: random.Random, tmp_path: Path
) -> None:
    r = chance
    for number in range(4):
        by_both = r.random() < 0.5
        job = Job(type(lake)(tmp_path / str(number)), ["k", "p"] if by_both else "k", partition_by=r.choice([None, "p", ["p"]]))
        sink = job.sink()
        model: dict[Any, int] = {}
        for step in range(10):
            for _ in range(r.randint(1, 3)):
                batch = [(r.randrange(60), r.choice("xyz"), step * 1000 + n) for n in range(r.randint(1, 30))]
                job.write(sink, dict(zip("kpv", map(pa.array, zip(*batch, strict=True)), strict=True)))
                for k, p, v in batch:
                    if not by_both:
                        model = {key: value for key, value in model.items() if key[0] != k}
                    model[k, p] = v
            job.commit(sink)
            if r.random() < 0.2:
                job.lake.rewrite()
            if r.random() < 0.3:
                sink = job.sink()
                sink.recover([], restored=job.checkpoint)
            assert job.lake.sorted_rows("k", "p", "v") == sorted(((*key, v) for key, v in model.items()), key=repr)


# Other programs


@pytest.mark.parametrize("what", ["append", "rewrite", "delete"])
def test_a_commit_that_another_program_overtakes_is_planned_again(job: Job, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = job.sink()
    job.commit(sink, rows((1, "a"), (2, "b")))
    job.commit(sink, rows((3, "c"), (4, "d")))
    text = job.staged(sink, rows((1, "A"), (3, "C"), (5, "E")))
    acts = {
        "append": lambda: job.lake.append(**rows((5, "e"), (6, "f"))),
        "rewrite": job.lake.rewrite,
        "delete": lambda: job.lake.delete("k = 2"),
    }
    job.lake.overtake(monkeypatch, acts[what])
    sink.commit(text)
    others = {"append": [(2, "b"), (4, "d"), (6, "f")], "delete": [(4, "d")]}
    assert job.rows() == sorted([(1, "A"), (3, "C"), (5, "E"), *others.get(what, [(2, "b"), (4, "d")])], key=repr)
    assert {*job.lake.remainders()} <= job.lake.files()


def test_instances_commit_to_one_table_at_the_same_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (job.sink(index=index, parallelism=2) for index in (0, 1))
    job.commit(one, rows((1, "a"), (2, "b")))
    job.commit(other, rows((3, "c"), (4, "d")))
    first, second = job.staged(one, rows((1, "A"), (3, "moved"))), job.staged(other, rows((4, "D")))
    job.lake.overtake(monkeypatch, lambda: other.commit(second))
    one.commit(first)
    assert job.rows() == [(1, "A"), (2, "b"), (3, "moved"), (4, "D")]


@pytest.mark.parametrize("commits", [False, True])
def test_an_older_owner_that_is_overtaken_changes_nothing(job: Job, commits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the newer one commits the transaction in the middle of its commit."""
    late = job.sink(epoch=6)
    job.commit(late, rows((1, "a"), (2, "b")))
    text = job.staged(late, rows((1, "A")))
    job.lake.overtake(monkeypatch, lambda: job.sink(epoch=7).recover([text] if commits else [], restored=1 + commits))
    with pytest.raises(SinkFenced, match=r"epoch 6.*epoch 7"):
        late.commit(text)
    assert job.rows() == [(1, "A" if commits else "a"), (2, "b")]


@pytest.mark.parametrize("epoch", [1, 2])
def test_what_an_interrupted_commit_has_written_is_deleted(job: Job, epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = job.sink()
    job.commit(sink, rows((1, "a"), (2, "b")))
    text = job.staged(sink, rows((1, "A")))

    def dies() -> None:
        raise KeyboardInterrupt

    job.lake.overtake(monkeypatch, dies)
    with pytest.raises(KeyboardInterrupt):
        sink.commit(text)
    (left,) = job.lake.remainders()
    job.sink(epoch=epoch).recover([text], restored=2)
    assert job.rows() == [(1, "A"), (2, "b")]
    assert not left.exists()


def test_a_file_that_has_vanished_is_named(job: Job) -> None:
    sink = job.sink()
    job.commit(sink, rows((1, "a")))
    text = job.staged(sink, rows((1, "A")))
    (file,) = job.lake.files()
    file.unlink()
    with pytest.raises(SinkUnavailable, match=rf"{file.name}.*(VACUUM|orphan files)") as failed:
        sink.commit(text)
    assert not failed.value.repeats


# Restores and new starts


def test_the_order_of_commits_is_known_across_branches(job: Job, tmp_path: Path) -> None:
    """A savepoint that is committed only by its restore is newer than what was committed before on another branch."""
    sink = job.sink()
    job.commit(sink, rows((1, "a")))
    savepoint = job.staged(sink, rows((1, "savepoint")))
    files = {name: Path(shutil.copy(file, tmp_path / name)) for name, file in sink.transaction_files(savepoint).items()}
    other = job.sink(epoch=2)
    other.recover([], restored=1)
    job.commit(other, rows((1, "other way")))
    for epoch in (3, 4):  # also again, after a crash
        back = job.sink(epoch=epoch)
        back.restore_transaction(savepoint, files)
        back.recover([savepoint], restored=2)
        assert job.rows() == [(1, "savepoint")]
    job.commit(back, rows((2, "x")))
    job.sink(epoch=5).recover([], restored=4)
    with pytest.raises(SinkCannotTakeBack, match="checkpoint 3 may have been replaced"):
        job.sink(epoch=6).recover([], restored=3)


def test_a_new_start_refuses_keeps_or_replaces(lake: LakeRows[Any]) -> None:
    def run(job_id: int, at_new_start: str, *pairs: tuple[Any, Any]) -> Job:
        job = Job(lake, at_new_start=at_new_start)
        lake.sink(**job.settings).check_new_start(context(job_id=job_id))
        sink = job.sink(job_id=job_id, attempt=f"job{job_id}")
        sink.start_new()
        job.commit(sink, rows(*pairs))
        job.commit(sink, rows(pairs[0]))
        return job

    run(1, "refuse", (1, "a"), (2, "b"))
    with pytest.raises(SinkHoldsEarlierRows, match="job 1 has committed"):
        run(2, "refuse", (1, "never"))
    assert run(2, "keep", (1, "A"), (3, "c")).rows() == [(1, "A"), (2, "b"), (3, "c")]
    job = run(3, "replace", (7, "x"), (8, "y"))
    assert job.rows() == [(7, "x"), (8, "y")]
    job.sink(job_id=3, attempt="again").start_new()  # after a crash
    assert job.rows() == [(7, "x"), (8, "y")]
    lake.rewrite()
    with pytest.raises(SinkPathInUse, match=r"of another program, or rewritten by one \((OPTIMIZE|rewrite_data_files)"):
        run(4, "replace", (1, "never"))
    assert job.rows() == [(7, "x"), (8, "y")]
    assert run(5, "keep", (7, "X"), (9, "z")).rows() == [(7, "X"), (8, "y"), (9, "z")]


def test_rows_of_an_abandoned_branch_are_rows_of_an_earlier_job(job: Job) -> None:
    job.commit(job.sink(pipeline="other"), rows((5, "other")))
    sink = job.sink()
    job.commit(sink, rows((1, "a")))
    back = job.sink(epoch=2)
    back.recover([], restored=1)
    assert back.pre_commit(3) is None
    with pytest.raises(SinkHoldsEarlierRows, match="job 1 has committed"):
        job.lake.sink(key="k").check_new_start(context(job_id=2, epoch=3))


# What does not fit


@pytest.mark.parametrize(
    ("key", "partition_by", "error", "text"),
    [
        ("k", None, SinkRowsRefused, "column 'k', which belongs to the key"),
        (["v", "k"], "v", SinkRowsRefused, "column 'k'"),
        ("ratio", None, SinkColumnsMismatch, "key column 'ratio': expected type (string|boolean), .*found double"),
        (["k", "missing"], None, SinkColumnsMismatch, "key column 'missing': expected a column of the stage's rows"),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(
    lake: LakeRows[Any], key: Any, partition_by: Any, error: type[Exception], text: str
) -> None:
    job = Job(lake, key, partition_by=partition_by)
    with pytest.raises(error, match=text):
        job.write(job.sink(), {**rows((1, "y"), (None, "y")), "ratio": pa.array([0.5, 1.5])})
    assert lake.data_files() == []


def test_settings_of_the_key_and_output_modes(lake: LakeRows[Any]) -> None:
    sink = lake.sink(key=["a", "b"])
    assert sink.key == ("a", "b") and repr(sink).endswith("key=['a', 'b'])") and not sink.appends
    assert lake.sink(key="a").key == ("a",)
    for key in (["a", "a"], [""]):
        with pytest.raises(ValueError, match="different columns"):
            lake.sink(key=key)

    @unbounded_source
    def numbers(context: StageContext) -> Any: ...

    def totals(numbers: Any) -> Any: ...

    for mode in ("update", "complete"):
        Pipeline("sums", [numbers, stage(sink=sink, output_mode=mode)(totals)])  # type: ignore[call-overload]
        with pytest.raises(OutputModeError, match=rf'output_mode="{mode}", but its sink \w+ supports append only'):
            Pipeline("sums", [numbers, stage(sink=lake.sink(), output_mode=mode)(totals)])  # type: ignore[call-overload]
