"""Taken-back directories: a restore hides committed directories from readers; a later restore that needs them shows them again.

::

    <path>/checkpoint=44-job1-0/                visible to readers
    <path>/.taken-back/checkpoint=45-job1-0/    committed later than the checkpoint that the job was restored from
    <path>/.branches/job1-0.json                the restores of job 1 (see :mod:`branches`), and the directories in .taken-back

Rows are moved, never deleted: a savepoint that is later than the restored one may be restored afterwards, and the rows
that it counts as committed exist only in ``.taken-back``. An operator may delete ``.taken-back`` if no such savepoint will be
restored; a restore that needs a deleted directory fails and names it. Every step can be repeated after a crash.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from uuid import uuid4

import msgspec

from dagster_checkpoints.files.durable import sync
from dagster_checkpoints.sinks.branches import Branches, settlement
from dagster_checkpoints.systems.errors import SinkPathInUse, SinkTransactionLost

TAKEN_BACK = ".taken-back"
BRANCHES = ".branches"
COMMITTED = re.compile(r"checkpoint=(\d+)-job(\d+(?:\.\w+)?)-(\d+)")
"""Groups: the checkpoint's id, the job, the instance's index."""


class _Record(msgspec.Struct, frozen=True):
    """Content of the instance's file; ``taken_back`` may also name directories that are visible: not moved yet, or moved back."""

    branches: Branches = Branches()
    taken_back: tuple[str, ...] = ()
    version: int = 1


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_RECORD = msgspec.json.Decoder(_Record)


class TakenBack:
    """The taken-back directories of one instance of one job, below a sink's path.

    Args:
        path: the sink's directory.
        job: the job's number; with a dot and its history's id if that is not the history that first wrote to this sink.
        index: the instance's index.
    """

    def __init__(self, path: Path, job: str, index: int) -> None:
        self._path = path
        self._hidden = path / TAKEN_BACK
        self._file = path / BRANCHES / f"job{job}-{index}.json"
        self._job_and_index = (job, index)

    def settle(self, restored: int, staged: Collection[str]) -> None:
        """Show exactly the directories on the way to the checkpoint that the job is restored from.

        Args:
            restored: id of the checkpoint or savepoint.
            staged: names of directories that are about to be committed.

        Raises:
            SinkTransactionLost: a directory that was taken back is needed again, and it has been deleted. Nothing was
                changed.
        """
        record = self._read()
        visible, hidden = self._committed(self._path), self._committed(self._hidden)
        self._check_complete(record, restored, visible | hidden | set(staged))
        moves = settlement(record.branches, restored, visible, hidden, _id)
        if not moves.hide and not moves.show:
            return
        self._hidden.mkdir(exist_ok=True)
        self._write(msgspec.structs.replace(record, taken_back=tuple(sorted(hidden | moves.hide))))
        for name in sorted(moves.hide):
            if name in hidden:  # the same rows, which the restore of a savepoint has committed a second time
                shutil.rmtree(self._hidden / name)
            os.rename(self._path / name, self._hidden / name)
        for name in sorted(moves.show):
            if name in visible:
                shutil.rmtree(self._hidden / name)
            else:
                os.rename(self._hidden / name, self._path / name)
        sync(self._hidden)
        sync(self._path)
        self._write(msgspec.structs.replace(record, taken_back=tuple(sorted((hidden - moves.show) | moves.hide))))

    def has_visible_rows(self) -> bool:
        """Whether readers see a directory of this instance and job."""
        return bool(self._committed(self._path))

    def begin_branch(self, restored: int, first: int) -> None:
        """Record the restore from ``restored`` and the job's first checkpoint after it. Durable when this returns.

        Args:
            restored: id of the restored checkpoint or savepoint; 0 for the job's beginning.
            first: id of the first checkpoint after the restore.
        """
        record = self._read()
        branches = record.branches.begun(restored, first)
        if branches != record.branches:
            self._write(msgspec.structs.replace(record, branches=branches))

    def _committed(self, directory: Path) -> set[str]:
        if not directory.exists():
            return set()
        names = ((name, COMMITTED.fullmatch(name)) for name in os.listdir(directory))
        return {name for name, match in names if match and (match[2], int(match[3])) == self._job_and_index}

    def _check_complete(self, record: _Record, restored: int, existing: set[str]) -> None:
        lost = [n for n in record.taken_back if n not in existing and record.branches.is_ancestor(_id(n), restored)]
        if lost:
            raise SinkTransactionLost(
                f"expected the rows that had been committed before checkpoint {restored} in {self._path}, and taken back "
                f"since, in {self._hidden}, found no {', '.join(sorted(lost)[:5])}: they have been deleted. Restore "
                f"{TAKEN_BACK} from a backup, or restore another checkpoint or savepoint; {self._file} lists what was taken back"
            )

    def _read(self) -> _Record:
        try:
            return _RECORD.decode(self._file.read_bytes())
        except FileNotFoundError:
            return _Record()
        except msgspec.DecodeError as error:
            raise SinkPathInUse(
                f"expected {self._file} to list the job's restores, found a file that cannot be read: {error}. Restore it "
                "from a backup; or delete it if the job was only ever restored from its newest checkpoint"
            ) from error

    def _write(self, record: _Record) -> None:
        self._file.parent.mkdir(exist_ok=True)
        temporary = self._file.with_name(f"{self._file.name}-{uuid4().hex}")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        sync(temporary)
        os.replace(temporary, self._file)
        sync(self._file.parent)


def _id(name: str) -> int:
    match = COMMITTED.fullmatch(name)
    return int(match[1]) if match else 0
