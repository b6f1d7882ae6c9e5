"""The tree of a job's checkpoints: which of them are on the way to the restored one, from the job's beginning.

Restoring an older checkpoint or savepoint makes a job's checkpoints a tree. Example: 41 … 46 were taken, the job is restored
from 43 and takes 47 next; the way to 47 is 41, 42, 43, 47, and the way to savepoint 45, which still exists, is 41 … 45. A sink
that commits by checkpoint shows exactly the rows of the checkpoints on the way to the restored one. Ids grow for the whole
life of a job, so the tree is one pair of ids for each restore of an older checkpoint.

Values only; must not know files or rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dagster_checkpoints.systems.errors import SinkCannotTakeBack


class Branch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A branch of the tree: it begins at ``restored``, and its checkpoints are ``first`` and the ids after it.

    Args:
        restored: id of the restored checkpoint or savepoint; 0 for the job's beginning.
        first: id of the job's first checkpoint after that restore.
    """

    restored: int
    first: int


class Branches(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All branches of one job that one instance of a sink has recorded, oldest first."""

    branches: tuple[Branch, ...] = ()

    def begun(self, restored: int, first: int) -> Branches:
        """The branches after the job was restored from ``restored`` and has taken ``first`` as its next checkpoint.

        An id is used a second time only if no checkpoint with this or a later id ever completed: branches that begin there
        are removed.
        """
        kept = tuple(branch for branch in self.branches if branch.first < first)
        if restored < first - 1:  # otherwise no checkpoint is between them that could be on another branch
            kept = (*kept, Branch(restored, first))
        return Branches(kept)

    def branch_of(self, checkpoint_id: int) -> int:
        """The first checkpoint of the branch that a new checkpoint is on; 0 for the first branch."""
        return max((branch.first for branch in self.branches if branch.first <= checkpoint_id), default=0)

    def is_ancestor(self, checkpoint_id: int, restored: int) -> bool:
        """Whether the state of checkpoint ``restored`` includes all rows up to ``checkpoint_id``."""
        for branch in reversed(self.branches):
            if branch.first > restored:
                continue
            if checkpoint_id >= branch.first:
                break
            restored = branch.restored
        return checkpoint_id <= restored


def overwritten(branches: Branches, restored: int, commits: Sequence[int]) -> frozenset[int]:
    """The checkpoints on the way to ``restored`` whose rows a table of newest rows by key may no longer show.

    In such a table a commit replaces rows of earlier commits. A job that is restored from an older checkpoint writes again all
    later rows of the same branch. It does not write rows between the place where another branch began and ``restored``; where a
    commit of that other branch came after them, it has replaced them with older rows.

    Args:
        branches: the job's branches.
        restored: id of the checkpoint or savepoint that the job is restored from.
        commits: ids of the checkpoints of an instance's commits, in the order in which the rows were written.
    """
    lost: set[int] = set()
    on_the_way: list[int] = []
    for checkpoint_id in commits:
        if branches.is_ancestor(checkpoint_id, restored):
            on_the_way.append(checkpoint_id)
        elif not branches.is_ancestor(restored, checkpoint_id):
            lost.update(earlier for earlier in on_the_way if not branches.is_ancestor(earlier, checkpoint_id))
    return frozenset(lost)


def check_not_overwritten(branches: Branches, restored: int, commits: Sequence[int], sink: str) -> None:
    """Refuse a restore after which a table of newest rows by key would not show the rows on the way to ``restored``.

    Args:
        branches: the job's branches.
        restored: id of the checkpoint or savepoint that the job is restored from.
        commits: as for :func:`overwritten`.
        sink: the sink as errors name it.

    Raises:
        SinkCannotTakeBack: rows on the way may have been replaced.
    """
    lost = sorted(overwritten(branches, restored, commits))
    if lost:
        shown = ", ".join(map(str, lost[:5])) + (", …" if len(lost) > 5 else "")
        raise SinkCannotTakeBack(
            f"{sink}: expected that the table still shows the rows on the way to checkpoint {restored}, found that the rows of "
            f"checkpoint{'s' if len(lost) > 1 else ''} {shown} may have been replaced: the job was restored from an older "
            "checkpoint after them, and went another way. Restore the newest checkpoint, or one that is older than the place "
            "where the ways part; or begin a new job with at_new_start='replace'"
        )
