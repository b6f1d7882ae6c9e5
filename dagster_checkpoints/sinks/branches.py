"""The tree of a job's checkpoints: which of them are on the way to the restored one, from the job's beginning.

Restoring an older checkpoint or savepoint makes a job's checkpoints a tree. Example: 41 … 46 were taken, the job is restored
from 43 and takes 47 next; the way to 47 is 41, 42, 43, 47, and the way to savepoint 45, which still exists, is 41 … 45. A sink
that commits by checkpoint shows exactly the rows of the checkpoints on the way to the restored one. Ids grow for the whole
life of a job, so the tree is one pair of ids for each restore of an older checkpoint.

Values only; must not know files or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec


class Branch(msgspec.Struct, frozen=True):
    """A branch of the tree: it begins at ``restored``, and its checkpoints are ``first`` and the ids after it.

    Args:
        restored: id of the restored checkpoint or savepoint; 0 for the job's beginning.
        first: id of the job's first checkpoint after that restore.
    """

    restored: int
    first: int


class Branches(msgspec.Struct, frozen=True):
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

    def is_ancestor(self, checkpoint_id: int, restored: int) -> bool:
        """Whether the state of checkpoint ``restored`` includes all rows up to ``checkpoint_id``."""
        for branch in reversed(self.branches):
            if branch.first > restored:
                continue
            if checkpoint_id >= branch.first:
                break
            restored = branch.restored
        return checkpoint_id <= restored


T = TypeVar("T")
"""Type of the value that stands for the rows of one checkpoint, for example a directory's name."""


@dataclass(frozen=True)
class Settlement(Generic[T]):
    """The rows that change their visibility when the job is restored from a checkpoint.

    Attributes:
        hide: rows that are visible now and not on the way to the restored checkpoint.
        show: rows that are hidden now and on the way to the restored checkpoint.
    """

    hide: frozenset[T]
    show: frozenset[T]


def settlement(
    branches: Branches, restored: int, visible: Collection[T], hidden: Collection[T], id_of: Callable[[T], int]
) -> Settlement[T]:
    """The rows of an instance to hide and to show again, so that readers see exactly the rows on the way to ``restored``.

    Args:
        branches: the job's branches.
        restored: id of the checkpoint or savepoint that the job is restored from.
        visible: rows that readers see now.
        hidden: rows that an earlier restore has hidden.
        id_of: returns the id of the checkpoint that committed the rows.
    """
    return Settlement(
        frozenset(rows for rows in visible if not branches.is_ancestor(id_of(rows), restored)),
        frozenset(rows for rows in hidden if branches.is_ancestor(id_of(rows), restored)),
    )
