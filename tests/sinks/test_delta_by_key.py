"""DeltaSink with a key: a row replaces the row with its key, once, in a table that other programs may write to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from dagster_checkpoints.pipeline import Pipeline, StageContext, stage, unbounded_source
from dagster_checkpoints.pipeline.errors import OutputModeError
from dagster_checkpoints.sinks import (
    DeltaSink,
    SinkCannotTakeBack,
    SinkColumnsMismatch,
    SinkContext,
    SinkFenced,
    SinkHoldsEarlierRows,
    SinkPathInUse,
    SinkRowsRefused,
    SinkUnavailable,
)
from dagster_checkpoints.sinks.lake import replaced_rows

BATCH: Any = SimpleNamespace()
DAY = date(2024, 1, 1)


class Job:
    """A job that writes rows to a table by key, and the table's rows as readers see them."""

    def __init__(self, folder: Path, key: str | Sequence[str] = "k", **settings: Any) -> None:
        self.path = folder / "table"
        self._folder = folder
        self._settings = {"key": key, **settings}
        self._files = 0
        self._checkpoint = 0
        self._batch = 0

    def sink(self, **changes: Any) -> DeltaSink:
        sink = DeltaSink(self.path, **self._settings)
        values = {"job_id": 1, "attempt": f"a{self._files}", "history": "h1", "epoch": 1, "index": 0, "parallelism": 1, **changes}
        sink.open(SinkContext("flights", "delays", str(values["index"]), **values))
        return sink

    def write(self, sink: DeltaSink, *tables: pa.Table) -> None:
        """One micro-batch, a file for each table."""
        files = []
        for table in tables:
            self._files += 1
            files.append(self._folder / f"segment-{self._files}.parquet")
            pq.write_table(table, files[-1])
        self._batch += 1
        sink.write(BATCH, [str(file) for file in files], self._batch)

    def staged(self, sink: DeltaSink, *batches: pa.Table) -> str:
        for batch in batches:
            self.write(sink, batch)
        self._checkpoint += 1
        transaction = sink.pre_commit(self._checkpoint)
        assert transaction is not None
        return transaction

    def commit(self, sink: DeltaSink, *batches: pa.Table) -> None:
        sink.commit(self.staged(sink, *batches))

    def append(self, table: pa.Table) -> None:
        """Another program adds rows."""
        write_deltalake(self.path, table, mode="append")

    def rows(self) -> list[tuple[Any, ...]]:
        """All rows, by the library's reader and by pyarrow's, which must agree."""
        table = DeltaTable(self.path)
        found = table.to_pyarrow_table()
        other = pa.table(table.scan(columns=found.column_names).read_all())
        rows = sorted((tuple(row.values()) for row in found.to_pylist()), key=repr)
        assert rows == sorted((tuple(row.values()) for row in other.to_pylist()), key=repr)
        return rows

    def files(self) -> set[str]:
        return set(DeltaTable(self.path).file_uris())


def rows(*pairs: tuple[Any, Any]) -> pa.Table:
    return pa.table({"k": pa.array([k for k, _ in pairs], pa.int64()), "v": [v for _, v in pairs]})


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


# What readers see


def test_a_row_replaces_the_row_with_its_key(job: Job) -> None:
    sink = job.sink()
    sink.start_new()
    job.commit(sink, rows((1, "a"), (2, "b"), (3, "c")))
    done = sink.commit(job.staged(sink, rows((2, "B"), (4, "d"))))
    assert job.rows() == [(1, "a"), (2, "B"), (3, "c"), (4, "d")]
    assert (done.rows, done.version) == (2, str(DeltaTable(job.path).version()))
    job.commit(sink, rows((1, "x"), (3, "y"), (2, "z"), (4, "w")))
    assert job.rows() == [(1, "x"), (2, "z"), (3, "y"), (4, "w")]
    assert len(job.files()) == 1  # what is replaced as a whole leaves no empty file


def test_the_last_row_of_a_checkpoint_is_kept(job: Job) -> None:
    sink = job.sink()
    job.write(sink, rows((1, "first"), (2, "first")), rows((1, "second")))
    job.write(sink, rows((3, "x"), (3, "y"), (2, "later")))
    job.commit(sink)
    assert job.rows() == [(1, "second"), (2, "later"), (3, "y")]


def test_a_batch_that_is_written_again_keeps_its_place(job: Job) -> None:
    sink = job.sink()
    for batch_id, table in ((1, rows((1, "one"))), (2, rows((1, "two"))), (1, rows((1, "one again")))):
        job._batch = batch_id - 1
        job.write(sink, table)
    job.commit(sink)
    assert job.rows() == [(1, "two")]


def test_files_without_a_key_of_the_transaction_stay_as_they_are(job: Job) -> None:
    sink = job.sink()
    for begin in (0, 100, 200):
        job.commit(sink, rows(*((n, "old") for n in range(begin, begin + 100, 2))))
    before = job.files()
    job.commit(sink, rows((151, "odd"), (100, "new")))
    after = job.files()
    assert len(before & after) == 2 and len(after) == 4
    assert job.rows() == sorted([*((n, "old") for n in range(0, 300, 2) if n != 100), (100, "new"), (151, "odd")], key=repr)


def test_what_remains_of_many_files_goes_into_one(job: Job) -> None:
    sink = job.sink()
    for number in range(20):
        job.commit(sink, rows((number * 2, "a"), (number * 2 + 1, "b")))
    assert len(job.files()) == 20
    job.commit(sink, rows(*((number * 2, "A") for number in range(20))))
    assert len(job.files()) == 2
    assert job.rows() == sorted([(n, "b" if n % 2 else "A") for n in range(40)], key=repr)


def test_rows_that_remain_go_to_several_files_where_one_would_be_too_large(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced_rows, "_BUFFERED_BYTES", 1000)
    monkeypatch.setattr(replaced_rows, "_FILE_BYTES", 1000)
    monkeypatch.setattr(replaced_rows, "_ROWS_AT_A_TIME", 150)
    sink = job.sink()
    for begin in (0, 100, 200, 300):
        job.commit(sink, rows(*((n, f"{n:>20}") for n in range(begin, begin + 100))))
    job.commit(sink, rows((0, "A"), (150, "B"), (399, "C")))
    assert len(job.files()) > 3
    assert [row for row in job.rows() if len(row[1]) < 20] == [(0, "A"), (150, "B"), (399, "C")]
    assert len(job.rows()) == 400


MOMENT = datetime(2024, 3, 1, 12, 30, 45, 123456, tzinfo=UTC)
KEYS: dict[str, tuple[Any, Any]] = {
    "long": (pa.array([1, 2, 3], pa.int64()), pa.array([3, 4], pa.int64())),
    "byte": (pa.array([-128, 2, 127], pa.int8()), pa.array([127, 4], pa.int8())),
    "string": (pa.array(["a", "é" * 100, "é"]), pa.array(["é", "b"])),
    "boolean": (pa.array([True]), pa.array([True, False])),
    "binary": (pa.array([b"\x00", b"\xff"]), pa.array([b"\xff", b""])),
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


@pytest.mark.parametrize(
    ("kind", "partitioned"), [(kind, partitioned) for kind in KEYS for partitioned in (False, True)[: 1 + (kind != "binary")]]
)
def test_keys_of_all_types_are_found(tmp_path: Path, kind: str, partitioned: bool) -> None:
    old, new = KEYS[kind]
    job = Job(tmp_path, partition_by="k" if partitioned else None)

    sink = job.sink()
    job.commit(sink, pa.table({"k": old, "v": [0] * len(old)}))
    job.commit(sink, pa.table({"k": new, "v": [1] * len(new)}))
    expected = dict.fromkeys(old.to_pylist(), 0) | dict.fromkeys(new.to_pylist(), 1)
    assert sorted((row["k"], row["v"]) for row in DeltaTable(job.path).to_pyarrow_table().to_pylist()) == sorted(expected.items())


def test_a_key_of_several_columns_and_partitions_that_are_in_it_or_not(tmp_path: Path) -> None:
    def table(*values: tuple[Any, ...]) -> pa.Table:
        columns = list(zip(*values, strict=True))
        return pa.table(dict(zip(("shop", "day", "n", "v"), columns, strict=True)))

    first = table(("a b/ü=", DAY, 1, "x"), ("n", DAY, 1, "x"), ("n", DAY + timedelta(1), 1, "x"))
    second = table(("n", DAY + timedelta(1), 1, "y"), ("a b/ü=", DAY, 2, "y"), ("a b/ü=", DAY, 1, "z"))
    for number, (key, partition_by, left) in enumerate(
        (
            (["shop", "day", "n"], ["shop", "day"], {("n", DAY, 1, "x")}),
            (["n", "shop"], ["day"], set()),
            (["shop", "day", "n"], None, {("n", DAY, 1, "x")}),
            (["n"], ["shop"], set()),
        )
    ):
        (folder := tmp_path / str(number)).mkdir()
        job = Job(folder, key, partition_by=partition_by)
        sink = job.sink()
        job.commit(sink, first)
        job.commit(sink, second)
        model = {tuple(row[name] for name in key): row for row in [*first.to_pylist(), *second.to_pylist()]}
        found = DeltaTable(job.path).to_pyarrow_table().select(["shop", "day", "n", "v"]).to_pylist()
        assert sorted(found, key=repr) == sorted(model.values(), key=repr)
        assert {tuple(row.values()) for row in found if row["v"] == "x"} == left


def test_any_sequence_of_checkpoints_leaves_the_newest_row_of_each_key(tmp_path: Path, chance: random.Random) -> None:
    r = chance
    for number in range(6):
        (folder := tmp_path / str(number)).mkdir()
        partition_by = r.choice([None, "p", ["p"]])
        job = Job(folder, ["k", "p"] if r.random() < 0.5 else "k", partition_by=partition_by)
        by_both = len(job._settings["key"]) == 2
        sink = job.sink()
        model: dict[Any, int] = {}
        for step in range(12):
            for _ in range(r.randint(1, 3)):
                batch = [(r.randrange(60), r.choice("xyz"), step * 1000 + n) for n in range(r.randint(1, 30))]
                job.write(sink, pa.table(dict(zip("kpv", zip(*batch, strict=True), strict=True))))
                for k, p, v in batch:
                    if not by_both:
                        model = {key: value for key, value in model.items() if key[0] != k}
                    model[k, p] = v
            job.commit(sink)
            if r.random() < 0.2:
                DeltaTable(job.path).optimize.compact()
            if r.random() < 0.3:
                sink = job.sink()
                sink.recover([], restored=job._checkpoint)
            found = DeltaTable(job.path).to_pyarrow_table().to_pylist()
            assert sorted((row["k"], row["p"], row["v"]) for row in found) == sorted((*key, v) for key, v in model.items())


# Other programs


def test_rows_of_other_programs_are_replaced_and_their_other_rows_stay(tmp_path: Path) -> None:
    job = Job(tmp_path, ["k", "ts"])
    times = pa.array([MOMENT, MOMENT, MOMENT + timedelta(seconds=1)])
    write_deltalake(
        job.path,
        pa.table(
            {"k": pa.array(["a", "b", None], pa.large_string()), "ts": times.cast(pa.timestamp("us", "UTC")), "v": [1, 2, 3]}
        ),
    )
    sink = job.sink()
    new = pa.table({"k": ["b", "c"], "ts": pa.array([MOMENT, MOMENT]).cast(pa.timestamp("us", "UTC")), "v": [20, 30]})
    job.commit(sink, new)
    job.append(pa.table({"k": ["c"], "ts": pa.array([MOMENT]).cast(pa.timestamp("us", "UTC")), "v": [31]}))
    assert sorted(row[2] for row in job.rows()) == [1, 3, 20, 30, 31]
    job.commit(sink, new)
    assert sorted(row[2] for row in job.rows()) == [1, 3, 20, 30]
    DeltaTable(job.path).optimize.compact()
    DeltaTable(job.path).create_checkpoint()
    job.commit(sink, new.slice(1))
    assert sorted(row[2] for row in job.rows()) == [1, 3, 20, 30]


def overtake(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    """Let another program act between the plan of the next commit and the commit."""
    real = DeltaTable.create_write_transaction

    def overtaken(*arguments: Any, **keywords: Any) -> None:
        monkeypatch.setattr(DeltaTable, "create_write_transaction", real)
        act()
        real(*arguments, **keywords)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", overtaken)


@pytest.mark.parametrize("what", ["append", "compact", "delete", "merge"])
def test_a_commit_that_another_program_overtakes_is_planned_again(job: Job, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = job.sink()
    job.commit(sink, rows((1, "a"), (2, "b")))
    job.commit(sink, rows((3, "c"), (4, "d")))
    text = job.staged(sink, rows((1, "A"), (3, "C"), (5, "E")))

    def act() -> None:
        table = DeltaTable(job.path)
        match what:
            case "append":
                job.append(rows((5, "e"), (6, "f")))
            case "compact":
                table.optimize.compact()
            case "delete":
                table.delete("k = 2")
            case "merge":
                merge = table.merge(rows((3, "other"), (5, "other")), "t.k = s.k", source_alias="s", target_alias="t")
                merge.when_matched_update_all().when_not_matched_insert_all().execute()

    overtake(monkeypatch, act)
    sink.commit(text)
    others = {"append": [(2, "b"), (4, "d"), (6, "f")], "delete": [(4, "d")]}
    assert job.rows() == sorted([(1, "A"), (3, "C"), (5, "E"), *others.get(what, [(2, "b"), (4, "d")])], key=repr)
    used = {Path(file) for file in job.files()}
    assert [file for file in job.path.glob("dagster-checkpoints/**/remainders/*") if file not in used] == []


def test_instances_commit_to_one_table_at_the_same_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (job.sink(index=index, parallelism=2) for index in (0, 1))
    job.commit(one, rows((1, "a"), (2, "b")))
    job.commit(other, rows((3, "c"), (4, "d")))
    first, second = job.staged(one, rows((1, "A"), (3, "moved"))), job.staged(other, rows((4, "D")))
    overtake(monkeypatch, lambda: other.commit(second))
    one.commit(first)
    assert job.rows() == [(1, "A"), (2, "b"), (3, "moved"), (4, "D")]


def test_an_older_owner_that_is_overtaken_changes_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    late = job.sink(epoch=6)
    job.commit(late, rows((1, "a"), (2, "b")))
    text = job.staged(late, rows((1, "late")))
    overtake(monkeypatch, lambda: job.sink(epoch=7, attempt="newer").recover([]))
    with pytest.raises(SinkFenced, match=r"epoch 6.*epoch 7"):
        late.commit(text)
    assert job.rows() == [(1, "a"), (2, "b")]


def test_the_newer_owner_commits_a_transaction_in_the_middle_of_its_commit(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    late = job.sink(epoch=6)
    job.commit(late, rows((1, "a"), (2, "b")))
    text = job.staged(late, rows((1, "A")))
    overtake(monkeypatch, lambda: job.sink(epoch=7, attempt="newer").recover([text], restored=2))
    with pytest.raises(SinkFenced):
        late.commit(text)
    assert job.rows() == [(1, "A"), (2, "b")]


@pytest.mark.parametrize("epoch", [1, 2])
def test_what_an_interrupted_commit_has_written_is_deleted(job: Job, epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = job.sink()
    job.commit(sink, rows((1, "a"), (2, "b")))
    text = job.staged(sink, rows((1, "A")))

    def dies() -> None:
        raise KeyboardInterrupt

    overtake(monkeypatch, dies)
    with pytest.raises(KeyboardInterrupt):
        sink.commit(text)
    (left,) = job.path.glob("dagster-checkpoints/**/remainders/*")
    job.sink(epoch=epoch, attempt="again").recover([text], restored=2)
    assert job.rows() == [(1, "A"), (2, "b")]
    assert not left.exists()


def test_a_file_that_has_vanished_is_named(job: Job) -> None:
    sink = job.sink()
    job.commit(sink, rows((1, "a")))
    text = job.staged(sink, rows((1, "A")))
    (file,) = job.files()
    Path(file).unlink()
    with pytest.raises(SinkUnavailable, match=r"part-000001-0000.*VACUUM") as failed:
        sink.commit(text)
    assert not failed.value.repeats


# Restores and new starts


def test_a_restore_of_an_older_checkpoint_keeps_newer_rows_until_they_are_written_again(job: Job) -> None:
    sink = job.sink()
    for value in "abc":
        job.commit(sink, rows((1, value), (ord(value), value)))
    back = job.sink(epoch=2)
    back.recover([], restored=1)
    assert (1, "c") in job.rows()
    job.commit(back, rows((1, "B")))
    assert job.rows() == [(1, "B"), (97, "a"), (98, "b"), (99, "c")]
    with pytest.raises(SinkCannotTakeBack, match=r"checkpoint 3, .*rows of checkpoints 2, 3 may have been replaced"):
        job.sink(epoch=3).recover([], restored=3)
    job.sink(epoch=4).recover([], restored=4)


def test_the_order_of_commits_is_known_across_branches(job: Job, tmp_path: Path) -> None:
    """A savepoint that is committed only by its restore is newer than what was committed before on another branch."""
    sink = job.sink()
    job.commit(sink, rows((1, "a")))
    savepoint = job.staged(sink, rows((1, "savepoint")))
    files = {name: tmp_path / f"copy-{name}" for name in sink.transaction_files(savepoint)}
    for name, file in sink.transaction_files(savepoint).items():
        files[name].write_bytes(file.read_bytes())
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


def test_a_new_start_refuses_keeps_or_replaces(tmp_path: Path) -> None:
    def run(job_id: int, at_new_start: str, *pairs: tuple[Any, Any]) -> Job:
        job = Job(tmp_path, at_new_start=at_new_start)
        context = SinkContext("flights", "delays", "0", 0, 1, job_id, "", "h1", 1)
        DeltaSink(job.path, **job._settings).check_new_start(context)
        sink = job.sink(job_id=job_id, attempt=f"job{job_id}")
        sink.start_new()
        job.commit(sink, rows(*pairs))
        job.commit(sink, rows(pairs[0]))
        return job

    run(1, "refuse", (1, "a"), (2, "b"))
    with pytest.raises(SinkHoldsEarlierRows, match="job 1 has committed"):
        run(2, "refuse", (1, "never"))
    job = run(2, "keep", (1, "A"), (3, "c"))
    assert job.rows() == [(1, "A"), (2, "b"), (3, "c")]
    job = run(3, "replace", (7, "x"), (8, "y"))
    assert job.rows() == [(7, "x"), (8, "y")]
    again = job.sink(job_id=3, attempt="again")  # after a crash
    again.start_new()
    assert job.rows() == [(7, "x"), (8, "y")]
    DeltaTable(job.path).optimize.compact()
    with pytest.raises(SinkPathInUse, match=r"part-.*of another program, or rewritten by one \(OPTIMIZE"):
        run(4, "replace", (1, "never"))
    assert job.rows() == [(7, "x"), (8, "y")]
    assert run(5, "keep", (7, "X"), (9, "z")).rows() == [(7, "X"), (8, "y"), (9, "z")]


def test_a_new_start_does_not_remove_what_remains_of_rows_of_other_programs(job: Job) -> None:
    job.append(rows((1, "other"), (2, "other")))
    job.commit(job.sink(), rows((1, "a")))
    assert len(job.files()) == 2  # the other program's file was written again
    context = SinkContext("flights", "delays", "0", 0, 1, 2, "", "h1", 1)
    with pytest.raises(SinkPathInUse, match=r"-of-others-.*of another program, or rewritten by one"):
        DeltaSink(job.path, key="k", at_new_start="replace").check_new_start(context)


def test_rows_of_an_abandoned_branch_are_rows_of_an_earlier_job(job: Job) -> None:
    sink = job.sink()
    job.append(rows((5, "other")))
    assert sink.pre_commit(1) is None
    job._checkpoint = 1
    job.commit(sink, rows((1, "a")))
    back = job.sink(epoch=2)
    back.recover([], restored=1)
    assert back.pre_commit(3) is None
    with pytest.raises(SinkHoldsEarlierRows, match="job 1 has committed"):
        DeltaSink(job.path, key="k").check_new_start(SinkContext("flights", "delays", "0", 0, 1, 2, "", "h1", 3))


# What does not fit


def test_keys_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    table = pa.table({"k": pa.array([1, None], pa.int64()), "ratio": [0.5, 1.5], "s": ["", "x"], "v": ["y", "y"]})
    for number, (key, partition_by, error, text) in enumerate(
        (
            ("k", None, SinkRowsRefused, "column 'k', which belongs to the key"),
            (["v", "k"], "v", SinkRowsRefused, "column 'k'"),
            ("s", "s", SinkRowsRefused, "An empty text in a partition column may be null"),
            ("ratio", None, SinkColumnsMismatch, "key column 'ratio': expected type string, .*found double"),
            (["k", "missing"], None, SinkColumnsMismatch, "key column 'missing': expected a column of the stage's rows"),
        )
    ):
        (folder := tmp_path / str(number)).mkdir()
        job = Job(folder, key, partition_by=partition_by)
        with pytest.raises(error, match=text):
            job.write(job.sink(), table)
        assert list(job.path.glob("dagster-checkpoints/**/*.parquet")) == []


def test_tables_in_which_rows_cannot_be_replaced_are_refused(job: Job) -> None:
    for name in ("delta.appendOnly", "delta.enableChangeDataFeed"):
        write_deltalake(job.path, rows((1, "a")), mode="overwrite")
        DeltaTable(job.path).alter.set_table_properties({name: "true"})
        with pytest.raises(SinkColumnsMismatch, match=name):
            job.sink()
        DeltaTable(job.path).alter.set_table_properties({name: "false"})
    job.sink()


def test_a_file_whose_name_the_library_would_write_otherwise_is_refused(job: Job) -> None:
    job.append(rows((1, "a")))
    log = job.path / "_delta_log" / "00000000000000000000.json"
    (name,) = (file.name for file in job.path.glob("*.parquet"))
    (job.path / name).rename(job.path / "café.parquet")
    log.write_text(log.read_text().replace(name, "café.parquet"))
    sink = job.sink()
    text = job.staged(sink, rows((1, "A")))
    with pytest.raises(SinkColumnsMismatch, match=r"caf.*other escapes"):
        sink.commit(text)


def test_settings_of_the_key() -> None:
    assert repr(DeltaSink("/t", key=["a", "b"])) == "DeltaSink('/t', key=['a', 'b'])"
    assert DeltaSink("/t", key="a").key == ("a",)
    assert not DeltaSink("/t", key="a").appends
    for key in (["a", "a"], [""]):
        with pytest.raises(ValueError, match="different columns"):
            DeltaSink("/t", key=key)


def test_the_output_mode_update_needs_a_key() -> None:
    @unbounded_source
    def numbers(context: StageContext) -> Any: ...

    def totals(numbers: Any) -> Any: ...

    for mode in ("update", "complete"):
        Pipeline("sums", [numbers, stage(sink=DeltaSink("/t", key="k"), output_mode=mode)(totals)])  # type: ignore[call-overload]
        with pytest.raises(OutputModeError, match=rf'output_mode="{mode}", but its sink DeltaSink supports append only'):
            Pipeline("sums", [numbers, stage(sink=DeltaSink("/t"), output_mode=mode)(totals)])  # type: ignore[call-overload]
