"""Whose a savepoint is, once a pipeline has been restored from it.

Must not know: storage, how a savepoint is deleted.

Source: FLIP-193, "Snapshots ownership".
"""

from __future__ import annotations

from enum import Enum


class ClaimMode(Enum):
    """Whether the pipeline may rely upon, and delete, the savepoint that it is restored from.

    The pipeline's own checkpoints stay its own in either mode.
    """

    NO_CLAIM = "no_claim"
    """The default. The savepoint stays the user's: it may be moved or deleted as soon as the next checkpoint has
    completed, for that one names none of its files, and the system never deletes it."""
    CLAIM = "claim"
    """The savepoint becomes the pipeline's own: it is retained like a checkpoint and deleted when newer ones have
    taken its place. Nobody else may restore from it."""
