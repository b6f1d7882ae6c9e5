"""Which of a job's checkpoints lie on the way to the one that it is restored from.

Going back to an older checkpoint or savepoint makes a job's history a tree: with 41 … 46 taken, going back to 43 and on
with 47, the way to 47 is 41, 42, 43, 47, and the way to savepoint 45, which still exists, is 41 … 45. A sink that commits by
checkpoint shows exactly the rows of those on the way to where the job goes on from. Ids grow for the whole life of a job,
so the tree is one pair of ids for each time that the job went back.

Values only; must not know files or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec


class Branch(msgspec.Struct, frozen=True):
    """The job went on from ``restored``; ``first`` and the ids after it grew there.

    Args:
        restored: id of the checkpoint or savepoint; 0 for the job's beginning.
        first: id of the next one.
    """

    restored: int
    first: int


class Branches(msgspec.Struct, frozen=True):
    """All branches of one job, as one instance of a sink has seen them, oldest first."""

    branches: tuple[Branch, ...] = ()

    def begun(self, restored: int, first: int) -> Branches:
        """After the job has gone on from ``restored`` with ``first``.

        An id comes again only if no checkpoint with it, or a later one, was ever completed: what grew there is forgotten.
        """
        kept = tuple(branch for branch in self.branches if branch.first < first)
        if restored < first - 1:  # else nothing lies between them that could be on another branch
            kept = (*kept, Branch(restored, first))
        return Branches(kept)

    def on_the_way(self, checkpoint_id: int, restored: int) -> bool:
        """Whether the state of ``restored`` includes what came before ``checkpoint_id``."""
        for branch in reversed(self.branches):
            if branch.first > restored:
                continue
            if checkpoint_id >= branch.first:
                break
            restored = branch.restored
        return checkpoint_id <= restored


T = TypeVar("T")
"""What stands for the rows of one checkpoint: a directory's name, say."""


@dataclass(frozen=True)
class Settlement(Generic[T]):
    """What changes when the job goes on from a checkpoint.

    Attributes:
        hide: shown now, and not on the way to it.
        show: hidden now, and on the way to it.
    """

    hide: frozenset[T]
    show: frozenset[T]


def settlement(
    branches: Branches, restored: int, visible: Collection[T], hidden: Collection[T], id_of: Callable[[T], int]
) -> Settlement[T]:
    """Which rows of an instance are hidden and which are shown again, so that exactly those on the way are shown.

    Args:
        branches: of the job.
        restored: id of the checkpoint or savepoint that the job goes on from.
        visible: rows that readers see.
        hidden: rows that were taken back.
        id_of: the checkpoint that rows were committed with.
    """
    return Settlement(
        frozenset(rows for rows in visible if not branches.on_the_way(id_of(rows), restored)),
        frozenset(rows for rows in hidden if branches.on_the_way(id_of(rows), restored)),
    )
