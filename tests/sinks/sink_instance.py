"""The instance of a stage that tests of single sinks write for, and its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_checkpoints.sinks import SinkCommit, SinkContext, SinkFenced, TwoPhaseCommitSink

S = TypeVar("S", bound=TwoPhaseCommitSink)

BATCH: Any = SimpleNamespace()
"""Stands for a micro-batch whose DataFrame the sink does not ask for."""


def context(**changes: Any) -> SinkContext:
    """The context of the only instance of a stage, with changes."""
    values: dict[str, Any] = {
        "pipeline": "flights",
        "stage": "delays",
        "instance": "0",
        "index": 0,
        "parallelism": 1,
        "job_id": 1,
        "attempt": "a1",
        "history": "h1",
        "epoch": 1,
    }
    return SinkContext(**{**values, **changes})


def opened(sink: S, epoch: int) -> S:
    """The sink, opened for the owner of an epoch."""
    sink.open(context(epoch=epoch, attempt=f"a{epoch}"))
    return sink


def staged(sink: TwoPhaseCommitSink, folder: Path, checkpoint_id: int, *rows: int) -> str:
    """Write a batch of these rows, by default the number of the checkpoint, and pre-commit: the transaction."""
    file = folder / f"{uuid4()}.parquet"
    pq.write_table(pa.table({"n": pa.array(rows or [checkpoint_id], pa.int64())}), file)
    sink.write(BATCH, [str(file)], checkpoint_id)
    file.unlink()
    transaction = sink.pre_commit(checkpoint_id)
    assert transaction is not None
    return transaction


def check_commits_and_restores(
    new_sink: Callable[[], TwoPhaseCommitSink], rows: Callable[[], list[int]], append: Callable[[pa.Table], object], folder: Path
) -> None:
    """Rows are committed, taken back, and restored from a savepoint, beside those of another program."""
    sink = opened(new_sink(), 1)
    sink.start_new()
    for checkpoint_id in (1, 2):
        sink.commit(staged(sink, folder, checkpoint_id))
    append(pa.table({"n": [100]}))
    waiting = staged(sink, folder, 3)
    savepoint = {name: file.read_bytes() for name, file in sink.transaction_files(waiting).items()}
    assert rows() == [1, 2, 100]
    back = opened(new_sink(), 2)
    back.recover([], restored=1)
    assert rows() == [1, 100]
    with pytest.raises(SinkFenced, match=r"epoch 1.*epoch 2"):
        sink.commit(waiting)
    forth = opened(new_sink(), 3)
    for name, data in savepoint.items():
        (folder / name).write_bytes(data)
    forth.restore_transaction(waiting, {name: folder / name for name in savepoint})
    forth.recover([waiting], restored=3)
    assert rows() == [1, 2, 3, 100]
    assert (forth.commit(waiting) or SinkCommit()).version is None
    for each in (sink, back, forth):
        each.close()
