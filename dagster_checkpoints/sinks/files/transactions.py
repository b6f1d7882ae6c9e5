"""The transactions of a FileSink: their text in a checkpoint, their staged files, and their commit.

A commit records the files first (``commits/…``), then moves them to their visible names one after the other, then writes the
manifest. Each step can be repeated, so a commit that was interrupted is completed by the next one. The record stays: a restore of
an older checkpoint needs it (see :mod:`restores`).

Must not know which transaction is current.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dagster_checkpoints.sinks.base import SinkCommit, SinkContext
from dagster_checkpoints.sinks.fence import Fence
from dagster_checkpoints.sinks.files.names import (
    FileCommitName,
    attempts_folder,
    commits_folder,
    parse_commit,
    staged_folder,
    staged_name,
    staged_parts,
    timeline_name,
)
from dagster_checkpoints.sinks.files.records import PARTS, TIMELINES, JobTimeline, StagedParts
from dagster_checkpoints.sinks.files.target_files import TargetFiles
from dagster_checkpoints.sinks.temporary_folder import TemporaryFolder
from dagster_checkpoints.systems.errors import SinkTransactionLost, UnreadableSinkTransaction, few

_IN_SAVEPOINT = "transaction.json"


class FileTransaction(msgspec.Struct, frozen=True, tag="files", tag_field="sink"):
    """A transaction's text in a checkpoint, decoded.

    Args:
        transaction: its name.
        files: the number of its files.
        rows: the number of its rows.
        bytes: the size of its files.
    """

    transaction: str
    files: int
    rows: int
    bytes: int
    version: int = 1


class _ManifestFile(msgspec.Struct, frozen=True):
    path: str
    rows: int
    bytes: int


class FileManifest(msgspec.Struct, frozen=True):
    """Content of a manifest, for readers.

    Args:
        checkpoint: id of the checkpoint.
        pipeline: the pipeline's name.
        stage: the stage's name.
        instance: the instance's index.
        files: path relative to the sink's location, number of rows and size of each file.
    """

    checkpoint: int
    pipeline: str
    stage: str
    instance: int
    files: tuple[_ManifestFile, ...]
    version: int = 1


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_TEXTS = msgspec.json.Decoder(FileTransaction)


class FileTransactions:
    """The transactions of one instance.

    Args:
        files: the location.
        context: the instance.
        fence: the owner's right to change the instance's rows.
        manifests: whether each commit writes a manifest.
        sink: the sink as errors name it.
    """

    def __init__(self, files: TargetFiles, context: SinkContext, fence: Fence, *, manifests: bool, sink: str) -> None:
        self._files = files
        self._context = context
        self._fence = fence
        self._manifests = manifests
        self._sink = sink
        self._copies: TemporaryFolder | None = None

    def pre_commit(self, name: FileCommitName, staged: StagedParts) -> str:
        """Make a transaction durable. Returns its text."""
        self._files.put(name.transaction, msgspec.json.encode(staged))
        parts = staged.parts
        text = FileTransaction(name.text, len(parts), sum(part.rows for part in parts), sum(part.bytes for part in parts))
        return msgspec.json.encode(text).decode()

    def commit(self, text: str) -> SinkCommit:
        """Move the transaction's files to their visible names; see ``FileSink.commit``."""
        decoded, name = self.decode(text)
        self._fence.take()
        self._commit(name)
        return SinkCommit(rows=decoded.rows, bytes=decoded.bytes, files=decoded.files)

    def abort(self, text: str) -> None:
        """Delete a transaction that is not committed."""
        _, name = self.decode(text)
        if self._files.read(name.commit) is None:
            self._delete_staged(name.index, name.attempt, name.number)

    def abort_rest(self, attempt: str) -> None:
        """Abort the staged transactions of all attempts but this one; complete commits that were interrupted.

        Args:
            attempt: the name of the attempt that acts, with its owner.
        """
        found = {staged_parts(file) for file in self._files.names(f"{attempts_folder(self._context.index)}/")} - {None}
        begun = {(name.attempt, name.number): name for name in self.commits()} if found else {}
        for each in sorted(one for one in found if one is not None):
            if each[0] == attempt or self._fence.is_newer(each[0]):
                continue
            if each in begun and self._read(begun[each].transaction) is not None:
                self._commit(begun[each])
            else:
                self._delete_staged(self._context.index, *each)

    def savepoint_files(self, text: str) -> dict[str, Path]:
        """The files of a transaction by name, none if it is committed. Raises SinkTransactionLost."""
        _, name = self.decode(text)
        if self._files.read(name.commit) is not None:
            return {}
        staged = self._read(name.transaction)
        if staged is None:
            raise self._lost(name, [name.transaction])
        self._check_complete(name, staged)
        self.drop_copies()
        self._copies = TemporaryFolder()
        stored = {_IN_SAVEPOINT: name.transaction}
        stored |= {staged_name(part.number): file for part, file in zip(staged.parts, staged.staged(name), strict=True)}
        return {saved: self._files.on_this_machine(file, self._copies.path) for saved, file in stored.items()}

    def drop_copies(self) -> None:
        """Delete the copies that a savepoint was taken from."""
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def restore(self, text: str, files: Mapping[str, Path]) -> None:
        """Create the transaction's staged files again from a savepoint's; see ``FileSink.restore_transaction``."""
        _, name = self.decode(text)
        if self._files.read(name.commit) is not None or self._read(name.transaction) is not None:
            return
        if _IN_SAVEPOINT not in files:
            raise self._unreadable(text, f"its savepoint holds no {_IN_SAVEPOINT}")
        staged = PARTS.decode(files[_IN_SAVEPOINT].read_bytes())
        self._delete_staged(name.index, name.attempt, name.number)  # a crash has interrupted an earlier restore
        sources = [files[staged_name(part.number)] for part in staged.parts]
        self._files.place_all(dict(zip(staged.staged(name), sources, strict=True)))
        self._files.put(name.transaction, msgspec.json.encode(staged))

    def decode(self, text: str) -> tuple[FileTransaction, FileCommitName]:
        """The transaction that a text names. Raises UnreadableSinkTransaction."""
        try:
            decoded = _TEXTS.decode(text)
        except msgspec.DecodeError as error:
            raise self._unreadable(text, str(error)) from error
        name = parse_commit(decoded.transaction)
        if name is None:
            raise self._unreadable(text, "no name of a transaction")
        return decoded, name

    def commits(self, job: str | None = None) -> list[FileCommitName]:
        """The commits of the instance, also those whose rows are taken back; of all jobs, or of one."""
        folder = commits_folder(self._context.index)
        names = self._files.names(f"{folder}/{job}/" if job else f"{folder}/")
        return [name for file in names if (name := parse_commit(file.rpartition("/")[2])) is not None]

    def committed(self, name: FileCommitName) -> StagedParts:
        """The files of a commit. Raises SinkTransactionLost."""
        found = self._read(name.commit)
        if found is None:
            raise self._lost(name, [name.commit])
        return found

    def timeline(self, job: str) -> JobTimeline:
        """The restores of a job. Raises UnreadableSinkTransaction."""
        file = timeline_name(self._context.index, job)
        data = self._files.read(file)
        try:
            return JobTimeline() if data is None else TIMELINES.decode(data)
        except msgspec.DecodeError as error:
            raise UnreadableSinkTransaction(
                f"{self._sink}: expected {self._files.place}/{file} to list the job's restores, found a file that cannot be "
                f"read: {error}. Restore it from a backup; or delete it if the job was only ever restored from its newest "
                "checkpoint"
            ) from error

    def record(self, job: str, timeline: JobTimeline) -> None:
        """Replace what is recorded about the restores of a job."""
        self._files.put(timeline_name(self._context.index, job), msgspec.json.encode(timeline))

    def show(self, name: FileCommitName, parts: StagedParts, *present: Sequence[str]) -> None:
        """Move a commit's files to their visible names, then write its manifest.

        Args:
            name: the commit.
            parts: its files.
            present: the names that the files may have, in the order in which they are tried.

        Raises:
            SinkTransactionLost: a file has none of these names, and is not visible either.
        """
        self.move(name, parts, parts.visible(name), *present)
        if self._manifests:
            files = zip(parts.visible(name), parts.parts, strict=True)
            manifest = FileManifest(
                name.checkpoint_id,
                self._context.pipeline,
                self._context.stage,
                name.index,
                tuple(_ManifestFile(path, part.rows, part.bytes) for path, part in files),
            )
            self._files.put(name.manifest, msgspec.json.encode(manifest) + b"\n")

    def move(self, name: FileCommitName, parts: StagedParts, new: Sequence[str], *present: Sequence[str]) -> None:
        """Move a commit's files; one that has its new name already stays. Raises SinkTransactionLost."""
        left = list(range(len(new)))
        for names in present:
            missing = self._files.move([(names[at], new[at], parts.parts[at].bytes) for at in left]) if left else []
            left = [left[position] for position in missing]
        lost = self._files.missing([new[at] for at in left])
        if lost:
            raise self._lost(name, lost)

    def _commit(self, name: FileCommitName) -> None:
        staged, committed = self._read(name.transaction), self._read(name.commit)
        if committed is not None:
            timeline = self.timeline(name.job)
            if name.text in timeline.taken_back:  # the restore of a savepoint of another job
                self.show(name, committed, committed.taken_back(name), committed.staged(name))
                left, unfinished = ({*names} - {name.text} for names in (timeline.taken_back, timeline.unfinished))
                self.record(name.job, timeline.taking_back(left, unfinished))
        if staged is None:
            if committed is None:
                raise self._lost(name, [name.transaction])
            return
        if committed is None:
            self._check_complete(name, staged)
            self._files.put(name.commit, msgspec.json.encode(staged))
        self.show(name, staged, staged.staged(name))
        self._files.delete([name.transaction])

    def _check_complete(self, name: FileCommitName, staged: StagedParts) -> None:
        """Whether all files are staged, before the first of them becomes visible. Raises SinkTransactionLost."""
        present = dict(self._files.sizes(f"{name.staged}/"))
        files = zip(staged.staged(name), staged.parts, strict=True)
        lost = [file for file, part in files if present.get(file) != part.bytes]
        if lost:
            raise self._lost(name, lost)

    def _delete_staged(self, index: int, attempt: str, number: int) -> None:
        folder = staged_folder(index, attempt, number)
        files = self._files.names(f"{folder}/")
        last = f"{folder}/transaction"  # so that a crash leaves no files that are not listed
        self._files.delete(file for file in files if file != last)
        self._files.delete([last])

    def _read(self, file: str) -> StagedParts | None:
        data = self._files.read(file)
        try:
            return None if data is None else PARTS.decode(data)
        except msgspec.DecodeError as error:
            raise SinkTransactionLost(
                f"{self._sink}: expected {self._files.place}/{file} to list the files of a transaction, found a file that cannot "
                f"be read: {error}. Restore it from a backup"
            ) from error

    def _lost(self, name: FileCommitName, lost: Sequence[str]) -> SinkTransactionLost:
        return SinkTransactionLost(
            f"{self._sink}: expected the files of the transaction of checkpoint {name.checkpoint_id}, instance {name.index}, "
            f"staged or committed in {self._files.place}, found no {few(lost)}: another program has deleted them. The sink has "
            "lost rows of that checkpoint: restore the files from a backup, or begin a new job"
        )

    def _unreadable(self, text: str, why: str) -> UnreadableSinkTransaction:
        return UnreadableSinkTransaction(
            f"{self._sink}: expected the text of one of its transactions, found {text!r}: {why}. Did the stage have another "
            "kind of sink when the checkpoint was taken? Restore with that kind of sink, or start the job without restoring"
        )
