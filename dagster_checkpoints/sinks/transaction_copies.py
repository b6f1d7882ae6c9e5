"""Copies of batches' files that a sink keeps until it has committed them, for savepoints; on the driver's machine.

Links where possible.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from dagster_checkpoints.files.durable import link_or_copy
from dagster_checkpoints.sinks.temporary_folder import TemporaryFolder


class TransactionCopies:
    """The copies of one sink's instance, in a temporary directory that exists until :meth:`close`."""

    def __init__(self) -> None:
        self._folder = TemporaryFolder()

    def keep(self, token: str, batch_id: int, files: Iterable[Path]) -> None:
        """Keep the files of a batch; they replace those kept for this batch before.

        Args:
            token: the transaction's name, which can name a directory.
            batch_id: id of the micro-batch.
            files: the batch's files, in order.
        """
        folder = self._folder.path / token
        folder.mkdir(exist_ok=True)
        for stale in folder.glob(f"batch-{batch_id:09d}-*"):
            stale.unlink()
        for number, file in enumerate(files):
            link_or_copy(file, folder / f"batch-{batch_id:09d}-{number:05d}.parquet")

    def files(self, token: str) -> dict[str, Path]:
        """The files of a transaction by name, in the order of the batches; none if none are kept."""
        folder = self._folder.path / token
        return {file.name: file for file in sorted(folder.iterdir())} if folder.exists() else {}

    def drop(self, token: str) -> None:
        shutil.rmtree(self._folder.path / token, ignore_errors=True)

    def close(self) -> None:
        self._folder.close()
