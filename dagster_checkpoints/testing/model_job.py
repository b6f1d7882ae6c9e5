"""A job without Spark that uses a sink as the runtime does: numbered rows, checkpoints, savepoints, restarts.

The order of the calls is that of the shipped :class:`TaskSink`. Row ``n`` of instance ``i`` has the number ``i * 1_000_000 + n``,
and each instance writes its rows in order: so the numbers of instances' rows tell which rows a checkpoint holds.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_checkpoints.sinks import SinkCommit, SinkContext, TwoPhaseCommitSink
from dagster_checkpoints.spark.tasks.task_sink import TaskSink

_OF_INSTANCE = 1_000_000


class ModelCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint or savepoint of a model job.

    Attributes:
        id: its id.
        rows: by instance, the number of rows that it holds.
        transactions: by instance, the transactions that it holds.
        files: by instance, by position of the transaction and by name, the path of each stored file; empty for a checkpoint.
        finished: whether the instances had reached the end of their data.
        committed: by instance, the transaction that it had committed last; None if that is not known.
    """

    id: int
    rows: tuple[int, ...]
    transactions: tuple[tuple[str, ...], ...]
    files: tuple[dict[int, dict[str, str]], ...] = ()
    finished: bool = False
    committed: tuple[str | None, ...] = ()

    @property
    def visible(self) -> list[int]:
        """The numbers of the rows that readers see when it is committed."""
        return [row for index, count in enumerate(self.rows) for row in _numbers(index, 0, count)]


class UnevaluatedBatch:
    """Stands for a batch's DataFrame where there is no Spark: it has columns, and refuses everything else."""

    columns = ("n", "text")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"Without Spark: expected that the sink uses the batch's files and batch.columns, found batch.{name}. "
            "Write from the files: they hold the same rows"
        )


@dataclass
class ModelJob:
    """One attempt after another of a job whose only stage writes to the sink.

    Args:
        sink: the configured sink.
        folder: a directory for the files that Spark and storage would write.
        instances: number of instances of the stage.
        watch: wraps the sink of each instance.
    """

    sink: TwoPhaseCommitSink
    folder: Path
    instances: int = 1
    watch: Callable[[TwoPhaseCommitSink], TwoPhaseCommitSink] = lambda sink: sink

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sinks: list[TaskSink] = []
        self._written: list[TwoPhaseCommitSink] = []
        self._rows: list[int] = []
        self._batch = 0

    def context(self, index: int, epoch: int, job_id: int = 1, attempt: str | None = None) -> SinkContext:
        """The description of an instance; the token of the attempt is random if none is given."""
        token = uuid4().hex[:8] if attempt is None else attempt
        return SinkContext("conformance", "stage", str(index), index, self.instances, job_id, token, "history", epoch)

    def start(self, restored: ModelCheckpoint | None = None, *, epoch: int = 1, job_id: int = 1, own: bool = True) -> None:
        """Begin an attempt.

        Args:
            restored: the checkpoint or savepoint to continue from; None for a new start.
            epoch: the owner's fencing epoch.
            job_id: the job's number.
            own: whether this job took the checkpoint.
        """
        self.sinks, self._written, unused = [], [], Any
        self._rows = list(restored.rows) if restored else [0] * self.instances
        self._batch = 0
        for index in range(self.instances):
            sink = self.watch(self.sink.new_instance())
            context = self.context(index, epoch, job_id)
            if restored is not None and restored.committed and own:
                context = replace(context, committed=restored.committed[index])
            task = TaskSink(sink, context, unused, unused, self.folder / "scratch")  # type: ignore[arg-type]
            self.sinks.append(task)
            self._written.append(sink)
            if restored is None:
                task.open(None)
            else:
                files = self._fetched(restored.files[index]) if restored.files else {}
                task.open(restored.transactions[index], restored.id if own else None, files)
        if restored is not None:
            shutil.rmtree(self.folder / "fetched", ignore_errors=True)  # a sink may not refer to them after the call

    def write(self, rows: int, index: int = 0) -> None:
        """Write one micro-batch of an instance's next rows, in two files; the files are deleted afterwards."""
        first, batch = self._rows[index], self._batch
        self._rows[index] += rows
        self._batch += 1
        self.write_numbers(list(_numbers(index, first, first + rows)), batch, index)

    def write_numbers(self, numbers: Sequence[int], batch_id: int, index: int = 0) -> None:
        """Write a micro-batch of these rows."""
        segment = self.folder / f"segment-{uuid4().hex}"
        segment.mkdir()
        files: list[Path] = []
        for half in (numbers[::2], numbers[1::2]):
            if half:
                table = pa.table({"n": pa.array(half, pa.int64()), "text": [f"row {n}" for n in half]})
                files.append(segment / f"part-{len(files)}.parquet")
                pq.write_table(table, files[-1])
        self._written[index].write(UnevaluatedBatch(), [str(file) for file in files], batch_id)  # type: ignore[arg-type]
        shutil.rmtree(segment)

    def snapshot(self, checkpoint_id: int, *, savepoint: bool = False, finished: bool = False) -> ModelCheckpoint:
        """Pre-commit every instance; a savepoint also stores the files of the transactions."""
        transactions: list[tuple[str, ...]] = []
        files: list[dict[int, dict[str, str]]] = []
        for index, sink in enumerate(self.sinks):
            transactions.append(sink.pre_commit(checkpoint_id))
            if savepoint:
                pinned = sink.pin_transactions(self.folder / f"savepoint-{checkpoint_id}-{uuid4().hex}" / str(index))
                files.append({at: {name: str(file) for name, file in named.items()} for at, named in pinned.items()})
        last = tuple(sink.committed for sink in self.sinks)
        committed = tuple(None if each is None else each.transaction for each in last)
        return ModelCheckpoint(checkpoint_id, tuple(self._rows), tuple(transactions), tuple(files), finished, committed)

    def commit(self, checkpoint_id: int) -> list[SinkCommit]:
        """The checkpoint is complete: commit it in every instance."""
        return [commit for sink in self.sinks for commit in sink.commit_up_to(checkpoint_id)]

    def checkpoint(self, checkpoint_id: int, *, savepoint: bool = False) -> ModelCheckpoint:
        """Take a checkpoint and commit it."""
        taken = self.snapshot(checkpoint_id, savepoint=savepoint)
        self.commit(checkpoint_id)
        return taken

    def finish(self) -> None:
        """The data has ended in every instance."""
        for sink in self.sinks:
            sink.finish()

    def close(self) -> None:
        """End the attempt in order."""
        for sink in self.sinks:
            sink.close()

    def _fetched(self, files: Mapping[int, Mapping[str, str]]) -> dict[int, dict[str, Path]]:
        """Copies of a savepoint's files, as a restore fetches them."""
        fetched: dict[int, dict[str, Path]] = {}
        for position, named in files.items():
            folder = self.folder / "fetched" / uuid4().hex
            folder.mkdir(parents=True)
            fetched[position] = {name: Path(shutil.copy(file, folder / name)) for name, file in named.items()}
        return fetched


def _numbers(index: int, first: int, end: int) -> range:
    return range(index * _OF_INSTANCE + first, index * _OF_INSTANCE + end)
