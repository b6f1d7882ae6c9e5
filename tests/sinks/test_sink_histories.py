"""After any history of a job, readers see exactly the rows of the checkpoint that the job was restored from, each once.

A model job of two instances processes numbered rows, takes checkpoints and savepoints, aborts, commits late, crashes in the
middle of any change of the file system, and is restored from any of its savepoints. A row's number is the instance's position
in its input, so the rows of a checkpoint are 0 … position-1, on every branch.
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

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dagster_checkpoints.sinks import ParquetSink, SinkContext
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
        for module, name in ((os, "rename"), (os, "replace"), (os, "link"), (os, "fsync")):
            self._wrap(patches, module, name)
        rmtree = shutil.rmtree

        def remove_bit_by_bit(path: Path, ignore_errors: bool = False) -> None:
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
            return real(*arguments, **keywords)

        patches.setattr(module, name, counting)


FUSE = st.one_of(st.none(), st.integers(0, 40))


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="histories-"))
        self.table = self.folder / "table"
        self.configured = ParquetSink(self.table)
        self.disk = Disk()
        self.numbers = iter(range(10**9))
        self.attempt = 0
        self.highest = 0
        self.newest: Snapshot | None = None
        self.retained: list[Snapshot] = []
        self.savepoints: list[Snapshot] = []
        self.start(None)

    def teardown(self) -> None:
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
        return TaskSink(self.configured.new_instance(), context, unused, unused)

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
        segment.write_text("".join(f"{index}:{n}\n" for n in range(self.positions[index], self.positions[index] + rows)))
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

    # Invariants

    @invariant()
    def readers_see_each_row_once(self) -> None:
        found = sorted(
            line
            for directory in self.table.glob("checkpoint=*")
            for file in directory.iterdir()
            for line in file.read_text().splitlines()
        )
        assert found == sorted(f"{index}:{n}" for index in INSTANCES for n in range(self.seen[index]))


Histories.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase
