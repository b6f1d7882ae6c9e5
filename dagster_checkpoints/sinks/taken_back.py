"""Committed directories that a restore takes out of readers' sight, and brings back when the job goes there again.

::

    <path>/checkpoint=44-job1-0/                what readers see
    <path>/.taken-back/checkpoint=45-job1-0/    committed later than the checkpoint that the job was restored from
    <path>/.branches/job1-0.json                from where job 1 went on, and what is in .taken-back

Rows are moved, never deleted: a savepoint taken later than the one restored may still be restored afterwards, and the rows
that it counts as committed are nowhere else. Whoever will never go there again may delete ``.taken-back``; a restore that
needs it then says so. Every step can be repeated after a crash.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from uuid import uuid4

import msgspec

from dagster_checkpoints.sinks.branches import Branches, settlement
from dagster_checkpoints.sinks.durable import sync
from dagster_checkpoints.sinks.errors import SinkPathInUse, SinkTransactionLost

TAKEN_BACK = ".taken-back"
BRANCHES = ".branches"
COMMITTED = re.compile(r"checkpoint=(\d+)-job(\d+(?:\.\w+)?)-(\d+)")
"""Groups: the checkpoint's id, the job, the instance's index."""


class _Record(msgspec.Struct, frozen=True):
    """Content of the instance's file; ``taken_back`` may name directories that are still, or again, in sight."""

    branches: Branches = Branches()
    taken_back: tuple[str, ...] = ()
    version: int = 1


# Made here: two threads that decode a type for the first time at the same moment crash msgspec.
_RECORD = msgspec.json.Decoder(_Record)


class TakenBack:
    """What one instance of one job has taken back below a sink's path.

    Args:
        path: the sink's.
        job: its number, and the history that it is of where that is not the first one of this sink.
        index: the instance's.
    """

    def __init__(self, path: Path, job: str, index: int) -> None:
        self._path = path
        self._hidden = path / TAKEN_BACK
        self._file = path / BRANCHES / f"job{job}-{index}.json"
        self._whose = (job, index)

    def settle(self, restored: int, staged: Collection[str]) -> None:
        """Show exactly the directories on the way to the checkpoint that the job is restored from.

        Args:
            restored: its id.
            staged: names of directories that are about to be committed.

        Raises:
            SinkTransactionLost: a directory that was taken back is needed again, and somebody has deleted it. Nothing was
                changed.
        """
        record = self._read()
        visible, hidden = self._committed(self._path), self._committed(self._hidden)
        self._check_whole(record, restored, visible | hidden | set(staged))
        moves = settlement(record.branches, restored, visible, hidden, _id)
        if not moves.hide and not moves.show:
            return
        self._hidden.mkdir(exist_ok=True)
        self._write(msgspec.structs.replace(record, taken_back=tuple(sorted(hidden | moves.hide))))
        for name in sorted(moves.hide):
            if name in hidden:  # the same rows once more: a savepoint had brought them along
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

    def anything_visible(self) -> bool:
        """Whether readers see a directory of this instance and job."""
        return bool(self._committed(self._path))

    def go_on(self, restored: int, first: int) -> None:
        """The job, restored from ``restored`` (0: begun), takes its first checkpoint since. Durable when this returns."""
        record = self._read()
        branches = record.branches.begun(restored, first)
        if branches != record.branches:
            self._write(msgspec.structs.replace(record, branches=branches))

    def _committed(self, directory: Path) -> set[str]:
        if not directory.exists():
            return set()
        found = ((name, COMMITTED.fullmatch(name)) for name in os.listdir(directory))
        return {name for name, match in found if match and (match[2], int(match[3])) == self._whose}

    def _check_whole(self, record: _Record, restored: int, there: set[str]) -> None:
        lost = [n for n in record.taken_back if n not in there and record.branches.on_the_way(_id(n), restored)]
        if lost:
            raise SinkTransactionLost(
                f"expected the rows that had been committed before checkpoint {restored} in {self._path}, and taken back "
                f"since, in {self._hidden}, found no {', '.join(sorted(lost)[:5])}: somebody has deleted them. Restore "
                f"{TAKEN_BACK} from a backup, or restore another checkpoint or savepoint; {self._file} says what was taken back"
            )

    def _read(self) -> _Record:
        try:
            return _RECORD.decode(self._file.read_bytes())
        except FileNotFoundError:
            return _Record()
        except msgspec.DecodeError as error:
            raise SinkPathInUse(
                f"expected {self._file} to say from where the job went on, found a file that cannot be read: {error}. Restore it "
                "from a backup; or delete it if the job was never restored from anything but its newest checkpoint"
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
