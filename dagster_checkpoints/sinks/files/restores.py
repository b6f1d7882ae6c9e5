"""Restores of older checkpoints: files of later checkpoints are hidden, and visible again if a later savepoint is restored.

Files are moved, never deleted. Every step can be repeated after a crash. Must not know how rows are staged.
"""

from __future__ import annotations

from dagster_checkpoints.sinks.branches import settlement
from dagster_checkpoints.sinks.files.names import FileCommitName
from dagster_checkpoints.sinks.files.records import StagedParts
from dagster_checkpoints.sinks.files.target_files import TargetFiles
from dagster_checkpoints.sinks.files.transactions import FileTransactions
from dagster_checkpoints.systems.errors import SinkCannotTakeBack, SinkTransactionLost, few


class FileRestores:
    """The rows of one instance of one job, as readers see them after restores.

    Args:
        files: the location.
        transactions: the instance's transactions.
        job: the job's name.
        sink: the sink as errors name it.
    """

    def __init__(self, files: TargetFiles, transactions: FileTransactions, job: str, sink: str) -> None:
        self._files = files
        self._transactions = transactions
        self._job = job
        self._sink = sink

    def settle(self, restored: int) -> None:
        """Show exactly the rows on the way to a checkpoint.

        Raises:
            SinkCannotTakeBack: another program has deleted or rewritten rows that have to vanish. Nothing was changed.
            SinkTransactionLost: rows that are needed again have been deleted. Nothing was changed.
        """
        timeline = self._transactions.timeline(self._job)
        commits = self._transactions.commits(self._job)
        hidden = {name for name in commits if name.text in timeline.taken_back}
        moves = settlement(timeline.branches, restored, set(commits) - hidden, hidden, lambda name: name.checkpoint_id)
        unfinished = {name for name in hidden if name.text in timeline.unfinished}
        hide = {name: self._transactions.committed(name) for name in _in_order(moves.hide | (unfinished - moves.show))}
        show = {name: self._transactions.committed(name) for name in _in_order(moves.show)}
        if not hide and not show:
            return
        self._check_present(hide, show, restored)
        moving = {name.text for name in (*hide, *show)}
        self._transactions.record(self._job, timeline.taking_back({name.text for name in hidden} | moving, moving))
        for name, parts in hide.items():
            self._files.delete([name.manifest])
            self._transactions.move(name, parts, parts.taken_back(name), parts.visible(name), parts.staged(name))
        for name, parts in show.items():
            self._transactions.show(name, parts, parts.taken_back(name), parts.staged(name))
        for name in hide:  # otherwise an interrupted commit of these rows would be completed
            self._files.delete([name.transaction])
        left = (hidden | moves.hide) - moves.show
        self._transactions.record(self._job, timeline.taking_back(name.text for name in left))

    def has_visible_rows(self) -> bool:
        """Whether readers see rows of this instance and job."""
        hidden = self._transactions.timeline(self._job).taken_back
        return any(name.text not in hidden for name in self._transactions.commits(self._job))

    def begin_branch(self, restored: int, first: int) -> None:
        """Record the restore from a checkpoint, and the job's first checkpoint after it. Durable when this returns.

        Args:
            restored: id of the restored checkpoint or savepoint; 0 for the job's beginning.
            first: id of the first checkpoint after the restore.
        """
        timeline = self._transactions.timeline(self._job)
        branches = timeline.branches.begun(restored, first)
        if branches != timeline.branches:
            self._transactions.record(self._job, type(timeline)(branches, timeline.taken_back, timeline.unfinished))

    def _check_present(
        self, hide: dict[FileCommitName, StagedParts], show: dict[FileCommitName, StagedParts], restored: int
    ) -> None:
        gone = [file for name, parts in hide.items() for file in self._lost(name, parts)]
        if gone:
            raise SinkCannotTakeBack(
                f"{self._sink}: expected the files that later checkpoints than {restored} have committed in {self._files.place}, "
                f"found that {len(gone)} are not there any more ({few(gone)}): another program has rewritten or deleted them, so "
                f"this sink cannot hide their rows to restore checkpoint {restored}. Nothing was changed. Restore the newest "
                "checkpoint instead; or put the files back; or, if their rows are really gone, delete the records of these "
                f"commits: {few(name.commit for name in hide)}"
            )
        lost = [file for name, parts in show.items() for file in self._lost(name, parts)]
        if lost:
            raise SinkTransactionLost(
                f"{self._sink}: expected the rows that had been committed before checkpoint {restored}, and taken back since, in "
                f"{self._files.place}, found no {few(lost)}: they have been deleted. Restore them from a backup, or restore "
                "another checkpoint or savepoint"
            )

    def _lost(self, name: FileCommitName, parts: StagedParts) -> list[str]:
        """The visible names of the files that have none of their names."""
        left = list(range(len(parts.parts)))
        for names in (parts.visible(name), parts.taken_back(name), parts.staged(name)):
            missing = set(self._files.missing([names[at] for at in left])) if left else set()
            left = [at for at in left if names[at] in missing]
        return [parts.visible(name)[at] for at in left]


def _in_order(names: frozenset[FileCommitName] | set[FileCommitName]) -> list[FileCommitName]:
    return sorted(names, key=lambda name: name.checkpoint_id)
