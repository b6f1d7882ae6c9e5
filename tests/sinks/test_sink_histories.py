"""After any history of a job, readers see exactly the rows of the checkpoint that the job was restored from, each once.

A model job of two instances processes numbered rows, takes checkpoints and savepoints, aborts, commits late, crashes in the
middle of any change of the file system, and is restored from any of its savepoints. A row's number is the instance's position
in its input, so the rows of a checkpoint are 0 … position-1, on every branch. `long/test_many_sink_histories.py` searches longer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from dagster_checkpoints.sinks import DeltaSink, IcebergSink, ParquetSink, SinkCannotTakeBack, SinkContext, TwoPhaseCommitSink
from dagster_checkpoints.spark.tasks.task_sink import TaskSink

INSTANCES = (0, 1)
BATCH: Any = SimpleNamespace(columns=["n"])


class Crash(BaseException):
    """The process has ended."""


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint or savepoint of the model job."""

    id: int
    positions: tuple[int, ...]
    transactions: tuple[tuple[str, ...], ...]
    files: tuple[dict[int, dict[str, Path]], ...] = ({}, {})


@dataclass
class Disk:
    """Counts changes of the file system and ends the process at one of them."""

    changes: tuple[tuple[Any, str], ...]
    left: int | None = None
    real: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def spend(self) -> None:
        if self.left is None:
            return
        if self.left == 0:
            raise Crash
        self.left -= 1

    @contextmanager
    def may_fail(self, after: int | None) -> Iterator[None]:
        patches = pytest.MonkeyPatch()
        for module, name in self.changes:
            self._wrap(patches, module, name)
        rmtree = shutil.rmtree

        def remove_bit_by_bit(path: Path, ignore_errors: bool = False, **of_temporary_directories: Any) -> None:
            if of_temporary_directories:
                rmtree(path, ignore_errors, **of_temporary_directories)
                return
            for file in sorted(Path(path).iterdir()) if Path(path).exists() else ():
                self.spend()
                file.unlink() if file.is_file() else rmtree(file)
            rmtree(path, ignore_errors=ignore_errors)

        patches.setattr(shutil, "rmtree", remove_bit_by_bit)
        self.left = after
        try:
            yield
        finally:
            self.left = None
            patches.undo()

    def _wrap(self, patches: pytest.MonkeyPatch, module: Any, name: str) -> None:
        real = getattr(module, name)

        def counting(*arguments: Any, **keywords: Any) -> Any:
            self.spend()
            result = None if name == "fsync" else real(*arguments, **keywords)  # the machine does not crash
            if module is DeltaTable:
                self.spend()
            return result

        patches.setattr(module, name, counting)


FUSE = st.one_of(st.none(), st.integers(0, 40))


class Histories(RuleBasedStateMachine):
    changes: tuple[tuple[Any, str], ...] = ((os, "rename"), (os, "replace"), (os, "link"), (os, "fsync"))

    def make_sink(self) -> TwoPhaseCommitSink:
        return ParquetSink(self.table)

    def visible_files(self) -> list[Path]:
        return [file for directory in self.table.glob("checkpoint=*") for file in directory.iterdir()]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="histories-"))
        # Of its own: the sinks delete what killed processes have left there a minute ago, each file a step of the disk.
        (self.folder / "temporary").mkdir()
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(tempfile, "tempdir", str(self.folder / "temporary"))
        self.table = self.folder / "table"
        self.configured = self.make_sink()
        self.disk = Disk(self.changes)
        self.numbers = iter(range(10**9))
        self.read: dict[Path, list[str]] = {}
        self.attempt = 0
        self.highest = 0
        self.newest: Snapshot | None = None
        self.retained: list[Snapshot] = []
        self.savepoints: list[Snapshot] = []
        self.start(None)

    def teardown(self) -> None:
        self.patches.undo()
        shutil.rmtree(self.folder)

    # The job

    def start(self, fuse: int | None) -> None:
        """A new attempt, from the newest checkpoint; crashes in it lead to another."""
        while True:
            self.attempt += 1
            self.pending: list[Snapshot] = []
            self.completed: list[Snapshot] = []
            self.sinks = [self.sink(index) for index in INSTANCES]
            origin = self.newest
            try:
                with self.disk.may_fail(fuse):
                    for index, sink in enumerate(self.sinks):
                        if origin is None:
                            sink.open(None)
                        else:
                            fetched = self.copied(origin.files[index], "fetched")
                            sink.open(origin.transactions[index], origin.id, fetched)
                break
            except Crash:
                fuse = None
        self.positions = list(origin.positions) if origin else [0, 0]
        self.seen = list(self.positions)
        self.batch = 0
        self.next_id = self.highest + 1

    def sink(self, index: int) -> TaskSink:
        context = SinkContext("pipeline", "stage", str(index), index, len(INSTANCES), 1, f"a{self.attempt}")
        unused: Any = None
        return TaskSink(self.configured.new_instance(), context, unused, unused, Path("never used"))

    def copied(self, files: dict[int, dict[str, Path]], where: str) -> dict[int, dict[str, Path]]:
        target = self.folder / where / str(next(self.numbers))
        copies: dict[int, dict[str, Path]] = {}
        for position, named in files.items():
            (target / str(position)).mkdir(parents=True)
            copies[position] = {name: Path(shutil.copy(file, target / str(position) / name)) for name, file in named.items()}
        return copies

    def snapshot(self, savepoint: bool) -> Snapshot:
        checkpoint_id, self.next_id = self.next_id, self.next_id + 1
        transactions = tuple(sink.pre_commit(checkpoint_id) for sink in self.sinks)
        files = tuple(
            sink.pin_transactions(self.folder / "pins" / str(next(self.numbers))) if savepoint else {} for sink in self.sinks
        )
        return Snapshot(checkpoint_id, tuple(self.positions), transactions, files)

    @contextmanager
    def process(self, fuse: int | None) -> Iterator[None]:
        try:
            with self.disk.may_fail(fuse):
                yield
        except Crash:
            self.start(None)

    # Events

    @rule(index=st.sampled_from(INSTANCES), rows=st.integers(1, 3), fuse=FUSE)
    def process_rows(self, index: int, rows: int, fuse: int | None) -> None:
        with self.process(fuse):
            self.write(index, rows)

    def write(self, index: int, rows: int) -> None:
        segment = self.folder / f"segment-{next(self.numbers)}"
        written = [f"{index}:{n}" for n in range(self.positions[index], self.positions[index] + rows)]
        pq.write_table(pa.table({"row": written}), segment)
        self.sinks[index]._sink.write(BATCH, [str(segment)], self.batch)
        self.batch += 1
        self.positions[index] += rows

    @rule(index=st.sampled_from(INSTANCES), rows=st.integers(0, 2), fuse=FUSE)
    def trigger_checkpoint(self, index: int, rows: int, fuse: int | None) -> None:
        with self.process(fuse):
            if rows:
                self.write(index, rows)
            self.pending.append(self.snapshot(savepoint=False))

    @rule(index=st.sampled_from(INSTANCES), rows=st.integers(0, 2), fuse=FUSE, data=st.data())
    def take_savepoint(self, index: int, rows: int, fuse: int | None, data: st.DataObject) -> None:
        with self.process(fuse):
            if rows:
                self.write(index, rows)
            taken = self.snapshot(savepoint=True)
            # A checkpoint may complete while it is being stored.
            self.complete_one(data.draw(st.booleans()), data)
            files = tuple(self.copied(named, "savepoints") for named in taken.files)
            self.highest = max(self.highest, taken.id)
            self.savepoints.append(Snapshot(taken.id, taken.positions, taken.transactions, files))

    @precondition(lambda self: self.pending)
    @rule(fuse=FUSE, notified=st.booleans(), data=st.data())
    def complete_checkpoint(self, fuse: int | None, notified: bool, data: st.DataObject) -> None:
        with self.process(fuse):
            self.complete_one(notified, data)

    def complete_one(self, notified: bool, data: st.DataObject) -> None:
        if not self.pending:
            return
        done = data.draw(st.sampled_from(self.pending), label="completed")
        self.pending = [pending for pending in self.pending if pending.id > done.id]
        self.highest = max(self.highest, done.id)
        self.newest = done
        self.retained = [*[kept for kept in self.retained if kept.id < done.id][-1:], done]
        self.completed.append(done)
        if notified:
            self.tell()

    @rule(fuse=FUSE)
    def tell_tasks(self, fuse: int | None) -> None:
        with self.process(fuse):
            self.tell()

    def tell(self) -> None:
        for done in self.completed:
            for index, sink in enumerate(self.sinks):
                sink.commit_up_to(done.id)
                self.seen[index] = max(self.seen[index], done.positions[index])
        self.completed = []

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def abort_checkpoint(self, data: st.DataObject) -> None:
        self.pending.remove(data.draw(st.sampled_from(self.pending)))

    @rule(fuse=FUSE)
    def crash(self, fuse: int | None) -> None:
        self.start(fuse)

    @precondition(lambda self: self.savepoints)
    @rule(fuse=FUSE, data=st.data())
    def restore_savepoint(self, fuse: int | None, data: st.DataObject) -> None:
        self.newest = data.draw(st.sampled_from(self.savepoints))
        self.retained = []
        self.start(fuse)

    @precondition(lambda self: len(self.retained) > 1)
    @rule(fuse=FUSE)
    def restore_older_checkpoint(self, fuse: int | None) -> None:
        self.newest = self.retained[0]
        self.retained = self.retained[:1]
        self.start(fuse)

    def rows_in(self, file: Path) -> list[str]:
        """A file's rows; its path tells the attempt and the batch, and so the rows."""
        if file not in self.read:
            self.read[file] = pq.read_table(file)["row"].to_pylist()
        return self.read[file]

    # Invariants

    @invariant()
    def readers_see_each_row_once(self) -> None:
        found = sorted(row for file in self.visible_files() for row in self.rows_in(file))
        assert found == sorted(f"{index}:{n}" for index in INSTANCES for n in range(self.seen[index]))


Histories.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase


class DeltaHistories(Histories):
    """The same with a Delta table, in which another program rewrites nothing, but appends rows."""

    changes = (*Histories.changes, (os, "unlink"), (DeltaTable, "create_write_transaction"))

    def make_sink(self) -> TwoPhaseCommitSink:
        return DeltaSink(self.table)

    def visible_files(self) -> list[Path]:
        if not DeltaTable.is_deltatable(str(self.table)):
            return []
        files = [Path(file) for file in DeltaTable(self.table).file_uris()]
        assert len(files) == len(set(files))
        return [file for file in files if file.parent != self.table]

    @precondition(lambda self: DeltaTable.is_deltatable(str(self.table)))
    @rule()
    def another_program_appends(self) -> None:
        write_deltalake(self.table, pa.table({"row": ["of another program"]}), mode="append")


DeltaHistories.TestCase.settings = settings(
    max_examples=5, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestDeltaHistories = DeltaHistories.TestCase


class DeltaKeyHistories(DeltaHistories):
    """The same with rows that replace others by key: later rows stay after a restore, and are not doubled."""

    def make_sink(self) -> TwoPhaseCommitSink:
        return DeltaSink(self.table, key="row")

    @precondition(lambda self: self.savepoints)
    @rule(fuse=FUSE, data=st.data())
    def restore_savepoint(self, fuse: int | None, data: st.DataObject) -> None:
        before = self.newest, self.retained
        try:
            super().restore_savepoint(fuse, data)
        except SinkCannotTakeBack:  # rows on its way may have been replaced
            self.newest, self.retained = before
            self.start(None)

    @invariant()
    def readers_see_each_row_once(self) -> None:
        found = [row for file in self.visible_files() for row in self.rows_in(file)]
        assert len(found) == len(set(found))
        assert set(found) >= {f"{index}:{n}" for index in INSTANCES for n in range(self.seen[index])}


DeltaKeyHistories.TestCase.settings = DeltaHistories.TestCase.settings
TestDeltaKeyHistories = DeltaKeyHistories.TestCase


class IcebergHistories(Histories):
    """The same with an Iceberg table, to which another program appends rows."""

    changes = (*Histories.changes, (os, "unlink"), (SqlCatalog, "commit_table"))

    def make_sink(self) -> TwoPhaseCommitSink:
        return IcebergSink("lab.rows", warehouse=self.table)

    def read_table(self) -> Table | None:
        if not (self.table / "catalog.db").exists():
            return None
        catalog = load_catalog("default", type="sql", uri=f"sqlite:///{self.table}/catalog.db")
        return catalog.load_table("lab.rows") if catalog.table_exists("lab.rows") else None

    def visible_files(self) -> list[Path]:
        table = self.read_table()
        tasks = [] if table is None else table.scan().plan_files()
        files = [Path(task.file.file_path.removeprefix("file://")) for task in tasks]
        assert len(files) == len(set(files))
        return [file for file in files if "dagster-checkpoints" in file.parts]

    @precondition(lambda self: self.read_table() is not None)
    @rule()
    def another_program_appends(self) -> None:
        table = self.read_table()
        assert table is not None
        table.append(pa.table({"row": ["of another program"]}))


IcebergHistories.TestCase.settings = settings(
    max_examples=5, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestIcebergHistories = IcebergHistories.TestCase
