"""A FileSink that is open, and rows that wait in it for their checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_checkpoints.sinks import FileSink, SinkContext

BATCH: Any = SimpleNamespace(columns=["n"])


def opened(sink: FileSink, epoch: int) -> FileSink:
    """An instance of the sink, for the owner of an epoch."""
    sink = sink.new_instance()
    sink.open(SinkContext("flights", "delays", "0", 0, 1, 1, f"a{epoch}", history="h1", epoch=epoch))
    return sink


def staged(sink: FileSink, folder: Path, checkpoint_id: int, *rows: int) -> str:
    """Write a batch of two files of these rows, and pre-commit: the transaction."""
    file = folder / f"{checkpoint_id}.parquet"
    pq.write_table(pa.table({"n": pa.array(rows, pa.int64()), "day": [f"é+/ {n % 2}" for n in rows]}), file)
    sink.write(BATCH, [str(file), str(file)], checkpoint_id)
    file.unlink()
    transaction = sink.pre_commit(checkpoint_id)
    assert transaction is not None
    return transaction
